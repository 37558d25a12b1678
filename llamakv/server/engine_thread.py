"""The one thread that decodes: it takes requests from the event loop and gives back what is written."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from llamakv.engine.contract import Counts, Run, Scheduler
from llamakv.errors import EngineError, LlamakvError, NoRoomError
from llamakv.server.jobs import Job, for_space

_SHORT_WAIT_S = 0.01
"""How often it is looked whether there is room while nothing can be decoded, or a time was up."""

_COURTESY_S = 0.0005
"""The pause between steps while others want the context: a lock goes to whoever asks, not to whoever waited longest."""

_LATE_S = 0.25
"""How much later than the scheduler, which keeps what was written, a run is ended here."""

_IDLE_S = 60.0
"""How often a step is taken while there is nothing to do, so that the scheduler can give memory back."""

_STUCK_S = 2.0
"""How long nobody may be under way, with somebody waiting and nothing that could be let go of, before he is refused."""

_T = TypeVar("_T")


class EngineThread:
    """Runs a scheduler. ``on_shortage`` is called when a run waits for cells or a sequence that others keep; it returns
    whether there are any that may still be let go of. ``on_failure`` is told, once, that the engine does not work any
    more. Everything but ``stop`` may be called from any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        on_shortage: Callable[[], bool],
        on_failure: Callable[[EngineError], None],
    ) -> None:
        self._scheduler = scheduler
        self._on_shortage = on_shortage
        self._on_failure = on_failure
        self._condition = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._jobs: dict[Run, Job] = {}
        self._n_guests = 0
        self._is_ending = self._is_over = self._is_held = False
        self._idle_since_s: float | None = None
        self.error: EngineError | None = None
        self.n_ctx = scheduler.root.n_ctx
        self._thread = threading.Thread(target=self._work, name="llamakv-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ for other threads

    @property
    def counts(self) -> Counts:
        """Where the scheduler stands, or stood before the call under way."""
        return self._scheduler.counts

    @property
    def is_alive(self) -> bool:
        """Whether the thread takes orders."""
        return not self._is_over

    def submit(self, jobs: Sequence[Job]) -> None:
        """Do these, in their order."""
        if not self._do(lambda: self._begin(jobs)):
            for job in jobs:
                self._finish(job, has_cells=False, error=EngineError("the server is stopping"))

    def cancel(self, jobs: Sequence[Job]) -> None:
        """End these, before the next step, and free their cells."""
        self._do(lambda: self._cancel(jobs))

    def call(self, action: Callable[[], _T]) -> Future[_T]:
        """Do something between two steps."""
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

        if not self._do(run):
            future.set_exception(EngineError("the server is stopping"))
        return future

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Use the scheduler from another thread, with a chance to get at it."""
        with self._condition:
            self._n_guests += 1
        try:
            yield
        finally:
            with self._condition:
                self._n_guests -= 1
                self._condition.notify_all()

    def wake(self) -> None:
        """Look again whether something can be done."""
        with self._condition:
            self._condition.notify_all()

    def pause(self, jobs: Sequence[Job]) -> bool:
        """Let these stand still; False, and nothing is changed, if one of them does not write now. On the engine
        thread, as by ``call``."""
        writing = [job for job in jobs if not job.is_over]
        paused = [job.run for job in writing if job.run in self._jobs and self._scheduler.pause(job.run)]
        if writing and len(paused) == len(writing):
            return True
        for run in paused:
            self._scheduler.resume(run)
        return False

    def resume(self, jobs: Sequence[Job]) -> None:
        """Go on with jobs that were paused."""

        def resume() -> None:
            for job in jobs:
                if job.run is not None and not job.is_over:
                    self._scheduler.resume(job.run)

        self._do(resume)

    def send_back(self, jobs: Sequence[Job]) -> bool:
        """Take the cells of those of these that stand still; False if none has any. On the engine thread."""
        runs = [job.run for job in jobs if job.run is not None and not job.is_over]
        return sum(self._scheduler.send_back(run) for run in runs) > 0

    def hold(self) -> list[Job]:
        """Decode no more. Returns the jobs that are not over, with their runs as they are."""

        def held() -> list[Job]:
            self._is_held = True
            return list(self._jobs.values())

        return self.call(held).result()

    def stop(self) -> None:
        """End the thread; what is not over is left as it is."""
        with self._condition:
            self._is_ending = True
            self._condition.notify_all()
        self._thread.join()

    def _do(self, command: Callable[[], None]) -> bool:
        with self._condition:
            if self._is_over:
                return False
            self._commands.append(command)
            self._condition.notify_all()
            return True

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        wait_s: float | None = None
        while True:
            is_idle = False
            with self._condition:
                if not self._commands and not self._is_ending:
                    if not self._has_work:
                        is_idle = not self._condition.wait(_IDLE_S)
                    elif wait_s is not None:
                        self._condition.wait(wait_s)
                commands = list(self._commands)
                self._commands.clear()
                if self._is_ending and not commands:
                    self._is_over = True
                    return
                is_beside = self._n_guests > 0
            for command in commands:
                command()
            if self._has_work or (is_idle and self.error is None and not self._is_held):
                wait_s = self._turn()
                if is_beside and wait_s is None:
                    time.sleep(_COURTESY_S)
            self.n_ctx = self._scheduler.root.n_ctx

    @property
    def _has_work(self) -> bool:
        return bool(self._jobs) and self.error is None and not self._is_held

    def _turn(self) -> float | None:
        """A step; returns how long to wait for the next one, None where it is due at once."""
        n_before = self.counts.n_decoded
        try:
            over = self._scheduler.step()
            self._publish()
            for run in over:
                self._end(run)
            self._end_late()
            is_idle = self.counts.n_decoded == n_before and not over
            if is_idle:
                self._see_to_shortage()
            else:
                self._idle_since_s = None
                if self._scheduler.shortage is not None:
                    self._on_shortage()
        except Exception as error:
            self._break(error)
            return None
        return _SHORT_WAIT_S if is_idle else None

    def _publish(self) -> None:
        for run, job in self._jobs.items():
            if job.held is not None and not job.is_waiting:
                self._unhold(job)
            if not run.is_over:
                self._tell(job, None)

    def _unhold(self, job: Job) -> None:
        """It has begun with what was held for it, or never will."""
        held, job.held = job.held, None
        if held is not None:
            self._scheduler.unhold(held)

    def _tell(self, job: Job, finish_reason: str | None) -> None:
        run = job.run
        if run is None or job.outbox is None:
            return
        text = run.take_text()
        logprobs = run.take_logprobs()
        if text or logprobs or finish_reason is not None:
            job.outbox.put(job.index, text, logprobs, finish_reason=finish_reason)

    # ------------------------------------------------------------ in and out

    def _begin(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.is_over or job.is_cancelled:
                self._finish(job, has_cells=False)
                continue
            if self.error is not None or self._is_held or self._is_ending:
                error = self.error or EngineError("the server is stopping")
                self._finish(job, has_cells=False, error=error)
                continue
            try:
                job.run = self._scheduler.submit(job.request)
            except (LlamakvError, ValueError) as error:
                own = error if isinstance(error, LlamakvError) else EngineError(f"the engine refused: {error}")
                self._finish(job, has_cells=False, error=own)
            else:
                self._jobs[job.run] = job

    def _end(self, run: Run) -> None:
        job = self._jobs.pop(run, None)
        if job is None:
            return
        if run.error is not None:
            self._finish(job, has_cells=False, error=for_space(run.error, job.request.space))
            return
        job.finish_reason = run.finish_reason
        self._finish(job, has_cells=self._scheduler.has_cells(run))

    def _finish(self, job: Job, *, has_cells: bool, error: LlamakvError | None = None) -> None:
        if job.is_over:
            return
        job.is_over = True
        self._unhold(job)
        try:
            job.on_over(job, has_cells)
        finally:
            if job.outbox is None:
                pass
            elif error is not None:
                job.outbox.fail(error)
            else:
                self._tell(job, job.finish_reason or "interrupted")
                if job.run is None:
                    job.outbox.put(job.index, "", finish_reason=job.finish_reason or "interrupted")

    def _cancel(self, jobs: Sequence[Job], reason: str = "interrupted") -> None:
        for job in jobs:
            job.is_cancelled = True
            if job.run is None or job.run not in self._jobs:
                continue
            if job.keeps_when_left and job.run.n_generated and reason == "interrupted":
                self._scheduler.end(job.run)
                if self._scheduler.has_cells(job.run):  # it is over with the next step
                    continue
            del self._jobs[job.run]
            self._scheduler.cancel(job.run)
            job.finish_reason = reason
            self._finish(job, has_cells=False)

    def _end_late(self) -> None:
        now_s = time.perf_counter()
        late = [
            job
            for job in self._jobs.values()
            if job.deadline_s is not None and now_s > job.deadline_s + (0.0 if job.is_waiting else _LATE_S)
        ]
        if late:
            self._cancel(late, "timeout")

    # ------------------------------------------------------------ when it does not go on

    def _see_to_shortage(self) -> None:
        """Nothing could be decoded: have room made, or refuse the first that waits where that can never be."""
        waiting = next((job for run, job in self._jobs.items() if self._waits(run, job)), None)
        if waiting is None or self._scheduler.shortage is None:
            self._idle_since_s = None
            if self._scheduler.shortage is not None:
                self._on_shortage()
            return
        may_come = self._on_shortage() or self._n_guests > 0 or self._scheduler.counts.n_active > 0
        now_s = time.perf_counter()
        if may_come:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        elif now_s - self._idle_since_s > _STUCK_S:
            self._idle_since_s = None
            self._refuse(waiting)

    def _waits(self, run: Run, job: Job) -> bool:
        return not self._scheduler.has_cells(run) and (job.turn is None or not job.turn.is_paused)

    def _refuse(self, job: Job) -> None:
        assert job.run is not None
        lacking, counts = self._scheduler.shortage, self._scheduler.counts
        what = f"{lacking.n_cells} cells" if lacking is not None and lacking.n_cells else "a sequence"
        del self._jobs[job.run]
        self._scheduler.cancel(job.run)
        error = NoRoomError(
            f"{what} more would be needed, and all that is in memory ({counts.n_cells} of {counts.n_cells_max} cells) "
            "is pinned",
            hint="unpin a session, or start the server with more --cells",
        )
        self._finish(job, has_cells=False, error=for_space(error, job.request.space))

    def _break(self, error: Exception) -> None:
        """The engine does not work any more: all that is under way fails, and whatever comes."""
        told = error if isinstance(error, EngineError) else EngineError(f"the engine failed: {error!r}")
        self.error = told
        jobs = list(self._jobs.values())
        self._jobs.clear()
        for job in jobs:
            with contextlib.suppress(Exception):
                self._finish(job, has_cells=False, error=told)
        self._on_failure(told)
