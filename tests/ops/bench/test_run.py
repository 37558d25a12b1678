"""A whole ``bench``: rows, refusals, interruptions, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from llamakv import __version__
from llamakv.errors import (
    EngineError,
    InterruptedByUser,
    ModelFileError,
    NoRoomError,
    NotFoundError,
    UsageError,
    WriteError,
)
from llamakv.ops.bench import run, strategies
from llamakv.ops.bench.processes import ProcessEndedError
from llamakv.ops.bench.requests import BenchRequest, StrategiesRequest
from llamakv.ops.bench.results import BenchResult, StrategiesResult
from llamakv.ops.bench.run import run_bench
from llamakv.ops.requests import Reporter
from tests.cli import bench_samples as samples
from tests.ops.bench.conftest import Ask, types_request

ROOT = Path(__file__).parents[3]
F16, Q8 = ("f16", "f16"), ("q8_0", "q8_0")


def left_behind(request: BenchRequest) -> tuple[list[Path], list[psutil.Process]]:
    """Files, and processes of this one that are not multiprocessing's own."""
    children = [child for child in psutil.Process().children() if "resource_tracker" not in " ".join(child.cmdline())]
    return list(request.work_dir.iterdir()), children


@pytest.fixture
def in_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are run in this process, which is quicker, where processes are not what is tested."""

    def run_here(function: Callable[..., object], *arguments: object, **_: object) -> tuple[object, int]:
        return function(Silent(), *arguments), 0

    monkeypatch.setattr(run, "run_alone", run_here)


class Silent:
    """A link that tells nobody."""

    def tell(self, message: object) -> None: ...


# ---------------------------------------------------------------- all of it


@pytest.mark.slow
def test_each_pair_has_a_row_in_its_order_and_a_refused_one_says_why(ask: Ask) -> None:
    results: list[BenchResult] = []
    steps: list[tuple[str, int, int]] = []
    notices: list[str] = []
    reporter = Reporter(notice=notices.append, progress=lambda *values: steps.append(values))
    request = ask(types_request(F16, ("f16", "q9"), Q8), reporter=reporter, on_result=results.append)
    result = run_bench(request)
    assert [(row.label, row.refused) for row in result.types] == [
        ("f16", None),
        ("f16/q9", "unknown cache type 'q9'"),
        ("q8_0", None),
    ]
    first, refused, last = result.types
    assert (first.output.mean_kl, first.output.top_agreement) == (0.0, 1.0)
    assert last.output.mean_kl > 0
    assert (refused.lengths, refused.n_ctx, refused.output, refused.break_even_warm) == ((), None, None, None)
    assert [length.n_tokens for length in last.lengths] == [2, 4, 8, 16, 32, 48]
    assert last.lengths[-1].raw_bytes < first.lengths[-1].raw_bytes
    assert not result.interrupted
    assert result.elapsed_s > 0
    assert abs(result.started_s + result.elapsed_s - time.time()) < 60
    assert [len(partial.types) for partial in results] == [1, 2, 3]
    assert {partial.interrupted for partial in results} == {True}  # strategies, or rows, were still to come
    bench = [(done, total) for phase, done, total in steps if phase == "bench"]
    assert [done for done, _ in bench] == sorted(done for done, _ in bench)
    assert bench[-1] == (bench[-1][1], bench[-1][1])
    assert len({total for _, total in bench}) == 1
    assert notices == []
    assert left_behind(request) == ([], [])


def test_users_that_cannot_be_are_refused_before_types_are_measured(ask: Ask) -> None:
    results: list[BenchResult] = []
    nobody = StrategiesRequest(n_users=0, n_prefix=8, n_question=8, n_answer=8, shares_prefix=True)
    with pytest.raises(UsageError, match="users must be at least 1"):
        run_bench(ask(types_request(F16), strategies=nobody, on_result=results.append))
    assert results == []


@pytest.mark.usefixtures("in_here")
def test_machine_and_model_are_described(ask: Ask, model_path: Path) -> None:
    result = run_bench(ask(model_options={"n_threads": 1}))
    machine, model = result.machine, result.model
    assert result.types == ()
    assert (result.n_threads, result.n_repeats, result.strategies) == (1, 1, None)
    assert (machine.llamakv, machine.python) == (__version__, ".".join(map(str, sys.version_info[:3])))
    assert machine.processor
    assert machine.memory_bytes == psutil.virtual_memory().total
    assert 1 <= machine.n_cores <= (os.cpu_count() or 1)
    assert machine.llama_cpp.startswith("0.3.")
    assert (model.name, model.architecture, model.kind) == ("tiny llama", "llama", "dense")
    assert (model.n_bytes, model.n_ctx_train) == (model_path.stat().st_size, 8192)
    assert len(model.digest) == 64


@pytest.mark.slow
def test_f16_is_compared_with_where_it_is_no_row_itself(ask: Ask) -> None:
    (row,) = run_bench(ask(types_request(Q8))).types
    assert row.output.mean_kl > 0


@pytest.mark.slow
def test_without_comparing_there_is_no_output(ask: Ask) -> None:
    (row,) = run_bench(ask(types_request(F16, compares_output=False))).types
    assert row.output is None
    assert row.refused is None


@pytest.mark.slow
def test_the_users_own_text_adapters_and_log_are_taken(ask: Ask, models) -> None:
    lines: list[str] = []
    plain, own, adapted = (
        run_bench(request).types[0]
        for request in (
            ask(types_request(Q8)),
            ask(types_request(Q8), text="Some other words, again and again."),
            ask(types_request(Q8), model_options={"adapters": ((models.lora(), 1.0),), "on_log": lines.append}),
        )
    )
    assert len({row.output.mean_kl for row in (plain, own, adapted)}) == 3  # other text, other weights
    assert any("flash_attn" in line for line in lines)


@pytest.mark.usefixtures("in_here")
@pytest.mark.parametrize("stops", [False, True])
def test_strategies_are_asked_for_and_their_rows_told(ask: Ask, monkeypatch: pytest.MonkeyPatch, stops: bool) -> None:
    asked = StrategiesRequest(n_users=2, n_prefix=16, n_question=4, n_answer=4, shares_prefix=True)
    rows = StrategiesResult(
        n_users=2,
        n_prefix=16,
        n_question=4,
        n_answer=4,
        shares_prefix=True,
        type_k="f16",
        type_v="f16",
        flash_attn=True,
        memory_limit_bytes=1,
        rows=(),
    )
    part = replace(rows, failed=(("none", "no reason"),))
    results: list[BenchResult] = []
    request = ask(strategies=asked, on_result=results.append)

    def measure(given: BenchRequest, *, on_row: Callable[[StrategiesResult], None]) -> StrategiesResult:
        assert given is request
        on_row(part)
        if stops:
            raise InterruptedByUser("interrupted while measuring")
        return rows

    monkeypatch.setattr(strategies, "measure_strategies", measure)
    result = run_bench(request)
    assert [partial.strategies for partial in results] == [part]
    assert (result.interrupted, result.strategies) == ((True, part) if stops else (False, rows))


# ---------------------------------------------------------------- stopped


@pytest.mark.slow
def test_interrupted_it_returns_what_was_measured(ask: Ask) -> None:
    """In the second row, after its first repeat."""
    rows: list[BenchResult] = []
    done: list[int] = []
    reporter = Reporter(
        progress=lambda phase, n, total: done.append(n) if phase == "bench" and rows else None,
        should_abort=lambda: len(done) > 45,
    )
    asked = types_request(F16, Q8, compares_output=False)
    request = ask(asked, n_repeats=20, reporter=reporter, on_result=rows.append)
    result = run_bench(request)
    assert result.interrupted
    assert [row.label for row in result.types] == ["f16", "q8_0"]
    whole, part = result.types
    assert whole.lengths[0].save_s.n_runs == 20
    assert 1 <= part.lengths[0].save_s.n_runs < 20
    assert part.fork_s is None
    assert left_behind(request) == ([], [])


@pytest.mark.slow
def test_interrupted_in_a_long_prefill_it_stops_at_once(ask: Ask) -> None:
    seen: list[int] = []
    reporter = Reporter(
        progress=lambda phase, n, total: seen.append(n) if phase == "bench" else None,
        should_abort=lambda: len(seen) >= 6,  # some batches of the text that outputs are compared with
    )
    request = ask(types_request(F16, n_tokens=8000), reporter=reporter)
    result = run_bench(request)
    assert (result.interrupted, result.types) == (True, ())
    assert seen[-1] < 20  # of more than a hundred steps
    assert left_behind(request) == ([], [])


def test_interrupted_before_the_model_was_opened_there_is_nothing_to_return(ask: Ask) -> None:
    request = ask(types_request(F16), reporter=Reporter(should_abort=lambda: True))
    with pytest.raises(InterruptedByUser):
        run_bench(request)
    assert left_behind(request) == ([], [])


@pytest.mark.slow
def test_a_process_that_dies_is_a_row_and_the_others_go_on(ask: Ask) -> None:
    killed: list[int] = []

    def progress(phase: str, n_done: int, n_total: int) -> None:
        if phase == "bench" and n_done > 3 and not killed:
            (child,) = left_behind(request)[1]
            killed.append(child.pid)
            os.kill(child.pid, signal.SIGABRT)

    request = ask(types_request(F16, Q8, compares_output=False), reporter=Reporter(progress=progress))
    first, second = run_bench(request).types
    assert first.failed == "a measuring process was ended by SIGABRT"
    assert (first.refused, second.refused, second.failed) == (None, None, None)
    assert len(second.lengths) == 6
    assert left_behind(request) == ([], [])


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the measuring of a first pair tell what is given, then end with an error."""

    def end(error: Exception, *messages: tuple) -> None:
        left = [error]

        def run_here(function: Callable[..., object], job: object, **more: Any) -> tuple[object, int]:
            if function is run.measure_pair and left:
                for message in messages:
                    more["on_message"](message)
                raise left.pop()
            return function(Silent(), job), 0

        monkeypatch.setattr(run, "run_alone", run_here)

    return end


OPENED, ROW = ("opened",), ("row", samples.cut_short("f16"))


@pytest.mark.parametrize(
    ("error", "messages", "expected"),
    [
        (ProcessEndedError("ended by SIGKILL"), (OPENED, ROW), replace(ROW[1], failed="ended by SIGKILL")),
        (ProcessEndedError("ended by SIGKILL"), (), (None, "ended by SIGKILL")),
        (EngineError("cannot decode"), (OPENED, ROW), replace(ROW[1], failed="cannot decode")),
        (EngineError("cannot decode"), (OPENED,), (None, "cannot decode")),
        (EngineError("no such context"), (), ("no such context", None)),
    ],
)
def test_a_pair_that_fails_keeps_what_it_has_and_is_not_called_refused(
    ask: Ask, ends: Callable[..., None], error: EngineError, messages: tuple, expected: object
) -> None:
    ends(error, *messages)
    failures: list[tuple[str, object]] = []
    request = ask(
        types_request(F16, Q8, n_tokens=2, compares_output=False), on_failure=lambda *both: failures.append(both)
    )
    first, second = run_bench(request).types
    assert expected in (first, (first.refused, first.failed))
    assert (second.refused, second.failed, len(second.lengths)) == (None, None, 1)
    assert failures == ([("f16", error)] if first.failed else [])


def test_interrupted_in_the_first_pair_its_finished_lengths_are_returned(ask: Ask, ends: Callable[..., None]) -> None:
    ends(InterruptedByUser("interrupted"), OPENED, ROW)
    result = run_bench(ask(types_request(F16, Q8, compares_output=False)))
    assert (result.interrupted, result.types) == (True, (ROW[1],))


def test_an_error_that_ends_all_comes_after_what_was_measured(ask: Ask, ends: Callable[..., None]) -> None:
    ends(WriteError("disk full"), OPENED, ROW)
    results: list[BenchResult] = []
    request = ask(types_request(F16, Q8, compares_output=False), on_result=results.append)
    with pytest.raises(WriteError, match="disk full"):
        run_bench(request)
    assert [result.types for result in results] == [(ROW[1],)]
    assert results[0].work_dir == str(request.work_dir)


@pytest.mark.slow
def test_a_reference_that_dies_leaves_outputs_uncompared(ask: Ask) -> None:
    killed: list[int] = []
    notices: list[str] = []

    def progress(phase: str, n_done: int, n_total: int) -> None:
        if phase == "bench" and not killed:
            (child,) = left_behind(request)[1]
            killed.append(child.pid)
            os.kill(child.pid, signal.SIGKILL)

    request = ask(types_request(F16), reporter=Reporter(progress=progress, notice=notices.append))
    (row,) = run_bench(request).types
    assert (row.refused, row.output) == (None, None)
    assert notices == [
        "outputs are not compared: with f16 a measuring process was ended by SIGKILL (is there enough memory?)"
    ]


@pytest.mark.slow
def test_killed_it_takes_its_processes_along(ask: Ask) -> None:
    request = ask()
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from llamakv.ops.bench.requests import BenchRequest\n"
        "from llamakv.ops.bench.run import run_bench\n"
        "from llamakv.ops.requests import MemoryOptions, ModelRequest, Reporter\n"
        "from tests.ops.bench.conftest import types_request\n"
        "if __name__ == '__main__':\n"
        "    model, work = map(Path, sys.argv[1:])\n"
        "    run_bench(BenchRequest(model=ModelRequest(path=model, cache_dir=work, n_threads=1), work_dir=work,\n"
        "        memory=MemoryOptions(), types=types_request(n_tokens=8000), n_repeats=1, strategies=None, text=None,\n"
        "        reporter=Reporter(progress=lambda *values: print(*values, flush=True))))\n"
    )
    command = [sys.executable, "-c", code, str(request.model.path), str(request.work_dir)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        while not parent.stdout.readline().startswith("bench 2 "):  # in a prefill
            assert parent.poll() is None
        children = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
        parent.wait()
        _, alive = psutil.wait_procs(children, timeout=20)
    for process in alive:
        process.kill()
    assert len(children) == 2  # it, and multiprocessing's own
    assert alive == []


# ---------------------------------------------------------------- refused


def test_a_model_that_is_none_is_said_at_once(ask: Ask, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        run_bench(ask(types_request(), model=tmp_path / "none.gguf"))
    other = tmp_path / "other.gguf"
    other.write_bytes(b"not a model")
    with pytest.raises(ModelFileError, match="not a GGUF model file"):
        run_bench(ask(types_request(), model=other))
    other.write_bytes(b"GGUF but not a model")
    request = ask(types_request(), model=other)
    with pytest.raises(ModelFileError, match="cannot load"):
        run_bench(request)
    assert left_behind(request) == ([], [])


@pytest.mark.usefixtures("in_here")
def test_a_text_longer_than_a_context_may_be_is_refused(ask: Ask) -> None:
    request = ask(types_request(n_tokens=100), model_options={"n_ctx": 110})
    with pytest.raises(NoRoomError, match="a context of this model may have 110"):
        run_bench(request)
    assert left_behind(request) == ([], [])


@pytest.mark.usefixtures("in_here")
def test_too_little_room_on_the_disk_is_refused_before_measuring(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    phases: list[str] = []
    request = ask(types_request(n_tokens=1000), reporter=Reporter(progress=lambda phase, *_: phases.append(phase)))
    monkeypatch.setattr(run.shutil, "disk_usage", lambda _: usage(10**6, 0, 10**6))
    with pytest.raises(WriteError, match=r"1,000 tokens need 1\.1 MB in .*work, 1\.0 MB are free") as caught:
        run_bench(request)
    assert caught.value.exit_status == 16
    assert "bench" not in phases
    assert left_behind(request) == ([], [])


def test_a_folder_that_cannot_be_written_is_refused(ask: Ask, tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="cannot make a folder in"):
        run_bench(ask(types_request(), work_dir=tmp_path / "none"))


@pytest.mark.parametrize(
    ("types", "more", "said"),
    [
        ({}, {"n_repeats": 0}, "at least once"),
        ({"n_tokens": 1}, {}, "at least 2 tokens"),
        ({"n_branches": 255}, {}, r"1 \.\.\. 254 sequences"),
        ({"n_decoded": 0}, {}, "at least one token"),
        ({"n_positions": 0}, {}, "at one position"),
    ],
)
def test_numbers_out_of_range_are_refused(ask: Ask, types: dict, more: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_bench(ask(types_request(**types), **more))
