"""From what a client asks to tokens: what was read or written before is never tokenised again."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llamakv.engine.prompt import ChatTemplate, plan_turn
from llamakv.errors import LlamakvError, NoRoomError, UsageError
from llamakv.ops.opening import OpenModel
from llamakv.ops.reading import placed, template_of, tokenise
from llamakv.records import Message
from llamakv.server.contract import Ask, ChatMessage
from llamakv.server.conversations import Conversation, Conversations, Known, Words, words_of

_TEMPLATE_S = 60.0
"""How long a template's present time holds: conversations begun in the same minute read the same text."""

_N_LONG = 1 << 16
"""Characters of a long text, which takes the engine a while: for 4 MB that was 3 to 6 s, and with many special tokens
the square of their number (1.7 s for 20,000 of them)."""

_N_MANY = 1000
"""Messages that make a long text, too: each brings special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request made out. ``messages`` have the ranges of ``tokens`` they are read at; ``said`` is the text that was
    asked to be gone on with, None in a chat or where it is not known, and ``marks`` are where replies in it end, as
    characters and tokens. ``base`` is the conversation it begins as, and ``goes_on`` says that it is that one, to its
    end, with something new. ``now_s`` is the time its template takes for now; ``template`` is None for raw text."""

    tokens: tuple[int, ...]
    now_s: float
    template: str | None = None
    messages: tuple[Message, ...] = ()
    said: str | None = None
    marks: tuple[tuple[int, int], ...] = ()
    base: Conversation | None = None
    goes_on: bool = False

    @property
    def places(self) -> tuple[int, ...]:
        """After how many tokens other requests are likely to go on in another way: where what the system says ends,
        where the last message begins (it may be put in other words), and at the last token (the same again)."""
        ends = [len(self.tokens) - 1]
        if self.messages:
            ends.append(self.messages[-1].p0)
            leading = itertools.takewhile(lambda message: message.role == "system", self.messages)
            ends += [message.p1 for message in leading]
        return tuple(sorted({place for place in ends if 0 < place < len(self.tokens)}))


Asked = tuple[ChatMessage, ...] | str | tuple[int, ...]


def is_long(prompt: Asked) -> bool:
    """Whether making a prompt out may take so long that others should not wait for it."""
    if isinstance(prompt, str):
        return len(prompt) > _N_LONG
    n_characters = sum(len(message.content) for message in prompt if isinstance(message, ChatMessage))
    return len(prompt) > _N_MANY or n_characters > _N_LONG


class Prompts:
    """Makes requests out. ``load`` brings back what a conversation was that is in the store only; it may fail with a
    ``LlamakvError``. A prompt has ``n_tokens_max`` tokens at most. Safe between threads; not quick."""

    def __init__(
        self,
        opened: OpenModel,
        conversations: Conversations,
        load: Callable[[Conversation], None],
        *,
        n_tokens_max: int,
    ) -> None:
        self._opened = opened
        self._n_tokens_max = n_tokens_max
        self._n_longest = 0
        self._conversations = conversations
        self._load = load
        self._lock = threading.Lock()
        self._present: ChatTemplate | None = None
        self._present_s = 0.0

    def read(self, ask: Ask) -> Prompt:
        """Make a request out.

        Raises:
            UsageError: it is empty, or the chat template refuses it, or there is none, or a token does not exist.
            NoRoomError: it is so long that it need not be tokenised to know that it does not fit.
        """
        prompt = ask.prompt
        self._refuse_endless(prompt)
        if isinstance(prompt, str):
            return self._text(ask.space, prompt)
        if prompt and isinstance(prompt[0], ChatMessage):
            return self._chat(ask.space, [message for message in prompt if isinstance(message, ChatMessage)])
        return self._tokens(ask.space, tuple(token for token in prompt if isinstance(token, int)))

    def make_ready(self) -> None:
        """Compile the model's chat template, if it has one."""
        with contextlib.suppress(LlamakvError):
            self._present_template()

    def _refuse_endless(self, prompt: Asked) -> None:
        if not is_long(prompt):
            return
        # every message and every token id takes a token at least
        n_least = -(-len(prompt) // self._longest()) if isinstance(prompt, str) else len(prompt)
        if n_least >= self._n_tokens_max:
            raise NoRoomError(
                f"the prompt has {n_least:,} tokens at least, and a conversation may have {self._n_tokens_max:,}",
                needed=n_least + 1,
                limit=self._n_tokens_max,
            )

    def _longest(self) -> int:
        """Bytes of the longest token: no token is more characters."""
        if not self._n_longest:
            model, n_vocab = self._opened.model, self._opened.info.n_vocab
            self._n_longest = max(len(model.token_bytes(token, special=True)) for token in range(n_vocab))
        return self._n_longest

    # ------------------------------------------------------------ a chat

    def _chat(self, space: str, asked: Sequence[ChatMessage]) -> Prompt:
        for known in self._conversations.find_chat(space, asked):
            words = self._words(known)
            if words is None or words.template is None or known.n_tokens > len(words.tokens):
                continue
            if known.n_messages == len(asked):  # the same question again
                return Prompt(
                    tokens=words.tokens[: known.n_tokens],
                    now_s=words.created_s,
                    template=words.template,
                    messages=words.messages[: known.n_messages],
                    base=known.conversation,
                )
            template = template_of(self._opened, words.template, now_s=words.created_s)
            return self._turn(template, words.created_s, asked, known, words)
        template, now_s = self._present_template()
        return self._turn(template, now_s, asked, None, None)

    def _turn(
        self,
        template: ChatTemplate,
        now_s: float,
        asked: Sequence[ChatMessage],
        known: Known | None,
        words: Words | None,
    ) -> Prompt:
        old: tuple[Message, ...] = ()
        before: tuple[int, ...] = ()
        if known is not None and words is not None:
            old, before = words.messages[: known.n_messages], words.tokens[: known.n_tokens]
        new = [Message(role=message.role, content=message.content, p0=0, p1=0) for message in asked[len(old) :]]
        wanted = (*old, *new)
        ends = bool(before) and self._opened.model.is_end(before[-1])
        plan = plan_turn(template, old, wanted, n_tokens=len(before), ends_with_end_token=ends)
        pieces = tokenise(self._opened, plan.pieces, at_start=plan.n_keep == 0)
        tokens = (
            *before[: plan.n_keep - plan.replace_pending],
            *(token for _, piece in pieces for token in piece),
        )
        return Prompt(
            tokens=tokens,
            now_s=now_s,
            template=template.source,
            messages=placed(self._opened, wanted, plan, pieces, end=len(tokens), time_s=time.time()),
            base=None if known is None else known.conversation,
            goes_on=words is not None and len(old) == len(words.messages) and old[-1].role == "assistant",
        )

    def _present_template(self) -> tuple[ChatTemplate, float]:
        with self._lock:
            now_s = time.time()
            if self._present is None or not 0 <= now_s - self._present_s < _TEMPLATE_S:
                self._present = template_of(self._opened, None, now_s=now_s)
                self._present_s = now_s
            return self._present, self._present_s

    # ------------------------------------------------------------ raw text

    def _text(self, space: str, text: str) -> Prompt:
        if not text:
            raise UsageError("the prompt is empty")
        model = self._opened.model
        for known in self._conversations.find_text(space, text):
            words = self._words(known)
            if words is None or words.said is None or known.n_tokens > len(words.tokens):
                continue
            if not text.startswith(words.said[: known.n_said]):
                continue
            before = words.tokens[: known.n_tokens]
            if len(before) > 1 and model.is_end(before[-1]):
                before = before[:-1]
            rest = text[known.n_said :]
            new = model.tokenize(rest, add_special=False, parse_special=True) if rest else []
            marks = [mark for mark in words.marks if mark[0] < known.n_said]
            return Prompt(
                tokens=(*before, *new),
                now_s=words.created_s,
                said=text,
                marks=(*marks, (known.n_said, len(before))),
                base=known.conversation,
                goes_on=known.n_said == len(words.said),
            )
        info = self._opened.info
        adds = not (info.bos and text.startswith(info.bos))
        tokens = tuple(model.tokenize(text, add_special=adds, parse_special=True))
        if not tokens:
            raise UsageError("the text is empty: it gives no token")
        return Prompt(tokens=tokens, now_s=time.time(), said=text)

    def _tokens(self, space: str, tokens: tuple[int, ...]) -> Prompt:
        if not tokens:
            raise UsageError("the prompt is empty")
        wrong = next((token for token in tokens if not 0 <= token < self._opened.info.n_vocab), None)
        if wrong is not None:
            raise UsageError(f"token {wrong} is not one of 0 ... {self._opened.info.n_vocab - 1}")
        base = self._conversations.find_tokens(space, tokens)
        return Prompt(tokens=tokens, now_s=time.time(), base=base, goes_on=base is not None)

    # ------------------------------------------------------------ what was said before

    def _words(self, known: Known) -> Words | None:
        """What a conversation is; one that is lost is forgotten."""
        conversation = known.conversation
        for _ in range(2):
            with self._conversations.lock:
                if conversation.is_loaded:
                    return words_of(conversation)
            try:
                self._load(conversation)
            except LlamakvError:
                break
        if conversation.run is None:
            self._conversations.remove(conversation)
        return None
