"""Cells and room: the engine's own count of cells against the scheduler's, and runs that have to share what there is."""

from __future__ import annotations

import itertools
import random
import struct
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from llama_cpp import llama_cpp as api

from llamakv.engine.contract import RunRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.context import NativeContext, Rows
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.scheduler import LlamaScheduler
from llamakv.engine.llamacpp.shared import SharedContext
from llamakv.engine.llamacpp.state import StateCutter
from llamakv.errors import NoRoomError
from llamakv.records import MemoryKind, Sampling
from tests.engine.test_scheduler import (
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
from tests.engine.test_sequence import KINDS, tokens_of

Cells = list[tuple[int, frozenset[int]]]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, models) -> Iterator[LlamaModel]:
    with LlamaModel(models(request.param)) as model:
        yield model


@pytest.fixture(scope="module")
def dense(models) -> Iterator[LlamaModel]:
    with LlamaModel(models("M")) as model:
        yield model


@pytest.fixture(scope="module", params=["M", "MS", "MH", "MH2"])
def attentive(request: pytest.FixtureRequest, models) -> Iterator[LlamaModel]:
    """Models with a cell for each token; a recurrent one has a state for each sequence."""
    with LlamaModel(models(request.param)) as model:
        yield model


def engine_cells(scheduler: LlamaScheduler) -> Cells:
    """Position and sequences of each cell that is not empty, as the engine itself writes them when it saves a whole
    context: the architecture's name, then for each stream (one, in unified memory) the number of cells and the cells
    (llama_context::state_write_data, llama_kv_cache::state_write; a windowed model's full layers come first). A
    recurrent memory has no streams (llama_memory_recurrent::state_write)."""
    pointer = scheduler._shared.native.pointer
    buffer = np.empty(api.llama_state_get_size(pointer), np.uint8)
    array = buffer.ctypes.data_as(api.ctypes.POINTER(api.ctypes.c_uint8))
    assert api.llama_state_get_data(pointer, array, buffer.size) == buffer.size
    data = memoryview(buffer.data)
    at = 4 + struct.unpack_from("<I", data)[0]
    if scheduler._info.kind is not MemoryKind.RECURRENT:
        assert struct.unpack_from("<I", data, at) == (1,)
        at += 4
    (n_cells,) = struct.unpack_from("<I", data, at)
    at += 4
    cells = []
    for _ in range(n_cells):
        position, n_seq = struct.unpack_from("<iI", data, at)
        at += 8
        cells.append((position, frozenset(struct.unpack_from(f"<{n_seq}i", data, at))))
        at += 4 * n_seq
    return cells


# ---------------------------------------------------------------- cells


def test_forking_1000_tokens_to_64_sequences_takes_no_cell_and_less_than_50_ms(attentive: LlamaModel) -> None:
    scheduler = open_scheduler(attentive, 64, n_ctx=2048)
    root, shared = scheduler.root, scheduler._shared
    root.extend(tokens_of(attentive, 1001))
    assert [position for position, _ in engine_cells(scheduler)] == list(range(1000))
    times_s = []
    for _ in range(5):
        start = time.perf_counter()
        branches = [shared.fork(root.cells, 1000) for _ in range(64)]
        times_s.append(time.perf_counter() - start)
        cells = engine_cells(scheduler)
        assert (len(cells), scheduler.counts.n_cells) == (1000, 1000)
        assert all(len(sequences) == 65 for _, sequences in cells)
        for branch in branches:
            shared.drop(branch)
    assert engine_cells(scheduler) == [(position, frozenset({root.cells.seq_id})) for position in range(1000)]
    print(f"64 forks of 1,000 cells: {1e3 * min(times_s):.1f} to {1e3 * max(times_s):.1f} ms")
    assert min(times_s) < 0.050


def test_a_recurrent_fork_shares_the_state_until_it_reads(models) -> None:
    with LlamaModel(models("MR")) as model:
        scheduler = open_scheduler(model, 64)
        scheduler.root.extend(tokens_of(model, 101))
        runs = [scheduler.submit(request([*tokens_of(model, 101), 400], 2)) for _ in range(64)]
        scheduler._admit()
        ((position, sequences),) = engine_cells(scheduler)
        assert (position, len(sequences)) == (99, 65)
        scheduler.step()
        assert sorted(len(sequences) for _, sequences in engine_cells(scheduler)) == [1, 64]
        drive(scheduler, runs)
        assert engine_cells(scheduler) == [(99, frozenset({scheduler.root.cells.seq_id}))]


def n_read(run: LlamaRun) -> int:
    """Tokens of a run that have been evaluated, from what it says of itself."""
    return len(run.tokens) - 1 if run.n_generated else run.n_reused + run.n_evaluated


@pytest.mark.parametrize("n_parallel", [1, 8])
def test_at_every_step_the_cells_in_use_are_the_prefix_and_the_active_suffixes(
    attentive: LlamaModel, n_parallel: int
) -> None:
    prefix, numbers = tokens_of(attentive, 201), random.Random(3)
    scheduler = open_scheduler(attentive, n_parallel)
    scheduler.root.extend(prefix)
    runs = [
        scheduler.submit(
            request([*prefix, *tokens_of(attentive, numbers.choice((0, 1, 20, 70, 300)), seed=i)], 1 + i % 7)
        )
        for i in range(16)
    ]
    most, n_ctx = 200, set()
    for _ in range(N_STEPS_MAX):
        scheduler.step()
        cells, n_cells = engine_cells(scheduler), scheduler.counts.n_cells
        active = [run for run in runs if run.started_s and not run.is_over]
        assert len(active) == scheduler.counts.n_active <= n_parallel
        assert len(cells) == n_cells == 200 + sum(n_read(run) - 200 for run in active)
        of_root = {position for position, sequences in cells if scheduler.root.cells.seq_id in sequences}
        assert of_root == set(range(200))
        assert all(len(sequences) == 1 + len(active) for position, sequences in cells if position < 200)
        assert all(len(sequences) == 1 for position, sequences in cells if position >= 200)
        assert n_cells <= scheduler.counts.n_reserved <= scheduler.counts.n_cells_max
        most = max(most, n_cells)
        n_ctx.add(scheduler.root.n_ctx)
        if not scheduler.counts.n_active and not scheduler.counts.n_waiting:
            break
    assert all(run.finish_reason == "length" for run in runs)
    assert len(engine_cells(scheduler)) == 200
    assert scheduler.counts.n_cells_peak >= most
    assert (len(n_ctx) > 1) == (n_parallel == 8)


def test_the_peak_is_the_most_cells_the_engine_had_in_use(dense: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = open_scheduler(dense, 4)
    scheduler.root.extend(tokens_of(dense, 201))
    most, decode = [], NativeContext.decode

    def counting(context: NativeContext, rows: Sequence[Rows], **options) -> bool:
        done = decode(context, rows, **options)
        most.append(len(engine_cells(scheduler)))
        return done

    monkeypatch.setattr(NativeContext, "decode", counting)
    run_all(scheduler, [request([*tokens_of(dense, 201), *tokens_of(dense, i * 9, seed=i)], 1 + i) for i in range(9)])
    assert scheduler.counts.n_cells_peak == max(most) > 201 + 4 * 9
    assert scheduler.counts.n_steps == len(most) + 1


def test_growing_shares_the_prefix_again(attentive: LlamaModel) -> None:
    scheduler = open_scheduler(attentive, 8)
    prefix = tokens_of(attentive, 301)
    scheduler.root.extend(prefix)
    runs = [scheduler.submit(request([*prefix, *tokens_of(attentive, 20, seed=i)], 60)) for i in range(8)]
    before = scheduler.root.n_ctx
    while scheduler.root.n_ctx == before:
        scheduler.step()
    assert len(engine_cells(scheduler)) == scheduler.counts.n_cells == 300 + sum(n_read(run) - 300 for run in runs)
    drive(scheduler, runs)
    assert engine_cells(scheduler) == [(position, frozenset({scheduler.root.cells.seq_id})) for position in range(300)]


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
    runs = [scheduler.submit(request(tokens_of(model, 50, seed=i), n)) for i, n in enumerate((None, 1000, 5))]
    drive(scheduler, runs)
    assert [run.finish_reason for run in runs] == ["context", "context", "length"]
    assert [len(run.tokens) for run in runs] == [401, 401, 55]
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
    case = make_case(model, [(20 + i, 30) for i in range(24)])
    scheduler = case.scheduler(24, n_ctx=1)
    before, sizes = scheduler.root.n_ctx, set()
    with watching() as seen:
        runs = [scheduler.submit(RunRequest(tokens=(*case.prefix, *s), sampling=o)) for s, o in case.branches]
        while not all(run.is_over for run in runs):
            scheduler.step()
            sizes.add(scheduler.root.n_ctx)
    assert max(sizes) >= 300 + 24 * 50 > before
    check_all_close([written(run, seen) for run in runs], case.expected)


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
    assert 0.8 * 512 < np.mean(used) < max(used) <= 512
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
    case = make_case(model, [(30 + i, 60) for i in range(6)])
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


def _no_memory(_: SharedContext, n_ctx: int) -> None:
    raise NoRoomError(f"no memory for {n_ctx} cells")


def test_the_last_one_fails_with_its_error_and_the_results_of_others_stand(
    dense: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(dense, [(20, 400), (30, 40), (40, 40), (5, 6)])
    scheduler = case.scheduler(6, n_cells_max=4096)
    monkeypatch.setattr(SharedContext, "_check_memory", _no_memory)
    with watching() as seen:
        runs = [scheduler.submit(RunRequest(tokens=(*case.prefix, *s), sampling=o)) for s, o in case.branches]
        drive(scheduler, runs)
    assert (runs[0].finish_reason, type(runs[0].error)) == ("", NoRoomError)
    assert len(runs[0].tokens) == 513
    check_all_close([written(run, seen) for run in runs[1:]], case.expected[1:])
    assert scheduler.counts.n_cells == 299


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
    scheduler.root.extend(tokens_of(model, 100))
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
        monkeypatch.setattr(StateCutter, "_can_be_cut", lambda *_: False)
        _, actual = case.run(4, n_ctx_max=1000)
        check_all_close(actual, case.expected)


def test_growing_in_the_middle_of_one_run_is_exact(model: LlamaModel) -> None:
    case: Case = make_case(model, [(180, 60), (0, 300)])
    scheduler, actual = case.run(1, n_ctx=1)
    assert scheduler.root.n_ctx > 512
    pairs: list[tuple[Written, Written]] = list(zip(actual, case.expected, strict=True))
    assert [is_same(*pair) for pair in pairs] == [True, True]
    assert all(check_close(*pair) for pair in pairs)
