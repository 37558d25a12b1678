"""What a scheduler's users say of runs: which are kept, held, pinned or paused."""

from __future__ import annotations

from collections.abc import Sequence

from llamakv.engine.contract import Run, Shortage
from llamakv.engine.llamacpp.admission import Admission
from llamakv.engine.llamacpp.kept import KeptRuns
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.turns import TurnLock


class RunsKept:
    """The part of a ``Scheduler`` that is about runs as a whole; see the contract. ``lock`` is held while the context
    is used."""

    def __init__(self, kept: KeptRuns, admission: Admission) -> None:
        self._kept = kept
        self.admission = admission
        self.lock = TurnLock()

    def own(self, run: Run) -> LlamaRun:
        """A run of this scheduler. Raises: ValueError: it is another's."""
        if not isinstance(run, LlamaRun) or run.owner is not self:
            raise ValueError("the run is not one of this scheduler")
        return run

    @property
    def kept(self) -> Sequence[LlamaRun]:
        """Runs that are over and have their cells; see the contract."""
        with self.lock:
            return list(self._kept)

    @property
    def shortage(self) -> Shortage | None:
        """What the first run that waits lacks."""
        return self.admission.shortage

    @property
    def is_short(self) -> bool:
        """Whether the first run that waits waited for runs under way; see the contract."""
        return self.admission.is_short

    def let_go(self, run: Run) -> None:
        """Allow that a kept run's cells are taken when others need them."""
        self.own(run).may_go = True

    def hold(self, run: Run) -> bool:
        """Have a kept run's cells stay a while though they may go; False if they are gone."""
        own = self.own(run)
        with self.lock:
            own.n_holds += own.cells is not None
            return own.cells is not None

    def unhold(self, run: Run) -> None:
        """The opposite of a ``hold`` that returned True."""
        own = self.own(run)
        with self.lock:
            own.n_holds -= 1

    def is_held(self, run: Run) -> bool:
        """Whether somebody holds it."""
        return self.own(run).n_holds > 0

    def pin(self, run: Run, *, is_pinned: bool) -> None:
        """Keep a kept run's cells whatever comes, or no longer."""
        self.own(run).is_pinned = is_pinned

    def has_cells(self, run: Run) -> bool:
        """Whether it still has its cells."""
        return self.own(run).cells is not None

    def is_whole(self, run: Run) -> bool:
        """Whether it has the cells of all its tokens but the last; see the contract."""
        own = self.own(run)
        return own.cells is not None and own.n_unread == 0

    def pause(self, run: Run) -> bool:
        """Let a run that writes or waits stand still, and another have its place; False if it is over, or reads."""
        own = self.own(run)
        with self.lock:
            writes = own.cells is not None and own.n_unread == 0 and not own.is_guest
            own.is_paused = own.is_paused or (not own.is_over and (writes or own in self.admission.waiting))
            return own.is_paused

    def resume(self, run: Run) -> None:
        """Go on with a run that was paused."""
        self.own(run).is_paused = False
