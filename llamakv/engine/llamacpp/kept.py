"""Which live sequence a run begins with, and runs that stay when they are over until others need their cells."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from llamakv.engine.llamacpp.cells import SequenceCells
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.sequence import LlamaSequence
from llamakv.engine.llamacpp.shared import SharedContext
from llamakv.engine.prefix import n_common

N_WORTH_WAITING = 32
"""Tokens that are worth waiting for while another run reads them: half a call's reading (the scheduler's 64)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What a run can begin with: the first ``n_shared`` cells of a sequence. ``tails`` are recurrent states of that
    sequence by place, for memory that is shared at such places only. ``owner`` is the run whose sequence it is, None
    for the root's. With ``takes_over`` that one goes, and leaves the run what it begins with. ``is_being_read`` says
    that more of its tokens are being read for another run now."""

    cells: SequenceCells
    n_shared: int
    tails: Mapping[int, memoryview] = field(default_factory=dict)
    owner: LlamaRun | None = None
    takes_over: bool = False
    is_being_read: bool = False


class KeptRuns:
    """Runs that are over and keep their cells, the one used longest ago first.

    ``active`` are the runs under way. With ``shares_runs`` a run may begin with the cells of any run of its space, else
    with the root's only.
    """

    def __init__(self, shared: SharedContext, active: Sequence[LlamaRun], *, shares_runs: bool) -> None:
        self._shared = shared
        self._active = active
        self._runs: dict[LlamaRun, None] = {}
        self._awaited: dict[LlamaRun, tuple[LlamaRun, int]] = {}
        self.shares_runs = shares_runs

    def __iter__(self) -> Iterator[LlamaRun]:
        return iter(list(self._runs))

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, run: LlamaRun) -> None:
        """Keep a run that is over."""
        self._runs[run] = None

    def remove(self, run: LlamaRun) -> None:
        """It has no cells any more."""
        self._runs.pop(run, None)
        self._awaited.pop(run, None)

    def note_begun(self, run: LlamaRun, owner: LlamaRun | None) -> None:
        """A run has begun with the cells of ``owner``, which is used by that."""
        self._awaited.pop(run, None)
        if owner is not None and owner in self._runs:
            owner.begun_s = time.perf_counter()
            del self._runs[owner]
            self._runs[owner] = None

    @property
    def are_awaited(self) -> bool:
        """Whether some may still be let go of: they are neither that already nor pinned."""
        return self.shares_runs and any(not run.may_go and not run.is_pinned for run in self._runs)

    @property
    def that_may_go(self) -> list[LlamaRun]:
        """Those whose cells may be given to others, in the order in which they are."""
        return [run for run in self._runs if run.may_go and not run.is_pinned]

    # ------------------------------------------------------------ what a run begins with

    def beginning_of(self, run: LlamaRun, root: LlamaSequence) -> Beginning:
        """What it shares most with; of several, the one used last."""
        best = self._of_root(run, root)
        if not self.shares_runs:
            return best
        n_most = min(len(run.tokens) - 1, len(run.ids))
        for other in (*reversed(self._runs), *self._active):
            cells = other.cells
            if cells is None or other.space != run.space or min(cells.n_cells, n_most) <= best.n_shared:
                continue
            n = min(n_equal_beyond(best.n_shared, other.ids, run.ids), cells.n_cells, n_most)
            if n > best.n_shared and self._shared.can_share(cells, n):
                best = Beginning(cells=cells, n_shared=n, owner=other)
        if self._shared.is_recurrent:
            waits = self._waits_for_a_place(run, n_most, best.n_shared)
        else:
            waits = self._shared.shares_anywhere and self._waits_for_another(run, n_most, best.n_shared)
        if waits:
            return replace(best, is_being_read=True)
        return best

    def _waits_for_another(self, run: LlamaRun, n_most: int, n_shared: int) -> bool:
        for other in self._active:
            if other.space == run.space and other.n_unread > 0 and other.cells is not None:
                n_there = max(n_shared, other.cells.n_cells)
                n = min(n_equal_beyond(n_shared, other.ids, run.ids), n_most, len(other.tokens) - 1)
                if n >= n_there + N_WORTH_WAITING:
                    self._awaited[run] = other, n
                    return True
        return False

    def _waits_for_a_place(self, run: LlamaRun, n_most: int, n_shared: int) -> bool:
        """Where another comes to a place that a run can begin at; one more is made of where the two part, if that is
        far enough from any other."""
        for other in self._active:
            if other.space != run.space or other.n_unread <= 0 or other.cells is None or other.is_guest:
                continue
            n = min(n_equal_beyond(n_shared, other.ids, run.ids), n_most, len(other.tokens) - 1)
            place = max((place for place in other.places if place <= n), default=0)
            if n >= max(place, other.cells.n_cells, n_shared) + N_WORTH_WAITING:
                other.places, place = tuple(sorted((*other.places, n))), n
            if place > other.cells.n_cells and place >= n_shared + N_WORTH_WAITING:
                self._awaited[run] = other, place
                return True
        return False

    def is_still_waiting(self, run: LlamaRun) -> bool:
        """Whether what it waits for is still being read, as far as can be told without looking at all others."""
        other, n = self._awaited.get(run, (None, 0))
        if other is not None and other.n_unread > 0 and other in self._active and other.cells is not None:
            return other.cells.n_cells + (N_WORTH_WAITING if self._shared.shares_anywhere else 1) <= n
        return False

    def _of_root(self, run: LlamaRun, root: LlamaSequence) -> Beginning:
        """Where memory cannot be shared at any place, these are all of the root's cells, those of a place that it
        remembers, or none."""
        if run.space:
            return Beginning(cells=root.cells, n_shared=0)
        n = n_common(root.tokens[: root.n_cells], run.tokens[:-1])
        if not self._shared.can_share(root.cells, n):
            places = (place for place in root.marks if place <= n) if self._shared.is_recurrent else ()
            n = max(places, default=0)
        return Beginning(cells=root.cells, n_shared=n, tails=root.marks)


def begins_with(run: LlamaRun, other: LlamaRun, n_cells: int) -> bool:
    """Whether a run begins with the first ``n_cells`` tokens of another one of its space."""
    return run.space == other.space and n_equal_beyond(n_cells - 1, run.ids, other.ids) >= n_cells


def n_equal_beyond(n_known: int, one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two arrays begin with alike, if these are more than ``n_known``; else 0. Most pairs that are
    compared differ at once behind what is known to be shared."""
    n = min(len(one), len(other))
    if n <= n_known or one[n_known] != other[n_known]:
        return 0
    differs = one[:n] != other[:n]
    first = int(differs.argmax())
    return first if differs[first] else n
