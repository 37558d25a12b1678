"""Random walks in which runs stand still and are held, and the context grows and shrinks, against runs alone."""

from __future__ import annotations

import contextlib
import random

import pytest

from llamakv.engine.llamacpp import LlamaModel, admission
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.errors import NoRoomError
from tests.engine.scheduler.cases import watching
from tests.engine.scheduler.many import check_account, check_answers
from tests.engine.scheduler.test_walks import Walk

N_ACTIONS = 1500


class PausedWalk(Walk):
    def __init__(self, model: LlamaModel, seed: int) -> None:
        super().__init__(model, seed)
        self.choice = random.Random(7 * seed)
        self.held: list[LlamaRun] = []
        self.paused: list[LlamaRun] = []
        self.n_paused = self.n_shrunk = 0

    def act(self) -> None:
        what, scheduler = self.choice.random(), self.scheduler
        if what < 0.08 and scheduler._active:
            run = self.choice.choice(scheduler._active)
            if scheduler.pause(run):
                self.paused.append(run)
                self.n_paused += 1
        elif what < 0.14 and self.paused:
            scheduler.resume(self.paused.pop(self.choice.randrange(len(self.paused))))
        elif what < 0.18 and scheduler.kept:
            run = self.choice.choice(list(scheduler.kept))
            if scheduler.hold(run):
                self.held.append(run)
        elif what < 0.22 and self.held:
            scheduler.unhold(self.held.pop(self.choice.randrange(len(self.held))))
        elif what < 0.25:
            self.resize()
        elif what < 0.28:
            scheduler.release_copies(0.0)
        else:
            super().act()

    def resize(self) -> None:
        with self.scheduler.lock, contextlib.suppress(NoRoomError):
            shared = self.scheduler._shared
            n_ctx = shared.native.n_ctx
            if self.choice.random() < 0.5:
                shared.shrink()
            elif shared.can_grow:
                shared.enlarge()
            self.n_shrunk += shared.native.n_ctx < n_ctx

    def step(self) -> None:
        n_before = {run: len(run.tokens) for run in self.paused if run.is_paused and not run.is_over}
        super().step()
        assert all(len(run.tokens) == n for run, n in n_before.items())

    def finish(self) -> None:
        for run in self.held:
            self.scheduler.unhold(run)
        for run in self.paused:
            self.scheduler.resume(run)
        super().finish()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n_promised"), [("M", 256), ("M", 1), ("MS", 1), ("MR", 256), ("MH", 256)])
def test_standing_still_being_held_and_moving_change_nothing(
    models, name: str, n_promised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "N_PROMISED", n_promised)
    with LlamaModel(models(name)) as model:
        walk = PausedWalk(model, 1)
        with watching() as seen:
            for _ in range(N_ACTIONS):
                walk.act()
                check_account(walk.scheduler)
            walk.finish()
        for run in walk.scheduler.kept:
            walk.scheduler.release(run)
        assert walk.scheduler.counts.n_cells == 0
        check_answers(model, [run for run in walk.runs if run.error is None and run.n_generated], seen)
        assert walk.n_paused > 5
        walk.scheduler.close()
