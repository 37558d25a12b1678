"""Runs that have to share what room there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from llamakv.engine.contract import MemoryRequest, RunRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.context import NativeContext, Rows
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.scheduler import LlamaScheduler
from llamakv.engine.llamacpp.shared import SharedContext
from llamakv.engine.llamacpp.state import StateCutter
from llamakv.errors import EngineError, NoRoomError
from llamakv.records import Sampling
from tests.engine.scheduler.cases import (
    N_STEPS_MAX,
    Case,
    Written,
    check_all_close,
    check_close,
    drive,
    is_same,
    make_case,
    open_scheduler,
    request,
    run_all,
    watching,
    written,
)
from tests.engine.test_sequence import tokens_of

Cells = list[tuple[int, frozenset[int]]]


# ---------------------------------------------------------------- less room than all of them would need


def step_through(scheduler: LlamaScheduler, runs: Sequence[LlamaRun]) -> tuple[int, int]:
    """Step until all are over, never with more cells than allowed; the most cells in use, and the most runs."""
    n_cells = n_active = 0
    limit = scheduler.counts.n_cells_max
    for _ in range(N_STEPS_MAX):
        if all(run.is_over for run in runs):
            return n_cells, n_active
        scheduler.step()
        counts = scheduler.counts
        assert counts.n_cells <= counts.n_reserved <= counts.n_cells_max <= limit
        assert counts.n_cells_peak <= limit
        n_cells, n_active = max(n_cells, counts.n_cells), max(n_active, counts.n_active)
    return pytest.fail("still not over")


def test_with_less_room_fewer_run_at_once_and_all_complete(model: LlamaModel) -> None:
    case = make_case(model, [(10 + 7 * i, 6 + i) for i in range(12)])
    scheduler = case.scheduler(8, n_cells_max=512)
    with watching() as seen:
        runs = [scheduler.submit(RunRequest(tokens=(*case.prefix, *s), sampling=o)) for s, o in case.branches]
        _, n_active = step_through(scheduler, runs)
    assert 1 < n_active < 8
    check_all_close([written(run, seen) for run in runs], case.expected)
    assert [run.n_reused for run in runs] == [299] * 12


def test_a_prompt_that_can_never_fit_fails_alone_with_exit_status_15(model: LlamaModel) -> None:
    case = make_case(model, [(20, 8), (30, 8), (40, 8)])
    scheduler = case.scheduler(4, n_ctx_max=512, n_cells_max=1024)
    requests = [RunRequest(tokens=(*case.prefix, *suffix), sampling=s) for suffix, s in case.branches]
    requests.insert(1, request(tokens_of(model, 600), 8))
    with watching() as seen:
        runs = [scheduler.submit(one) for one in requests]
        over = []
        while len(over) < 4:
            over += scheduler.step()
    long = runs.pop(1)
    assert isinstance(long.error, NoRoomError)
    assert (long.error.exit_status, long.error.fields["needed"], long.error.fields["limit"]) == (15, 601, 512)
    assert (long.finish_reason, long.n_generated, long.text) == ("", 0, "")
    assert {run.number for run in over} == {0, 1, 2, 3}
    check_all_close([written(run, seen) for run in runs], case.expected)


def test_a_run_that_alone_may_not_have_all_it_was_promised_ends_with_context(model: LlamaModel) -> None:
    scheduler = open_scheduler(model, 4, n_cells_max=400)
    runs = [scheduler.submit(request(tokens_of(model, 350, seed=i), n)) for i, n in enumerate((None, 1000, 5))]
    drive(scheduler, runs)
    assert [run.finish_reason for run in runs] == ["context", "context", "length"]
    assert [len(run.tokens) for run in runs] == [401, 401, 355]
    assert scheduler.counts.n_cells_peak == 400


def test_what_is_promised_never_exceeds_the_limit(dense: LlamaModel) -> None:
    scheduler = open_scheduler(dense, 4, n_cells_max=400)
    runs = [scheduler.submit(request(tokens_of(dense, 50, seed=i), n)) for i, n in enumerate((None, 30))]
    step_through(scheduler, runs)


def test_a_run_as_long_as_its_context_ends_with_context(dense: LlamaModel) -> None:
    scheduler = open_scheduler(dense, 2, n_ctx_max=512)
    (run,), _ = run_all(scheduler, [request(tokens_of(dense, 500))])
    assert (run.finish_reason, len(run.tokens)) == ("context", 512)


def test_growing_in_the_middle_of_many_branches_gives_the_right_words(model: LlamaModel) -> None:
    case = make_case(model, [(20 + i, 24) for i in range(16)])
    scheduler = case.scheduler(16, n_ctx=1)
    before, sizes = scheduler.root.n_ctx, set()
    with watching() as seen:
        runs = [scheduler.submit(RunRequest(tokens=(*case.prefix, *s), sampling=o)) for s, o in case.branches]
        while not all(run.is_over for run in runs):
            scheduler.step()
            sizes.add(scheduler.root.n_ctx)
    assert max(sizes) >= 300 + 16 * 44 > before
    check_all_close([written(run, seen) for run in runs], case.expected)


@pytest.mark.slow
def test_200_prompts_through_4_sequences_find_room_in_scattered_cells(dense: LlamaModel) -> None:
    """B70: of 512 cells 80 % are in use on average, and no larger context is allowed."""
    numbers = random.Random(5)
    requests = [request(tokens_of(dense, numbers.randint(10, 110), seed=i), 1 + i % 9) for i in range(200)]
    scheduler = open_scheduler(dense, 4, n_cells_max=512)
    scheduler.root.extend(tokens_of(dense, 240, seed=1000))
    used = []
    with watching() as seen:
        runs = [scheduler.submit(one) for one in requests]
        while not all(run.is_over for run in runs):
            scheduler.step()
            used.append(scheduler.counts.n_cells)
            assert scheduler.counts.n_reserved <= 512
    assert scheduler.root.n_ctx == 512
    assert 0.75 * 512 < np.mean(used) < max(used) <= 512
    _, expected = run_all(open_scheduler(dense, 1), requests)
    check_all_close([written(run, seen) for run in runs], expected, n_ties_max=10)


@pytest.mark.parametrize("may_grow", [False, True])
def test_where_the_engine_finds_no_place_less_is_decoded_at_once(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch, may_grow: bool
) -> None:
    case = make_case(model, [(i, 8) for i in range(20)])
    scheduler = case.scheduler(8, n_ctx=1024, n_cells_max=2048 if may_grow else 1024)
    refuse_some(monkeypatch)
    with watching() as seen:
        runs = [scheduler.submit(RunRequest(tokens=(*case.prefix, *s), sampling=o)) for s, o in case.branches]
        step_through(scheduler, runs)
    assert scheduler.root.n_ctx == (2048 if may_grow else 1024)
    check_all_close([written(run, seen) for run in runs], case.expected)


def refuse_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine finds no room for every third call of more than one token."""
    calls, decode = itertools.count(1), NativeContext.decode

    def scattered(context: NativeContext, rows: Sequence[Rows], **options) -> bool:
        if sum(len(part.tokens) for part in rows) > 1 and next(calls) % 3 == 0:
            raise NoRoomError("no room")
        return decode(context, rows, **options)

    monkeypatch.setattr(NativeContext, "decode", scattered)


def take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have taken the machine's memory."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))


def test_where_no_place_is_found_and_memory_is_short_less_is_decoded_at_once(
    dense: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(dense, [(i, 8) for i in range(8)])
    scheduler = case.scheduler(8, n_cells_max=4096)
    refuse_some(monkeypatch)
    take_memory(monkeypatch)
    with watching() as seen:
        runs = [scheduler.submit(RunRequest(tokens=(*case.prefix, *s), sampling=o)) for s, o in case.branches]
        drive(scheduler, runs)
    assert [run.error for run in runs] == [None] * 8
    check_all_close([written(run, seen) for run in runs], case.expected)


def test_when_memory_runs_short_the_latest_wait_again_and_write_the_right_words(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(model, [(30 + i, 40) for i in range(6)])
    scheduler = case.scheduler(6, n_cells_max=4096)
    monkeypatch.setattr(SharedContext, "_check_memory", _no_memory)
    with watching() as seen:
        runs = [scheduler.submit(RunRequest(tokens=(*case.prefix, *s), sampling=o)) for s, o in case.branches]
        active = []
        while not all(run.is_over for run in runs):
            scheduler.step()
            active.append(scheduler.counts.n_active)
    assert max(active) > active[-2] > 0, "some were sent back"
    assert scheduler.root.n_ctx == 512
    assert scheduler.counts.n_cells_peak <= 512
    check_all_close([written(run, seen) for run in runs], case.expected)
    assert [run.finish_reason for run in runs] == ["length"] * 6


def _no_memory(_: SharedContext, n_ctx: int, n_seq_max: int) -> None:
    raise NoRoomError(f"no memory for {n_ctx} cells")


def test_the_last_one_ends_where_it_is_and_the_results_of_others_stand(
    dense: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(dense, [(20, 400), (30, 40), (40, 40), (5, 6)])
    scheduler = case.scheduler(6, n_cells_max=4096)
    monkeypatch.setattr(SharedContext, "_check_memory", _no_memory)
    with watching() as seen:
        runs = [scheduler.submit(RunRequest(tokens=(*case.prefix, *s), sampling=o)) for s, o in case.branches]
        drive(scheduler, runs)
    assert (runs[0].finish_reason, runs[0].error) == ("context", None)
    assert len(runs[0].tokens) == 513
    check_all_close([written(run, seen) for run in runs[1:]], case.expected[1:])
    assert scheduler.counts.n_cells == 299


def test_what_the_engine_refuses_of_one_run_is_the_error_of_that_run_only(
    dense: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused call changes nothing (llama.h), so the others of the call can be decoded without it."""
    case = make_case(dense, [(i, 8) for i in range(4)])
    scheduler = case.scheduler(4)
    decode, refused = NativeContext.decode, []

    def refusing(context: NativeContext, rows: Sequence[Rows], **options) -> bool:
        if any(part.seq_id in refused for part in rows):
            raise EngineError("refused")
        return decode(context, rows, **options)

    monkeypatch.setattr(NativeContext, "decode", refusing)
    with watching() as seen:
        runs = [scheduler.submit(RunRequest(tokens=(*case.prefix, *s), sampling=o)) for s, o in case.branches]
        scheduler.step()
        refused.append(runs[1].cells.seq_id)
        drive(scheduler, runs)
    assert [str(run.error) for run in runs] == ["None", "refused", "None", "None"]
    others = (0, 2, 3)
    check_all_close([written(runs[i], seen) for i in others], [case.expected[i] for i in others])


# ---------------------------------------------------------------- the root's own needs


def test_the_limit_is_not_raised_where_the_context_is_larger(dense: LlamaModel) -> None:
    """The engine rounds a context of 600 cells up to 768."""
    scheduler = open_scheduler(dense, 4, n_ctx=600, n_cells_max=600)
    prefix = tokens_of(dense, 100)
    scheduler.root.extend(prefix)
    runs = [scheduler.submit(request([*prefix, *tokens_of(dense, 5, seed=i)], 240)) for i in range(2)]
    run = scheduler.root.write(Sampling(max_tokens=200))
    n_cells = 0
    while not all(one.is_over for one in (*runs, run)):
        scheduler.step()
        n_cells = max(n_cells, scheduler.counts.n_cells)
    assert (scheduler.counts.n_cells_max, n_cells <= 600) == (600, True)


def test_what_the_root_writes_leaves_runs_what_they_were_promised(dense: LlamaModel) -> None:
    scheduler = open_scheduler(dense, 4, n_cells_max=512)
    prefix = tokens_of(dense, 100)
    scheduler.root.extend(prefix)
    run = scheduler.submit(request([*prefix, *tokens_of(dense, 5, seed=1)], 400))
    scheduler.step()
    scheduler.root.write(Sampling(max_tokens=50))
    drive(scheduler, [run])
    assert (run.error, run.finish_reason, run.n_generated) == (None, "length", 400)


def test_the_root_ends_with_context_where_no_more_cells_are_allowed(model: LlamaModel) -> None:
    scheduler = open_scheduler(model, 4, n_cells_max=600)
    scheduler.root.extend(tokens_of(model, 560))
    run = scheduler.root.write(Sampling())
    drive(scheduler, [run])
    assert (run.error, run.finish_reason) == (None, "context")
    assert len(run.tokens) in (600, 601)


# ---------------------------------------------------------------- memory that is not shared in part, or not cut


def test_a_window_sized_cache_runs_branches_one_by_one_with_the_right_words(models) -> None:
    with LlamaModel(models("MS")) as model:
        case = make_case(model, [(5 + i, 8) for i in range(6)], swa_full=False)
        scheduler, actual = case.run(3)
        assert scheduler.decodes_together is False
        check_all_close(actual, case.expected)


def test_a_prefix_longer_than_the_window_cache_has_branches_in_a_tight_context(models) -> None:
    """engine-facts d7: masked cells that sequences share are never used again."""
    with LlamaModel(models("MS")) as model:
        case = make_case(model, [(5, 8)] * 3, n_prefix=900, swa_full=False)
        _, actual = case.run(3, n_ctx=1100, n_ctx_max=1100, n_cells_max=1100)
        check_all_close(actual, case.expected)


@pytest.mark.parametrize("name", ["MH", "MH2"])
def test_hybrids_that_cannot_be_cut_grow_too(models, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with LlamaModel(models(name)) as model:
        case = make_case(model, [(60, 8)] * 4, n_prefix=450)
        monkeypatch.setattr(StateCutter, "can_be_cut", lambda *_: False)
        _, actual = case.run(4, n_ctx_max=1000)
        check_all_close(actual, case.expected)


def test_growing_in_the_middle_of_one_run_is_exact(model: LlamaModel) -> None:
    case: Case = make_case(model, [(180, 60), (212, 30)])
    scheduler, actual = case.run(1, n_ctx=1)
    assert scheduler.root.n_ctx > 512
    pairs: list[tuple[Written, Written]] = list(zip(actual, case.expected, strict=True))
    assert [is_same(*pair) for pair in pairs] == [True, True]
    assert all(check_close(*pair) for pair in pairs)


def test_a_reply_of_the_root_ends_where_memory_does(dense: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(dense, [])
    scheduler = case.scheduler(1)
    monkeypatch.setattr(SharedContext, "_check_memory", _no_memory)
    tokens = list(scheduler.root.generate(Sampling(), n_max=1000))
    assert (scheduler.root.finish_reason, len(tokens)) == ("context", 513 - 300)
    with pytest.raises(NoRoomError):
        scheduler.root.extend([300] * 20)


def test_a_window_only_run_has_the_whole_context_as_a_chat_has(models) -> None:
    with LlamaModel(models("MS")) as model:
        tokens = tokens_of(model, 250)
        memory = MemoryRequest(swa_full=False)
        scheduler = model.open_scheduler(
            memory, n_parallel=1, n_ctx_min=250, n_ctx_max=1024, n_cells_max=1024, n_threads=1
        )
        scheduler.root.extend(tokens)
        run = scheduler.submit(RunRequest(tokens=tuple(tokens), sampling=Sampling(max_tokens=None)))
        drive(scheduler, [run])
        assert (run.error, run.finish_reason, len(run.tokens)) == (None, "context", 1024)
