"""Answers as OpenAI's clients read them: whole ones, chunks of streams, usage, log probabilities."""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from llamakv.server.contract import AnswerPiece, ServedModel, TokenLogprob, Usage

_FINISH = {"stop": "stop", "length": "length", "context": "length", "timeout": "length", "interrupted": "length"}
"""OpenAI's word for each of ours; ours is told in ``finish_detail``."""


def fingerprint(model: ServedModel) -> str:
    """Names what answers depend on beside the request: the model's content and its settings."""
    told = json.dumps([model.digest, model.settings], sort_keys=True, default=str)
    return f"fp_{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def usage_json(usage: Usage) -> dict[str, object]:
    """``cached_tokens`` were not read again; ``source`` says where they were, ``queued_s`` how long it waited."""
    return {
        "prompt_tokens": usage.n_prompt,
        "completion_tokens": usage.n_generated,
        "total_tokens": usage.n_prompt + usage.n_generated,
        "prompt_tokens_details": {"cached_tokens": usage.n_cached, "source": usage.source},
        "queued_s": round(usage.queued_s, 3),
    }


@dataclass(slots=True)
class _Choice:
    """What came of one choice so far."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None


class Wording:
    """How the answer to one request is said; chats and completions differ.

    ``has_logprobs`` is whether the request asked for them; ``echo`` is put before each choice.
    """

    def __init__(self, model: ServedModel, *, is_chat: bool, has_logprobs: bool, echo: str = "") -> None:
        self._is_chat = is_chat
        self._has_logprobs = has_logprobs
        self._echo = echo
        self._head: dict[str, object] = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": fingerprint(model),
        }
        self._offsets: dict[int, _Offsets] = {}

    def whole(self, pieces: Sequence[AnswerPiece], n_choices: int, usage: Usage) -> dict[str, object]:
        """The answer to a request that was not streamed."""
        choices = [_Choice() for _ in range(n_choices)]
        for piece in pieces:
            choice = choices[piece.index]
            choice.text.append(piece.text)
            choice.logprobs.extend(piece.logprobs)
            choice.finish = piece.finish_reason or choice.finish
        told = [self._whole_choice(index, choice) for index, choice in enumerate(choices)]
        name = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": name, "choices": told, "usage": usage_json(usage)}

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, object]:
        text = "".join(choice.text)
        said: dict[str, object] = {"text": self._echo + text}
        if self._is_chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"index": index, **said, "logprobs": self._logprobs(index, choice.logprobs), **_finish(choice.finish)}

    def opening(self, n_choices: int) -> list[dict[str, object]]:
        """The chunks a stream begins with."""
        if self._is_chat:
            delta = {"role": "assistant", "content": "", "refusal": None}
            return [self._chunk(index, {"delta": delta}) for index in range(n_choices)]
        return [self._chunk(index, {"text": self._echo}) for index in range(n_choices) if self._echo]

    def chunks(self, piece: AnswerPiece) -> list[dict[str, object]]:
        """The chunks that say a piece."""
        told = []
        logprobs = self._logprobs(piece.index, piece.logprobs) if piece.logprobs else None
        if piece.text or logprobs:
            said: dict[str, object] = {"delta": {"content": piece.text}} if self._is_chat else {"text": piece.text}
            told.append(self._chunk(piece.index, said, logprobs))
        if piece.finish_reason is not None:
            said = {"delta": {}} if self._is_chat else {"text": ""}
            told.append(self._chunk(piece.index, said, finish=piece.finish_reason))
        return told

    def usage_chunk(self, usage: Usage) -> dict[str, object]:
        """The chunk that tells usage, the last one."""
        return {**self._head, "object": self._chunk_name, "choices": [], "usage": usage_json(usage)}

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _chunk(
        self, index: int, said: dict[str, object], logprobs: object = None, finish: str | None = None
    ) -> dict[str, object]:
        choice = {"index": index, **said, "logprobs": logprobs, **_finish(finish)}
        return {**self._head, "object": self._chunk_name, "choices": [choice]}

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, object] | None:
        if not self._has_logprobs:
            return None
        if self._is_chat:
            content = [
                {**_token_json(token), "top_logprobs": [_token_json(other) for other in token.top]} for token in tokens
            ]
            return {"content": content, "refusal": None}
        offsets = self._offsets.setdefault(index, _Offsets())
        return {
            "tokens": [_text(token) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [{_text(other): _finite(other.logprob) for other in token.top} for token in tokens],
            "text_offset": [offsets.next(token.text) for token in tokens],
        }


class _Offsets:
    """Where tokens begin in a choice's text, in characters; a character made of several tokens begins with the last."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_characters = 0

    def next(self, text: bytes) -> int:
        start = self._n_characters
        self._n_characters += len(self._decoder.decode(text))
        return start


def _finish(reason: str | None) -> dict[str, object]:
    if reason is None:
        return {"finish_reason": None}
    told = _FINISH.get(reason, "stop")
    return {"finish_reason": told} if told == reason else {"finish_reason": told, "finish_detail": reason}


def _text(token: TokenLogprob) -> str:
    return token.text.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI says -9999 for what cannot be."""
    return logprob if math.isfinite(logprob) else -9999.0


def _token_json(token: TokenLogprob) -> dict[str, object]:
    return {"token": _text(token), "logprob": _finite(token.logprob), "bytes": list(token.text)}
