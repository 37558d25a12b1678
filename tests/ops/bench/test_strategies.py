"""Strategies side by side: the same answers, and figures that add up."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.errors import EngineError, InterruptedByUser, MismatchError
from llamakv.ops.bench.requests import BenchRequest, StrategiesRequest
from llamakv.ops.bench.results import StrategiesResult, StrategyResult
from llamakv.ops.bench.strategies import Measured, measure_strategies, middle_of
from llamakv.ops.bench.strategy_jobs import (
    Group,
    Prefix,
    ProcessMemory,
    ProcessResult,
    Setup,
    UserAnswer,
    answer_users,
    fill_store,
    greedy_without,
)
from llamakv.ops.bench.strategy_sizes import Shape, n_ctx_for
from llamakv.ops.bench.text import story
from llamakv.ops.bench.work import Work, make_work, n_different
from llamakv.ops.matching import find_model
from llamakv.ops.requests import MemoryOptions, ModelRequest, Reporter
from llamakv.records import Sampling
from llamakv.store.session_file import read_session
from llamakv.store.session_store import SessionStore

N, P, Q, A = 2, 300, 7, 9
CELL = 2 * 2 * 64 * 2 * 2
"""Bytes of a cell of M and ME: keys and values of 2 layers with 2 heads of 64, at 2 bytes each."""


@dataclass
class Told:
    """What a run said, and when it is to be stopped."""

    rows: list[StrategiesResult] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    progress: list[tuple[str, int, int]] = field(default_factory=list)
    stop_after: int | None = None

    @property
    def reporter(self) -> Reporter:
        return Reporter(
            notice=self.notices.append,
            progress=lambda *what: self.progress.append(what),
            should_abort=lambda: self.stop_after is not None and len(self.rows) >= self.stop_after,
        )


def measure(model: Path, folder: Path, told: Told, *, n_ctx: int | None = None, **more) -> StrategiesResult:
    values = {"n_users": N, "n_prefix": P, "n_question": Q, "n_answer": A, "shares_prefix": True, **more}
    work_dir = folder / "work"
    work_dir.mkdir(exist_ok=True)
    request = BenchRequest(
        model=ModelRequest(path=model, cache_dir=folder / "cache", n_threads=1, n_ctx=n_ctx),
        memory=MemoryOptions(),
        n_repeats=1,
        types=None,
        strategies=StrategiesRequest(**values),
        text=None,
        work_dir=work_dir,
        reporter=told.reporter,
    )
    try:
        return measure_strategies(request, on_row=told.rows.append)
    finally:
        assert list(work_dir.iterdir()) == []
        children = psutil.Process().children(recursive=True)
        assert all("resource_tracker" in " ".join(child.cmdline()) for child in children)


# ---------------------------------------------------------------- all of it, once


@pytest.fixture(scope="module")
def measured(models, tmp_path_factory: pytest.TempPathFactory) -> tuple[StrategiesResult, Told]:
    told = Told()
    # a model that likes to end its answers, of the same shape as M
    return measure(models("ME"), tmp_path_factory.mktemp("strategies"), told), told


@pytest.fixture
def rows(measured: tuple[StrategiesResult, Told]) -> dict[str, StrategyResult]:
    return {row.name: row for row in measured[0].rows}


def test_all_strategies_are_run_and_each_is_told_when_it_is_done(measured: tuple[StrategiesResult, Told]) -> None:
    result, told = measured
    assert [row.name for row in result.rows] == ["none", "in-process", "cross-process", "hybrid"]
    assert [len(so_far.rows) for so_far in told.rows] == [1, 2, 3, 4]
    assert told.rows[-1] == result
    assert result.failed == ()
    assert (result.type_k, result.type_v, result.shares_prefix) == ("f16", "f16", True)


def test_all_strategies_give_the_same_answers(measured: tuple[StrategiesResult, Told]) -> None:
    assert measured[1].notices == []


def test_progress_ends_where_it_said(measured: tuple[StrategiesResult, Told]) -> None:
    steps = [what for what in measured[1].progress if what[0] == "bench"]
    done = [n_done for _, n_done, _ in steps]
    total = P + (N * (P + Q + A - 1)) + (P + N * (Q + A - 1)) + 2 * N * (Q + A - 1)
    assert {n_total for _, _, n_total in steps} == {total}
    assert done == sorted(done)
    assert done[-1] == total


def test_cells_and_their_bytes_are_as_constructed(rows: dict[str, StrategyResult]) -> None:
    apart, shared = N * (P + Q + A - 1), P + N * (Q + A - 1)
    assert {name: row.n_cells_peak for name, row in rows.items()} == {
        "none": apart,
        "in-process": shared,
        "cross-process": apart,
        "hybrid": shared,
    }
    assert {name: row.cell_bytes for name, row in rows.items()} == {
        name: row.n_cells_peak * CELL for name, row in rows.items()
    }


def test_hit_rates_are_as_constructed(rows: dict[str, StrategyResult]) -> None:
    all_tokens = N * (P + Q)
    reused = {"none": 0, "in-process": (N - 1) * P, "cross-process": N * P, "hybrid": N * P}
    for name, row in rows.items():
        assert row.n_prompt_tokens == all_tokens
        assert (row.n_reused, row.n_evaluated) == (reused[name], all_tokens - reused[name]), name
        assert row.hit_rate == reused[name] / all_tokens


def test_only_the_store_is_read_and_written(rows: dict[str, StrategyResult]) -> None:
    one = rows["hybrid"].bytes_read
    assert one > 0.8 * P * CELL
    assert {name: (row.bytes_read, row.bytes_written) for name, row in rows.items()} == {
        "none": (0, 0),
        "in-process": (0, 0),
        "cross-process": (N * one, one),
        "hybrid": (one, one),
    }
    assert rows["hybrid"].preparation_s == rows["cross-process"].preparation_s > 0
    assert rows["none"].preparation_s == rows["in-process"].preparation_s == 0


def test_each_answer_is_as_long_as_asked_for(rows: dict[str, StrategyResult]) -> None:
    for row in rows.values():
        assert row.n_generated == N * A
        assert row.tokens_per_s == row.n_generated / row.elapsed_s
        assert row.first_token_s.n_runs == N
        assert 0 < row.first_token_s.least <= row.first_token_s.median <= row.first_token_s.most <= row.elapsed_s


def test_memory_holds_what_the_contexts_and_the_weights_take(rows: dict[str, StrategyResult]) -> None:
    assert [row.n_processes for row in rows.values()] == [1, 1, N, 1]
    n_ctx = {
        "none": n_ctx_for(N * (P + Q + A - 1)),
        "in-process": n_ctx_for(P + N * (Q + A - 1)),
        "cross-process": N * n_ctx_for(P + Q + A - 1),
        "hybrid": n_ctx_for(P + N * (Q + A - 1)),
    }
    for name, row in rows.items():
        assert row.context_bytes > n_ctx[name] * CELL
        assert row.peak_bytes > row.weights_bytes + n_ctx[name] * CELL
    assert rows["cross-process"].peak_bytes > 1.5 * rows["hybrid"].peak_bytes
    assert rows["hybrid"].limited_by in ("memory", "sequences")


# ---------------------------------------------------------------- when it does not go well


@pytest.mark.slow
def test_a_strategy_that_cannot_be_run_says_why_and_the_others_go_on(model_path: Path, tmp_path: Path) -> None:
    told = Told()
    result = measure(model_path, tmp_path, told, n_ctx=512, names=("none", "in-process"), memory_limit_bytes=1)
    assert result.failed == (("none", "a context of 768 cells is needed, 512 are allowed (--n-ctx)"),)
    (row,) = result.rows
    assert (row.name, row.n_users_that_fit, row.limited_by) == ("in-process", 0, "memory")
    assert [(len(so_far.rows), len(so_far.failed)) for so_far in told.rows] == [(0, 1), (1, 1)]


def test_more_users_than_sequences_or_than_memory_holds_are_refused(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamakv.ops.bench.strategies.available_bytes", lambda: 10**9)
    told = Told()
    result = measure(model_path, tmp_path, told, n_users=255, n_prefix=9000, names=("none", "cross-process"))
    assert result.memory_limit_bytes == 10**9
    reasons = dict(result.failed)
    assert reasons["none"] == "255 users need a sequence each, a context has 254"
    assert re.fullmatch(
        r"about \d+\.\d GB of memory are needed, 900 MB may be used: 90% of the 1\.0 GB available",
        reasons["cross-process"],
    )
    assert result.rows == ()
    assert told.notices[0].startswith("each user has 9,016 tokens, the model was trained with contexts of 8,192")


@pytest.mark.slow
def test_stopped_what_was_measured_is_told_and_nothing_is_left(model_path: Path, tmp_path: Path) -> None:
    told = Told(stop_after=1)
    with pytest.raises(InterruptedByUser):
        measure(model_path, tmp_path, told, n_prefix=20, names=("none", "in-process"))
    assert [[row.name for row in so_far.rows] for so_far in told.rows] == [["none"], ["none"]]


# ---------------------------------------------------------------- of several


def process(arrived_s: float, ended_s: float, private_bytes: int, mapped_bytes: int) -> ProcessResult:
    answer = UserAnswer(tokens=(1,), first_token_s=arrived_s, ended_s=ended_s, n_reused=0, n_evaluated=1)
    return ProcessResult(
        arrived_s=arrived_s,
        answers=(answer,),
        n_read_once=0,
        n_cells_peak=1,
        contexts=(),
        bytes_read=0,
        memory=ProcessMemory(private_bytes=private_bytes, mapped_bytes=mapped_bytes),
    )


def run_of(*processes: ProcessResult) -> Measured:
    return Measured(shape=Shape(per_user="process", n_users=1, n_shared=0, n_own=1), processes=processes)


def test_processes_count_from_the_first_arrival_to_the_last_token() -> None:
    assert run_of(process(10.0, 12.0, 1, 1), process(9.5, 11.0, 1, 1)).elapsed_s == 2.5


def test_what_processes_share_counts_once() -> None:
    assert run_of(process(0, 1, 100, 1000), process(0, 1, 120, 1010)).peak_bytes == 100 + 120 + 1010


def test_of_several_runs_the_one_with_the_median_time_is_taken() -> None:
    slow, fast, middle = (run_of(process(0.0, s, 1, 1)) for s in (3.0, 1.0, 2.0))
    assert middle_of([slow, fast, middle]) is middle
    assert middle_of([slow, middle]) is middle


def test_different_answers_are_counted() -> None:
    assert n_different([(1, 2), (3, 4), (5,)], [(1, 2), (3, 5), (6,)]) == 2


# ---------------------------------------------------------------- inside a process


class Alone:
    """A link to nobody."""

    def tell(self, message: object) -> None:
        pass

    def wait_for_others(self) -> None:
        pass


@dataclass
class Bench:
    """Work for one model, done in this process."""

    setup: Setup
    work: Work
    folder: Path
    ends: Sequence[int]
    memory: MemoryRequest

    def answer(self, *groups: Group) -> ProcessResult:
        return answer_users(Alone(), self.setup, groups, greedy_without(self.ends, n_answer=A))  # type: ignore[arg-type]

    def fill(self) -> tuple[list[Path], int]:
        """Save each prefix there is; returns the files and the bytes written."""
        store = SessionStore(self.folder / "store")
        users = self.work.users[:1] if self.work.shares_prefix else self.work.users
        sessions = [
            (store.resolve_for_writing(f"prefix-{number}"), self.work.session_tokens(user))
            for number, user in enumerate(users)
        ]
        done = fill_store(Alone(), self.setup, sessions, n_ctx_for(P + 1))  # type: ignore[arg-type]
        return [path for path, _ in sessions], done.bytes_written

    def each_reads(self) -> Group:
        return Group(users=self.work.users, prefix=Prefix.EACH_READS, n_ctx=n_ctx_for(N * (P + Q + A - 1)))

    def read_once(self) -> Group:
        begins_with = self.work.session_tokens(self.work.users[0])
        n_ctx = n_ctx_for(P + N * (Q + A - 1))
        return Group(users=self.work.users, prefix=Prefix.READ_ONCE, n_ctx=n_ctx, begins_with=begins_with)

    def resumed(self, session: Path) -> Group:
        n_ctx = n_ctx_for(P + N * (Q + A - 1))
        return Group(users=self.work.users, prefix=Prefix.RESUMED, n_ctx=n_ctx, session=session)

    def own(self, number: int, session: Path) -> Group:
        n_ctx = n_ctx_for(P + Q + A - 1)
        return Group(users=(self.work.users[number],), prefix=Prefix.OWN_SESSION, n_ctx=n_ctx, session=session)

    def alone(self, number: int) -> tuple[int, ...]:
        """What a context says that never restored or shared anything."""
        with LlamaModel(self.setup.found.path) as model:
            sequence = model.open_sequence(self.memory, n_ctx_min=512, n_ctx_max=1024, n_threads=1)
            sequence.extend(self.work.users[number].prompt)
            bias = tuple((token, -math.inf) for token in self.ends)
            return tuple(sequence.generate(Sampling(logit_bias=bias), n_max=A))


def bench_of(models, name: str, folder: Path, *, shares_prefix: bool = True, swa_full: bool = True) -> Bench:
    request = ModelRequest(path=models(name), cache_dir=folder / "cache", n_threads=1)
    memory = MemoryRequest(flash_attn=True, swa_full=swa_full)
    asked = StrategiesRequest(n_users=N, n_prefix=P, n_question=Q, n_answer=A, shares_prefix=shares_prefix)
    with LlamaModel(models(name)) as model:
        text = model.tokenize(story(60), add_special=False, parse_special=False)
        ends = [token for token in range(model.info.n_vocab) if model.is_end(token)]
    setup = Setup(found=find_model(request, None, Reporter()), model=request, memory=memory)
    return Bench(setup, make_work(text, list(dict.fromkeys(text)), (), asked), folder, ends, memory)


@pytest.fixture(params=["M", "ME", "MS", "MR", "MH", "window"])
def bench(request: pytest.FixtureRequest, models, tmp_path: Path) -> Bench:
    """All memory kinds, and a model that likes to end its answers."""
    is_window = request.param == "window"
    return bench_of(models, "MS" if is_window else request.param, tmp_path, swa_full=not is_window)


def test_answers_are_those_of_a_context_that_shares_nothing(bench: Bench) -> None:
    (session,), _ = bench.fill()
    expected = [bench.alone(number) for number in range(N)]
    for group in (bench.each_reads(), bench.read_once(), bench.resumed(session)):
        found = bench.answer(group)
        assert [answer.tokens for answer in found.answers] == expected, group.prefix
    found = bench.answer(*(bench.own(number, session) for number in range(N)))
    assert [answer.tokens for answer in found.answers] == expected
    assert [(answer.n_reused, answer.n_evaluated) for answer in found.answers] == [(P, Q)] * N
    assert found.n_cells_peak == N * (P + Q + A - 1)


def test_users_with_a_session_each_go_on_from_their_own(models, tmp_path: Path) -> None:
    bench = bench_of(models, "M", tmp_path, shares_prefix=False)
    sessions, _ = bench.fill()
    found = bench.answer(*(bench.own(number, session) for number, session in enumerate(sessions)))
    assert [answer.tokens for answer in found.answers] == [bench.alone(number) for number in range(N)]
    assert found.bytes_read == sum(size_of(session) for session in sessions)
    assert len(found.contexts) == N


def test_written_and_read_are_the_files_of_the_store(models, tmp_path: Path) -> None:
    bench = bench_of(models, "M", tmp_path)
    (session,), bytes_written = bench.fill()
    objects = [path for path in (tmp_path / "store" / ".objects").glob("??/*") if path.is_file()]
    assert bytes_written == session.stat().st_size + sum(path.stat().st_size for path in objects)
    assert bench.answer(bench.resumed(session)).bytes_read == bytes_written == size_of(session)
    assert len(read_session(session).record.tokens) == P + 1


def test_the_only_user_may_have_the_last_cell_of_a_context(models, tmp_path: Path) -> None:
    bench = bench_of(models, "M", tmp_path)
    n_prefix = 512 - 1 - (Q + A - 1)  # 511 cells and the pending token: a context of 512 is full
    asked = StrategiesRequest(n_users=1, n_prefix=n_prefix, n_question=Q, n_answer=A, shares_prefix=True)
    text = bench.work.users[0].prefix
    bench.work = make_work(text, text, (), asked)
    (session,), _ = bench.fill()
    for prefix, where in ((Prefix.EACH_READS, None), (Prefix.OWN_SESSION, session), (Prefix.RESUMED, session)):
        group = Group(users=bench.work.users, prefix=prefix, n_ctx=n_ctx_for(511), session=where)
        found = bench.answer(group)
        assert (found.n_cells_peak, found.contexts[0].n_ctx) == (511, 512)


def test_a_session_of_another_model_is_refused(models, tmp_path: Path) -> None:
    bench = bench_of(models, "M", tmp_path)
    (session,), _ = bench.fill()
    bench.setup = replace(bench.setup, found=replace(bench.setup.found, digest="0" * 64))
    with pytest.raises(MismatchError):
        bench.answer(bench.resumed(session))


def test_an_answer_that_ends_early_is_no_measurement(models, tmp_path: Path) -> None:
    bench = bench_of(models, "M", tmp_path)
    with pytest.raises(EngineError, match=r"got \d tokens instead of 9: the answer ended by 'context'"):
        bench.answer(replace(bench.each_reads(), users=bench.work.users[:1], n_ctx=P + Q + 3))


def test_no_answer_has_an_end_token_in_it(models, tmp_path: Path) -> None:
    bench = bench_of(models, "M", tmp_path)
    said = bench.answer(bench.each_reads()).answers[0].tokens
    bench.ends = said  # as if the model would end with the first of them, and with each that follows
    answers = bench.answer(bench.each_reads()).answers
    assert not set(said) & {token for answer in answers for token in answer.tokens}
    assert {len(answer.tokens) for answer in answers} == {A}


def size_of(session: Path) -> int:
    return session.stat().st_size + sum(section.n_stored for section in read_session(session).sections)
