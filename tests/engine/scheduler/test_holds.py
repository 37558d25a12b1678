"""Runs that are held for somebody who waits, and runs that stand still for a while."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llamakv.engine.llamacpp import LlamaModel
from tests.engine.scheduler.cases import drive, watching
from tests.engine.scheduler.many import ask, check_account, check_answers, open_many, run_one
from tests.engine.scheduler.test_many import kept_runs
from tests.engine.test_sequence import tokens_of


@pytest.fixture(scope="module", params=["M", "MS", "MR", "MH"])
def model(request: pytest.FixtureRequest, models) -> Iterator[LlamaModel]:
    with LlamaModel(models(request.param)) as opened:
        yield opened


# ---------------------------------------------------------------- held


def test_a_held_run_goes_after_all_others(dense: LlamaModel) -> None:
    scheduler = open_many(dense, 1, n_cells_max=512)
    runs = kept_runs(scheduler, dense, 4)
    for run in runs:
        scheduler.let_go(run)
    assert scheduler.hold(runs[0])
    run_one(scheduler, tokens_of(dense, 150, seed=20), 2, keeps=False)
    assert [scheduler.has_cells(run) for run in runs] == [True, False, True, True]
    run_one(scheduler, tokens_of(dense, 400, seed=21), 2, keeps=False)
    assert [scheduler.has_cells(run) for run in runs] == [True, False, False, False]
    run_one(scheduler, tokens_of(dense, 450, seed=22), 2, keeps=False)  # there is no other room
    assert not scheduler.has_cells(runs[0])
    assert not scheduler.hold(runs[0])
    check_account(scheduler)


def test_who_lacks_room_waits_for_runs_under_way_rather_than_take_what_is_held(dense: LlamaModel) -> None:
    scheduler = open_many(dense, 2, n_cells_max=512)
    (held,) = kept_runs(scheduler, dense, 1)
    scheduler.let_go(held)
    assert scheduler.hold(held)
    active = scheduler.submit(ask(tokens_of(dense, 150, seed=20), 60, keeps=False))
    while not active.n_generated:
        scheduler.step()
    waiting = scheduler.submit(ask(tokens_of(dense, 250, seed=21), 2, keeps=False))
    while not active.is_over:
        scheduler.step()
        assert waiting.started_s == 0 or active.is_over
    drive(scheduler, [waiting])
    assert scheduler.has_cells(held)
    scheduler.unhold(held)
    run_one(scheduler, tokens_of(dense, 450, seed=22), 2, keeps=False)
    assert not scheduler.has_cells(held)


def test_who_waits_for_what_is_held_begins_with_it(dense: LlamaModel) -> None:
    scheduler = open_many(dense, 1, n_cells_max=512)
    (held,) = kept_runs(scheduler, dense, 1)
    scheduler.let_go(held)
    assert scheduler.hold(held)
    others = [scheduler.submit(ask(tokens_of(dense, 380, seed=30 + n), 2, keeps=False)) for n in range(3)]
    own = scheduler.submit(ask([*held.tokens, 7], 2))
    drive(scheduler, [*others, own])
    assert own.n_reused == len(held.tokens) - 1
    check_account(scheduler)


# ---------------------------------------------------------------- paused


def test_a_paused_run_keeps_its_cells_and_goes_on_as_if_nothing_had_been(model: LlamaModel) -> None:
    scheduler = open_many(model, 1)
    with watching() as seen:
        long = scheduler.submit(ask(tokens_of(model, 60), 40))
        while long.n_generated < 10:
            scheduler.step()
        others = []
        for n in range(3):
            assert scheduler.pause(long)
            others.append(scheduler.submit(ask(tokens_of(model, 40, seed=n + 1), 6)))
            drive(scheduler, others)
            assert long.n_generated == 10 + n
            check_account(scheduler)
            scheduler.resume(long)
            while long.n_generated == 10 + n:
                scheduler.step()
        drive(scheduler, [long])
    assert check_answers(model, [long, *others], seen) == 0


def test_the_place_of_a_paused_run_is_anothers_until_it_goes_on(dense: LlamaModel) -> None:
    scheduler = open_many(dense, 2)
    one, two, three = (scheduler.submit(ask(tokens_of(dense, 40, seed=n), 60, keeps=False)) for n in range(3))
    while not two.n_generated:
        scheduler.step()
    assert three.started_s == 0
    assert scheduler.pause(two)
    n_written = two.n_generated
    while three.n_generated < 5:
        scheduler.step()
    assert two.n_generated == n_written
    assert one.n_generated > 5
    scheduler.resume(two)
    scheduler.step()
    assert two.n_generated == n_written + 1
    drive(scheduler, [one, two, three])
    assert [run.n_generated for run in (one, two, three)] == [60, 60, 60]
    assert scheduler.counts.n_cells == 0


def test_what_reads_or_is_over_is_not_paused(dense: LlamaModel) -> None:
    scheduler = open_many(dense, 1)
    over = run_one(scheduler, tokens_of(dense, 20), 1)
    reading = scheduler.submit(ask(tokens_of(dense, 1000, seed=1), 2))
    scheduler.step()
    assert reading.n_generated == 0
    assert not scheduler.pause(over)
    assert not scheduler.pause(reading)
    drive(scheduler, [reading])
    assert reading.finish_reason == "length"


def test_a_paused_run_ends_when_its_time_is_up_and_can_be_cancelled(dense: LlamaModel) -> None:
    scheduler = open_many(dense, 2)
    late = scheduler.submit(ask(tokens_of(dense, 20), 400))
    gone = scheduler.submit(ask(tokens_of(dense, 20, seed=1), 400))
    while not (late.n_generated and gone.n_generated):
        scheduler.step()
    assert scheduler.pause(late)
    assert scheduler.pause(gone)
    scheduler.cancel(gone)
    assert (gone.finish_reason, scheduler.counts.n_active) == ("interrupted", 1)
    late.started_s -= 10.0
    object.__setattr__(late.request, "timeout_s", 5.0)
    assert scheduler.step() == [late]
    assert late.finish_reason == "timeout"
    assert scheduler.has_cells(late)
