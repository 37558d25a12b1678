"""What sequences share: a tree, in which each has the first cells of its parent."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceCells:
    """The cells of one sequence: positions ``[0, n_cells)``, the first ``n_shared`` of which are also ``parent``'s.

    ``n_branches`` sequences share some of its own. Windowed layers have, of those they have, all from ``whole_from``
    on; what was put together from stored pieces may have gaps before (see ``Joiner``). ``is_arriving``: it is being
    put together.
    """

    seq_id: int
    n_cells: int = 0
    n_shared: int = 0
    parent: SequenceCells | None = None
    n_branches: int = 0
    whole_from: int = 0
    is_arriving: bool = False

    @property
    def n_own(self) -> int:
        """Cells that nobody before it has."""
        return self.n_cells - self.n_shared


def share(parent: SequenceCells, branch: SequenceCells, n_cells: int) -> None:
    """Let an empty sequence begin with the first cells of another."""
    branch.parent, branch.n_shared, branch.n_cells = parent, n_cells, n_cells
    branch.whole_from = parent.whole_from
    parent.n_branches += 1


def leave(cells: SequenceCells) -> None:
    """Let a sequence share nothing with its parent any more; how many cells it has is not changed."""
    if cells.parent is not None:
        cells.parent.n_branches -= 1
    cells.parent, cells.n_shared = None, 0


def leave_to_branches(live: Iterable[SequenceCells], cells: SequenceCells) -> None:
    """Let the branches of a sequence that goes share with each other what they shared with it."""
    branches = [other for other in live if other.parent is cells]
    heir = max(branches, key=lambda branch: branch.n_shared, default=None)
    for branch in branches:
        if branch.n_shared <= cells.n_shared:  # all of that lies in the part it has from its own parent
            branch.parent = cells.parent
        elif branch is heir:
            branch.parent, branch.n_shared = cells.parent, cells.n_shared
        else:
            branch.parent = heir
        if branch.parent is not None:
            branch.parent.n_branches += 1
    cells.n_branches = 0


def put_fullest_first(live: Iterable[SequenceCells], lowest: Mapping[SequenceCells, int]) -> None:
    """Let no sequence share with one whose windowed layers have fewer cells: ``lowest`` are the positions from which on
    they have any. Who owns the shared cells changes, how many there are does not."""
    for cells in parents_first(live):
        while cells.parent is not None and lowest[cells] < lowest[cells.parent]:
            parent = cells.parent
            parent.n_branches -= 1
            if cells.n_shared <= parent.n_shared:  # all of that lies in the part it has from its own parent
                cells.parent = parent.parent
                if cells.parent is not None:
                    cells.parent.n_branches += 1
            else:
                cells.parent, parent.parent = parent.parent, cells
                cells.n_shared, parent.n_shared = parent.n_shared, cells.n_shared
                cells.n_branches += 1


def parents_first(live: Iterable[SequenceCells]) -> list[SequenceCells]:
    """All sequences, each after the one it shares cells with."""

    def depth(cells: SequenceCells) -> int:
        n = 0
        while cells.parent is not None:
            cells, n = cells.parent, n + 1
        return n

    return sorted(live, key=depth)


def n_freed(live: Iterable[SequenceCells], going: Collection[SequenceCells], held: SequenceCells, n_held: int) -> int:
    """Cells that would be free without the sequences that are ``going``, if a new one has the first ``n_held`` cells
    of ``held``."""
    reach = {cells: 0 if cells in going else cells.n_cells for cells in live}
    reach[held] = max(reach[held], n_held)
    for cells in reversed(parents_first(reach)):
        if cells.parent is not None:
            reach[cells.parent] = max(reach[cells.parent], min(cells.n_shared, reach[cells]))
    return sum(max(cells.n_cells - max(cells.n_shared, n), 0) for cells, n in reach.items())
