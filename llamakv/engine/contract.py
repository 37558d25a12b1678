"""The engine as the rest of llamakv sees it: a model, and sequences in its memory.

Token ids are the model's own. A sequence of ``N`` tokens holds cells for at least its first ``N - 1``; the last token
is *pending*: it is decoded with whatever comes next, because a saved state holds no logits.

Sequences of one scheduler share its context; it runs them together, a step (one decode call) at a time. Calls from
several threads are done one after the other. ``AbortCheck`` is called often, from inside the engine; it must be quick
and must not raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from llamakv.engine.runs import Counts as Counts
from llamakv.engine.runs import Run as Run
from llamakv.engine.runs import RunRequest as RunRequest
from llamakv.engine.runs import Shortage as Shortage
from llamakv.engine.runs import TokenLogprob as TokenLogprob
from llamakv.records import EngineVersions, MemoryKind, MemorySettings, Sampling, StateSection

if TYPE_CHECKING:  # it builds on this module
    from llamakv.engine.memory import ContextMemory, DeviceBuffer

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


def decodes_together(kind: MemoryKind, *, swa_full: bool) -> bool:
    """Whether sequences of such memory may be decoded in one call. Recurrent parts have been wrong in company
    (llama.cpp #29002), and windows that keep only themselves lose cells to each other (engine-facts d5, d7)."""
    return kind is MemoryKind.DENSE or (kind is MemoryKind.WINDOWED and swa_full)


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

    @property
    def n_state_bytes(self) -> int:
        """Bytes its whole state takes as the engine gives it; nothing is copied."""

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

    def write(self, sampling: Sampling) -> Run:
        """Begin to write behind the pending token; the scheduler's ``step`` moves it on, and no second one may be begun
        before it is over. See ``Run``.

        Raises:
            UsageError: a grammar that cannot be read, or a biased token that does not exist.
        """

    def generate(
        self, sampling: Sampling, *, n_max: int | None = None, should_abort: AbortCheck | None = None
    ) -> Iterator[int]:
        """``write``, and all steps it needs: yields each token as it is chosen, ``n_max`` of them at most.

        Ends as a ``Run`` does, or when ``should_abort`` says so; ``finish_reason`` tells which.
        """

    def stop(self) -> None:
        """End what is being written, if anything is, as ``interrupted``; the sequence stays as far as it came."""

    @property
    def scheduler(self) -> Scheduler:
        """Who decodes for it."""

    @property
    def finish_reason(self) -> str:
        """Why the last writing ended: as a ``Run``'s, or ``interrupted``."""

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


class Scheduler(Protocol):
    """Runs many sequences in one context. Runs wait in the order they came until a sequence is free and the cells they
    may need, to their last token, are there beside what was promised to others; a finished one makes room for the next.
    In each step every writing run decodes one token, and what is left of the call goes to those that still read.

    Recurrent and hybrid models, and windows without all their cells, are decoded one sequence per call
    (``decodes_together`` is False then).

    A scheduler opened with ``n_kept`` is for many users: a run begins with the cells of the longest live sequence of
    its space that its tokens begin with, be it the root, a run under way or one that was kept; while another reads what
    both begin with, it waits for that, and others behind it may pass. Kept runs that were let go of make room for
    others, the one used longest ago first, and only where that makes enough. While some may still be let go of, a run
    that lacks room waits for that (see ``shortage``). No long prompt keeps others from reading or writing. Where runs
    are decoded together, one begins when there are cells for its prompt and some hundred tokens more, since few become
    as long as they may: when cells run out after all, those that stand still and the latest give theirs to the first,
    and read their tokens again when there are more.

    Recurrent states are shared at the end of a sequence only: so copies are kept of them at the ``places`` that
    requests tell, as runs that may go like others, where there is a sequence for one. What is released takes those
    along that nobody else begins with.

    Threads that call it get their turn in the order they came, one step or one section each.
    """

    @property
    def root(self) -> LiveSequence:
        """The sequence that is always there; runs share the cells of the tokens they have in common with it."""

    @property
    def n_parallel(self) -> int:
        """Runs under way at the same time, at most."""

    @property
    def decodes_together(self) -> bool:
        """Whether one call decodes several sequences."""

    @property
    def counts(self) -> Counts:
        """Where things stand, or stood before the call under way: this does not wait."""

    @property
    def memory(self) -> ContextMemory:
        """What the present context took when it was opened; a larger one takes its place as sequences grow."""

    def submit(self, request: RunRequest) -> Run:
        """Queue a run. What cannot be done (no room, a bad grammar) becomes its ``error``."""

    def step(self, should_abort: AbortCheck | None = None) -> list[Run]:
        """One decode call for all that are under way. Returns the runs that are over since the step before. A step of a
        scheduler for many users in which nobody has been under way for a minute gives memory back instead.

        Raises:
            AbortedError: stopped; all runs stand as they stood before this step.
        """

    def release_copies(self, idle_s: float) -> None:
        """Free the copies (see the class) that no other run, under way, kept or waiting, begins with, and that none has
        begun with for so long."""

    def cancel(self, run: Run) -> None:
        """End a run as ``interrupted`` and free its cells."""

    def end(self, run: Run) -> None:
        """End a run as ``interrupted``. One that is to keep its cells and has written something does; the next step
        returns it. Any other is cancelled."""

    def release(self, run: Run) -> None:
        """Free the cells of a run that kept them."""

    @property
    def kept(self) -> Sequence[Run]:
        """The runs that are over and have their cells, in the order in which they go: the one used longest ago first,
        and last what others begin with (see ``Model.open_scheduler``)."""

    @property
    def shortage(self) -> Shortage | None:
        """What the first run that waits lacks beyond what may go already, since the last step; kept runs are to be let
        go of then. None if it lacks nothing, or waits for runs under way only."""

    def let_go(self, run: Run) -> None:
        """Allow that the cells of a kept run are taken when others need them."""

    def hold(self, run: Run) -> bool:
        """Have a kept run's cells stay for somebody who is to begin with them, until ``unhold``: they are given to
        others only when nobody is under way and nothing else can be had. False: they are gone already."""

    def unhold(self, run: Run) -> None:
        """Take back a ``hold`` that returned True."""

    def is_held(self, run: Run) -> bool:
        """Whether somebody holds it."""

    def pin(self, run: Run, *, is_pinned: bool) -> None:
        """Keep the cells of a kept run whatever comes, or no longer."""

    def pause(self, run: Run) -> bool:
        """Let a run stand still that writes, with its cells, or one that waits; the next one that waits has its place.
        False if it is over, or still reads: it goes on then."""

    def resume(self, run: Run) -> None:
        """Go on with a run that was paused, beside ``n_parallel`` others if so many are under way."""

    def send_back(self, run: Run) -> bool:
        """Take its cells from a run that stands still: it reads its tokens again when it goes on. False if it has none,
        or does not stand still."""

    @property
    def is_short(self) -> bool:
        """Whether the first run that waits waited, at the last step, for cells or a sequence of runs under way."""

    def has_cells(self, run: Run) -> bool:
        """Whether a run has cells: a kept one still, or one under way now."""

    def is_whole(self, run: Run) -> bool:
        """Whether a run has the cells of all its tokens but the last: not while it reads."""

    def adopt(
        self, tokens: Sequence[int], sections: Callable[[int], Iterable[StateSection]], *, space: str = ""
    ) -> Run:
        """A kept run made of stored tokens and their state, as ``LiveSequence.restore``; its ``finish_reason`` is
        ``restored``. ``sections(n)`` gives the state beyond the first ``n`` cells, which are live already (sections
        that begin before may be among them); while it reads, others go on.

        Raises:
            MismatchError: the engine refused a section, or they do not make up the sequence; nothing is kept.
            NoRoomError: there is no room for so many cells beside those of others; nothing was dropped.
        """

    def export(self, run: Run, from_position: int = 0) -> Iterator[StateSection]:
        """As ``LiveSequence.export``, of a run that kept its cells.

        Raises:
            EngineError: they were freed before all was taken.
        """

    def close(self) -> None:
        """Free the context, and all sequences with it."""


class Model(Protocol):
    """A loaded model. Close it, or use it in a ``with`` statement; its sequences end with it."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def versions(self) -> EngineVersions: ...

    @property
    def weights_by_device(self) -> tuple[DeviceBuffer, ...]:
        """Where the weights lie, as the engine says it (in steps of 0.01 MiB); a file that is mapped counts with the
        part of it that holds tensors."""

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

    def open_scheduler(
        self,
        memory: MemoryRequest,
        *,
        n_parallel: int,
        n_ctx_min: int,
        n_ctx_max: int,
        n_cells_max: int | None = None,
        n_kept: int = 0,
        is_within_memory: bool = False,
        later_share: float = 0.0,
        n_threads: int,
    ) -> Scheduler:
        """A context for a sequence and ``n_parallel`` runs beside it. Each may have ``n_ctx_max`` tokens; together they
        have ``n_cells_max`` cells at most (None: as many as memory allows). ``n_kept`` sequences more are for runs that
        stay when they are over, and that others begin with (see ``Scheduler``); they come as they are used, while
        memory allows.

        With ``is_within_memory``, or None, the limit of cells follows the memory that is free, up to ``n_cells_max``
        (``Counts.n_cells_max`` tells the present one). What several runs began with lately goes after all others, as
        long as it and what is pinned have no more than ``later_share`` of the cells and sequences there may be."""

    def check_sampling(self, sampling: Sampling) -> None:
        """Try whether the engine takes these parameters.

        Raises:
            UsageError: a grammar that cannot be read, or a biased token that does not exist.
        """

    @property
    def settings(self) -> MemorySettings:
        """The settings of the context last opened, resolved."""

    def close(self) -> None: ...
