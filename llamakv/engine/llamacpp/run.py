"""A sequence under way: what it has to read, then what it writes, and when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llamakv.engine.contract import RunRequest, TokenLogprob
from llamakv.engine.llamacpp.cells import SequenceCells
from llamakv.engine.llamacpp.native import Pointer
from llamakv.engine.llamacpp.sampler import TokenChooser, TokenProbabilities
from llamakv.engine.text import TextStream, open_character
from llamakv.errors import EngineError, LlamakvError


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """How many others have begun with the first ``n_cells`` cells of a run, or with those it begins with itself; the
    last one when ``at`` had begun in all."""

    n_others: int = 0
    n_cells: int = 0
    at: int = 0


class LlamaRun:
    """``Run`` of the contract; its scheduler (``owner``) moves it on.

    ``tokens`` is the sequence's own list: it grows by what is written. A run without a request only reads. A run with
    ``cells`` of its own from the beginning is a guest: they are not the scheduler's to give away.

    ``may_go``, ``is_pinned`` and ``n_holds`` are for when it is kept: its cells may be given to others, or never, or
    only when nothing else is left; ``begun`` says who began as it does, ``begun_s`` when anybody last did, and
    ``is_copy`` that it is there for that only. ``is_paused`` is for before: it does not go on.
    ``n_sent_back`` is how often it had to give its cells to others, ``n_begun_with`` how much it had written when it
    last began.
    Reading it stops at its ``places``.
    """

    def __init__(
        self,
        tokens: list[int],
        *,
        owner: object,
        request: RunRequest | None,
        n_ctx_max: int,
        number: int,
        cells: SequenceCells | None = None,
    ) -> None:
        self.tokens = tokens
        self.owner = owner
        self.request = request
        self.n_ctx_max = n_ctx_max
        self.number = number
        self.cells = cells
        self.is_guest = cells is not None
        self.space = request.space if request is not None else ""
        self.may_go = self.is_pinned = self.is_paused = self.is_copy = False
        self.n_holds = self.n_sent_back = self.n_begun_with = 0
        self.begun = Begun()
        self.begun_s = 0.0
        self.places: tuple[int, ...] = ()
        self.logprobs: list[TokenLogprob] = []
        self.writer: Writer | None = None
        self.n_prompt = len(tokens)
        self.n_reused = cells.n_cells if cells is not None else 0
        self.n_evaluated = 0
        self.finish_reason = ""
        self.error: LlamakvError | None = None
        self.started_s = self.first_token_s = self.ended_s = 0.0
        self._held: list[str] = []
        self._n_vocab = 0
        self._ids: np.ndarray | None = None

    @property
    def ids(self) -> np.ndarray:
        """Its tokens as far as others may have them too: the prompt, and of one that is over all."""
        n = len(self.tokens) if self.is_over else self.n_prompt
        if self._ids is None or len(self._ids) != n:
            self._ids = np.array(self.tokens[:n], np.int32)
        return self._ids

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not."""
        return bool(self.finish_reason) or self.error is not None

    @property
    def n_generated(self) -> int:
        """Tokens written, the end token included."""
        return len(self.tokens) - self.n_prompt

    @property
    def text(self) -> str:
        """All that was written and is certain."""
        return self.writer.stream.text if self.writer is not None else ""

    @property
    def n_unread(self) -> int:
        """Tokens still to evaluate before the pending one."""
        return len(self.tokens) - 1 - (self.cells.n_cells if self.cells is not None else 0)

    @property
    def n_readable(self) -> int:
        """Tokens of these that one call may read: as far as the next of its places."""
        n_cells = self.cells.n_cells if self.cells is not None else 0
        return min((place - n_cells for place in self.places if place > n_cells), default=self.n_unread)

    @property
    def n_to_come(self) -> int:
        """Cells it may still take."""
        n_tokens = len(self.tokens)
        if self.request is not None:
            n_max = self.request.sampling.max_tokens
            most = self.n_ctx_max if n_max is None else min(self.n_prompt + n_max, self.n_ctx_max)
            n_tokens = max(n_tokens, most)
        return n_tokens - 1 - (self.cells.n_cells if self.cells is not None else 0)

    def take_text(self) -> str:
        """The text that became certain since this was last asked."""
        text = "".join(self._held)
        self._held.clear()
        return text

    def take_logprobs(self) -> Sequence[TokenLogprob]:
        """The logarithms of probability that came since this was last asked."""
        taken, self.logprobs = self.logprobs, []
        return taken

    # ------------------------------------------------------------ the scheduler's

    def begin(self, vocab: Pointer, n_vocab: int, token_bytes: Callable[[int], bytes]) -> None:
        """It has its sequence now."""
        now = time.perf_counter()
        self.started_s = self.started_s or now
        if self.request is not None and self.writer is None:
            self.writer = Writer(self.request, self.tokens, vocab, n_vocab, token_bytes)
            self._n_vocab = n_vocab

    def add_token(self, index: int, context: Pointer, is_end: Callable[[int], bool]) -> None:
        """Choose the next token from the logits at ``index`` of the decode call that took the pending one."""
        assert self.writer is not None
        assert self.request is not None
        n_top = self.request.n_top_logprobs
        probabilities = None if n_top is None else TokenProbabilities(context, index, self._n_vocab)
        try:
            token = self.writer.chooser.choose(context, len(self.tokens), index)
        except EngineError as error:
            if self.is_guest:
                raise
            self.fail(error)
            return
        if token is None:  # the grammar is at its end, or at a place where all it allows is forbidden
            self.end("stop")
            return
        if probabilities is not None and n_top is not None:
            self.logprobs.append(probabilities.of(token, n_top))
        self.tokens.append(token)
        now = time.perf_counter()
        self.first_token_s = self.first_token_s or now
        stream = self.writer.stream
        if is_end(token):
            self.end("stop")
            return
        piece = stream.feed(token)
        if piece:
            self._held.append(piece)
        if stream.stopped:
            self.end("stop")

    def check_limits(self) -> None:
        """End it where it may not write any more."""
        if self.is_over or self.request is None:
            return
        n_max = self.request.sampling.max_tokens
        timeout_s = self.request.timeout_s
        if n_max is not None and self.n_generated >= n_max:
            self.end("length")
        elif timeout_s is not None and self.started_s and time.perf_counter() - self.started_s >= timeout_s:
            self.end("timeout")
        elif len(self.tokens) >= self.n_ctx_max:
            self.end("context")

    def end(self, reason: str) -> None:
        """It is over, for this reason."""
        if not self.is_over:
            self.finish_reason = reason
            self._close()

    def fail(self, error: LlamakvError) -> None:
        """It is over, with this error."""
        if not self.is_over:
            self.error = error
            self._close()

    def _close(self) -> None:
        self.ended_s = time.perf_counter()
        if self.writer is not None:
            piece = self.writer.stream.finish()
            if piece:
                self._held.append(piece)
            self.writer.chooser.close()


class Writer:
    """What a run that writes has: its sampler chain, and the way from tokens to text."""

    def __init__(
        self,
        request: RunRequest,
        tokens: Sequence[int],
        vocab: Pointer,
        n_vocab: int,
        token_bytes: Callable[[int], bytes],
    ) -> None:
        prime = open_character([token_bytes(token) for token in tokens[-4:]])
        self.stream = TextStream(token_bytes, stops=request.sampling.stop, prime=prime)
        self.chooser = TokenChooser(vocab, n_vocab, request.sampling, tokens)
