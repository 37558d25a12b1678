"""The engine as the rest of llamakv sees it: a model, and sequences in its memory.

Token ids are the model's own. A sequence of ``N`` tokens holds cells for at least its first ``N - 1``; the last token
is *pending*: it is decoded with whatever comes next, because a saved state holds no logits.

None of these objects may be used from two threads at once. ``AbortCheck`` is called often, from inside the engine; it
must be quick and must not raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from llamakv.records import EngineVersions, MemoryKind, MemorySettings, Sampling, StateSection

AbortCheck = Callable[[], bool]
OnTokens = Callable[[int, int], None]
"""Progress: tokens evaluated so far, tokens to evaluate in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a model file says of itself. ``n_window`` is the sliding window in tokens, 0 for none; ``template`` is the
    Jinja chat template; ``bos`` and ``eos`` are those tokens' texts; ``n_bytes`` is the size of the weights."""

    architecture: str
    name: str
    quantisation: str
    kind: MemoryKind
    n_ctx_train: int
    n_vocab: int
    n_layer: int
    n_window: int
    n_bytes: int
    template: str | None
    bos: str
    eos: str
    adds_bos: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """Memory settings as asked for; ``flash_attn`` None lets the engine decide (the result is recorded)."""

    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: bool | None = None
    swa_full: bool = True
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0

    @classmethod
    def like(cls, settings: MemorySettings) -> MemoryRequest:
        """Ask for exactly the settings a session was saved with."""
        return cls(
            type_k=settings.type_k,
            type_v=settings.type_v,
            flash_attn=settings.flash_attn,
            swa_full=settings.swa_full,
            rope_freq_base=settings.rope_freq_base,
            rope_freq_scale=settings.rope_freq_scale,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewound:
    """What going back took: the first ``n_kept`` cells are as they were, ``n_evaluated`` tokens were read again."""

    n_kept: int
    n_evaluated: int


class LiveSequence(Protocol):
    """One sequence in memory. Grows its context by itself, up to the limit it was opened with."""

    @property
    def tokens(self) -> Sequence[int]:
        """All token ids; the last is pending."""

    @property
    def n_cells(self) -> int:
        """Cells in use: positions ``[0, n_cells)`` are evaluated."""

    @property
    def n_ctx(self) -> int:
        """Cells the context has room for now."""

    @property
    def n_ctx_max(self) -> int:
        """Cells the context may grow to."""

    @property
    def n_settled(self) -> int:
        """Leading cells unchanged since the last ``settle``; a save needs to take only what lies beyond."""

    def settle(self) -> None:
        """Declare the present cells saved."""

    def extend(
        self,
        tokens: Sequence[int],
        *,
        replace_pending: bool = False,
        on_progress: OnTokens | None = None,
        should_abort: AbortCheck | None = None,
    ) -> int:
        """Append tokens and evaluate all but the last. Returns the number of tokens evaluated.

        With ``replace_pending`` the pending token is dropped first (an end-of-reply token that the template writes
        again). On failure before anything was evaluated the sequence is as it was.

        Raises:
            NoRoomError: more tokens than the context may hold; nothing was changed.
            AbortedError: stopped; the tokens evaluated so far are kept, followed by one pending token.
        """

    def generate(
        self, sampling: Sampling, *, n_max: int | None = None, should_abort: AbortCheck | None = None
    ) -> Iterator[int]:
        """Decode the pending token, choose the next, append it as the new pending token and yield it; repeat.

        Ends after an end-of-generation token (which is yielded), after ``n_max`` tokens, when the context is
        full, or when ``should_abort`` says so; ``finish_reason`` tells which. The choice at a position depends on
        the tokens before it, the settings, the seed and the position only, so a run that was saved and resumed
        anywhere gives the same tokens.
        """

    @property
    def finish_reason(self) -> str:
        """Why the last ``generate`` ended: ``stop``, ``length``, ``context`` or ``interrupted``."""

    def rewind(
        self, n_tokens: int, *, on_progress: OnTokens | None = None, should_abort: AbortCheck | None = None
    ) -> Rewound:
        """Keep the first ``n_tokens`` tokens (at least one), the last of them pending; evaluate again what the
        memory cannot go back to."""

    def mark(self) -> None:
        """Remember this place, so that ``rewind`` to it is cheap on recurrent memory (a few places are kept)."""

    def remember(self, section: StateSection) -> None:
        """Take a stored tail as a place to ``rewind`` to; the cells up to it must be the present ones."""

    def export(self, from_position: int = 0) -> Iterator[StateSection]:
        """Yield the state beyond ``from_position`` in sections (all of what cannot be had in part)."""

    def restore(self, tokens: Sequence[int], sections: Iterable[StateSection]) -> None:
        """Replace the sequence with stored tokens and their state; nothing is evaluated.

        Raises:
            MismatchError: the engine refused a section; the sequence is empty afterwards.
            NoRoomError: more tokens than the context may hold; nothing was changed.
        """

    def logits(self) -> memoryview:
        """Float32 logits of the last decoded token, ``n_vocab`` of them; valid until the next decode."""

    def close(self) -> None:
        """Free its cells."""


class Model(Protocol):
    """A loaded model. Close it, or use it in a ``with`` statement; its sequences end with it."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def versions(self) -> EngineVersions: ...

    def tokenizer_digest(self) -> str:
        """Hex digest of the vocabulary: each token's text and attributes, and the special tokens."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text; ``add_special`` lets the model add its own start token."""

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """The UTF-8 bytes a token stands for (maybe a part of a character); control tokens only with ``special``."""

    def is_end(self, token: int) -> bool:
        """Whether the token ends a reply."""

    def open_sequence(self, memory: MemoryRequest, *, n_ctx_min: int, n_ctx_max: int, n_threads: int) -> LiveSequence:
        """A context with one sequence, of at least ``n_ctx_min`` cells, growing to ``n_ctx_max``."""

    def check_sampling(self, sampling: Sampling) -> None:
        """Try whether the engine takes these parameters.

        Raises:
            UsageError: a grammar that cannot be read, or a biased token that does not exist.
        """

    @property
    def settings(self) -> MemorySettings:
        """The settings of the context last opened, resolved."""

    def close(self) -> None: ...
