"""Strategies side by side: the same users answered in several ways, each in processes of its own.

``none``: one context, decoded together, each reads all of its own. ``in-process``: one context, the prefix is read once
and its cells are shared. ``cross-process``: a process for each user, which resumes the prefix from the store.
``hybrid``: one context, the prefix is resumed from the store and its cells are shared. Where each user has a prefix of
its own, ``in-process`` is ``none``, and ``hybrid`` has a context for each user, decoded in turns.

What is counted: a prompt is ``n_prefix`` + ``n_question`` tokens, and each of them is evaluated or reused. The prefix
is saved with one more token behind it, which is pending and gives way (``Work.session_tokens``), so that all of it has
cells: resumed, it is ``n_prefix`` tokens reused. Read once for all, it is evaluated for one user and reused by the
others. Of an answer's tokens all but the last are decoded. Users arrive all at once, when every process has the model
loaded, its context open and has decoded a little; the sessions of the store are in the page cache then. Memory is what
each process had of its own at its largest, and once the files that all of them have open (the weights, programs).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from llamakv.errors import EngineError, InterruptedByUser, LlamakvError, NoRoomError
from llamakv.ops.bench.folders import own_folder
from llamakv.ops.bench.processes import Job, run_alone, run_together
from llamakv.ops.bench.requests import BenchRequest, StrategiesRequest
from llamakv.ops.bench.results import Spread, StrategiesResult, StrategyResult
from llamakv.ops.bench.strategy_jobs import (
    Group,
    ModelLook,
    Prefix,
    Prepared,
    ProcessResult,
    Setup,
    answer_users,
    fill_store,
    greedy_without,
    look_at_model,
)
from llamakv.ops.bench.strategy_sizes import (
    N_SEQUENCES_MAX,
    Shape,
    cell_bytes,
    growth_of,
    n_ctx_for,
    shape_of,
    users_that_fit,
)
from llamakv.ops.bench.text import story
from llamakv.ops.bench.work import FROM_STORE, Tokens, check_request, make_work, n_different, n_evaluated
from llamakv.ops.matching import find_model, merge_memory
from llamakv.ops.opening import default_threads
from llamakv.ops.process_memory import available_bytes
from llamakv.ops.requests import Reporter
from llamakv.ops.sizes import size
from llamakv.store.session_store import SessionStore

_N_SENTENCES = 2000
_MEMORY_SHARE = 0.9  # of the available memory, that a strategy may be expected to take


def measure_strategies(request: BenchRequest, *, on_row: Callable[[StrategiesResult], None]) -> StrategiesResult:
    """Do the work of ``request.strategies`` in each of its ways; ``on_row`` gets what is there after each.

    Each is done ``n_repeats`` times, in fresh processes, and its row is the whole run with the median time (of an even
    number, the faster one of the two in the middle). A strategy that cannot be run is in ``failed``, and the others go
    on. Threads are divided among processes, one at least for each. Where answers differ from those of the first
    strategy, ``reporter.notice`` says of how many users.

    Raises:
        InterruptedByUser: ``reporter.should_abort`` said so; ``on_row`` got what there was, all processes are gone.
        UsageError, NotFoundError, EngineError: the model cannot be used, or this is no work.
    """
    assert request.strategies is not None
    check_request(request.strategies)
    with own_folder(request.work_dir) as folder:
        bench = _Bench(request, request.strategies, folder)
        return bench.run(on_row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of a strategy: what its processes found, with their users in order."""

    shape: Shape
    processes: tuple[ProcessResult, ...]

    @property
    def peak_bytes(self) -> int:
        """What all processes together took at their largest; what they share counts once."""
        memory = [process.memory for process in self.processes]
        return sum(one.private_bytes for one in memory) + max(one.mapped_bytes for one in memory)

    @property
    def arrived_s(self) -> float:
        """When the users came: the first process knew first."""
        return min(process.arrived_s for process in self.processes)

    @property
    def elapsed_s(self) -> float:
        """From then to the last token of all."""
        return max(answer.ended_s for process in self.processes for answer in process.answers) - self.arrived_s

    @property
    def answers(self) -> tuple[Tokens, ...]:
        """What the users got."""
        return tuple(answer.tokens for process in self.processes for answer in process.answers)


def middle_of(runs: Sequence[Measured]) -> Measured:
    """The run with the median time; of an even number, the faster one of the two in the middle."""
    median_s = statistics.median_low([run.elapsed_s for run in runs])
    return next(run for run in runs if run.elapsed_s == median_s)


class _Bench:
    """The strategies of one model, one after the other."""

    def __init__(self, request: BenchRequest, asked: StrategiesRequest, folder: Path) -> None:
        reporter = request.reporter
        self._asked = asked
        self._reporter = reporter
        self._on_failure = request.on_failure
        self._n_repeats = request.n_repeats
        self._store = folder / "store"
        self._limit_bytes = available_bytes() if asked.memory_limit_bytes is None else asked.memory_limit_bytes
        self._n_ctx_max = request.model.n_ctx
        self._n_threads = request.model.n_threads or default_threads()
        setup = Setup(
            found=find_model(request.model, None, reporter),
            model=replace(request.model, on_log=None, n_ctx=None, n_parallel=0, n_threads=self._n_threads),
            memory=merge_memory(request.memory, None, None, may_change=True),
        )
        text = story(_N_SENTENCES) if request.text is None else request.text
        look, _ = run_alone(look_at_model, setup, text, asked.n_users, should_abort=reporter.should_abort)
        assert isinstance(look, ModelLook)
        self._look = look
        self._work = make_work(look.text, look.firsts, look.start, asked)
        self._setup = replace(setup, memory=replace(setup.memory, flash_attn=look.settings.flash_attn))
        self._sampling = greedy_without(look.ends, n_answer=asked.n_answer)
        self._prepared: Prepared | LlamakvError | None = None
        self._progress = _Progress(reporter, self._n_expected())
        self._rows: list[StrategyResult] = []
        self._failed: list[tuple[str, str]] = []
        self._first_answers: tuple[Tokens, ...] | None = None

    def run(self, on_row: Callable[[StrategiesResult], None]) -> StrategiesResult:
        """All of them."""
        self._warn_of_length()
        for name in self._asked.names:
            try:
                self._rows.append(self._measure(name))
            except InterruptedByUser:
                on_row(self._result())
                raise
            except LlamakvError as error:
                self._failed.append((name, error.message))
                self._on_failure(name, error)
            on_row(self._result())
        return self._result()

    def _result(self) -> StrategiesResult:
        asked, settings = self._asked, self._look.settings
        return StrategiesResult(
            n_users=asked.n_users,
            n_prefix=asked.n_prefix,
            n_question=asked.n_question,
            n_answer=asked.n_answer,
            shares_prefix=asked.shares_prefix,
            type_k=settings.type_k,
            type_v=settings.type_v,
            flash_attn=settings.flash_attn,
            memory_limit_bytes=self._limit_bytes,
            rows=tuple(self._rows),
            failed=tuple(self._failed),
        )

    def _warn_of_length(self) -> None:
        n_tokens = self._asked.n_prefix + self._asked.n_question + self._asked.n_answer
        if 0 < self._look.n_ctx_train < n_tokens:
            self._reporter.notice(
                f"each user has {n_tokens:,} tokens, the model was trained with contexts of "
                f"{self._look.n_ctx_train:,}: sizes and times hold, answers mean little"
            )

    # ------------------------------------------------------------ one strategy

    def _measure(self, name: str) -> StrategyResult:
        shape = shape_of(name, self._work)
        self._check_can_run(shape)
        prepared = self._prepare() if name in FROM_STORE else Prepared(elapsed_s=0.0, bytes_written=0)
        run = middle_of([self._run_once(name, shape) for _ in range(self._n_repeats)])
        return replace(self._row(name, run, prepared), n_other_answers=self._compare(name, run.answers))

    def _check_can_run(self, shape: Shape) -> None:
        """Refuse what would only fail later, or take the memory of others.

        Raises:
            NoRoomError: too many users for a context, or more cells than allowed, or too little memory.
        """
        if shape.n_in_context > N_SEQUENCES_MAX:
            raise NoRoomError(f"{shape.n_in_context} users need a sequence each, a context has {N_SEQUENCES_MAX}")
        if self._n_ctx_max is not None and shape.n_ctx > self._n_ctx_max:
            raise NoRoomError(
                f"a context of {shape.n_ctx:,} cells is needed, {self._n_ctx_max:,} are allowed (--n-ctx)"
            )
        each = growth_of(self._look.context).bytes_for(shape.n_ctx, shape.n_in_context)
        needed = shape.n_processes * self._look.memory.private_bytes + shape.n_contexts * each
        available = available_bytes()
        free = int(available * _MEMORY_SHARE)
        if needed > free:
            raise NoRoomError(
                f"about {size(needed)} of memory are needed, {size(free)} may be used: {_MEMORY_SHARE:.0%} of the "
                f"{size(available)} available",
                needed=needed,
                free=free,
            )

    def _prepare(self) -> Prepared:
        """Fill the store, once for all strategies that use it."""
        if self._prepared is None:
            try:
                self._prepared = self._fill_store()
            except InterruptedByUser:
                raise
            except LlamakvError as error:
                self._prepared = error
        if isinstance(self._prepared, LlamakvError):
            raise EngineError(f"the store could not be filled: {self._prepared.message}")
        return self._prepared

    def _fill_store(self) -> Prepared:
        work = self._work
        users = work.users[:1] if work.shares_prefix else work.users
        store = SessionStore(self._store)
        sessions = [
            (store.resolve_for_writing(_session_name(number)), work.session_tokens(user))
            for number, user in enumerate(users)
        ]
        with self._progress.part(len(sessions) * work.n_prefix) as on_message:
            prepared, _ = run_alone(
                fill_store,
                self._setup,
                sessions,
                n_ctx_for(work.n_prefix + 1),
                should_abort=self._reporter.should_abort,
                on_message=lambda n_done: on_message(0, n_done),
            )
        assert isinstance(prepared, Prepared)
        return prepared

    def _run_once(self, name: str, shape: Shape) -> Measured:
        n_threads = max(1, self._n_threads // shape.n_processes)
        setup = replace(self._setup, model=replace(self._setup.model, n_threads=n_threads))
        groups = self._groups(name, shape)
        n_each = len(groups) // shape.n_processes
        parts = [groups[i : i + n_each] for i in range(0, len(groups), n_each)]
        jobs = [Job(function=answer_users, arguments=(setup, part, self._sampling)) for part in parts]
        with self._progress.part(n_evaluated(name, self._work)) as on_message:
            together = run_together(
                jobs, should_abort=self._reporter.should_abort, on_message=on_message, samples_memory=False
            )
        found = []
        for outcome in together.outcomes:
            if outcome.error is not None:
                raise outcome.error
            assert isinstance(outcome.value, ProcessResult)
            found.append(outcome.value)
        return Measured(shape=shape, processes=tuple(found))

    def _groups(self, name: str, shape: Shape) -> list[Group]:
        """Who is in which context, and where they have their prefix from."""
        work = self._work
        if shape.per_user != "cells":
            return [
                Group(
                    users=(user,),
                    prefix=Prefix.OWN_SESSION,
                    n_ctx=shape.n_ctx,
                    session=self._session(0 if work.shares_prefix else number),
                )
                for number, user in enumerate(work.users)
            ]
        if not shape.n_shared:
            return [Group(users=work.users, prefix=Prefix.EACH_READS, n_ctx=shape.n_ctx)]
        if name in FROM_STORE:
            return [
                Group(users=work.users, prefix=Prefix.RESUMED, n_ctx=shape.n_ctx, session=self._session(0)),
            ]
        begins_with = work.session_tokens(work.users[0])
        return [Group(users=work.users, prefix=Prefix.READ_ONCE, n_ctx=shape.n_ctx, begins_with=begins_with)]

    def _session(self, number: int) -> Path:
        return SessionStore(self._store).resolve(_session_name(number))

    # ------------------------------------------------------------ what came of it

    def _compare(self, name: str, answers: tuple[Tokens, ...]) -> int:
        """How many answers are not those of the first strategy."""
        if self._first_answers is None:
            self._first_answers = answers
            return 0
        n_other = n_different(answers, self._first_answers)
        if n_other:
            first = self._rows[0].name
            self._reporter.notice(
                f"{name}: {n_other} of {len(answers)} answers are not those of {first!r}: in other batches rounding is "
                "another, and near ties can fall the other way"
            )
        return n_other

    def _row(self, name: str, run: Measured, prepared: Prepared) -> StrategyResult:
        shape, processes, memory = run.shape, run.processes, run.processes[0].contexts[0]
        answers = [answer for process in processes for answer in process.answers]
        n_read_once = sum(process.n_read_once for process in processes)
        # read once for all: evaluated for one of them, and reused by the others
        n_read = n_read_once + sum(answer.n_evaluated for answer in answers)
        n_reused = sum(answer.n_reused for answer in answers) - n_read_once
        n_generated = sum(len(answer.tokens) for answer in answers)
        n_cells_peak = sum(process.n_cells_peak for process in processes)
        n_sequences = shape.n_in_context + bool(shape.n_shared)
        fit = users_that_fit(
            shape,
            limit_bytes=self._limit_bytes,
            peak_bytes=run.peak_bytes,
            private_bytes=sum(process.memory.private_bytes for process in processes) // len(processes),
            memory=memory,
        )
        return StrategyResult(
            name=name,
            n_processes=shape.n_processes,
            peak_bytes=run.peak_bytes,
            counts_shared_once=True,
            weights_bytes=self._look.weights_bytes,
            context_bytes=sum(context.n_bytes for process in processes for context in process.contexts),
            n_cells_peak=n_cells_peak,
            cell_bytes=shape.n_contexts * cell_bytes(memory, n_cells_peak // shape.n_contexts, n_sequences),
            first_token_s=Spread.of([answer.first_token_s - run.arrived_s for answer in answers]),
            elapsed_s=run.elapsed_s,
            preparation_s=prepared.elapsed_s,
            n_generated=n_generated,
            tokens_per_s=n_generated / run.elapsed_s,
            n_prompt_tokens=self._work.n_prompt_tokens,
            n_reused=n_reused,
            n_evaluated=n_read,
            hit_rate=n_reused / self._work.n_prompt_tokens,
            bytes_read=sum(process.bytes_read for process in processes),
            bytes_written=prepared.bytes_written,
            n_users_that_fit=fit.n_users,
            limited_by=fit.limited_by,
        )

    def _n_expected(self) -> int:
        """Tokens to evaluate in all runs."""
        names, work = self._asked.names, self._work
        n_sessions = 1 if work.shares_prefix else len(work.users)
        prepared = n_sessions * work.n_prefix if any(name in FROM_STORE for name in names) else 0
        return prepared + self._n_repeats * sum(n_evaluated(name, work) for name in names)


def _session_name(number: int) -> str:
    return f"prefix-{number}"


class _Progress:
    """Tokens evaluated so far, of all there are, for the reporter's phase ``bench``."""

    def __init__(self, reporter: Reporter, n_total: int) -> None:
        self._reporter = reporter
        self._n_total = n_total
        self._n_before = 0

    @contextmanager
    def part(self, n_tokens: int) -> Iterator[Callable[[int, int], None]]:
        """One run of ``n_tokens``; what it gives takes the number of a process and the tokens it has evaluated."""
        done: dict[int, int] = {}

        def on_message(number: int, n_done: int) -> None:
            done[number] = n_done
            self._tell(self._n_before + min(sum(done.values()), n_tokens))

        self._tell(self._n_before)
        try:
            yield on_message
        finally:
            self._n_before += n_tokens
        self._tell(self._n_before)

    def _tell(self, n_done: int) -> None:
        self._reporter.progress("bench", n_done, self._n_total)
