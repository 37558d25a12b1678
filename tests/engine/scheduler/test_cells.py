"""The engine's own count of cells against the scheduler's, and what windowed layers lose."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from llama_cpp import llama_cpp as api

from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.context import NativeContext, Rows
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.scheduler import LlamaScheduler
from llamakv.records import MemoryKind
from tests.engine.scheduler.cases import (
    N_STEPS_MAX,
    check_close,
    cold,
    drive,
    open_scheduler,
    request,
    run_all,
    watching,
    written,
)
from tests.engine.test_sequence import tokens_of

Cells = list[tuple[int, frozenset[int]]]


@pytest.fixture(scope="module", params=["M", "MS", "MG", "MH", "MH2", "ML"])
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
        guard = scheduler._shared.native.n_seq_max  # of windows, if there is one
        cells.append((position, frozenset(struct.unpack_from(f"<{n_seq}i", data, at)) - {guard}))
        at += 4 * n_seq
    return cells


def test_forking_1000_tokens_to_64_sequences_takes_no_cell(attentive: LlamaModel) -> None:
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


def test_a_recurrent_fork_shares_the_state_until_it_reads(models) -> None:
    with LlamaModel(models("MR")) as model:
        scheduler = open_scheduler(model, 64)
        scheduler.root.extend(tokens_of(model, 101))
        runs = [scheduler.submit(request([*tokens_of(model, 101), 400], 2)) for _ in range(64)]
        scheduler.admission.admit(scheduler.root, scheduler._begin)
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
        for i in range(12)
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


# ---------------------------------------------------------------- windows


@pytest.fixture(scope="module")
def windowed(models) -> Iterator[LlamaModel]:
    """A window of 32 tokens. Unguarded, the engine takes the cells of windowed layers that are out of their sequence's
    window for whatever comes, and then all before them too, also where the layers have cells for everything (swa_full;
    llama_kv_cache::find_slot and apply_ubatch)."""
    with LlamaModel(models("MS")) as model:
        yield model


def position_range(scheduler: LlamaScheduler) -> tuple[int, int]:
    return scheduler._shared.native.position_range(scheduler.root.cells.seq_id)


def with_cells_free_before_the_root(windowed: LlamaModel, root: list[int]) -> LlamaScheduler:
    """What takes the free cells goes on into the root's if it may."""
    scheduler = open_scheduler(windowed, 2, n_cells_max=512)
    before = scheduler.submit(request(tokens_of(windowed, 100, seed=1), 100))
    scheduler.step()
    scheduler.root.extend(root)
    scheduler.cancel(before)
    run_all(scheduler, [request(tokens_of(windowed, 150, seed=3), 1)])
    return scheduler


@pytest.mark.parametrize("n_common", [40, 60, 100, 300])
def test_a_run_begins_anywhere_as_windowed_layers_keep_all_that_a_sequence_has(
    windowed: LlamaModel, n_common: int
) -> None:
    root = tokens_of(windowed, 300, seed=2)
    scheduler = with_cells_free_before_the_root(windowed, root)
    assert position_range(scheduler) == (0, 298)
    tokens = [*root[:n_common], *tokens_of(windowed, 5, seed=4)]
    (run,), (actual,) = run_all(scheduler, [request(tokens, 8)])
    assert run.n_reused == min(n_common, 299)
    check_close(actual, cold(windowed, tokens))


@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize("n_common", [40, 60, 100, 300])
def test_a_run_begins_only_where_the_windowed_layers_of_the_root_still_have_its_window(
    windowed: LlamaModel, n_common: int
) -> None:
    root = tokens_of(windowed, 300, seed=2)
    scheduler = with_cells_free_before_the_root(windowed, root)
    assert position_range(scheduler) == (50, 298)
    tokens = [*root[:n_common], *tokens_of(windowed, 5, seed=4)]
    _, (actual,) = run_all(scheduler, [request(tokens, 8)])
    check_close(actual, cold(windowed, tokens))


@pytest.mark.usefixtures("unguarded")
def test_a_branch_keeps_its_window_when_the_context_grows_after_the_root_lost_it(windowed: LlamaModel) -> None:
    root, rest = tokens_of(windowed, 200, seed=2), tokens_of(windowed, 5, seed=4)
    scheduler = open_scheduler(windowed, 4)
    scheduler._n_read_max = 256  # so that the other prompt takes the cells in one call
    first = scheduler.submit(request(tokens_of(windowed, 100, seed=1), 100))
    scheduler.step()
    scheduler.root.extend(root)
    with watching() as seen:
        branch = scheduler.submit(request([*root, *rest], 20))
        scheduler.step()
        scheduler.step()
        scheduler.root.extend(tokens_of(windowed, 60, seed=5))
        scheduler.cancel(first)
        others = [scheduler.submit(request(tokens_of(windowed, 150, seed=3), 4))]
        scheduler.step()
        assert position_range(scheduler) == (228, 258)
        assert (scheduler.root.n_ctx, branch.is_over) == (512, False)
        others.append(scheduler.submit(request(tokens_of(windowed, 150, seed=6), 4)))
        scheduler.step()
        assert (scheduler.root.n_ctx, branch.is_over) == (1024, False)
        drive(scheduler, [branch, *others])
    check_close(written(branch, seen), cold(windowed, root, rest, n=20))
