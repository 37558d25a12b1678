"""A context that has as many sequences and cells as are used, and as memory allows at that time."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.admission import N_PROMISED
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.scheduler import LlamaScheduler
from llamakv.records import MemoryKind
from tests.engine.scheduler.cases import Written, drive, is_same, watching, written
from tests.engine.scheduler.many import ask, check_account, check_answers, open_many, run_one
from tests.engine.test_sequence import tokens_of

N_CELLS = 1 << 20


@pytest.fixture(scope="module", params=["M", "MS", "MR", "MH", "MH2"])
def model(request: pytest.FixtureRequest, models) -> Iterator[LlamaModel]:
    with LlamaModel(models(request.param)) as model:
        yield model


class Machine:
    """Its free memory, as tests want it; looked at in every step."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.available = 1 << 30
        patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=self.available))
        patch.setattr("llamakv.engine.llamacpp.shared.within_limits", lambda n: n)
        patch.setattr("llamakv.engine.llamacpp.admission._REVIEW_S", 0.0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def n_sequences(scheduler: LlamaScheduler) -> int:
    """Sequences the context has, the root among them."""
    return scheduler._shared.native.n_seq_max - 1


def keep(scheduler: LlamaScheduler, model: LlamaModel, n: int, *, n_tokens: int = 20) -> list[LlamaRun]:
    return [run_one(scheduler, tokens_of(model, n_tokens, seed=i), 2) for i in range(n)]


# ---------------------------------------------------------------- sequences


def test_a_context_opens_with_few_sequences_and_has_more_when_all_are_in_use(model: LlamaModel) -> None:
    scheduler = open_many(model, 2, n_kept=9)
    seen = []
    for i in range(9):
        run_one(scheduler, tokens_of(model, 20, seed=i), 2)
        seen.append(n_sequences(scheduler))
        check_account(scheduler)
    assert seen == [5, 5, 5, 5, 10, 10, 10, 10, 10]
    keep(scheduler, model, 2, n_tokens=30)
    assert (n_sequences(scheduler), len(scheduler.kept)) == (12, 11)


def test_what_takes_memory_by_sequence_takes_little_at_first(model: LlamaModel) -> None:
    scheduler = open_many(model, 2, n_kept=198)
    few = scheduler.memory
    keep(scheduler, model, 5)
    more = scheduler.memory
    n_guards = model.info.kind is MemoryKind.WINDOWED  # a sequence that keeps what others have
    assert (few.n_seq_max, more.n_seq_max) == (6 + n_guards, 11 + n_guards)
    assert more.recurrent_bytes * few.n_seq_max == few.recurrent_bytes * more.n_seq_max
    assert more.output_bytes * few.n_seq_max == few.output_bytes * more.n_seq_max > 0


def test_answers_go_on_exactly_in_a_context_with_more_sequences(model: LlamaModel) -> None:
    """The context is replaced while one is being written, and again before somebody goes on with it."""
    tokens, more = tokens_of(model, 300, seed=50), tokens_of(model, 20, seed=51)

    def write(*, moves: bool) -> list[Written]:
        scheduler = open_many(model, 1, n_kept=12)
        with watching() as seen:
            first = scheduler.submit(ask(tokens, 30))
            while first.n_generated < 15:
                scheduler.step()
            fill(scheduler, 5 if moves else 0)
            drive(scheduler, [first])
            fill(scheduler, 4 if moves else 0)
            second = run_one(scheduler, [*first.tokens, *more], 8)
        check_account(scheduler)
        assert second.n_reused == len(first.tokens) - 1
        assert n_sequences(scheduler) == (12 if moves else 3)
        return [written(run, seen) for run in (first, second)]

    assert all(is_same(*pair) for pair in zip(write(moves=True), write(moves=False), strict=True))


def fill(scheduler: LlamaScheduler, n: int) -> None:
    """Take sequences, but no cells."""
    for i in range(n):
        scheduler.adopt([300 + i], lambda n: [])


def test_without_memory_for_more_sequences_kept_runs_go(model: LlamaModel, machine: Machine) -> None:
    scheduler = open_many(model, 2, n_kept=9)
    runs = keep(scheduler, model, 4)
    machine.available = 0
    waiting = scheduler.submit(ask(tokens_of(model, 20, seed=9), 2))
    scheduler.step()
    assert scheduler.shortage is not None
    assert (scheduler.shortage.n_sequences, n_sequences(scheduler), waiting.is_over) == (1, 5, False)
    scheduler.let_go(runs[1])
    drive(scheduler, [waiting])
    assert (waiting.error, [scheduler.has_cells(run) for run in runs]) == (None, [True, False, True, True])
    machine.available = 1 << 30
    run_one(scheduler, tokens_of(model, 20, seed=10), 2)
    assert (n_sequences(scheduler), len(scheduler.kept)) == (10, 5)


def test_a_run_that_waited_for_a_sequence_gets_one_as_soon_as_memory_is_free(
    model: LlamaModel, machine: Machine
) -> None:
    scheduler = open_many(model, 2, n_kept=9)
    keep(scheduler, model, 4)
    machine.available = 0
    waiting = scheduler.submit(ask(tokens_of(model, 20, seed=9), 2))
    for _ in range(3):
        scheduler.step()
    machine.available = 1 << 30
    with watching() as seen:
        drive(scheduler, [waiting])
    assert (waiting.error, len(scheduler.kept)) == (None, 5)
    check_answers(model, [waiting], seen)


def test_conversations_share_what_they_shared_in_a_context_with_more_sequences(models) -> None:
    with LlamaModel(models("M")) as model:
        text = tokens_of(model, 200)
        scheduler = open_many(model, 2, n_kept=20)
        for i in range(12):
            run_one(scheduler, [*text, 300 + i], 1)
        assert (n_sequences(scheduler), scheduler.counts.n_cells) == (20, 200 + 12)
        check_account(scheduler)


# ---------------------------------------------------------------- cells


def open_within_memory(model: LlamaModel, n_cells_max: int = N_CELLS) -> LlamaScheduler:
    return model.open_scheduler(
        MemoryRequest(),
        n_parallel=2,
        n_kept=6,
        n_ctx_min=1,
        n_ctx_max=4096,
        n_cells_max=n_cells_max,
        is_within_memory=True,
        n_threads=1,
    )


def test_the_limit_of_cells_follows_free_memory_within_what_is_allowed(model: LlamaModel, machine: Machine) -> None:
    scheduler = open_within_memory(model, 100_000)
    limits = []
    for available in (1 << 30, 1 << 22, 0, 1 << 24, 1 << 40):
        machine.available = available
        scheduler.step()
        limits.append(scheduler.counts.n_cells_max)
    n_bytes = scheduler._shared.bytes_per_cell()
    if model.info.kind is MemoryKind.RECURRENT:
        assert (n_bytes, limits) == (0, [100_000] * 5)
    else:
        by_memory = [min(int(0.62 * ((1 << n) // n_bytes + 512)), 100_000) for n in (30, 22, 24, 40)]
        assert limits == [*by_memory[:2], 512, *by_memory[2:]]
        assert 512 < by_memory[1] < by_memory[2] <= 100_000


def test_the_limit_is_not_less_than_what_was_promised(models, machine: Machine) -> None:
    with LlamaModel(models("M")) as model:
        scheduler = open_within_memory(model)
        run = scheduler.submit(ask(tokens_of(model, 400), 1000))
        scheduler.step()
        machine.available = 0
        scheduler.step()
        assert scheduler.counts.n_reserved == scheduler.counts.n_cells_max == 399 + N_PROMISED
        check_account(scheduler)
        with watching() as seen:
            drive(scheduler, [run])
        scheduler.step()
        assert (run.finish_reason, scheduler.counts.n_cells_max) == ("context", 512)
        assert len(run.tokens) == 513
        assert len(seen[run]) > 100


def test_cells_that_memory_has_again_are_given_to_who_waits(models, machine: Machine) -> None:
    """Two were promised more than there is in the end: one waits until there is more."""
    with LlamaModel(models("M")) as model:
        scheduler = open_within_memory(model)
        with watching() as seen:
            runs = [scheduler.submit(ask(tokens_of(model, 150, seed=i), 300, keeps=False)) for i in range(2)]
            while not all(run.n_generated for run in runs):
                scheduler.step()
            machine.available = 0
            while scheduler.counts.n_active == 2:
                scheduler.step()
            assert (scheduler.counts.n_waiting, scheduler.counts.n_cells_max) == (1, 512)
            machine.available = 1 << 30
            scheduler.step()
            assert (scheduler.counts.n_active, scheduler.counts.n_cells_max > 10_000) == (2, True)
            drive(scheduler, runs)
        assert [run.finish_reason for run in runs] == ["length"] * 2
        check_answers(model, runs, seen)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is for those who look at memory."""
    clock = [100.0]
    monkeypatch.setattr("llamakv.engine.llamacpp.admission.time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def test_memory_is_looked_at_once_a_second(models, monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    looks = []
    with LlamaModel(models("M")) as model:
        scheduler = open_within_memory(model)
        look = scheduler._shared.n_cells_in_memory
        monkeypatch.setattr(scheduler._shared, "n_cells_in_memory", lambda: looks.append(clock[0]) or look())
        for clock[0] in (100.5, 100.9, 101.1, 101.2, 102.2):
            scheduler.step()
    assert looks == [101.1, 102.2]


# ---------------------------------------------------------------- memory that is given back


def test_after_a_minute_without_runs_a_context_that_is_far_too_large_becomes_smaller(
    model: LlamaModel, clock: list[float]
) -> None:
    """What was kept goes on exactly."""
    tokens, more = tokens_of(model, 200), tokens_of(model, 20, seed=1)

    def write(*, idle_s: float) -> tuple[int, list[Written]]:
        scheduler = open_many(model, 2, n_ctx=4096)
        scheduler._shared._n_ctx_min = 1
        with watching() as seen:
            first = run_one(scheduler, tokens, 4)
            clock[0] += idle_s
            assert scheduler.step() == []
            n_ctx = scheduler.root.n_ctx
            second = run_one(scheduler, [*first.tokens, *more], 8)
        assert second.n_reused == 203
        check_account(scheduler)
        return n_ctx, [written(run, seen) for run in (first, second)]

    (n_before, expected), (n_after, actual) = write(idle_s=59.0), write(idle_s=61.0)
    assert (n_before, n_after) == (4096, 512)
    assert all(is_same(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.parametrize(("n_tokens", "n_ctx_min", "n_ctx"), [(700, 1, 1024), (800, 1, 4096), (10, 1025, 4096)])
def test_a_context_is_left_with_room_for_more_than_is_in_use(
    dense: LlamaModel, clock: list[float], n_tokens: int, n_ctx_min: int, n_ctx: int
) -> None:
    scheduler = open_many(dense, 2, n_ctx=4096)
    scheduler._shared._n_ctx_min = n_ctx_min
    run_one(scheduler, tokens_of(dense, n_tokens), 1)
    clock[0] += 61.0
    scheduler.step()
    assert scheduler.root.n_ctx == n_ctx


def test_while_somebody_is_under_way_or_memory_is_short_the_context_stays(
    dense: LlamaModel, clock: list[float], machine: Machine
) -> None:
    scheduler = open_many(dense, 2, n_ctx=4096)
    scheduler._shared._n_ctx_min = 1
    run = scheduler.submit(ask(tokens_of(dense, 20), 30))
    for clock[0] in (200.0, 300.0, 359.0):
        scheduler.step()
    scheduler.cancel(run)
    clock[0] = 418.0
    scheduler.step()
    assert scheduler.root.n_ctx == 4096
    clock[0], machine.available = 420.0, 0
    scheduler.step()
    assert scheduler.root.n_ctx == 4096
    machine.available = 1 << 30
    scheduler.step()
    assert scheduler.root.n_ctx == 512
