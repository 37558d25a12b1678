"""Who gets a sequence, and when: cells are promised before they are taken."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from llamakv.engine.contract import ModelInfo, Shortage
from llamakv.engine.llamacpp.kept import Beginning, KeptRuns
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.sequence import LlamaSequence
from llamakv.engine.llamacpp.shared import SequenceCells, SharedContext
from llamakv.engine.room import no_room
from llamakv.errors import LlamakvError, NoRoomError
from llamakv.records import StateSection


class Admission:
    """Runs that wait, in their order, and the account of cells: those in use, and those that runs under way
    (``active``) may still take. What is promised never exceeds the limit.

    ``kept`` are the runs that are over and have their cells; ``drop`` frees those of one of them.
    ``fills_memory``: the limit is to be what the machine's free memory holds, where that is less.
    """

    def __init__(
        self,
        shared: SharedContext,
        active: list[LlamaRun],
        kept: KeptRuns,
        *,
        drop: Callable[[LlamaRun], None],
        info: ModelInfo,
        n_parallel: int,
        n_ctx_max: int,
        fills_memory: bool,
    ) -> None:
        self._shared = shared
        self._active = active
        self._info = info
        self._n_parallel = n_parallel
        self._n_ctx_max = n_ctx_max
        self._fills_memory = fills_memory
        self._short: int | None = None
        self._kept = kept
        self._drop = drop
        self._arriving: list[LlamaRun] = []
        self.shortage: Shortage | None = None
        self.waiting: deque[LlamaRun] = deque()

    # ------------------------------------------------------------ the account

    @property
    def limit(self) -> int:
        """Cells there may be."""
        most = self._shared.n_cells_max
        return most if self._short is None else min(most, self._short)

    @property
    def promised(self) -> int:
        """Cells that runs under way may still take, and sessions that are being brought back."""
        return sum(run.n_to_come for run in self._active) + sum(run.n_unread for run in self._arriving)

    @property
    def free(self) -> int:
        """Cells that are neither in use nor promised."""
        return self.limit - self._shared.n_used - self.promised

    def note_shortage(self) -> None:
        """The machine has no memory for a larger context now: what there is has to do until all runs are over."""
        self._short = min(self._shared.native.n_ctx, self._shared.n_cells_max)

    def check_free(self, n_more: int) -> None:
        """Have cells that nobody else was promised.

        Raises:
            NoRoomError: there are not so many.
        """
        if n_more > max(self.free, 0) and self._active:
            raise NoRoomError(
                f"{n_more} cells more are needed, {max(self.free, 0)} of {self.limit} are not promised to others",
                needed=n_more,
                free=max(self.free, 0),
            )

    # ------------------------------------------------------------ in

    def admit(self, root: LlamaSequence, begin: Callable[[LlamaRun], None]) -> list[LlamaRun]:
        """Give waiting runs a sequence as long as all they may need fits; ``begin`` is called for each. Returns those
        that failed."""
        if not self._active:
            self._short = None
        if self.waiting and self._fills_memory:
            self._fills_memory = False
            self._shared.n_cells_max = min(self._shared.n_cells_max, self._shared.n_cells_in_memory())
        failed = []
        index = 0
        self.shortage = None
        while index < len(self.waiting):
            run = self.waiting[index]
            n_under_way = sum(not active.is_guest for active in self._active)
            if not self._fits_at_all(run):
                del self.waiting[index]
                failed.append(run)
                continue
            if n_under_way >= self._n_parallel:
                break
            beginning = self._kept.beginning_of(run, root)
            if beginning.is_being_read:
                index += 1
                continue
            if not self._have_room(run.n_to_come - beginning.n_shared, beginning.cells):
                break
            del self.waiting[index]
            try:
                self._begin(run, beginning, self.free)
                begin(run)
            except LlamakvError as error:
                run.fail(error)
                failed.append(run)
            else:
                self._active.append(run)
        return failed

    def _have_room(self, n_cells: int, keep: SequenceCells) -> bool:
        """Have a sequence and so many cells, if need be those of runs that were let go of, but not of the one that
        ``keep`` belongs to. Alone a run may begin with less."""
        while n_cells > self.free or self._shared.n_free_ids == 0:
            run = self._kept.next_to_go(keep)
            if run is None:
                break
            self._drop(run)
        if self._shared.n_free_ids and n_cells <= self.free:
            return True
        if self._shared.n_free_ids and not self._kept.are_awaited and not self._arriving:
            return not any(active.n_to_come for active in self._active)
        self.shortage = Shortage(n_cells=max(n_cells - self.free, 0), n_sequences=int(self._shared.n_free_ids == 0))
        return False

    def _fits_at_all(self, run: LlamaRun) -> bool:
        if run.is_over:
            return False
        n_most = min(self._n_ctx_max, self._shared.n_cells_max)
        if len(run.tokens) < n_most or (len(run.tokens) == n_most and run.n_generated):
            return True
        run.fail(self._no_room(run, used=0, limit=n_most))
        return False

    def _no_room(self, run: LlamaRun, *, used: int, limit: int) -> NoRoomError:
        n_train = self._info.n_ctx_train
        return no_room(needed=len(run.tokens) + 1, used=used, limit=limit, n_ctx_train=n_train)

    def _begin(self, run: LlamaRun, beginning: Beginning, free: int) -> None:
        shared, n_shared = self._shared, beginning.n_shared
        if len(run.tokens) - n_shared > max(free, 0) and not run.n_generated:
            raise self._no_room(run, used=shared.n_used + self.promised, limit=self.limit)
        if shared.moves_whole:  # what is shared would not be after growing, so there is to be no growing
            free = self._make_room(n_least=len(run.tokens) - n_shared, n_most=min(run.n_to_come - n_shared, free))
        self._share(run, beginning)
        # alone it may have all there is, even if that is less than it could need
        run.n_ctx_max = min(self._n_ctx_max, max(n_shared + max(free, 0) + 1, len(run.tokens)))
        if not run.n_generated:
            run.n_reused = n_shared

    def _share(self, run: LlamaRun, beginning: Beginning) -> None:
        """Give a run a sequence, with what it begins with."""
        shared, parent, n = self._shared, beginning.cells, beginning.n_shared
        if shared.can_share(parent, n):
            run.cells = shared.fork(parent, n)
        else:
            run.cells = shared.fork(parent, parent.n_cells)
            shared.go_back_to_tail(run.cells, n, beginning.tails[n])

    def adopt(
        self,
        run: LlamaRun,
        root: LlamaSequence,
        sections: Callable[[int], Iterable[StateSection]],
        lock: AbstractContextManager[object],
    ) -> None:
        """Give a run, which is over, the cells of a session; others go on while it reads (``lock`` is held for a
        section at a time where memory can be moved half read).

        Raises:
            MismatchError, NoRoomError: nothing is kept.
        """
        shared, n_cells = self._shared, len(run.tokens) - 1
        pieces = shared.shares_anywhere
        with lock:
            beginning = self._kept.beginning_of(run, root)
            n_shared = beginning.n_shared if pieces else 0
            if not self._have_room(n_cells - n_shared, beginning.cells):
                self.shortage = None
                raise self._no_room(run, used=shared.n_used + self.promised, limit=self.limit)
            run.cells = shared.fork(beginning.cells, n_shared)
            run.n_reused = n_shared
            self._arriving.append(run)
        try:
            with contextlib.nullcontext() if pieces else lock:
                shared.restore_beside(run.cells, sections(n_shared), n_cells, lock)
        except BaseException:
            with lock:
                self._drop(run)
            raise
        finally:
            self._arriving.remove(run)
        with lock:
            self._kept.add(run)

    def _make_room(self, *, n_least: int, n_most: int) -> int:
        """Have room for as many cells as there is memory for; returns how many."""
        n = n_most
        while True:
            try:
                self._shared.ensure(n)
            except NoRoomError:
                if n <= n_least:
                    raise
                n = max(n // 2, n_least)
            else:
                return n
