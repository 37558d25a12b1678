"""Sequences that move to another context, with what they share."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from llamakv.engine.contract import ModelInfo
from llamakv.engine.llamacpp.cells import SequenceCells, leave, parents_first, put_fullest_first
from llamakv.engine.llamacpp.context import NativeContext
from llamakv.engine.llamacpp.state import StateCutter
from llamakv.records import MemoryKind


class Mover:
    """Moves the sequences of one context to another. ``copies_whole``: each goes in one piece, and shares nothing."""

    def __init__(self, cutter: StateCutter, info: ModelInfo, *, copies_whole: bool) -> None:
        self._cutter = cutter
        self._kind = info.kind
        self._copies_whole = copies_whole

    def loses_sharing(self, native: NativeContext, live: Sequence[SequenceCells]) -> bool:
        """Whether sequences go one by one, so that they share nothing there."""
        if self._copies_whole:
            return True
        longest = max(live, key=lambda cells: cells.n_cells, default=None)
        if self._kind is not MemoryKind.HYBRID or longest is None or longest.n_cells == 0:
            return False
        return not self._cutter.can_be_cut(native, longest.seq_id, longest.n_cells)

    def n_cells_after(self, native: NativeContext, live: Sequence[SequenceCells]) -> int:
        """Cells that all sequences take in another context. A sequence may have lost cells of windowed layers that its
        branches still have (the engine gave them to others), so that it is to share with them, not they with it."""
        if self._kind is MemoryKind.WINDOWED:
            low = {cells: native.position_range(cells.seq_id)[0] for cells in live}
            put_fullest_first(live, {cells: n if n >= 0 else sys.maxsize for cells, n in low.items()})
        return sum(cells.n_cells - self._n_shared_after(native, cells) for cells in live)

    def move(self, native: NativeContext, other: NativeContext, live: Sequence[SequenceCells]) -> None:
        """Give an empty context what the sequences have, and settle what they share there. On a failure nothing is
        changed but ``other``."""
        kept = {cells: self._n_shared_after(native, cells) for cells in live}
        whole_from = {cells: self._move_one(native, other, cells, kept[cells]) for cells in parents_first(live)}
        for cells in live:
            cells.whole_from = max(cells.whole_from, whole_from[cells])
            if kept[cells] < cells.n_shared:
                leave(cells)

    def _move_one(self, native: NativeContext, other: NativeContext, cells: SequenceCells, n_shared: int) -> int:
        """Returns from where on its windowed layers have no gap there, of what is not shared."""
        if n_shared and cells.parent is not None:
            other.copy(cells.parent.seq_id, cells.seq_id, 0, n_shared)
        joiner = self._cutter.joiner(other, cells.seq_id, n_shared)
        sections = self._cutter.cut(lambda: native, cells.seq_id, n_shared, cells.n_cells, whole_from=cells.whole_from)
        for section in sections:
            joiner.add(other, section)
        joiner.finish(other, cells.n_cells, is_checked=not cells.is_arriving)
        return joiner.whole_from

    def _n_shared_after(self, native: NativeContext, cells: SequenceCells) -> int:
        """What a sequence can still share in another context: not what moves in one piece."""
        if cells.parent is None or cells.n_shared == 0 or self._copies_whole:
            return 0
        if self._kind is MemoryKind.HYBRID and not self._cutter.can_be_cut(native, cells.seq_id, cells.n_cells):
            return 0
        return cells.n_shared
