"""A scheduler for many users: its runs, its account of cells, and what its runs write alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llamakv.engine.contract import MemoryRequest, RunRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.scheduler import LlamaScheduler
from llamakv.records import MemoryKind, Sampling
from tests.engine.scheduler.cases import Seen, check_close, drive, open_scheduler, watching, written
from tests.engine.scheduler.test_cells import engine_cells


def open_many(
    model: LlamaModel,
    n_parallel: int = 4,
    *,
    n_kept: int = 8,
    n_ctx: int = 512,
    n_ctx_max: int = 4096,
    n_cells_max: int | None = None,
    **memory,
) -> LlamaScheduler:
    return model.open_scheduler(
        MemoryRequest(**memory),
        n_parallel=n_parallel,
        n_kept=n_kept,
        n_ctx_min=n_ctx,
        n_ctx_max=n_ctx_max,
        n_cells_max=n_cells_max,
        n_threads=1,
    )


def ask(
    tokens: Sequence[int], n: int = 4, *, keeps: bool = True, space: str = "", n_top: int | None = None, **sampling
) -> RunRequest:
    """``n`` tokens to write behind these."""
    return RunRequest(
        tokens=tuple(tokens),
        sampling=Sampling(max_tokens=n, **sampling),
        keeps_cells=keeps,
        space=space,
        n_top_logprobs=n_top,
    )


def run_one(scheduler: LlamaScheduler, tokens: Sequence[int], n: int = 4, **settings) -> LlamaRun:
    run = scheduler.submit(ask(tokens, n, **settings))
    drive(scheduler, [run])
    assert run.error is None
    return run


def check_account(scheduler: LlamaScheduler) -> None:
    """Check the count of cells against the engine's own, and against what was promised."""
    with scheduler.lock:
        counts = scheduler.counts
        if scheduler._info.kind is not MemoryKind.RECURRENT:
            assert len(engine_cells(scheduler)) == counts.n_cells
        assert 0 <= counts.n_cells <= counts.n_reserved <= counts.n_cells_max
        live = scheduler._shared._live
        for cells in live:
            assert cells.n_branches == sum(other.parent is cells for other in live)
            assert cells.parent is None or cells.parent in live
            assert 0 <= cells.n_shared <= cells.n_cells


def check_answers(model: LlamaModel, runs: Sequence[LlamaRun], seen: Seen, **memory) -> int:
    """Check that runs wrote what each writes alone, as far as they came, but for ties; how many ties fell the other
    way."""
    scheduler, n_ties = open_scheduler(model, 1, **memory), 0
    for run in runs:
        assert run.request is not None
        actual, sampling = written(run, seen), run.request.sampling
        is_whole = run.finish_reason in ("length", "stop")
        if not is_whole:  # it had less room, or less time
            sampling = replace(sampling, max_tokens=run.n_generated)
        with watching() as seen_alone:
            single = scheduler.submit(replace(run.request, sampling=sampling, keeps_cells=False))
            drive(scheduler, [single])
        expected = written(single, seen_alone)
        n_ties += not check_close(actual, expected if is_whole else replace(expected, finish_reason=run.finish_reason))
    scheduler.close()
    return n_ties
