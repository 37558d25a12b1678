"""Work in processes of its own: fresh memory for each measurement, and what all of them take together."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from llamakv.errors import EngineError, InterruptedByUser, LlamakvError

_POLL_S = 0.05
_ENDING = {getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)}
_SAMPLING_SHARE = 0.03  # of one core, that looking at memory may take
_END_S = 5.0


class ProcessEndedError(EngineError):
    """A process ended without a result: killed, or aborted inside the engine."""


class Link:
    """A job's way to the process that started it. Not for use from two threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def tell(self, message: object) -> None:
        """Send something small (any data that can be pickled) to ``on_message``."""
        self._connection.send(("message", message))

    def wait_for_others(self) -> None:
        """Return when all jobs of the same call have come to such a place."""
        self._connection.send(("ready", None))
        self._connection.recv()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A module-level function that is called with a ``Link`` and ``arguments``, all of which can be pickled."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a job returned, or the error of ours it ended with. ``peak_bytes`` is the process at its largest (see
    ``own_peak_bytes``)."""

    value: Any
    error: LlamakvError | None
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Jobs that ran at the same time. ``peak_bytes`` is the largest sum over all processes that was seen; pages
    that several have count once where ``counts_shared_once`` (Linux), else in each."""

    outcomes: tuple[Outcome, ...]
    peak_bytes: int
    counts_shared_once: bool


def run_together(
    jobs: Sequence[Job],
    *,
    should_abort: Callable[[], bool],
    on_message: Callable[[int, Any], None] | None = None,
    samples_memory: bool = True,
) -> Together:
    """Run each job in a fresh process, all at once. ``on_message`` gets a job's number and what it told.

    The processes end with this one, however it ends, and never see Ctrl-C, or the signals that go to all programs of a
    terminal. Their memory is looked at a few times a second, and where all wait for each other. Without
    ``samples_memory`` nobody looks at them while they work, and ``Together.peak_bytes`` is 0.

    Raises:
        InterruptedByUser: ``should_abort`` said so; all processes are gone.
        ProcessEndedError: one ended without a result (out of memory, or an abort inside the engine).
    """
    running: list[_Process] = []
    memory = _Memory(running)
    try:
        running.extend(_Process(job) for job in jobs)
        while any(process.outcome is None for process in running):
            if should_abort():
                raise InterruptedByUser("interrupted while measuring")
            _receive(running, on_message)
            waiting = _all_waiting(running)
            if samples_memory:
                memory.look(at_once=bool(waiting))
            for process in waiting:
                process.go_on()
    except EngineError as error:
        if should_abort():  # what ends this process may have ended that one first
            raise InterruptedByUser("interrupted while measuring") from error
        raise
    finally:
        for process in running:
            process.end()
    return Together(
        outcomes=tuple(process.outcome for process in running if process.outcome is not None),
        peak_bytes=memory.peak_bytes,
        counts_shared_once=memory.counts_shared_once,
    )


def run_alone(
    function: Callable[..., Any],
    *arguments: Any,
    should_abort: Callable[[], bool],
    on_message: Callable[[Any], None] | None = None,
) -> tuple[Any, int]:
    """Run one job; returns its result and the most memory its process had (see ``own_peak_bytes``).

    Raises:
        LlamakvError: the job's own error, and as ``run_together``.
    """
    tell = None if on_message is None else lambda _, message: on_message(message)
    job = Job(function=function, arguments=arguments)
    done = run_together([job], should_abort=should_abort, on_message=tell, samples_memory=False)
    outcome = done.outcomes[0]
    if outcome.error is not None:
        raise outcome.error
    return outcome.value, outcome.peak_bytes


def _receive(running: Sequence[_Process], on_message: Callable[[int, Any], None] | None) -> None:
    live = {process.connection: (number, process) for number, process in enumerate(running) if process.outcome is None}
    for connection in wait(list(live), timeout=_POLL_S):
        assert isinstance(connection, Connection)
        number, process = live[connection]
        message = process.receive()
        if message is not None and on_message is not None:
            on_message(number, message[0])


def _all_waiting(running: Sequence[_Process]) -> list[_Process]:
    """The processes that are left, if all of them wait for each other."""
    live = [process for process in running if process.outcome is None]
    return live if all(process.is_waiting for process in live) else []


# ---------------------------------------------------------------- this side


class _Process:
    """A process under way. ``outcome`` is set when it is over."""

    def __init__(self, job: Job) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, job), daemon=True)
        self.outcome: Outcome | None = None
        self.is_waiting = False
        with _no_signals():
            self._process.start()
        theirs.close()
        self.seen = psutil.Process(self._process.pid)

    def receive(self) -> tuple[Any] | None:
        """Take what it sent; a message for the caller comes in a tuple."""
        try:
            kind, content = self.connection.recv()
        except (EOFError, OSError):
            self._process.join(_END_S)
            raise ProcessEndedError(_ended(self._process.exitcode)) from None
        if kind == "message":
            return (content,)
        if kind == "ready":
            self.is_waiting = True
        elif kind == "crashed":
            raise RuntimeError(f"a measuring process failed:\n{content}")
        else:
            value, error, peak_bytes = content
            self.outcome = Outcome(value=value, error=error, peak_bytes=peak_bytes)
        return None

    def go_on(self) -> None:
        """Let it go on from where it waits."""
        self.is_waiting = False
        self.connection.send(None)

    def end(self) -> None:
        """Kill it, if it is still there."""
        if self._process.is_alive() and self.outcome is None:
            self._process.kill()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.connection.close()
        self._process.close()


def _ended(status: int | None) -> str:
    if status is not None and status < 0:
        name = signal.Signals(-status).name if -status in signal.valid_signals() else f"signal {-status}"
        reason = " (is there enough memory?)" if name == "SIGKILL" else ""
        return f"a measuring process was ended by {name}{reason}"
    return f"a measuring process ended with status {status} and without a result"


@contextlib.contextmanager
def _no_signals() -> Iterator[None]:
    """Ctrl-C and a terminal's end go to its whole group: a process started in here never gets them, and ends when its
    parent wants it to, or with it."""
    resource_tracker.ensure_running()  # multiprocessing's own; starting it later would undo what follows
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Memory:
    """Looks at the memory of some processes, as often as costs little."""

    def __init__(self, processes: Sequence[_Process]) -> None:
        self._processes = processes
        self.counts_shared_once = hasattr(psutil.Process().memory_full_info(), "pss")
        self.peak_bytes = 0
        self._next_s = 0.0

    def look(self, *, at_once: bool) -> None:
        """Take a sample, if it is time to, or ``at_once``."""
        started, before_s = time.perf_counter(), time.thread_time()
        if started < self._next_s and not at_once:
            return
        self.peak_bytes = max(self.peak_bytes, sum(map(self._bytes_of, self._processes)))
        took_s = time.thread_time() - before_s  # not what it waited for others that wanted the core
        self._next_s = started + max(_POLL_S, took_s / _SAMPLING_SHARE)

    def _bytes_of(self, process: _Process) -> int:
        try:
            if self.counts_shared_once:
                return int(process.seen.memory_full_info().pss)
            return int(process.seen.memory_info().rss)
        except psutil.Error:  # it has just ended
            return 0


# ---------------------------------------------------------------- the other side


def own_peak_bytes() -> int:
    """The most memory that this process has had: resident pages, those of the model file that it looked at included."""
    try:
        # not getrusage: on Linux its figure begins with what the parent had when it started this process
        lines = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if psutil.MACOS else most * 1024  # bytes on macOS, else kilobytes (getrusage(2))


def _work(connection: Connection, job: Job) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    try:
        try:
            value, error = job.function(Link(connection), *job.arguments), None
        except LlamakvError as failure:
            value, error = None, failure
        connection.send(("done", (value, error, own_peak_bytes())))
    except BaseException:
        import traceback

        connection.send(("crashed", traceback.format_exc()))


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
