"""The root beside its branches, bad arguments, and calls from several threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest

from llamakv.engine.contract import MemoryRequest, RunRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.context import NativeContext
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.scheduler import LlamaScheduler
from llamakv.records import MemoryKind, Sampling, StateSection
from tests.engine.scheduler.cases import (
    Case,
    check_all_close,
    check_close,
    cold,
    drive,
    is_same,
    open_scheduler,
    prefilled,
    request,
    run_all,
    submit_all,
    watching,
    written,
)
from tests.engine.test_sequence import open_restored, saved, tokens_of
from tests.models.vocabulary import N_TOKENS

# ---------------------------------------------------------------- the root beside them


def test_the_root_may_read_and_write_while_branches_share_its_cells(branches: Case) -> None:
    model, more = branches.model, tokens_of(branches.model, 300, seed=71)
    scheduler = branches.scheduler(4)
    with watching() as seen:
        runs = submit_all(scheduler, branches)
        for _ in range(4):
            scheduler.step()
        assert scheduler.root.extend(more) == 300
        of_root = scheduler.root.write(Sampling(max_tokens=8))
        drive(scheduler, [of_root, *runs])
        actual = [written(run, seen) for run in runs]
    check_all_close(actual, branches.expected)
    check_close(written(of_root, seen), cold(model, branches.prefix, more))
    assert scheduler.counts.n_cells == scheduler.root.n_cells == 600 + 7


def test_going_back_is_refused_while_branches_share_the_cells_and_nothing_breaks(branches: Case) -> None:
    scheduler = branches.scheduler(6)
    sections = prefilled(branches.model, branches.prefix)
    with watching() as seen:
        runs = submit_all(scheduler, branches)
        for _ in range(4):
            scheduler.step()
        for call in (
            lambda: scheduler.root.rewind(100),
            lambda: scheduler.root.rewind(0),
            lambda: scheduler.root.restore(branches.prefix, sections),
        ):
            with pytest.raises(ValueError, match=r"6 sequences share the cells"):
                call()
            assert (list(scheduler.root.tokens), scheduler.root.n_cells) == (branches.prefix, 299)
        drive(scheduler, runs)
        actual = [written(run, seen) for run in runs]
        check_all_close(actual, branches.expected)
        scheduler.root.rewind(100)  # nobody does any more
        (again,) = submit_all(scheduler, branches)[:1]
        drive(scheduler, [again])
        check_close(written(again, seen), branches.expected[0])


def test_restoring_the_root_leaves_runs_alone_that_share_nothing(branches: Case) -> None:
    """B66: the first runs begin before the root has anything."""
    model = branches.model
    sections = prefilled(model, branches.prefix)
    scheduler = open_scheduler(model, 6)
    with watching() as seen:
        first = submit_all(scheduler, branches)[:3]
        while first[0].n_generated < 4:
            scheduler.step()
        scheduler.root.restore(branches.prefix, sections)
        second = submit_all(scheduler, branches)[3:]
        drive(scheduler, [*first, *second])
        actual = [written(run, seen) for run in (*first, *second)]
    assert [run.n_reused for run in second] == [299] * 3
    check_all_close(actual, branches.expected)


def test_free_cells_between_others_are_enough_for_a_session(dense: LlamaModel) -> None:
    """B26: 512 cells, four sequences of 100; the first and the third go, and one of 200 comes."""
    session = tokens_of(dense, 201, seed=9)
    sections = prefilled(dense, session)
    scheduler = open_scheduler(dense, 4, n_cells_max=512)
    runs = [scheduler.submit(request(tokens_of(dense, 100, seed=i), 1, keeps_cells=True)) for i in range(4)]
    drive(scheduler, runs)
    siblings = (runs[1], runs[3])
    before = [[bytes(section.data) for section in scheduler.export(run)] for run in siblings]
    scheduler.release(runs[0])
    scheduler.release(runs[2])
    scheduler.root.restore(session, sections)
    assert (scheduler.root.n_ctx, scheduler.counts.n_cells) == (512, 400)
    assert [[bytes(section.data) for section in scheduler.export(run)] for run in siblings] == before
    with watching() as seen:
        run = scheduler.root.write(Sampling(max_tokens=12))
        drive(scheduler, [run])
    check_close(written(run, seen), cold(dense, session, n=12))


def test_a_session_goes_on_whatever_sequence_it_was_saved_from(model: LlamaModel) -> None:
    """B27: from the last of four sequences into a single one, and the other way round."""
    scheduler = open_scheduler(model, 4)
    runs = [scheduler.submit(request(tokens_of(model, 60, seed=i), 4, keeps_cells=True)) for i in range(4)]
    drive(scheduler, runs)
    sections, tokens = list(scheduler.export(runs[3])), runs[3].tokens
    assert sorted(run.cells.seq_id for run in runs) == [2, 3, 4, 5]
    expected = cold(model, tokens)
    single, other = open_restored(model, tokens, sections), open_scheduler(model, 4)
    other.root.restore(tokens, saved(single))
    with watching() as seen:
        there = single.write(Sampling(max_tokens=8))
        drive(single.scheduler, [there])
        back = [other.submit(request(tokens, 8)) for _ in range(4)]
        drive(other, back)
    assert [run.n_reused for run in back] == [63] * 4
    for run in (there, *back):
        check_close(written(run, seen), expected)


def test_a_chat_goes_on_while_other_runs_come_and_go(branches: Case) -> None:
    """Three turns of the root, read and written among the runs of others, two of which come with each turn."""
    scheduler, runs = branches.scheduler(3), []
    requests = [RunRequest(tokens=(*branches.prefix, *suffix), sampling=s) for suffix, s in branches.branches]
    with watching() as seen:
        for i in range(3):
            runs += [scheduler.submit(one) for one in requests[2 * i : 2 * i + 2]]
            scheduler.step()
            scheduler.root.extend(tokens_of(branches.model, 30 + i, seed=80 + i))
            before = list(scheduler.root.tokens)
            reply = scheduler.root.write(Sampling(max_tokens=10))
            for call in (lambda: scheduler.root.write(Sampling()), lambda: scheduler.root.extend([400])):
                with pytest.raises(ValueError, match="is being written"):
                    call()
            text = ""
            while not reply.is_over:
                assert reply not in scheduler.step()
                text += reply.take_text()
            assert text + reply.take_text() == reply.text != ""
            assert scheduler.root.finish_reason == "length"
            check_close(written(reply, seen), cold(branches.model, before, n=10))
        drive(scheduler, runs)
        check_all_close([written(run, seen) for run in runs], branches.expected)
    assert scheduler.counts.n_cells == scheduler.root.n_cells == 299 + 30 + 31 + 32 + 30


def test_a_run_that_ends_while_the_root_reads_is_given_back_by_the_next_step(dense: LlamaModel) -> None:
    scheduler = open_scheduler(dense, 2)
    run = scheduler.submit(request(tokens_of(dense, 20), 2))
    assert scheduler.step() == []
    scheduler.root.extend(tokens_of(dense, 900, seed=1))
    assert run.finish_reason == "length"
    assert scheduler.step() == [run]


# ---------------------------------------------------------------- arguments, threads


def test_bad_arguments_are_value_errors_before_anything_is_done(dense: LlamaModel) -> None:
    """B71."""
    scheduler = open_scheduler(dense, 2)
    scheduler.root.extend(tokens_of(dense, 20))
    for call in (
        lambda: scheduler.submit(request([])),
        lambda: scheduler.submit(request([-1])),
        lambda: scheduler.submit(request([400, N_TOKENS])),
        lambda: open_scheduler(dense, 255),
        lambda: open_scheduler(dense, -1),
        lambda: scheduler._shared.fork(scheduler.root.cells, 20),
        lambda: scheduler._shared.fork(scheduler.root.cells, -1),
        lambda: scheduler._shared.native.remove(-1),
        lambda: scheduler._shared.native.copy(1, 4),
    ):
        with pytest.raises(ValueError, match=r"."):
            call()
    assert (scheduler.counts.n_waiting, scheduler.counts.n_cells, scheduler.step()) == (0, 19, [])


def test_254_run_at_once_and_no_more(dense: LlamaModel) -> None:
    scheduler = open_scheduler(dense, 254)
    assert scheduler.n_parallel == 254
    runs = [scheduler.submit(request(tokens_of(dense, 3, seed=i), 2)) for i in range(256)]
    scheduler.step()
    assert (scheduler.counts.n_active, scheduler.counts.n_waiting) == (254, 2)
    drive(scheduler, runs)


@pytest.fixture
def kept(dense: LlamaModel) -> tuple[LlamaScheduler, LlamaRun]:
    scheduler = open_scheduler(dense, 2)
    run = scheduler.submit(request(tokens_of(dense, 20), 2, keeps_cells=True))
    drive(scheduler, [run])
    return scheduler, run


def test_a_run_of_another_scheduler_is_refused_and_breaks_nothing(
    dense: LlamaModel, kept: tuple[LlamaScheduler, LlamaRun]
) -> None:
    tokens = tokens_of(dense, 20, seed=1)
    _, (expected,) = run_all(open_scheduler(dense, 2), [request(tokens, 20)])
    scheduler = open_scheduler(dense, 2)
    with watching() as seen:
        run = scheduler.submit(request(tokens, 20))
        for _ in range(3):
            scheduler.step()
        for call in (scheduler.release, scheduler.cancel, lambda other: list(scheduler.export(other))):
            with pytest.raises(ValueError, match=r"."):
                call(kept[1])
        drive(scheduler, [run])
        assert is_same(written(run, seen), expected)


def test_releasing_a_run_under_way_is_refused_and_breaks_nothing(dense: LlamaModel) -> None:
    scheduler = open_scheduler(dense, 2)
    run = scheduler.submit(request(tokens_of(dense, 20), 8))
    scheduler.step()
    with pytest.raises(ValueError, match=r"."):
        scheduler.release(run)
    drive(scheduler, [run])
    assert (run.error, run.n_generated) == (None, 8)


def test_exporting_a_run_that_kept_nothing_is_refused(dense: LlamaModel, kept: tuple[LlamaScheduler, LlamaRun]) -> None:
    scheduler, run = kept
    gone = scheduler.submit(request(tokens_of(dense, 20), 2))
    drive(scheduler, [gone])
    scheduler.release(run)
    for one in (gone, run):
        with pytest.raises(ValueError, match=r"."):
            list(scheduler.export(one))


def in_threads(*calls: Callable[[], object]) -> None:
    """Do these at the same time; an error in one of them is the test's."""
    errors: list[BaseException] = []

    def guarded(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # handed to the test
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []


def test_two_threads_submit_and_step_at_the_same_time_and_all_runs_finish(branches: Case) -> None:
    """B73."""
    scheduler = branches.scheduler(4, n_ctx=1)
    runs: list[list[LlamaRun]] = [[], []]
    start = threading.Barrier(2)

    def work(mine: list[LlamaRun]) -> None:
        start.wait(10)
        for suffix, sampling in branches.branches:
            mine.append(scheduler.submit(RunRequest(tokens=(*branches.prefix, *suffix), sampling=sampling)))
            scheduler.step()
        drive(scheduler, mine)

    with watching() as seen:
        in_threads(*(lambda mine=mine: work(mine) for mine in runs))
        for mine in runs:
            check_all_close([written(run, seen) for run in mine], branches.expected)
    assert (scheduler.counts.n_active, scheduler.counts.n_waiting, scheduler.counts.n_cells) == (0, 0, 299)


class Intrusion(Exception):
    """A thread came to the engine while another was there."""


CALLS: dict[str, Callable[[LlamaScheduler, LlamaRun, list[StateSection]], object]] = {
    "step": lambda scheduler, *_: scheduler.step(),
    "release": lambda scheduler, run, _: scheduler.release(run),
    "export of a run": lambda scheduler, run, _: list(scheduler.export(run)),
    "export of the root": lambda scheduler, *_: list(scheduler.root.export()),
    "extend": lambda scheduler, *_: scheduler.root.extend([400] * 600),
    "rewind": lambda scheduler, *_: scheduler.root.rewind(5),
    "restore": lambda scheduler, run, sections: scheduler.root.restore(run.tokens, sections),
    "close": lambda scheduler, *_: scheduler.close(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_from_another_thread_waits_until_the_engine_is_free(
    dense: LlamaModel, kept: tuple[LlamaScheduler, LlamaRun], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A step is held up inside the engine; what another thread asks for meanwhile must not reach the engine."""
    scheduler, run = kept
    scheduler.root.extend(tokens_of(dense, 20, seed=3))
    sections = list(scheduler.export(run))
    last = scheduler.submit(request(tokens_of(dense, 20, seed=2), 1))
    inside, busy = threading.Event(), threading.Event()
    between: list[str] = []
    decode, check = NativeContext.decode, NativeContext._check_seq

    def held_up(context: NativeContext, *args, **options) -> bool:
        if not inside.is_set():
            stepping.append(threading.get_ident())
            inside.set()
            busy.wait(0.05)  # a call that does not wait for its turn sets it at once
            stepping.clear()
        return decode(context, *args, **options)

    def noted(context: NativeContext, seq_id: int) -> None:
        if stepping and threading.get_ident() not in stepping:
            between.append(name)
            busy.set()
            raise Intrusion  # going on might be the end of the process
        check(context, seq_id)

    def call() -> None:
        inside.wait(10)
        with contextlib.suppress(Intrusion):
            CALLS[name](scheduler, run, sections)

    stepping: list[int] = []
    monkeypatch.setattr(NativeContext, "decode", held_up)
    monkeypatch.setattr(NativeContext, "_check_seq", noted)
    in_threads(lambda: scheduler.step(), call)
    assert inside.is_set()
    assert between == []
    if name != "close":
        drive(scheduler, [last])
        assert last.finish_reason == "length"


def test_recurrent_kinds_are_decoded_one_at_a_time_and_the_others_together(model: LlamaModel) -> None:
    scheduler = model.open_scheduler(MemoryRequest(), n_parallel=2, n_ctx_min=1, n_ctx_max=512, n_threads=1)
    assert scheduler.decodes_together is (model.info.kind in (MemoryKind.DENSE, MemoryKind.WINDOWED))
    runs = [scheduler.submit(request(tokens_of(model, 10, seed=i), 4)) for i in range(2)]
    drive(scheduler, runs)
    assert scheduler.counts.n_steps == (5 if scheduler.decodes_together else 10)
    assert scheduler.counts.n_decoded == 26
