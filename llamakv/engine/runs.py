"""Sequences that a scheduler reads and writes: what is asked for, and how they get on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from llamakv.errors import LlamakvError
from llamakv.records import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A sequence to be read and gone on with: all its ``tokens`` from position 0 on, and how to choose what follows
    (``max_tokens`` and ``stop`` of ``sampling`` included).

    ``timeout_s`` counts from when its turn came. With ``keeps_cells`` the sequence stays when the run is over, until it
    is released; else its cells are freed at once. Runs share cells with runs of the same ``space`` only, and with the
    root if that is empty. For each token written, the logarithms of probability of ``n_top_logprobs`` tokens are told,
    and of the chosen one; None: of no token. ``places`` are numbers of tokens, ascending and more than 0, all of them
    fewer than ``tokens``, after which other requests are likely to go on in another way: where memory is shared at
    such places only, reading stops at each for a copy.
    """

    tokens: tuple[int, ...]
    sampling: Sampling
    timeout_s: float | None = None
    keeps_cells: bool = False
    space: str = ""
    n_top_logprobs: int | None = None
    places: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """The natural logarithm of a token's probability before any sampling parameter; ``top`` are the most likely tokens
    with theirs, the first one first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What the first run that waits lacks: cells, and sequences."""

    n_cells: int
    n_sequences: int


class Run(Protocol):
    """A sequence under way. Each step decodes its pending token, chooses the next and appends it as the new pending
    one, until it is over: ``finish_reason`` is ``stop`` (an end-of-generation token or a stop string), ``length``,
    ``context`` (no room for more), ``timeout``, ``interrupted``, ``restored`` of a run that was adopted, or ``copied``
    of one that is another's beginning; or else ``error`` is set.

    The choice at a position depends on the tokens before it, the settings, the seed and the position only, so a run
    that was saved and resumed anywhere gives the same tokens. Times are ``time.perf_counter`` values, 0 before they
    came.
    """

    @property
    def tokens(self) -> Sequence[int]:
        """All tokens, the last one pending; do not change it."""

    @property
    def space(self) -> str:
        """The space of its request."""

    @property
    def n_reused(self) -> int:
        """Cells that were there already."""

    @property
    def n_evaluated(self) -> int:
        """Tokens read for it; those that were read again, after its cells were given to others, count again."""

    @property
    def n_sent_back(self) -> int:
        """How often its cells were given to others, so that its tokens were read again."""

    @property
    def n_generated(self) -> int:
        """Tokens written, an end token included."""

    @property
    def text(self) -> str:
        """What was written and is certain: whole characters, without the stop string."""

    def take_text(self) -> str:
        """The part of it that came since this was last asked."""

    @property
    def logprobs(self) -> Sequence[TokenLogprob]:
        """One for each token written, if that was asked for, less those that were taken; do not change it."""

    def take_logprobs(self) -> Sequence[TokenLogprob]:
        """Those that came since this was last asked, which are kept no longer."""

    @property
    def finish_reason(self) -> str:
        """Why it is over; empty before."""

    @property
    def error(self) -> LlamakvError | None:
        """Why it failed."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not."""

    @property
    def started_s(self) -> float:
        """When its turn came."""

    @property
    def first_token_s(self) -> float:
        """When its first token was chosen."""

    @property
    def ended_s(self) -> float:
        """When it was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a scheduler is doing. ``n_cells`` are in use, one that several sequences share counted once; ``n_reserved``
    is what they may come to with all that was promised to runs under way; ``n_cells_max`` is never exceeded."""

    n_waiting: int
    n_active: int
    n_cells: int
    n_cells_peak: int
    n_reserved: int
    n_cells_max: int
    n_steps: int
    n_decoded: int
    n_kept: int = 0
