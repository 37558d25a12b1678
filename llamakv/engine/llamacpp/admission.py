"""Who gets a sequence, and when: cells are promised before they are taken."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from llamakv.engine.contract import ModelInfo, Shortage
from llamakv.engine.llamacpp.kept import Beginning, KeptRuns
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.sequence import LlamaSequence
from llamakv.engine.llamacpp.shared import SharedContext
from llamakv.engine.room import no_room
from llamakv.errors import LlamakvError, NoRoomError
from llamakv.records import StateSection

_REVIEW_S = 1.0
"""How often it is looked how much memory is free, which takes about a millisecond."""

N_PROMISED = 256
"""Tokens that a run may write, which a scheduler for many users has cells for before it begins: where clients name no
limit, each answer might become as long as the context is, and hardly any does. Once it has written these, a quarter of
them are kept free for it."""

_IDLE_S = 60.0
"""How long nobody is under way before memory is given back. From 32,768 cells of SmolLM2 to 4,096, 1,000 of them in
use, that took 0.2 s and gave 650 MB; growing again to twice as many took as long."""


class Admission:
    """Runs that wait, in their order, and the account of cells: those in use, and those that runs under way
    (``active``) may still take. These are all they may come to; with ``promises_part`` what they read and some of what
    they write (``N_PROMISED``), for which the latest may have to make way.

    ``kept`` are the runs that are over and have their cells; ``drop`` frees those of one of them.
    ``fills_memory``: the limit follows the machine's free memory, up to what is allowed.
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
        promises_part: bool,
    ) -> None:
        self._shared = shared
        self._active = active
        self.promises_part = promises_part
        self._info = info
        self._n_parallel = n_parallel
        self._n_ctx_max = n_ctx_max
        self._fills_memory = fills_memory
        self._short: int | None = None
        self._kept = kept
        self._drop = drop
        self._arriving: dict[LlamaRun, int] = {}
        self.shortage: Shortage | None = None
        self.is_short = False
        self.waiting: deque[LlamaRun] = deque()
        self._busy_s = time.monotonic()
        self._reviewed_s = self._busy_s - _REVIEW_S
        self.review()

    # ------------------------------------------------------------ the account

    @property
    def limit(self) -> int:
        """Cells there may be."""
        most = self._shared.n_cells_max
        return most if self._short is None else min(most, self._short)

    @property
    def promised(self) -> int:
        """Cells that runs under way are to have, and sessions that are being brought back."""
        arriving = sum(run.n_unread + n_more for run, n_more in self._arriving.items())
        return sum(self._promise(run) for run in self._active) + arriving

    def _promise(self, run: LlamaRun) -> int:
        """Cells a run is to have. One that had to make way gets more the next time, so that it does not read all of it
        again for a few tokens."""
        if not self.promises_part or run.is_guest:
            return run.n_to_come
        n_written = 0 if run.cells is None else run.n_generated - run.n_begun_with
        n_ahead = max((N_PROMISED << min(run.n_sent_back, 16)) - n_written, N_PROMISED // 4)
        return min(run.n_to_come, run.n_unread + n_ahead)

    def leave_some(self, part: Sequence[tuple[LlamaRun, int]]) -> None:
        """Have runs that wrote all they were promised leave some cells to those who begin, unless one is alone.

        Raises:
            NoRoomError: these would be needed.
        """
        n_spare = min(N_PROMISED, self.limit // 8)
        if not self.promises_part or sum(not run.is_guest for run in self._active) < 2:
            return
        is_any_long = any(
            run.n_generated - run.n_begun_with >= N_PROMISED << min(run.n_sent_back, 16) for run, _ in part
        )
        if is_any_long and sum(n for _, n in part) + n_spare > self.limit - self._shared.n_used:
            raise NoRoomError(f"{n_spare} cells are left to who begins")

    @property
    def free(self) -> int:
        """Cells that are neither in use nor promised; less than none, where runs have become longer than that."""
        return self.limit - self._shared.n_used - self.promised

    def note_shortage(self) -> None:
        """The machine has no memory for a larger context now: what there is has to do until all runs are over."""
        self._short = min(self._shared.native.n_ctx, self._shared.n_cells_max)

    def review(self) -> None:
        """Look, now and then, how much memory is free, and let the limit follow it: never above what is allowed, nor
        below what is in use or promised. After a while without runs, memory that is not needed is given back."""
        shared, now_s = self._shared, time.monotonic()
        if self._active or self.waiting or self._arriving:
            self._busy_s = now_s
        if now_s < self._reviewed_s + _REVIEW_S:
            return
        self._reviewed_s = now_s
        shared.may_have_more_ids = True
        if self._kept.shares_runs and now_s >= self._busy_s + _IDLE_S:
            shared.shrink()
        if not self._fills_memory:
            return
        n_most, n_reserved = shared.n_cells_in_memory(), shared.n_used + self.promised
        shared.n_cells_max = min(max(n_most, n_reserved), shared.n_cells_limit)
        n_needed = max(n_reserved + (self._promise(self.waiting[0]) if self.waiting else 0), shared.native.n_ctx)
        if n_most >= min(2 * n_needed, shared.n_cells_limit):  # a context may be twice as large as what is needed
            self._short = None

    def check_free(self, n_more: int) -> None:
        """Have cells that nobody else was promised, if need be those of kept runs that may go.

        Raises:
            NoRoomError: there are not so many.
        """
        while n_more > self.free and self.drop_one():
            pass
        if n_more > max(self.free, 0) and (self._active or self._arriving):
            raise NoRoomError(
                f"{n_more} cells more are needed, {max(self.free, 0)} of {self.limit} are not promised to others",
                needed=n_more,
                free=max(self.free, 0),
            )

    # ------------------------------------------------------------ in

    def admit(self, root: LlamaSequence, begin: Callable[[LlamaRun], None]) -> list[LlamaRun]:
        """Give waiting runs a sequence as long as what they are promised fits; ``begin`` is called for each. Returns
        those that failed."""
        if not self._active and not self._kept.are_awaited:
            self._short = None
        self.review()
        failed = []
        index = 0
        self.shortage, self.is_short = None, False
        while index < len(self.waiting):
            run = self.waiting[index]
            n_under_way = sum(not active.is_guest and not active.is_paused for active in self._active)
            if not self._fits_at_all(run):
                del self.waiting[index]
                failed.append(run)
                continue
            if run.is_paused:
                index += 1
                continue
            if n_under_way >= self._n_parallel:
                break
            beginning = None if self._kept.is_still_waiting(run) else self._kept.beginning_of(run, root)
            if beginning is None or beginning.is_being_read:
                index += 1
                continue
            try:
                if not self._has_turn(run, beginning):
                    self.is_short = self.shortage is None
                    break
                self._begin(run, self._make_way(partial(self._kept.beginning_of, run, root), run, beginning))
                begin(run)
            except LlamakvError as error:
                run.fail(error)
                self._drop(run)
                failed.append(run)
            else:
                self._active.append(run)
            del self.waiting[index]
        return failed

    # ------------------------------------------------------------ room

    def _fits(self, n_cells: int) -> bool:
        return n_cells <= self.free and self._shared.has_sequence()

    def _lack(self, run: LlamaRun, beginning: Beginning, *, n_more: int = 0) -> Shortage | None:
        """What a run lacks that needs ``n_more`` cells for a while, even if all kept runs went that may."""
        n_cells = self._promise(run) - beginning.n_shared + n_more
        if self._fits(n_cells):
            return None
        going = self._kept.that_may_go()
        cells = [kept.cells for kept in going if kept.cells is not None]
        n_cells -= self.free + self._shared.n_freed(cells, beginning.cells, beginning.n_shared)
        has_sequence = bool(going) or self._shared.has_sequence()
        if n_cells <= 0 and has_sequence:
            return None
        return Shortage(n_cells=max(n_cells, 0), n_sequences=int(not has_sequence))

    def _has_turn(self, run: LlamaRun, beginning: Beginning) -> bool:
        """Whether a run may begin now. Alone it may with less than it could need, if nothing more will be free.

        Raises:
            NoRoomError: it never may.
        """
        lack = self._lack(run, beginning)
        if lack is None:
            return True
        if self._kept.are_awaited or self._arriving:
            self.shortage = lack
            return False
        if lack.n_sequences:
            if self._kept.shares_runs and not self._active:
                raise NoRoomError("all sequences of the context are kept, and none of them may go")
            return False
        if any(active.n_to_come for active in self._active):
            return False
        self._check_prompt(run, beginning.n_shared, self._promise(run) - beginning.n_shared - lack.n_cells)
        return True

    def _check_prompt(self, run: LlamaRun, n_shared: int, free: int) -> None:
        if len(run.tokens) - n_shared > max(free, 0) and not run.n_generated:
            raise self._no_room(run, used=self.limit - free, limit=self.limit)

    def _make_way(
        self, find: Callable[[], Beginning], run: LlamaRun, beginning: Beginning, *, n_more: int = 0
    ) -> Beginning:
        """Let kept runs go until there is room for a run, or none is left that may: the one used longest ago first, the
        one it begins with last. Returns what it begins with then; ``find`` looks for that again."""
        while not self._fits(self._promise(run) - beginning.n_shared + n_more):
            going = self._kept.that_may_go()
            owner = beginning.owner
            oldest = next((kept for kept in going if kept is not owner), owner if owner in going else None)
            if oldest is None:
                break
            if oldest is owner and (self._shared.n_free_ids or beginning.n_shared == beginning.cells.n_cells):
                return replace(beginning, takes_over=True)
            self._drop(oldest)
            if oldest is owner:
                beginning = find()
        return beginning

    @property
    def awaits_others(self) -> bool:
        """Whether kept runs may still be let go of."""
        return self._kept.are_awaited

    def drop_one(self) -> bool:
        """Free the cells of the kept run that is to go first; False if none may."""
        going = self._kept.that_may_go(is_last_resort=True)
        if going:
            self._drop(going[0])
        return bool(going)

    def _fits_at_all(self, run: LlamaRun) -> bool:
        if run.is_over:
            return False
        n_most = min(self._n_ctx_max, self._shared.n_cells_max)
        if len(run.tokens) < n_most or (len(run.tokens) == n_most and run.n_generated):
            return True
        if run.n_generated:  # what it has written stands
            run.end("context")
        else:
            run.fail(self._no_room(run, used=0, limit=n_most))
        return False

    def _no_room(self, run: LlamaRun, *, used: int, limit: int) -> NoRoomError:
        n_train = self._info.n_ctx_train
        return no_room(needed=len(run.tokens) + 1, used=used, limit=limit, n_ctx_train=n_train)

    def _begin(self, run: LlamaRun, beginning: Beginning) -> None:
        shared, n_shared = self._shared, beginning.n_shared
        if beginning.takes_over:
            self._share(run, beginning)
        free = self.free
        run.n_begun_with = run.n_generated
        self._check_prompt(run, n_shared, free)
        if run.cells is None:
            if shared.moves_whole:  # what is shared would not be after growing, so there is to be no growing
                n_most = min(run.n_to_come - n_shared, free)
                free = self._make_room(n_least=len(run.tokens) - n_shared, n_most=n_most)
            self._share(run, beginning)
        if not self.promises_part:  # alone it may have all there is, even if that is less than it could need
            run.n_ctx_max = min(self._n_ctx_max, max(n_shared + max(free, 0) + 1, len(run.tokens)))
        if not run.n_generated:
            run.n_reused = n_shared

    def _share(self, run: LlamaRun, beginning: Beginning) -> None:
        """Give a run a sequence, with what it begins with."""
        shared, parent, n = self._shared, beginning.cells, beginning.n_shared
        self._kept.note_begun(run, beginning.owner, n)
        if beginning.takes_over and beginning.owner is not None:
            owner = beginning.owner
            if n == parent.n_cells:
                run.cells, owner.cells = parent, None
            else:
                run.cells = shared.fork(parent, n)
            self._drop(owner)
        elif shared.can_share(parent, n):
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
        find = (
            partial(self._kept.beginning_of, run, root) if pieces else partial(Beginning, cells=root.cells, n_shared=0)
        )
        with lock:
            self.review()
            beginning = find()
            # a section that begins before what is live is in memory as a whole for a moment
            n_more = min(beginning.n_shared, shared.cutter.n_section - 1) if beginning.n_shared < n_cells else 0
            if len(run.tokens) > self._n_ctx_max or self._lack(run, beginning, n_more=n_more) is not None:
                limit = min(self.limit, self._n_ctx_max)
                raise self._no_room(run, used=shared.n_used + self.promised, limit=limit)
            beginning = self._make_way(find, run, beginning, n_more=n_more)
            self._share(run, beginning)
            assert run.cells is not None
            cells, run.n_reused = run.cells, beginning.n_shared
            self._arriving[run] = n_more
        try:
            with contextlib.nullcontext() if pieces else lock:
                shared.restore_beside(cells, sections(run.n_reused), n_cells, lock)
        except BaseException:
            with lock:
                del self._arriving[run]
                self._drop(run)
            raise
        with lock:
            del self._arriving[run]
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
