"""Which live sequence a run begins with, and runs that stay when they are over until others need their cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.sequence import LlamaSequence
from llamakv.engine.llamacpp.shared import SequenceCells, SharedContext
from llamakv.engine.prefix import n_common

N_WORTH_WAITING = 32
"""Tokens that are worth waiting for while another run reads them: half a call's reading (the scheduler's 64)."""

Ids = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What a run can begin with: the first ``n_shared`` cells of a sequence. ``tails`` are recurrent states of that
    sequence by place, for memory that is shared at such places only. ``is_being_read`` says that more of its tokens are
    being read for another run now."""

    cells: SequenceCells
    n_shared: int
    tails: Mapping[int, memoryview] = field(default_factory=dict)
    is_being_read: bool = False


class KeptRuns:
    """Runs that are over and keep their cells, the one used longest ago first.

    ``active`` are the runs under way. With ``shares_runs`` a run may begin with the cells of any run of its space, else
    with the root's only.
    """

    def __init__(self, shared: SharedContext, active: Sequence[LlamaRun], *, shares_runs: bool) -> None:
        self._shared = shared
        self._active = active
        self._shares_runs = shares_runs
        self._runs: dict[LlamaRun, None] = {}
        self._ids: dict[LlamaRun, Ids] = {}

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
        self._ids.pop(run, None)

    def use(self, run: LlamaRun) -> None:
        """It was used just now."""
        if run in self._runs:
            del self._runs[run]
            self._runs[run] = None

    @property
    def are_awaited(self) -> bool:
        """Whether some may still be let go of: they are neither that already nor pinned."""
        return self._shares_runs and any(not run.may_go and not run.is_pinned for run in self._runs)

    def next_to_go(self, keep: SequenceCells) -> LlamaRun | None:
        """The run whose cells are given to others next, which is not the one that ``keep`` belongs to."""
        return next((r for r in self._runs if r.may_go and not r.is_pinned and r.cells is not keep), None)

    # ------------------------------------------------------------ what a run begins with

    def beginning_of(self, run: LlamaRun, root: LlamaSequence) -> Beginning:
        """What it shares most with."""
        best = self._of_root(run, root)
        if not self._shares_runs:
            return best
        ids, n_most, owner = self._ids_of(run), len(run.tokens) - 1, None
        for other in [*self._runs, *self._active]:
            if other.space != run.space or other.cells is None or other.cells.n_cells <= best.n_shared:
                continue
            n = min(n_equal(self._ids_of(other), ids), other.cells.n_cells, n_most)
            if n > best.n_shared and self._shared.can_share(other.cells, n):
                best, owner = Beginning(cells=other.cells, n_shared=n), other
        if owner is not None:
            self.use(owner)
        if self._shared.shares_anywhere and self._is_being_read(run, ids, n_most, best.n_shared):
            return Beginning(cells=best.cells, n_shared=best.n_shared, tails=best.tails, is_being_read=True)
        return best

    def _is_being_read(self, run: LlamaRun, ids: Ids, n_most: int, n_shared: int) -> bool:
        return any(
            other.space == run.space
            and other.n_unread > 0
            and min(n_equal(self._ids_of(other), ids), n_most, len(other.tokens) - 1) >= n_shared + N_WORTH_WAITING
            for other in self._active
        )

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

    def _ids_of(self, run: LlamaRun) -> Ids:
        """The tokens of a run as far as others may have them too: of one that is under way, its prompt."""
        known = self._ids.get(run)
        n = len(run.tokens) if run in self._runs else run.n_prompt
        if known is None or len(known) != n:
            known = np.array(run.tokens[:n], np.int32)
            if run in self._runs or run in self._active:
                self._ids[run] = known
        return known


def n_equal(one: Ids, other: Ids) -> int:
    """How many tokens two arrays begin with alike."""
    n = min(len(one), len(other))
    differs = one[:n] != other[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n
