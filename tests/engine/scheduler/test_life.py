"""Runs that are cancelled, kept, exported and stopped."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from llamakv.engine.contract import RunRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.context import NativeContext
from llamakv.engine.llamacpp.scheduler import LlamaScheduler
from llamakv.errors import AbortedError
from llamakv.records import Sampling, SectionKind
from tests.engine.scheduler.cases import (
    Case,
    check_all_close,
    cold,
    drive,
    open_scheduler,
    prefilled,
    request,
    run_all,
    submit_all,
    watching,
    written,
)
from tests.engine.test_sequence import open_restored, tokens_of, write

# ---------------------------------------------------------------- cancelled, released, kept


def test_cancelling_frees_the_cells_and_the_others_go_on(branches: Case) -> None:
    scheduler = branches.scheduler(4)
    with watching() as seen:
        runs = submit_all(scheduler, branches)
        while runs[1].n_generated < 3:
            scheduler.step()
        before = scheduler.counts
        scheduler.cancel(runs[1])
        scheduler.cancel(runs[5])
        assert (before.n_active, before.n_waiting) == (4, 2)
        assert (scheduler.counts.n_active, scheduler.counts.n_waiting) == (3, 1)
        assert scheduler.counts.n_cells == before.n_cells - (len(runs[1].tokens) - 1 - 299)
        drive(scheduler, runs)
    assert [run.finish_reason for run in runs] == ["length", "interrupted", "length", "length", "length", "interrupted"]
    assert (runs[1].n_generated, runs[5].n_generated, runs[5].started_s) == (3, 0, 0.0)
    assert runs[1].ended_s >= runs[1].first_token_s >= runs[1].started_s > 0
    ended = [i for i, run in enumerate(runs) if run.finish_reason == "length"]
    check_all_close([written(runs[i], seen) for i in ended], [branches.expected[i] for i in ended])
    assert scheduler.counts.n_cells == 299
    for run in runs:  # over already
        scheduler.cancel(run)
        scheduler.release(run)
    assert runs[0].finish_reason == "length"


def test_a_run_is_given_back_once_when_it_is_over(branches: Case) -> None:
    scheduler = branches.scheduler(2)
    runs = submit_all(scheduler, branches)
    over = []
    while scheduler.counts.n_active or scheduler.counts.n_waiting:
        given = scheduler.step()
        assert all(run.is_over for run in given)
        over += given
    assert sorted(run.number for run in over) == [run.number for run in runs]
    assert scheduler.step() == []


def test_a_run_that_was_kept_goes_on_elsewhere_bit_for_bit(branches: Case) -> None:
    """As if it had been allowed to write on: 12 tokens here, then 12 more in another context."""
    model, prefix = branches.model, branches.prefix
    scheduler = branches.scheduler(1)
    for i, (suffix, sampling) in enumerate(branches.branches[:3]):
        run = scheduler.submit(RunRequest(tokens=(*prefix, *suffix), sampling=sampling, keeps_cells=True))
        drive(scheduler, [run])
        n_kept = len(run.tokens) - 1 - 299
        assert scheduler.counts.n_cells == 299 + n_kept
        beyond = list(scheduler.export(run, 299))
        whole = list(scheduler.export(run))
        scheduler.release(run)
        scheduler.release(run)
        assert scheduler.counts.n_cells == 299
        _, (longer,) = run_all(open_like(scheduler, branches), [request([*prefix, *suffix], 24)])
        assert longer.ids[:12] == branches.expected[i].ids
        expected = (longer.ids[12:], [bytes(logits) for logits in longer.logits[12:]])
        assert write(open_restored(model, run.tokens, whole), 12) == expected
        first = [section for section in prefilled(model, prefix) if section.kind is SectionKind.CELLS]
        assert write(open_restored(model, run.tokens, [*first, *beyond]), 12) == expected


def open_like(scheduler: LlamaScheduler, case: Case) -> LlamaScheduler:
    fresh = open_scheduler(case.model, scheduler.n_parallel)
    fresh.root.extend(case.prefix)
    return fresh


def test_kept_runs_hold_their_sequence_until_they_are_released(branches: Case) -> None:
    scheduler = branches.scheduler(2)
    with watching() as seen:
        runs = submit_all(scheduler, branches, keeps_cells=True)
        drive(scheduler, runs[:2])
        assert scheduler.step() == []
        assert (scheduler.counts.n_active, scheduler.counts.n_waiting) == (0, 4)
        for i in range(4):
            scheduler.release(runs[i])
            drive(scheduler, [runs[i + 2]])
        actual = [written(run, seen) for run in runs]
    check_all_close(actual, branches.expected)
    assert scheduler.counts.n_cells == 299 + sum(len(run.tokens) - 1 - 299 for run in runs[4:])


def test_kept_cells_are_the_same_while_others_run_and_the_context_grows(branches: Case) -> None:
    scheduler = branches.scheduler(4)
    kept = scheduler.submit(request([*branches.prefix, *branches.branches[2][0]], 12, keeps_cells=True))
    drive(scheduler, [kept])
    before, n_ctx = [bytes(section.data) for section in scheduler.export(kept)], scheduler.root.n_ctx
    _, actual = run_all(scheduler, [request(tokens_of(branches.model, 500, seed=i), 8) for i in range(4)])
    assert scheduler.root.n_ctx > n_ctx
    assert [bytes(section.data) for section in scheduler.export(kept)] == before
    assert len(actual) == 4


def test_an_export_that_is_taken_piece_by_piece_outlives_a_growing_context(
    dense: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_closed_contexts(monkeypatch)
    scheduler = open_scheduler(dense, 2)
    run = scheduler.submit(request(tokens_of(dense, 400), 8, keeps_cells=True))
    drive(scheduler, [run])
    expected = [bytes(section.data) for section in scheduler.export(run)]
    export = scheduler.export(run)
    first = next(export)
    drive(scheduler, [scheduler.submit(request(tokens_of(dense, 900, seed=1), 8))])
    assert [bytes(section.data) for section in (first, *export)] == expected


def forbid_closed_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call on a context that was freed is a failure here; elsewhere it is the end of the process."""
    check = NativeContext._check_seq

    def check_open(context: NativeContext, seq_id: int) -> None:
        if not context.pointer:
            pytest.fail("a call on a context that was freed")
        check(context, seq_id)

    monkeypatch.setattr(NativeContext, "_check_seq", check_open)


def test_after_close_nothing_reaches_the_engine(dense: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_closed_contexts(monkeypatch)
    scheduler = open_scheduler(dense, 2)
    scheduler.root.extend(tokens_of(dense, 20))
    kept = scheduler.submit(request(tokens_of(dense, 20), 2, keeps_cells=True))
    drive(scheduler, [kept])
    active, waiting = (scheduler.submit(request(tokens_of(dense, 20), 8)) for _ in range(2))
    scheduler.step()
    scheduler.close()
    assert [run.finish_reason for run in (active, waiting)] == ["interrupted", "interrupted"]
    for run in (kept, active, waiting):
        scheduler.cancel(run)
        scheduler.release(run)
    scheduler.close()
    with contextlib.suppress(ValueError):
        scheduler.submit(request(tokens_of(dense, 20), 8))
        scheduler.step()


# ---------------------------------------------------------------- stopped


@pytest.mark.parametrize("when", ["reading", "writing", "mixed"])
def test_after_a_stopped_step_all_runs_stand_as_before_and_go_on_with_the_right_words(
    branches: Case, when: str
) -> None:
    scheduler = branches.scheduler(6)
    with watching() as seen:
        runs = submit_all(scheduler, branches)
        long = scheduler.submit(request([*branches.prefix, *tokens_of(branches.model, 700, seed=50)], 4))
        n_writing, n_written = {"reading": (0, 0), "mixed": (1, 1), "writing": (6, 2)}[when]
        while sum(run.n_generated >= n_written for run in runs) < n_writing:
            scheduler.step()
        before = [(list(run.tokens), run.text, run.is_over) for run in runs]
        n_cells_root = scheduler.root.n_cells
        for _ in range(3):
            with pytest.raises(AbortedError):
                scheduler.step(lambda: True)
            assert [(list(run.tokens), run.text, run.is_over) for run in runs] == before
            assert scheduler.root.n_cells == n_cells_root
        drive(scheduler, [*runs, long])
        actual = [written(run, seen) for run in runs]
    check_all_close(actual, branches.expected)
    assert [run.finish_reason for run in (*runs, long)] == ["length"] * 7
    assert scheduler.counts.n_cells == 299


def test_stopped_in_the_middle_of_a_call_nothing_is_lost(branches: Case) -> None:
    """The check is asked many times in a call, and says yes the first, the tenth or the last time."""
    scheduler = branches.scheduler(6)
    numbers = np.random.default_rng(1)
    n_stopped = 0
    with watching() as seen:
        runs = submit_all(scheduler, branches)
        while not all(run.is_over for run in runs):
            left = [int(numbers.integers(0, 60))]

            def soon(left: list[int] = left) -> bool:
                left[0] -= 1
                return left[0] < 0

            try:
                scheduler.step(soon if n_stopped < 25 else None)
            except AbortedError:
                n_stopped += 1
        actual = [written(run, seen) for run in runs]
    assert n_stopped >= 2
    check_all_close(actual, branches.expected)
    assert scheduler.counts.n_cells == 299


def test_what_the_root_writes_goes_on_after_a_stopped_step(model: LlamaModel) -> None:
    prefix = tokens_of(model, 100)
    expected = cold(model, prefix).ids
    scheduler = open_scheduler(model, 2)
    scheduler.root.extend(prefix)
    run = scheduler.root.write(Sampling(max_tokens=8))
    scheduler.step()
    scheduler.step()
    with pytest.raises(AbortedError):
        scheduler.step(lambda: True)
    assert (list(run.tokens[100:]), scheduler.root.n_cells) == (expected[:2], 101)
    drive(scheduler, [run])
    assert list(scheduler.root.tokens[100:]) == expected
    assert scheduler.root.n_cells == scheduler.counts.n_cells == 107


def test_a_stopped_extend_of_the_root_leaves_its_branches_alone(branches: Case) -> None:
    model = branches.model
    scheduler = branches.scheduler(2)
    with watching() as seen:
        runs = submit_all(scheduler, branches)
        for _ in range(4):
            scheduler.step()
        with pytest.raises(AbortedError):
            scheduler.root.extend(tokens_of(model, 50, seed=70), should_abort=lambda: True)
        assert list(scheduler.root.tokens) == branches.prefix
        assert scheduler.root.n_cells == 299
        drive(scheduler, runs)
        actual = [written(run, seen) for run in runs]
    check_all_close(actual, branches.expected)
    assert list(scheduler.root.generate(Sampling(), n_max=8)) == cold(model, branches.prefix).ids
