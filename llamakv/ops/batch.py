"""A batch of branches: what is asked, what comes of it, and the loop from planning to telling."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from llamakv.engine.contract import Run, Scheduler
from llamakv.errors import AbortedError, ExistsError, LlamakvError
from llamakv.ops.branch_keeping import BranchKeeper
from llamakv.ops.branches import Branch, BranchPlanner, PlannedBranch
from llamakv.ops.budget import Budget
from llamakv.ops.prompts import Prompt
from llamakv.ops.requests import Compress, MemoryOptions, ModelRequest, ResumeOptions, SamplingOptions

N_PARALLEL = 16
"""Branches at the same time unless asked otherwise; what more of them gain is in the README, What it costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTarget:
    """Where a branch is kept: a file, and its name if it is one of the store's."""

    path: Path
    name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """Prompts to answer from one session, which is only read.

    ``at`` is a place inside it (``turnN`` or a position), None its end. ``n_samples`` branches are made of each prompt,
    with seeds counted up from the prompt's. ``n_parallel`` are under way at the same time at most. ``unordered``:
    results come as they are finished. ``done`` are keys of branches that were answered before, by id. ``save_as`` says
    where a branch is kept (None: nowhere).
    """

    model: ModelRequest
    path: Path
    prompts: Sequence[Prompt]
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    options: ResumeOptions = field(default_factory=ResumeOptions)
    at: str | None = None
    n_samples: int = 1
    n_parallel: int = N_PARALLEL
    unordered: bool = False
    timeout_s: float | None = None
    done: Mapping[str, str] = field(default_factory=dict)
    save_as: Callable[[Branch], SaveTarget] | None = None
    overwrite: bool = False
    compress: Compress = "auto"
    budget: Budget | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchResult:
    """What became of a branch: its answer, or the ``error`` that ended it.

    ``reused`` tokens are cells shared with the prefix, ``evaluated`` were read for it alone, ``generated`` written (an
    end token included). Times are from when its turn came; ``saved`` is where it is kept.
    """

    branch: Branch
    key: str | None = None
    text: str = ""
    finish_reason: str = ""
    reused: int = 0
    evaluated: int = 0
    generated: int = 0
    seed: int = 0
    elapsed_s: float = 0.0
    first_token_s: float = 0.0
    saved: Path | None = None
    error: LlamakvError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkProgress:
    """How far a batch is. ``n_active`` branches are under way; tokens are all that were evaluated and generated for
    branches so far, in ``elapsed_s`` since the prefix was there."""

    n_done: int
    n_total: int
    n_active: int
    n_evaluated: int
    n_generated: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkSummary:
    """A batch that has ended. ``reused`` and ``evaluated`` are the prefix's cells: from the file, or read again.
    ``branch_evaluated`` and ``generated`` are all branches' tokens; ``n_cells_peak`` cells were in use at most, the
    prefix's included. ``n_timeouts`` of the answers took too long. ``decoded_together`` is False where each call held
    one sequence."""

    n_answers: int
    n_timeouts: int
    n_errors: int
    n_skipped: int
    reused: int
    evaluated: int
    restore_s: float
    model_load_s: float
    branch_reused: int
    branch_evaluated: int
    generated: int
    n_parallel: int
    decoded_together: bool
    n_cells_peak: int
    n_steps: int
    elapsed_s: float
    interrupted: bool


class Batch:
    """The branches of one run, from planning to telling."""

    def __init__(
        self,
        request: ForkRequest,
        scheduler: Scheduler,
        planner: BranchPlanner,
        keeper: BranchKeeper,
        targets: Mapping[int, SaveTarget],
        branches: Sequence[Branch],
        done: frozenset[int],
        on_result: Callable[[BranchResult], None],
        on_progress: Callable[[ForkProgress], None],
    ) -> None:
        self._request = request
        self._scheduler = scheduler
        self._planner = planner
        self._keeper = keeper
        self._targets = targets
        self._todo = deque(branch for branch in branches if branch.index not in done)
        self._on_result = on_result
        self._on_progress = on_progress
        self._running: dict[int, tuple[Run, PlannedBranch]] = {}
        self._finished: dict[int, BranchResult | None] = dict.fromkeys(done)
        self._replaced: set[int] = set()
        self._next = 0
        self._n_total = len(branches)
        self._n_answers = self._n_errors = self._n_timeouts = 0
        self._n_skipped = len(done)
        self._n_reused = self._n_evaluated = self._n_generated = 0
        self._most = 0
        self._started_s = time.perf_counter()

    def run(self, should_abort: Callable[[], bool]) -> bool:
        """Run all of it; returns whether it was stopped. What is finished is told, whatever goes wrong."""
        try:
            while self._todo or self._running:
                self._fill(should_abort)
                for run in self._scheduler.step(should_abort):
                    self._end(run)
                self._most = max(self._most, self._scheduler.counts.n_active)
                self._tell_progress()
        except AbortedError:
            for run, _ in self._running.values():
                self._scheduler.cancel(run)
            return True
        finally:
            self._tell(in_order=False)
        return False

    # ------------------------------------------------------------ in

    def _fill(self, should_abort: Callable[[], bool]) -> None:
        """Have branches waiting, so that none that ends leaves a gap."""
        while self._todo and self._scheduler.counts.n_waiting < self._scheduler.n_parallel:
            if should_abort():
                raise AbortedError("stopped", n_done=0)
            branch = self._todo.popleft()
            try:
                planned = self._planner.plan(branch)
                self._check_target(planned)
                run = self._scheduler.submit(planned.request)
            except LlamakvError as error:
                self._finish(branch.index, BranchResult(branch=branch, error=error))
                continue
            self._running[id(run)] = (run, planned)

    def _check_target(self, planned: PlannedBranch) -> None:
        """A file that is there may be replaced if that was asked for, or if it is this very branch, kept by a run that
        was killed before it could tell."""
        target = self._targets.get(planned.branch.index)
        if target is None or self._request.overwrite or not target.path.exists():
            return
        self._replaced.discard(planned.branch.index)
        if not self._keeper.holds(target.path, planned.request):
            raise ExistsError(
                f"{target.path} already exists, and is not this branch",
                hint="add --force to replace it",
                path=str(target.path),
            )
        self._replaced.add(planned.branch.index)

    # ------------------------------------------------------------ out

    def _end(self, run: Run) -> None:
        _, planned = self._running.pop(id(run))
        branch = planned.branch
        result = BranchResult(
            branch=branch,
            key=planned.key,
            text=run.text,
            finish_reason=run.finish_reason,
            reused=run.n_reused,
            evaluated=run.n_evaluated,
            generated=run.n_generated,
            seed=planned.request.sampling.seed,
            elapsed_s=run.ended_s - run.started_s if run.started_s else 0.0,
            first_token_s=run.first_token_s - run.started_s if run.first_token_s else 0.0,
            error=run.error,
        )
        if branch.index in self._targets and run.error is None:
            try:
                if run.n_generated:  # else it was not read to its end, or has nothing to keep
                    result = replace(result, saved=self._save(run, planned))
            except LlamakvError as error:
                result = replace(result, error=error)
            finally:
                self._scheduler.release(run)
        self._n_reused += result.reused
        self._n_evaluated += result.evaluated
        self._n_generated += result.generated
        self._finish(branch.index, result)

    def _save(self, run: Run, planned: PlannedBranch) -> Path:
        target = self._targets[planned.branch.index]
        self._check_target(planned)  # it may have been there, or gone on with, since the branch began
        return self._keeper.save(
            target.path,
            self._scheduler,
            run,
            messages=planned.messages,
            sampling=planned.request.sampling,
            name=target.name,
            overwrite=self._request.overwrite or planned.branch.index in self._replaced,
        ).path

    def _finish(self, index: int, result: BranchResult) -> None:
        if result.error is not None:
            self._n_errors += 1
        else:
            self._n_answers += 1
            self._n_timeouts += result.finish_reason == "timeout"
        self._finished[index] = result
        self._tell(in_order=not self._request.unordered)

    def _tell(self, *, in_order: bool) -> None:
        """Give out what is finished: in order as far as there is no gap, or all of it."""
        if in_order:
            while self._next in self._finished:
                result = self._finished.pop(self._next)
                self._next += 1
                if result is not None:
                    self._on_result(result)
            return
        for index in sorted(self._finished):
            result = self._finished.pop(index)
            if result is not None:
                self._on_result(result)

    def _tell_progress(self) -> None:
        running = [run for run, _ in self._running.values()]
        self._on_progress(
            ForkProgress(
                n_done=self._n_answers + self._n_errors + self._n_skipped,
                n_total=self._n_total,
                n_active=self._scheduler.counts.n_active,
                n_evaluated=self._n_evaluated + sum(run.n_evaluated for run in running),
                n_generated=self._n_generated + sum(run.n_generated for run in running),
                elapsed_s=time.perf_counter() - self._started_s,
            )
        )

    def summary(
        self, *, reused: int, evaluated: int, restore_s: float, model_load_s: float, interrupted: bool
    ) -> ForkSummary:
        """What it came to."""
        counts = self._scheduler.counts
        return ForkSummary(
            n_answers=self._n_answers,
            n_timeouts=self._n_timeouts,
            n_errors=self._n_errors,
            n_skipped=self._n_skipped,
            reused=reused,
            evaluated=evaluated,
            restore_s=restore_s,
            model_load_s=model_load_s,
            branch_reused=self._n_reused,
            branch_evaluated=self._n_evaluated,
            generated=self._n_generated,
            n_parallel=self._most,
            decoded_together=self._scheduler.decodes_together,
            n_cells_peak=counts.n_cells_peak,
            n_steps=counts.n_steps,
            elapsed_s=time.perf_counter() - self._started_s,
            interrupted=interrupted,
        )
