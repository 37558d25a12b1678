"""Work in processes of its own: what comes back, how it ends, and that nothing is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from llamakv.errors import EngineError, InterruptedByUser, NoRoomError
from llamakv.ops.bench.processes import Job, run_alone, run_together
from tests.ops.bench.jobs import add, break_down, die, fail, meet, take, wait_long

MIB = 1 << 20
ROOT = Path(__file__).parents[3]


def never() -> bool:
    return False


# ---------------------------------------------------------------- one


def test_a_job_returns_its_value_from_another_process_that_signals_do_not_reach() -> None:
    told: list[object] = []
    before = bytearray(b"x" * (120 * MIB))  # of this process, and of no child's peak
    (total, pid, blocked), peak_bytes = run_alone(add, 2, 3, should_abort=never, on_message=told.append)
    del before
    assert total == 5
    assert pid != os.getpid()
    assert not psutil.pid_exists(pid)
    assert told == ["adding", {"a": 2}]
    assert {"SIGINT", "SIGTERM", "SIGHUP"} <= set(blocked)
    assert 5 * MIB < peak_bytes < 100 * MIB
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())  # here it is as it was


def test_an_error_of_ours_comes_back_whole() -> None:
    with pytest.raises(NoRoomError, match="no room for 9 cells") as caught:
        run_alone(fail, should_abort=never)
    assert (caught.value.hint, caught.value.fields, caught.value.exit_status) == ("use fewer", {"needed": 9}, 15)


def test_a_bug_comes_back_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)break_down.*KeyError: 'missing'"):
        run_alone(break_down, should_abort=never)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGABRT, "a measuring process was ended by SIGABRT"),
        pytest.param(
            signal.SIGKILL,
            "a measuring process was ended by SIGKILL (is there enough memory?)",
            marks=pytest.mark.slow,
        ),
        pytest.param(0, "a measuring process ended with status 7 and without a result", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_dies_is_an_error_that_says_how(number: int, said: str) -> None:
    with pytest.raises(EngineError) as caught:
        run_alone(die, int(number), should_abort=never)
    assert caught.value.message == said


def test_death_after_an_interrupt_is_the_interrupt() -> None:
    seen: list[int] = []

    def on_message(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            pass
        seen.append(pid)

    asked = iter([False])  # it is asked once more before the death is noticed
    with pytest.raises(InterruptedByUser):
        run_alone(wait_long, should_abort=lambda: bool(seen) and next(asked, True), on_message=on_message)


def test_an_interrupt_ends_the_process_at_once() -> None:
    pids: list[int] = []
    with pytest.raises(InterruptedByUser):
        run_alone(wait_long, should_abort=lambda: bool(pids), on_message=pids.append)
    assert len(pids) == 1
    assert not psutil.pid_exists(pids[0])


def test_an_error_while_a_message_is_taken_ends_the_process() -> None:
    pids: list[int] = []

    def on_message(pid: int) -> None:
        pids.append(pid)
        raise KeyError(pid)

    with pytest.raises(KeyError):
        run_alone(wait_long, should_abort=never, on_message=on_message)
    assert not psutil.pid_exists(pids[0])


# ---------------------------------------------------------------- several


def test_jobs_wait_for_each_other_and_keep_their_order() -> None:
    done = run_together([Job(function=meet, arguments=(delay,)) for delay in (0.4, 0.0)], should_abort=never)
    (late, late_on), (early, early_on) = (outcome.value for outcome in done.outcomes)
    assert min(late_on, early_on) >= max(late, early)  # nobody went on before the last one had come


def test_memory_of_all_is_what_they_have_together() -> None:
    jobs = [Job(function=take, arguments=(80 * MIB,)), Job(function=take, arguments=(40 * MIB,))]
    done = run_together(jobs, should_abort=never)
    assert [outcome.value for outcome in done.outcomes] == [80 * MIB, 40 * MIB]
    assert done.peak_bytes >= 120 * MIB
    assert done.outcomes[0].peak_bytes - done.outcomes[1].peak_bytes > 30 * MIB
    if psutil.LINUX:
        assert done.counts_shared_once
        assert done.peak_bytes <= sum(outcome.peak_bytes for outcome in done.outcomes)


def test_one_that_dies_takes_the_others_along() -> None:
    pids: list[int] = []
    jobs = [Job(function=wait_long), Job(function=die, arguments=(int(signal.SIGABRT),))]
    with pytest.raises(EngineError, match="SIGABRT"):
        run_together(jobs, should_abort=never, on_message=lambda _, pid: pids.append(pid))
    assert not any(map(psutil.pid_exists, pids))


# ---------------------------------------------------------------- kill -9


@pytest.mark.slow
def test_processes_end_with_a_parent_that_is_killed() -> None:
    code = (
        "from llamakv.ops.bench.processes import Job, run_together\n"
        "from tests.ops.bench.jobs import wait_long\n"
        "if __name__ == '__main__':\n"
        "    run_together([Job(function=wait_long)] * 2, should_abort=lambda: False,"
        " on_message=lambda _, pid: print(pid, flush=True))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [psutil.Process(int(parent.stdout.readline())) for _ in range(2)]
        parent.kill()
        parent.wait()
        _, alive = psutil.wait_procs(children, timeout=20)
    for process in alive:
        process.kill()
    assert alive == []
