"""Sequences that live in one context, the cells they share, and a context that grows with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress

import psutil

from llamakv.engine.contract import ModelInfo, decodes_together
from llamakv.engine.llamacpp.cells import (
    SequenceCells,
    leave,
    leave_to_branches,
    n_freed,
    share,
)
from llamakv.engine.llamacpp.context import NativeContext
from llamakv.engine.llamacpp.memory_log import ModelSizes
from llamakv.engine.llamacpp.moving import Mover
from llamakv.engine.llamacpp.state import SCRATCH, Joiner, StateCutter
from llamakv.engine.memory import CacheKind, ContextMemory
from llamakv.engine.memory_limit import within_limits
from llamakv.engine.room import n_cells_to_grow_to
from llamakv.errors import NoRoomError
from llamakv.records import MemoryKind, SectionKind, StateSection

N_SEQ_MAX = 256
"""Sequences of a context at most (LLAMA_MAX_SEQ in llama-cparams.h), the scratch sequence among them."""

N_EXPECTED = 256
"""Tokens a run is expected to write: a context that has to grow gets room for these, where they may come."""

_MIN_CTX = 512
_MEMORY_SHARE = 0.9  # of the available memory, that growing may take


class SharedContext:
    """One native context that is replaced by another when it has to be larger, or may be smaller; never more than
    ``n_cells_max`` cells, which is ``n_cells_limit`` at most.

    ``n_seq`` sequences at most, apart from the scratch sequence and one that guards windows (``WindowGuard``); it opens
    with ``n_seq_first`` of them, and has twice as many when all are in use. Not for use from two threads.
    """

    def __init__(
        self,
        open_context: Callable[[int, int], NativeContext],
        *,
        sizes: Callable[[], ModelSizes],
        info: ModelInfo,
        swa_full: bool,
        n_seq: int,
        n_seq_first: int,
        n_ctx_min: int,
        n_ctx_floor: int,
        n_cells_max: int,
    ) -> None:
        self._open_context = open_context
        self._sizes = sizes
        self._info = info
        self._n_ctx_floor = n_ctx_floor
        self.n_cells_limit = self.n_cells_max = n_cells_max
        self.cutter = StateCutter(info.kind, n_window=info.n_window, swa_full=swa_full)
        self.decodes_together = decodes_together(info.kind, swa_full=swa_full)
        self._copies_whole = info.kind is MemoryKind.WINDOWED and not swa_full
        self._mover = Mover(self.cutter, info, copies_whole=self._copies_whole)
        self._n_guards = int(swa_full and info.kind is MemoryKind.WINDOWED)
        self.n_seq, self._n_ctx_min = min(n_seq, N_SEQ_MAX - 1 - self._n_guards), n_ctx_min
        n_ids = self.n_seq if self._copies_whole else min(n_seq_first, self.n_seq)
        self.native = open_context(self._size(n_ctx_min), n_ids + 1)
        self._allocated: ContextMemory | None = None
        self._free_ids = [seq_id for seq_id in range(n_ids, 0, -1) if seq_id != SCRATCH]
        self.may_have_more_ids = True
        self._live: list[SequenceCells] = []
        self.n_peak = 0

    # ------------------------------------------------------------ facts

    @property
    def allocated(self) -> ContextMemory:
        """What the present context took."""
        if self._allocated is None:
            self._allocated = self.native.allocated(self._sizes())
        return self._allocated

    @property
    def is_recurrent(self) -> bool:
        """Whether there is a recurrent part, which is what it is at one place only."""
        return self._info.kind in (MemoryKind.RECURRENT, MemoryKind.HYBRID)

    @property
    def moves_whole(self) -> bool:
        """Whether sequences move to a larger context one by one, so that they share nothing there."""
        return self._mover.loses_sharing(self.native, self._live)

    @property
    def shares_anywhere(self) -> bool:
        """Whether sequences can share any number of cells; recurrent states are what they are at one place only."""
        return not self.is_recurrent and not self._copies_whole

    def can_share(self, cells: SequenceCells, n_cells: int) -> bool:
        """Whether a branch may begin with the first ``n_cells`` cells of a sequence: all of them or none, or as many as
        leave it all that positions from there on look at."""
        if n_cells in (0, cells.n_cells):
            return True
        if self.is_recurrent or self._copies_whole:
            return False
        return self.cutter.can_go_back(self.native, cells.seq_id, n_cells, whole_from=cells.whole_from)

    @property
    def n_free_ids(self) -> int:
        """Sequences that may be added to the present context."""
        return len(self._free_ids)

    @property
    def n_used(self) -> int:
        """Cells in use; one that several sequences share counts once."""
        return sum(cells.n_own for cells in self._live)

    def n_freed(self, going: Collection[SequenceCells], held: SequenceCells, n_held: int) -> int:
        """Cells that would be free without the sequences that are ``going``, if a new one has the first ``n_held``
        cells of ``held``."""
        return n_freed(self._live, going, held, n_held) if going else 0

    @property
    def n_ctx(self) -> int:
        """Cells there is room for now."""
        return min(self.native.n_ctx, self.n_cells_max)

    # ------------------------------------------------------------ sequences

    def has_sequence(self) -> bool:
        """Whether a sequence may be added: where all are in use and memory allows, a context with more is opened. What
        memory did not allow is tried again once ``may_have_more_ids`` is set."""
        n_now = self.native.n_seq_max - 1
        if not self._free_ids and n_now < self.n_seq and self.may_have_more_ids:
            n_after = self._mover.n_cells_after(self.native, self._live)
            try:
                if n_after > self.n_cells_max:  # what is shared would not be any more
                    raise NoRoomError(f"{n_after} cells would be needed", needed=n_after, limit=self.n_cells_max)
                self._move(self._size(max(self.native.n_ctx, n_after)), min(2 * n_now, self.n_seq) + 1)
            except NoRoomError:
                self.may_have_more_ids = False
        return bool(self._free_ids)

    def add(self) -> SequenceCells:
        """An empty sequence.

        Raises:
            NoRoomError: there are as many as there may be.
        """
        if not self.has_sequence():
            raise NoRoomError(f"all {len(self._live)} sequences of the context are in use")
        cells = SequenceCells(seq_id=self._free_ids.pop())
        self._live.append(cells)
        return cells

    def fork(self, parent: SequenceCells, n_cells: int) -> SequenceCells:
        """A sequence that shares the first ``n_cells`` cells of another; no cell is copied.

        Raises:
            NoRoomError: there are as many sequences as the context was opened for.
            ValueError: that part cannot be shared.
        """
        if not 0 <= n_cells <= parent.n_cells or not self.can_share(parent, n_cells):
            raise ValueError(f"cannot share {n_cells} of {parent.n_cells} cells")
        cells = self.add()
        if n_cells and self._copies_whole and not parent.n_branches:
            self._let_go_of_old_cells(parent)
        if n_cells:
            whole = n_cells == parent.n_cells
            self.native.copy(parent.seq_id, cells.seq_id, *((-1, -1) if whole else (0, n_cells)))
            share(parent, cells, n_cells)
        return cells

    def _let_go_of_old_cells(self, cells: SequenceCells) -> None:
        """Free the cells of windowed layers that are out of a sequence's window: once several sequences have them, the
        engine never uses them again (engine-facts d7)."""
        low, _ = self.native.position_range(cells.seq_id)
        if 0 <= low < cells.n_cells - self._info.n_window:
            sections = list(self.cutter.cut(lambda: self.native, cells.seq_id, 0, cells.n_cells))
            self.native.remove(cells.seq_id)
            self.cutter.put(self.native, cells.seq_id, sections, cells.n_cells)

    def drop(self, cells: SequenceCells) -> None:
        """Free a sequence; the cells that no other sequence has are free then."""
        leave_to_branches(self._live, cells)
        self.clear(cells)
        self._live.remove(cells)
        self._free_ids.append(cells.seq_id)

    def clear(self, cells: SequenceCells) -> None:
        """Empty a sequence; it shares nothing any more.

        Raises:
            ValueError: others share its cells.
        """
        self._check_alone(cells)
        self.native.remove(cells.seq_id)
        leave(cells)
        cells.n_cells = cells.whole_from = 0

    def cut(self, cells: SequenceCells, n_cells: int) -> bool:
        """Keep the first ``n_cells`` cells, if the memory can do that and the rest is as it was then; else nothing
        is changed."""
        self._check_alone(cells)
        context, seq_id = self.native, cells.seq_id
        if n_cells == 0 or not self.can_share(cells, n_cells):
            return False
        if not context.remove(seq_id, n_cells):
            return False
        cells.n_cells = n_cells
        cells.n_shared = min(cells.n_shared, n_cells)
        return True

    def go_back_to_tail(self, cells: SequenceCells, n_cells: int, tail: memoryview | None) -> None:
        """Make a sequence what it was after ``n_cells`` tokens, where ``tail`` was taken (None: empty it). Others may
        share its cells if it is no shorter then."""
        if n_cells < cells.n_cells:
            self._check_alone(cells)
        place = 0 if tail is None else n_cells
        cells.n_cells, cells.n_shared = 0, min(cells.n_shared, place)
        self.cutter.go_back_to_tail(self.native, cells.seq_id, place, tail)
        cells.n_cells = place

    def undo(self, cells: SequenceCells) -> None:
        """Drop what a decode that was stopped may have left of dense memory."""
        self.native.remove(cells.seq_id, cells.n_cells)

    def _check_alone(self, cells: SequenceCells) -> None:
        if cells.n_branches:
            raise ValueError(f"{cells.n_branches} sequences share the cells of sequence {cells.seq_id}")

    # ------------------------------------------------------------ state

    def tail(self, cells: SequenceCells) -> memoryview:
        """The recurrent part of a sequence as it is now."""
        return self.cutter.take_tail(self.native, cells.seq_id, cells.n_cells)

    def export(self, cells: SequenceCells, p0: int) -> Iterator[StateSection]:
        """State beyond ``p0``, in sections."""
        return self.cutter.cut(lambda: self.native, cells.seq_id, p0, cells.n_cells, whole_from=cells.whole_from)

    def restore(self, cells: SequenceCells, sections: Iterable[StateSection], n_cells: int) -> None:
        """Fill an empty sequence; it is empty after a failure, and the others are as they were.

        Raises:
            MismatchError: the engine refused a section.
            NoRoomError: there is no room for so many cells.
        """
        self.restore_beside(cells, sections, n_cells, nullcontext())

    def restore_beside(
        self,
        cells: SequenceCells,
        sections: Iterable[StateSection],
        n_cells: int,
        lock: AbstractContextManager[object],
    ) -> None:
        """Fill a sequence that has its first cells already; ``lock`` is held whenever the context is used. The sequence
        is empty after a failure.

        Raises:
            MismatchError, NoRoomError: as ``restore``.
        """
        with lock:
            n_more = n_cells - cells.n_cells
            self.ensure(n_more, expected=n_more + self.cutter.n_section + N_EXPECTED)
            joiner = self.cutter.joiner(self.native, cells.seq_id, cells.n_cells, whole_from=cells.whole_from)
            cells.is_arriving = True
        try:
            for section in sections:
                with lock:
                    self._put(joiner, cells, section)
            with lock:
                joiner.finish(self.native, n_cells)
                cells.n_cells = n_cells
                self.note_peak()
        except BaseException:
            with lock:
                if self.native.pointer:
                    self.native.remove(SCRATCH)
                    self.clear(cells)
            raise
        finally:
            cells.is_arriving = False

    def _put(self, joiner: Joiner, cells: SequenceCells, section: StateSection) -> None:
        """Add a section. It is in memory as a whole for a moment, also where cells of it are not wanted."""
        if section.kind is SectionKind.WHOLE:  # it brings its own
            self.clear(cells)
        if section.kind is not SectionKind.TAIL and section.p_used > cells.n_cells:
            self.ensure(section.p1 - section.p0)
        cells.n_cells = joiner.add(self.native, section)
        cells.whole_from = joiner.whole_from

    # ------------------------------------------------------------ room

    def note_peak(self) -> None:
        """Remember how many cells were in use at most."""
        self.n_peak = max(self.n_peak, self.n_used)

    def ensure(self, n_more: int, *, expected: int = 0) -> None:
        """Have room for ``n_more`` cells beyond those in use, in a larger context if need be; one that is opened has
        room for ``expected`` more, where it may.

        Raises:
            NoRoomError: that is more than ``n_cells_max``, or than memory is free; nothing was changed.
        """
        needed = self.n_used + n_more
        if needed > self.n_cells_max:
            raise NoRoomError(
                f"{n_more} cells more are needed, {self.n_used} of {self.n_cells_max} are in use",
                needed=needed,
                limit=self.n_cells_max,
            )
        if needed > self.native.n_ctx:
            needed = self._mover.n_cells_after(self.native, self._live) + n_more
            self._move(self._size(min(max(needed, self.n_used + expected), max(needed, self.n_cells_max))))

    @property
    def can_grow(self) -> bool:
        """Whether a larger context is allowed."""
        return self.native.n_ctx < self.n_cells_max

    def enlarge(self) -> None:
        """Have a context of twice the size, or as large as it may be.

        Raises:
            NoRoomError: memory is short; nothing was changed.
        """
        n_wanted = max(2 * self.native.n_ctx, self._mover.n_cells_after(self.native, self._live))
        self._move(self._size(min(n_wanted, self.n_cells_max)))

    def shrink(self) -> None:
        """Have a smaller context, if a quarter of the present one would do for what is in use and a run more, and what
        is shared stays so."""
        n_after = self._mover.n_cells_after(self.native, self._live)
        n_ctx = self._size(max(n_after + N_EXPECTED, self._n_ctx_min))
        if 4 * n_ctx <= self.native.n_ctx and n_after == self.n_used:
            with suppress(NoRoomError):
                self._move(n_ctx)

    def _size(self, n_tokens: int) -> int:
        """The power of two that holds ``n_tokens``, within the limit; growing later costs milliseconds."""
        size = 1 << (max(_MIN_CTX, n_tokens) - 1).bit_length()
        return max(min(size, max(self.n_cells_max, n_tokens)), self._n_ctx_floor)

    def _move(self, n_ctx: int, n_seq_max: int | None = None) -> None:
        """Go on in another context.

        Raises:
            NoRoomError: memory is short; nothing was changed.
        """
        n_before = self.native.n_seq_max
        n_seq_max = n_before if n_seq_max is None else n_seq_max
        self._check_memory(n_ctx, n_seq_max)
        other = self._open_context(n_ctx, n_seq_max)
        try:
            self._mover.move(self.native, other, self._live)
        except BaseException:
            other.close()
            raise
        self.native.close()
        self.native, self._allocated = other, None
        self._free_ids += range(n_seq_max - 1, n_before - 1, -1)

    def _check_memory(self, n_ctx: int, n_seq_max: int) -> None:
        present = self.allocated
        by_sequence = present.recurrent_bytes + present.compute_bytes + present.output_bytes
        n_sequences = n_seq_max + self._n_guards
        n_needed = self.bytes_per_cell() * n_ctx + by_sequence * n_sequences // present.n_seq_max
        n_free = int(_free_bytes() * _MEMORY_SHARE)
        if n_needed > n_free:
            raise NoRoomError(
                f"a context of {n_ctx} cells needs {n_needed} bytes, {n_free} bytes of memory are free",
                hint="use a smaller cache type (--type-k q8_0 --type-v q8_0) in a new session",
                needed=n_needed,
                free=n_free,
            )

    def bytes_per_cell(self) -> int:
        """What a cell takes; 0 where cells take nothing."""
        n_ctx = self.native.n_ctx  # windows that keep only themselves do not grow
        parts = (one for one in self.allocated.parts if one.kind is not CacheKind.RECURRENT and one.n_cells >= n_ctx)
        return sum(part.n_bytes // part.n_cells for part in parts)

    def n_cells_in_memory(self) -> int:
        """Cells that the memory now free, and what the context has already, allow to grow to."""
        n_bytes = self.bytes_per_cell()
        if n_bytes == 0:
            return self.n_cells_limit
        return n_cells_to_grow_to(bytes_per_cell=n_bytes, free_bytes=_free_bytes(), n_ctx=self.native.n_ctx)

    def close(self) -> None:
        """Free the context."""
        self.native.close()


def _free_bytes() -> int:
    return within_limits(int(psutil.virtual_memory().available))
