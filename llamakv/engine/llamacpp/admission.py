"""Who gets a sequence, and when: cells are promised before they are taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from llamakv.engine.contract import ModelInfo
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.sequence import LlamaSequence
from llamakv.engine.llamacpp.shared import SharedContext
from llamakv.engine.prefix import n_common
from llamakv.engine.room import no_room
from llamakv.errors import LlamakvError, NoRoomError


class Admission:
    """Runs that wait, in their order, and the account of cells: those in use, and those that runs under way
    (``active``) may still take. What is promised never exceeds the limit.

    ``fills_memory``: the limit is to be what the machine's free memory holds, where that is less.
    """

    def __init__(
        self,
        shared: SharedContext,
        active: list[LlamaRun],
        *,
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
        self.waiting: deque[LlamaRun] = deque()

    # ------------------------------------------------------------ the account

    @property
    def limit(self) -> int:
        """Cells there may be."""
        most = self._shared.n_cells_max
        return most if self._short is None else min(most, self._short)

    @property
    def promised(self) -> int:
        """Cells that runs under way may still take."""
        return sum(run.n_to_come for run in self._active)

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
        while self.waiting:
            run = self.waiting[0]
            n_under_way = sum(not active.is_guest for active in self._active)
            if not self._fits_at_all(run):
                failed.append(self.waiting.popleft())
                continue
            if n_under_way >= self._n_parallel or self._shared.n_free_ids == 0:
                break
            n_shared = self._n_to_share(run, root)
            free = self.free
            if run.n_to_come - n_shared > free and any(active.n_to_come for active in self._active):
                break
            self.waiting.popleft()
            try:
                self._begin(run, root, n_shared, free)
                begin(run)
            except LlamakvError as error:
                run.fail(error)
                failed.append(run)
            else:
                self._active.append(run)
        return failed

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

    def _n_to_share(self, run: LlamaRun, root: LlamaSequence) -> int:
        """How many of the root's cells a run may begin with. Where memory cannot be shared at any place, these are all
        of them, those of a place that the root remembers, or none."""
        n = n_common(root.tokens[: root.n_cells], run.tokens[:-1])
        if self._shared.can_share(root.cells, n):
            return n
        if self._shared.is_recurrent:
            return max((place for place in root.marks if place <= n), default=0)
        return 0

    def _begin(self, run: LlamaRun, root: LlamaSequence, n_shared: int, free: int) -> None:
        shared = self._shared
        if len(run.tokens) - n_shared > max(free, 0) and not run.n_generated:
            raise self._no_room(run, used=shared.n_used + self.promised, limit=self.limit)
        if shared.moves_whole:  # what is shared would not be after growing, so there is to be no growing
            free = self._make_room(n_least=len(run.tokens) - n_shared, n_most=min(run.n_to_come - n_shared, free))
        if shared.can_share(root.cells, n_shared):
            run.cells = shared.fork(root.cells, n_shared)
        else:
            run.cells = shared.fork(root.cells, root.n_cells)
            shared.go_back_to_tail(run.cells, n_shared, root.marks[n_shared])
        # alone it may have all there is, even if that is less than it could need
        run.n_ctx_max = min(self._n_ctx_max, max(n_shared + max(free, 0) + 1, len(run.tokens)))
        if not run.n_generated:
            run.n_reused = n_shared

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
