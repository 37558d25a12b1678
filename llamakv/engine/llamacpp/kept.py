"""Which live sequence a run begins with, and runs that stay when they are over until others need their cells."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from llamakv.engine.llamacpp.cells import SequenceCells
from llamakv.engine.llamacpp.run import Begun, LlamaRun
from llamakv.engine.llamacpp.sequence import LlamaSequence
from llamakv.engine.llamacpp.shared import N_SEQ_MAX, SharedContext
from llamakv.engine.prefix import n_common

N_WORTH_WAITING = 32
"""Tokens that are worth waiting for while another run reads them: half a call's reading (the scheduler's 64)."""

N_OTHERS = 2
"""Runs that begin with what another has, before that is taken for something that more will begin with."""


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
    """Runs that are over and keep their cells, in the order in which these are given to others: the one used longest
    ago first. What several others have begun with lately, which is while as many runs began as a context can have,
    goes last: one run of each such beginning, as long as these and the pinned ones have no more than ``later_share``
    of the cells and sequences there may be.

    ``active`` are the runs under way. With ``shares_runs`` a run may begin with the cells of any run of its space, else
    with the root's only.
    """

    def __init__(
        self, shared: SharedContext, active: Sequence[LlamaRun], *, shares_runs: bool, later_share: float = 0.0
    ) -> None:
        self._shared = shared
        self._active = active
        self._runs: dict[LlamaRun, None] = {}
        self._awaited: dict[LlamaRun, tuple[LlamaRun, int]] = {}
        self._n_begun = 0
        self._later_share = later_share
        self.shares_runs = shares_runs

    def __iter__(self) -> Iterator[LlamaRun]:
        later = self._to_go_later()
        return iter([run for run in self._runs if run not in later] + [run for run in self._runs if run in later])

    def _to_go_later(self) -> list[LlamaRun]:
        """The last used run of each beginning that several have begun with lately, as far as the share goes."""
        if not any(self._is_begun_with(run) for run in self._runs):
            return []
        pinned = [run for run in self._runs if run.is_pinned]
        n_cells = int(self._shared.n_cells_max * self._later_share) - sum(_n_cells(run) for run in pinned)
        n_runs = int(self._shared.n_seq * self._later_share) - len(pinned)
        later: list[LlamaRun] = []
        for run in reversed(self._runs):
            is_new = self._is_begun_with(run) and not any(begins_with(run, other, run.begun.n_cells) for other in later)
            if is_new and not run.is_pinned and _n_cells(run) <= n_cells and len(later) < n_runs:
                later.append(run)
                n_cells -= _n_cells(run)
        return later

    def _is_begun_with(self, run: LlamaRun) -> bool:
        return run.begun.n_others >= N_OTHERS and self._n_begun <= run.begun.at + N_SEQ_MAX

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def has_copies(self) -> bool:
        """Whether there are any for others to begin with. From any thread."""
        return any(run.is_copy for run in list(self._runs))

    def add(self, run: LlamaRun) -> None:
        """Keep a run that is over."""
        self._runs[run] = None

    def remove(self, run: LlamaRun) -> None:
        """It has no cells any more."""
        self._runs.pop(run, None)
        self._awaited.pop(run, None)

    def note_begun(self, run: LlamaRun, owner: LlamaRun | None, n_shared: int = 0) -> None:
        """A run has begun with the first ``n_shared`` cells of ``owner``, which is used by that. One that begins with
        all of them goes on with the same conversation."""
        self._awaited.pop(run, None)
        self._n_begun += 1
        if owner is not None and N_WORTH_WAITING <= n_shared < _n_cells(owner):
            before = owner.begun if self._n_begun <= owner.begun.at + N_SEQ_MAX else Begun()
            n_cells = min(n_shared, before.n_cells or n_shared)
            owner.begun = Begun(n_others=before.n_others + 1, n_cells=n_cells, at=self._n_begun)
        if owner is not None:
            run.begun = owner.begun
        if owner is not None and owner in self._runs:
            owner.begun_s = time.perf_counter()
            del self._runs[owner]
            self._runs[owner] = None

    @property
    def are_awaited(self) -> bool:
        """Whether some may still be let go of: they are neither that already nor pinned."""
        return self.shares_runs and any(not run.may_go and not run.is_pinned for run in self._runs)

    def that_may_go(self, *, is_last_resort: bool = False) -> list[LlamaRun]:
        """Those whose cells may be given to others, in the order in which they are. Those that are held come last, and
        only when nothing else can be had: nobody is under way, and all that could be let go of is."""
        going = [run for run in self if run.may_go and not run.is_pinned]
        going.sort(key=lambda run: run.n_holds > 0)
        if is_last_resort or not (self.are_awaited or any(not run.is_guest for run in self._active)):
            return going
        return [run for run in going if not run.n_holds]

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


def _n_cells(run: LlamaRun) -> int:
    return 0 if run.cells is None else run.cells.n_cells


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
