"""Answers that may become as long as the context is begin together; where cells run out, the latest make way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.admission import N_PROMISED
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.scheduler import LlamaScheduler
from tests.engine.scheduler.cases import N_STEPS_MAX, watching
from tests.engine.scheduler.many import ask, check_account, check_answers, open_many, run_one
from tests.engine.test_sequence import tokens_of

LIMIT = 720
N_PROMPT = 100


@pytest.fixture(scope="module", params=["M", pytest.param("MS", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, models) -> Iterator[LlamaModel]:
    with LlamaModel(models(request.param)) as model:
        yield model


def open_short(model: LlamaModel, n_parallel: int = 4) -> LlamaScheduler:
    return open_many(model, n_parallel, n_cells_max=LIMIT, n_ctx_max=LIMIT)


def submit(scheduler: LlamaScheduler, model: LlamaModel, n_written: int | None, n: int = 1) -> list[LlamaRun]:
    """Runs with nothing in common; None: they write as much as there is room for."""
    runs = []
    for number in range(n):
        request = ask(tokens_of(model, N_PROMPT, seed=number), 1, keeps=False)
        request = replace(request, sampling=replace(request.sampling, max_tokens=n_written))
        runs.append(scheduler.submit(request))
    return runs


def step_until_over(scheduler: LlamaScheduler, runs: list[LlamaRun]) -> int:
    """Step until all are over, never with more cells than there may be; the most that were under way."""
    n_active = 0
    for _ in range(2 * N_STEPS_MAX):
        if all(run.is_over for run in runs):
            return n_active
        scheduler.step()
        check_account(scheduler)
        n_active = max(n_active, scheduler.counts.n_active)
    return pytest.fail("still not over")


def test_answers_without_a_limit_begin_together(model: LlamaModel) -> None:
    scheduler = open_short(model)
    runs = submit(scheduler, model, None, 2)
    while not all(run.n_generated for run in runs):
        scheduler.step()
    assert scheduler.counts.n_active == 2
    assert scheduler.counts.n_reserved == 2 * (N_PROMPT - 1 + N_PROMISED)
    while scheduler.counts.n_cells < 2 * (N_PROMPT + 250):
        scheduler.step()
    assert scheduler.counts.n_reserved == LIMIT  # each is to have some more
    scheduler.close()


def test_where_cells_run_out_the_latest_makes_way_and_all_write_the_right_words(model: LlamaModel) -> None:
    scheduler = open_short(model)
    with watching() as seen:
        runs = submit(scheduler, model, 300, 4)
        assert step_until_over(scheduler, runs) == 2  # what a third is promised was not there
    assert [run.finish_reason for run in runs] == ["length"] * 4
    first, second, *_ = runs
    assert (first.n_sent_back, second.n_sent_back) == (0, 1)
    assert first.ended_s < second.ended_s
    assert check_answers(model, runs, seen) <= 2
    assert scheduler.counts.n_cells == 0
    scheduler.close()


def test_who_made_way_is_promised_more_before_he_reads_it_all_again(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamakv.engine.llamacpp.admission.N_PROMISED", 1)
    scheduler = open_short(model, 6)
    with watching() as seen:
        runs = submit(scheduler, model, 300, 6)
        assert step_until_over(scheduler, runs) == 6
    assert 1 < max(run.n_sent_back for run in runs) <= 9  # 1, 2, 4 ... 256 tokens, then all
    assert runs[0].n_sent_back == 0
    check_answers(model, runs, seen)
    scheduler.close()


def test_one_that_is_alone_goes_on_to_the_last_cell(model: LlamaModel) -> None:
    scheduler = open_short(model)
    runs = submit(scheduler, model, None, 2)
    step_until_over(scheduler, runs)
    assert [run.finish_reason for run in runs] == ["context"] * 2
    assert [len(run.tokens) for run in runs] == [LIMIT] * 2
    scheduler.close()


def test_what_stands_still_makes_way_first(model: LlamaModel) -> None:
    scheduler = open_short(model)
    with watching() as seen:
        first, second = runs = submit(scheduler, model, 600, 2)
        while not all(run.n_generated for run in runs):
            scheduler.step()
        assert scheduler.pause(first)
        while not second.is_over:
            scheduler.step()
        assert (first.n_sent_back, second.n_sent_back, first.cells) == (1, 0, None)
        scheduler.resume(first)
        step_until_over(scheduler, runs)
    check_answers(model, runs, seen)
    scheduler.close()


def test_conversations_go_before_anybody_makes_way(model: LlamaModel) -> None:
    scheduler = open_short(model)
    kept = [run_one(scheduler, tokens_of(model, 150, seed=10 + i)) for i in range(2)]
    for run in kept:
        scheduler.let_go(run)
    (run,) = submit(scheduler, model, 500)
    step_until_over(scheduler, [run])
    assert (run.finish_reason, run.n_sent_back) == ("length", 0)
    assert not any(scheduler.has_cells(run) for run in kept)
    scheduler.close()


def test_an_answer_waits_for_conversations_that_are_still_to_be_saved(model: LlamaModel) -> None:
    scheduler = open_short(model)
    kept = run_one(scheduler, tokens_of(model, 150, seed=10))
    with watching() as seen:
        (run,) = submit(scheduler, model, 500)
        for _ in range(N_STEPS_MAX):
            scheduler.step()
            if scheduler.shortage is not None:
                break
        assert not run.is_over
        assert scheduler.has_cells(kept)
        for _ in range(5):
            scheduler.step()  # it waits with its cells
        scheduler.let_go(kept)
        step_until_over(scheduler, [run])
    assert (run.finish_reason, run.n_sent_back) == ("length", 0)
    check_answers(model, [run], seen)
    scheduler.close()


def test_one_that_waits_again_and_no_longer_fits_keeps_what_it_wrote(model: LlamaModel) -> None:
    scheduler = open_short(model)
    with watching() as seen:
        first, second = runs = submit(scheduler, model, 400, 2)
        while not second.n_sent_back:
            scheduler.step()
        n_written = second.n_generated
        scheduler._shared.n_cells_max = len(second.tokens) - 1  # memory has gone to other programs
        step_until_over(scheduler, runs)
    assert (second.finish_reason, second.error, second.n_generated) == ("context", None, n_written)
    check_answers(model, [second], seen)
    assert first.is_over
    scheduler.close()


def test_one_that_ends_while_it_is_read_again_keeps_no_part_of_its_cells(model: LlamaModel) -> None:
    scheduler = open_short(model)
    first, second = (scheduler.submit(ask(tokens_of(model, N_PROMPT, seed=seed), 500, keeps=True)) for seed in range(2))
    while not second.n_sent_back:
        scheduler.step()
    scheduler.cancel(first)
    while second.cells is None or second.n_unread == 0:
        scheduler.step()
    assert not scheduler.is_whole(second)
    scheduler.end(second)
    assert second in scheduler.step()
    assert (second.finish_reason, scheduler.has_cells(second), scheduler.counts.n_cells) == ("interrupted", False, 0)
    scheduler.close()


def test_long_runs_leave_some_cells_to_those_who_begin(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    n_promised = 32
    monkeypatch.setattr("llamakv.engine.llamacpp.admission.N_PROMISED", n_promised)
    scheduler = open_short(model)
    runs = submit(scheduler, model, None, 2)
    while not runs[1].n_sent_back:
        scheduler.step()
        assert scheduler.counts.n_cells <= LIMIT - n_promised
    (alone,) = (run for run in runs if run.cells is not None)
    step_until_over(scheduler, [alone])
    assert (alone.finish_reason, len(alone.tokens)) == ("context", LIMIT)
    step_until_over(scheduler, runs)
    scheduler.close()
