"""Everything that many users do, in random order: the account of cells, and the answers.

A walk of windowed models found sequences with gaps, of cells that had been lost before they were saved.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from llamakv.engine.llamacpp import LlamaModel, admission
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.prefix import n_common
from llamakv.errors import NoRoomError
from llamakv.records import StateSection
from tests.engine.scheduler.cases import N_STEPS_MAX, watching
from tests.engine.scheduler.many import ask, check_account, check_answers, open_many
from tests.engine.test_sequence import tokens_of

Stored = tuple[list[int], list[StateSection], str]
KINDS = ["M", "MS", "MH", *(pytest.param(name, marks=pytest.mark.slow) for name in ("MG", "ML", "MR", "MH2"))]
ACTIONS = {
    "step": 50,
    "submit": 14,
    "cancel": 2,
    "let go": 10,
    "pin": 2,
    "unpin": 3,
    "release": 2,
    "save": 3,
    "adopt": 4,
}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, models) -> Iterator[LlamaModel]:
    with LlamaModel(models(request.param)) as model:
        yield model


class Walk:
    """A scheduler with little room, and what users do with it."""

    def __init__(self, model: LlamaModel, seed: int) -> None:
        self.model = model
        self.numbers = random.Random(seed)
        self.places = random.Random(seed)  # of its own: what else is done was chosen before there were any
        self.scheduler = open_many(model, 3, n_kept=5, n_cells_max=self.numbers.choice((450, 600, 900)))
        self.runs: list[LlamaRun] = []
        self.stored: list[Stored] = []
        self.n_dropped = self.n_adopted = 0
        self.prefixes = [tokens_of(model, 150, seed=1000 + i) for i in range(2)]

    def act(self) -> None:
        (action,) = self.numbers.choices(list(ACTIONS), list(ACTIONS.values()))
        kept = list(self.scheduler.kept)
        if action == "step":
            self.step()
            self.n_dropped += sum(not self.scheduler.has_cells(run) for run in kept)
            if self.scheduler.shortage is not None and self.numbers.random() < 0.3:
                unsaved = [run for run in self.scheduler.kept if not (run.may_go or run.is_pinned)]
                self.scheduler.let_go(unsaved[0])
        elif action == "submit":
            if self.scheduler.counts.n_waiting < 5:
                self.submit(kept)
        elif action == "cancel":
            self.scheduler.cancel(self.numbers.choice(self.runs)) if self.runs else None
        elif action == "adopt":
            self.adopt()
        elif kept:
            run = self.numbers.choice(kept)
            if action == "save":
                self.stored.append(
                    (list(run.tokens[: run.cells.n_cells + 1]), list(self.scheduler.export(run)), run.space)
                )
            elif action in ("pin", "unpin"):
                is_pinned = action == "pin" and sum(other.is_pinned for other in kept) < 2
                self.scheduler.pin(run, is_pinned=is_pinned)
            elif action == "let go":
                self.scheduler.let_go(run)
            else:
                self.scheduler.release(run)

    def step(self) -> None:
        """What fails has no room beside what is pinned, even with nothing else there but what it begins with."""
        kept = self.scheduler.kept
        n_pinned = sum(run.cells.n_cells for run in kept if run.is_pinned)
        for run in self.scheduler.step():
            if run.error is not None:
                assert isinstance(run.error, NoRoomError)
                n_begun = max(n_common(run.tokens, other.tokens) for other in kept)
                assert 0 < run.error.fields["used"] <= n_pinned + n_begun
                assert run.error.fields["used"] + len(run.tokens) - 1 >= run.error.fields["limit"] - run.n_reused

    def submit(self, kept: list[LlamaRun]) -> None:
        numbers = self.numbers
        space = numbers.choice(("", "", "other"))
        suffix = tokens_of(self.model, numbers.randint(1, 60), seed=len(self.runs))
        if kept and numbers.random() < 0.4:
            earlier = numbers.choice(kept)
            tokens = [*earlier.tokens[: numbers.choice((len(earlier.tokens), 100))], *suffix]
            space = earlier.space
        else:
            tokens = [*numbers.choice(self.prefixes)[: numbers.choice((0, 70, 150))], *suffix]
        if len(tokens) < 400:
            request = ask(tokens, numbers.randint(1, 12), keeps=numbers.random() < 0.8, space=space)
            places = {place for place in (70, 100, 150, len(tokens) - 1) if 0 < place < len(tokens)}
            chosen = tuple(sorted(place for place in places if self.places.random() < 0.5))
            self.runs.append(self.scheduler.submit(replace(request, places=chosen)))

    def adopt(self) -> None:
        if not self.stored:
            return
        tokens, sections, space = self.numbers.choice(self.stored)
        before = self.scheduler.counts
        try:
            run = self.scheduler.adopt(tokens, lambda n: [s for s in sections if s.p1 > n], space=space)
        except NoRoomError:
            assert self.scheduler.counts == before
        else:
            self.n_adopted += 1
            assert (list(run.tokens), run.cells.n_cells) == (tokens, len(tokens) - 1)

    def finish(self) -> None:
        """All that wait come to their turn when everything kept may go."""
        for _ in range(N_STEPS_MAX):
            for run in self.scheduler.kept:
                self.scheduler.pin(run, is_pinned=False)
                self.scheduler.let_go(run)
            if not self.scheduler.counts.n_waiting + self.scheduler.counts.n_active:
                break
            self.step()
            check_account(self.scheduler)
        assert all(run.is_over for run in self.runs)


@pytest.mark.parametrize(
    ("seed", "n", "n_promised"),
    [
        (1, 250, 256),
        (1, 250, 1),
        *(pytest.param(seed, 3000, 1 + 255 * (seed % 2), marks=pytest.mark.slow) for seed in range(2, 6)),
    ],
)
def test_whatever_users_do_the_account_is_the_engines_and_each_answer_is_the_one_alone(
    model: LlamaModel, seed: int, n: int, n_promised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that they may write is promised to runs, or only the next token."""
    monkeypatch.setattr(admission, "N_PROMISED", n_promised)
    walk = Walk(model, seed)
    with watching() as seen:
        for _ in range(n):
            walk.act()
            check_account(walk.scheduler)
        walk.finish()
    done = [run for run in walk.runs if run.finish_reason in ("length", "stop", "context")]
    assert len(done) > len(walk.runs) // 2
    assert walk.n_dropped > 0
    assert walk.n_adopted > 0
    assert any(run.n_reused for run in done)
    assert check_answers(model, done, seen) <= len(done) // 10
    for run in walk.scheduler.kept:
        walk.scheduler.release(run)
    check_account(walk.scheduler)
    assert (walk.scheduler.counts.n_cells, walk.scheduler.counts.n_reserved) == (0, 0)
