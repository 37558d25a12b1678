"""State in sections: how each memory kind is cut into pieces and put together again, exactly.

What was measured (engine-facts a to d): a range copied to the scratch sequence and read there, range by range, and put
back the same way, gives a sequence that continues bit for bit as before. A sequence's recurrent part comes last in its
bytes, so that it can be cut off a hybrid's cells and kept once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from llamakv.engine.llamacpp.context import PARTIAL, NativeContext
from llamakv.errors import EngineError, MismatchError
from llamakv.records import MemoryKind, SectionKind, StateSection

SCRATCH = 0
"""The sequence id through which all state goes. It stands in every section's bytes: another one would change them."""

_N_HEADER = 8  # u32 magic, i32 sequence id at the start of a sequence's state (engine-facts c6)
_N_SECTION = 256


class StateCutter:
    """Cuts and joins the state of single sequences of a context; remembers nothing of any context.

    ``n_window`` is the model's sliding window, 0 for none; ``swa_full`` whether windowed layers keep all cells. A
    section has ``n_section`` cells at most.
    """

    def __init__(self, kind: MemoryKind, *, n_window: int, swa_full: bool) -> None:
        self._kind = kind
        self._in_one_piece = kind is MemoryKind.WINDOWED and not swa_full
        self._n_window = n_window
        self._swa_full = swa_full
        self.n_section = min(_N_SECTION, n_window) if n_window > 0 else _N_SECTION

    @property
    def is_windowed(self) -> bool:
        """Whether there are windowed layers, which may lack cells that others have."""
        return self._kind is MemoryKind.WINDOWED

    # ------------------------------------------------------------ out

    def cut(
        self, context: Callable[[], NativeContext], seq_id: int, p0: int, n_cells: int, *, whole_from: int = 0
    ) -> Iterator[StateSection]:
        """Sections of ``[p0, n_cells)`` of a sequence, and its tail where the kind has one. ``context`` is asked for
        each: it may be replaced by a larger one in between. No section goes over ``whole_from``, so that a gap in
        windowed layers can be told from what a section begins and ends with."""
        if n_cells == 0:
            return
        if self._in_one_piece or not self.can_be_cut(context(), seq_id, n_cells):
            data = _through_scratch(context(), seq_id)
            yield StateSection(kind=SectionKind.WHOLE, p0=0, p1=n_cells, p_used=n_cells, data=data)
            return
        if self._kind is not MemoryKind.RECURRENT:
            a = p0
            while a < n_cells:
                b = min(a + self.n_section, whole_from if a < whole_from else n_cells, n_cells)
                data = self._cells(context(), seq_id, a, b)
                yield StateSection(kind=SectionKind.CELLS, p0=a, p1=b, p_used=b, data=data)
                a = b
        if self._kind in (MemoryKind.RECURRENT, MemoryKind.HYBRID):
            data = self.take_tail(context(), seq_id, n_cells)
            yield StateSection(kind=SectionKind.TAIL, p0=n_cells, p1=n_cells, p_used=n_cells, data=data)

    def can_be_cut(self, context: NativeContext, seq_id: int, n_cells: int) -> bool:
        """Whether a hybrid's recurrent part comes last in its bytes, as it does for nearly all (engine-facts c2)."""
        if self._kind is not MemoryKind.HYBRID:
            return True
        context.copy(seq_id, SCRATCH, n_cells - 1, n_cells)
        try:
            whole, recurrent = context.get_state(SCRATCH), context.get_state(SCRATCH, PARTIAL)[_N_HEADER:]
        finally:
            context.remove(SCRATCH)
        n_body = len(whole) - len(recurrent)
        return n_body > _N_HEADER and whole[n_body:] == recurrent

    def take_tail(self, context: NativeContext, seq_id: int, n_cells: int) -> memoryview:
        """The recurrent part of a sequence as it is now."""
        assert n_cells > 0
        return _through_scratch(context, seq_id, flags=PARTIAL if self._kind is MemoryKind.HYBRID else 0)

    def _cells(self, context: NativeContext, seq_id: int, p0: int, p1: int) -> memoryview:
        context.copy(seq_id, SCRATCH, p0, p1)
        try:
            whole = context.get_state(SCRATCH)
            if self._kind is not MemoryKind.HYBRID:
                return whole
            recurrent = context.get_state(SCRATCH, PARTIAL)[_N_HEADER:]
        finally:
            context.remove(SCRATCH)
        n_body = len(whole) - len(recurrent)
        if n_body <= _N_HEADER or whole[n_body:] != recurrent:
            raise EngineError("this architecture's state cannot be cut: its recurrent part does not come last")
        return whole[:n_body]

    # ------------------------------------------------------------ in

    def put(self, context: NativeContext, seq_id: int, sections: Iterable[StateSection], n_cells: int) -> None:
        """Make an empty sequence the one the sections were cut from.

        Raises:
            MismatchError: the engine refused a section, the sections leave a gap, or the result is not ``n_cells``
                long; the sequence is empty afterwards.
        """
        joiner = self.joiner(context, seq_id, 0)
        try:
            for section in sections:
                joiner.add(context, section)
            joiner.finish(context, n_cells)
        except BaseException:
            context.remove(SCRATCH)
            context.remove(seq_id)
            raise

    def joiner(self, context: NativeContext, seq_id: int, n_there: int, *, whole_from: int = 0) -> Joiner:
        """What puts sections together, behind the ``n_there`` cells that a sequence has already."""
        return Joiner(self, seq_id, n_there, whole_from, self._empty_tail(context))

    def _empty_tail(self, context: NativeContext) -> bytes:
        if self._kind is not MemoryKind.HYBRID:
            return b""
        return bytes(context.get_state(SCRATCH, PARTIAL)[_N_HEADER:])

    def put_piece(self, context: NativeContext, seq_id: int, data: memoryview, p0: int, p1: int) -> tuple[int, int]:
        """Add cells of a piece of state to a sequence. Returns the smallest and the largest position of the piece; of a
        windowed model, that its windowed layers have.

        Raises:
            MismatchError: the engine refused it.
        """
        taken = context.set_state(SCRATCH, data)
        if taken:
            context.copy(SCRATCH, seq_id, p0, p1)
        positions = context.position_range(SCRATCH)
        context.remove(SCRATCH)
        if not taken:
            raise MismatchError(f"the engine refused the stored state of positions {p0} to {p1}")
        return positions

    def put_tail(self, context: NativeContext, seq_id: int, data: memoryview) -> None:
        """Give a sequence its recurrent part.

        Raises:
            MismatchError: the engine refused it.
        """
        if self._kind is MemoryKind.RECURRENT:
            self.put_piece(context, seq_id, data, -1, -1)
        elif not context.set_state(seq_id, data, PARTIAL):
            raise MismatchError("the engine refused the stored recurrent state")

    def check(self, context: NativeContext, seq_id: int, n_cells: int, *, whole_from: int = 0) -> None:
        """Make sure that a sequence is ``n_cells`` long, and has all that the next position looks at.

        Raises:
            MismatchError: it is not, or has not.
        """
        low, high = context.position_range(seq_id)
        if high != n_cells - 1 or low > high or (low < 0) != (n_cells == 0):
            raise MismatchError(
                f"the restored state covers positions {low} to {high}, its session has {n_cells} cells",
                expected=n_cells - 1,
                actual=high,
            )
        first = n_cells - self._n_window + 1
        if self._kind is MemoryKind.WINDOWED and max(low, whole_from) > max(first, 0):
            raise MismatchError(
                f"the stored state lacks positions {max(first, 0)} to {max(low, whole_from) - 1} of windowed layers",
                expected=max(first, 0),
                actual=max(low, whole_from),
            )
        if not self._has_all(context, seq_id, max(first, 0), n_cells):
            raise MismatchError(
                f"the stored state lacks some of positions {max(first, 0)} to {n_cells - 1} of windowed layers"
            )

    # ------------------------------------------------------------ back

    def can_go_back(self, context: NativeContext, seq_id: int, n_cells: int, *, whole_from: int = 0) -> bool:
        """Whether removing the cells beyond ``n_cells`` leaves all that positions up to there look at. The engine
        says yes for windowed memory that has lost what it needs (engine-facts d6)."""
        if self._kind in (MemoryKind.RECURRENT, MemoryKind.HYBRID):
            return False
        low = max(context.position_range(seq_id)[0], whole_from)
        first = max(n_cells - self._n_window, 0) if self._n_window else 0
        return low in range(first + 1) and self._has_all(context, seq_id, first, n_cells)

    def _has_all(self, context: NativeContext, seq_id: int, p0: int, p1: int) -> bool:
        """Whether windowed layers have every position in ``[p0, p1)`` of a sequence. What is out of a sequence's window
        the engine may give to others, also from the middle of what it has; the sequence's last cells tell how many
        bytes a cell takes that is all there."""
        if not self.is_windowed or self._in_one_piece or p1 <= p0:
            return True
        _, high = context.position_range(seq_id)
        last = max(high - 1, 0)
        if any(not self._has_one(context, seq_id, position) for position in {high, last}):
            return False
        one = self._size(context, seq_id, high, high + 1)
        each = self._size(context, seq_id, last, high + 1) - one
        return self._size(context, seq_id, p0, p1) == one + each * (p1 - p0 - 1)

    @staticmethod
    def _has_one(context: NativeContext, seq_id: int, position: int) -> bool:
        context.copy(seq_id, SCRATCH, position, position + 1)
        low, _ = context.position_range(SCRATCH)
        context.remove(SCRATCH)
        return low == position

    @staticmethod
    def _size(context: NativeContext, seq_id: int, p0: int, p1: int) -> int:
        context.copy(seq_id, SCRATCH, p0, p1)
        size = context.state_size(SCRATCH)
        context.remove(SCRATCH)
        return size

    def go_back_to_tail(self, context: NativeContext, seq_id: int, n_cells: int, tail: memoryview | None) -> None:
        """Make a sequence what it was at ``n_cells``, where ``tail`` was taken; None or 0: empty it."""
        if tail is None or n_cells == 0:
            context.remove(seq_id)
            return
        if self._kind is MemoryKind.HYBRID:
            context.copy(seq_id, SCRATCH, 0, n_cells)
            context.remove(seq_id)
            context.copy(SCRATCH, seq_id)
            context.remove(SCRATCH)
        else:
            context.remove(seq_id)
        try:
            self.put_tail(context, seq_id, tail)
            self.check(context, seq_id, n_cells)
        except BaseException:
            context.remove(seq_id)
            raise


class Joiner:
    """Puts a sequence together, section by section. Nothing but the sequence is changed; on a failure it and the
    scratch sequence are to be emptied.

    Windowed layers may lack cells at the beginning of a section: those that were out of the window when it was cut, and
    had been taken for other sequences (see ``StateCutter.can_go_back``). So there may be gaps before ``whole_from``.
    """

    def __init__(self, cutter: StateCutter, seq_id: int, n_there: int, whole_from: int, empty_tail: bytes) -> None:
        self._cutter = cutter
        self._seq_id = seq_id
        self._n_there = n_there
        self._n_cells = n_there
        self._end = empty_tail
        self._last_tail: StateSection | None = None
        self.whole_from = whole_from

    def add(self, context: NativeContext, section: StateSection) -> int:
        """Take the next section; returns how many cells there are now. Cells that were there already are left alone.

        Raises:
            MismatchError: the engine refused it, or it does not begin where the one before it ended.
        """
        seq_id = self._seq_id
        if section.kind is SectionKind.TAIL:
            self._last_tail = section
        elif section.kind is SectionKind.WHOLE:
            context.remove(seq_id)  # it brings its own
            self._cutter.put_piece(context, seq_id, section.data, -1, -1)
            self._n_cells, self.whole_from = section.p1, 0
        elif section.p_used > self._n_there:
            p0 = max(section.p0, self._n_there)
            if p0 != self._n_cells:
                raise MismatchError(
                    f"the stored state goes on at position {p0}, the one before it ended at {self._n_cells}",
                    expected=self._n_cells,
                    actual=p0,
                )
            data = memoryview(b"".join((section.data, self._end))) if self._end else section.data
            low, high = self._cutter.put_piece(context, seq_id, data, p0, section.p_used)
            if self._cutter.is_windowed and high < section.p1 - 1:
                self.whole_from = section.p_used
            elif self._cutter.is_windowed and low > p0:
                self.whole_from = min(low, section.p_used)
            self._n_cells = section.p_used
        return self._n_cells

    def finish(self, context: NativeContext, n_cells: int, *, is_checked: bool = True) -> None:
        """All sections were added, or all that there are so far.

        Raises:
            MismatchError: the engine refused the recurrent part, or the sequence is not ``n_cells`` long.
        """
        if self._last_tail is not None:
            self._cutter.put_tail(context, self._seq_id, self._last_tail.data)
        if is_checked:
            self._cutter.check(context, self._seq_id, n_cells, whole_from=self.whole_from)


def _through_scratch(context: NativeContext, seq_id: int, flags: int = 0) -> memoryview:
    context.copy(seq_id, SCRATCH)
    try:
        return context.get_state(SCRATCH, flags)
    finally:
        context.remove(SCRATCH)
