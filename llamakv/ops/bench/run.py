"""``bench``: what reading, keeping, resuming and forking cost on this machine, in one run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamakv.errors import (
    EngineError,
    InterruptedByUser,
    LlamakvError,
    ModelFileError,
    UsageError,
    WriteError,
)
from llamakv.ops.bench.facts import Facts, FactsJob, read_facts
from llamakv.ops.bench.folders import own_folder
from llamakv.ops.bench.lengths import lengths_up_to, n_cells_needed, n_steps, n_steps_along
from llamakv.ops.bench.processes import ProcessEndedError, run_alone
from llamakv.ops.bench.requests import BenchRequest, CachePair, TypesRequest
from llamakv.ops.bench.results import BenchResult, StrategiesResult, TypeResult
from llamakv.ops.bench.types import PairJob, measure_pair, write_reference
from llamakv.ops.bench.work import check_request
from llamakv.ops.matching import FoundModel, find_model
from llamakv.ops.sizes import size

_F16: CachePair = ("f16", "f16")
_N_BRANCHES_MAX = 254
"""Sequences of a context beside the root and the scratch one (LLAMA_MAX_SEQ is 256)."""


def run_bench(request: BenchRequest) -> BenchResult:
    """Measure what was asked for; ``on_result`` gets what is there so far after each row.

    Each pair of cache types has a process of its own, one after the other. A pair that the engine refuses, or whose
    process dies, is a row that says why; the latter with what it had measured. Stopped by ``should_abort``, what was
    measured is returned, a row of fewer lengths or repeats included, with ``interrupted`` set; ended by an error,
    ``on_result`` has got that. No process and no file outlives this call.

    Raises:
        UsageError: numbers out of range.
        NotFoundError, ModelFileError: the model cannot be used.
        NoRoomError: a context cannot hold the longest text.
        WriteError: no folder can be made in ``work_dir``, or there is not enough room for the session files.
        InterruptedByUser: stopped before the model was opened: there is nothing to return.
    """
    _check(request)
    found = find_model(request.model, None, request.reporter)
    with own_folder(request.work_dir) as folder:
        return _Bench(request, found, folder).run()


def _check(request: BenchRequest) -> None:
    if request.strategies is not None:
        check_request(request.strategies)
    asked = request.types
    if request.n_repeats < 1:
        raise UsageError(f"everything is measured at least once, not {request.n_repeats} times")
    if asked is None:
        return
    if asked.n_tokens < 2:
        raise UsageError(f"the longest text has at least 2 tokens, not {asked.n_tokens}")
    if not 1 <= asked.n_branches <= _N_BRANCHES_MAX:
        raise UsageError(f"a text can be forked to 1 ... {_N_BRANCHES_MAX} sequences, not {asked.n_branches}")
    if asked.n_decoded < 1 or (asked.compares_output and asked.n_positions < 1):
        raise UsageError("at least one token is written, and the output compared at one position")


@dataclass(slots=True)
class _Progress:
    """Steps done, of all."""

    tell: Callable[[str, int, int], None]
    total: int
    done: int = 0

    def add(self, n: int) -> None:
        """So many more are done."""
        self.set(self.done + n)

    def set(self, done: int) -> None:
        """So many are done."""
        self.done = min(done, self.total)
        self.tell("bench", self.done, self.total)


class _Bench:
    """One run: what there is so far, and how to go on."""

    def __init__(self, request: BenchRequest, found: FoundModel, folder: Path) -> None:
        self._request = request
        self._reporter = request.reporter
        self._found = found
        self._folder = folder
        self._started = time.perf_counter()
        self._started_s = time.time()
        self._facts = self._read_facts()
        self._rows: list[TypeResult] = []
        self._partial: TypeResult | None = None
        self._is_open = False
        self._strategies: StrategiesResult | None = None
        self._progress = _Progress(self._reporter.progress, 1)

    def run(self) -> BenchResult:
        """All that was asked for, or what there is when it is stopped."""
        try:
            if self._request.types is not None:
                self._measure_types(self._request.types)
            if self._request.strategies is not None:
                self._measure_strategies()
        except InterruptedByUser:
            self._keep_partial()
            return self._result(interrupted=True)
        except LlamakvError:
            if self._keep_partial():
                self._tell_result()
            raise
        return self._result(interrupted=False)

    def _keep_partial(self) -> bool:
        """Have the row that was being measured, as far as it is; False if there is none."""
        if self._partial is None:
            return False
        self._rows.append(self._partial)
        self._partial = None
        return True

    def _result(self, *, interrupted: bool) -> BenchResult:
        return BenchResult(
            started_s=self._started_s,
            elapsed_s=time.perf_counter() - self._started,
            interrupted=interrupted,
            machine=self._facts.machine,
            model=self._facts.model,
            n_threads=self._facts.n_threads,
            n_repeats=self._request.n_repeats,
            types=tuple(self._rows),
            strategies=self._strategies,
            work_dir=str(self._request.work_dir.absolute()),
        )

    def _tell_result(self) -> None:
        """Tell what is there; it is not all."""
        self._request.on_result(self._result(interrupted=True))

    # ------------------------------------------------------------ before

    def _read_facts(self) -> Facts:
        request, asked = self._request, self._request.types
        job = FactsJob(
            found=self._found,
            model=replace(request.model, on_log=None, n_parallel=0),
            memory=request.memory,
            types=asked,
            text=request.text,
            n_cells=0 if asked is None else n_cells_needed(asked),
        )
        facts: Facts = self._alone(read_facts, job)
        return facts

    def _alone(self, function: Callable[..., Any], job: object) -> Any:
        """Run a job in a process of its own; what it tells is passed on."""
        value, _ = run_alone(function, job, should_abort=self._reporter.should_abort, on_message=self._on_message)
        return value

    def _on_message(self, message: tuple[Any, ...]) -> None:
        kind, *content = message
        if kind == "steps":
            self._progress.add(*content)
        elif kind == "row":
            (self._partial,) = content
        elif kind == "opened":
            self._is_open = True
        elif kind == "notice":
            self._reporter.notice(*content)
        elif kind == "progress":
            self._reporter.progress(*content)
        elif self._request.model.on_log is not None:
            self._request.model.on_log(*content)

    # ------------------------------------------------------------ cache types

    def _measure_types(self, asked: TypesRequest) -> None:
        self._check_disk(asked)
        lengths = lengths_up_to(asked.n_tokens)
        n_positions = asked.n_positions if asked.compares_output else 0
        n_each = n_steps(lengths, n_repeats=self._request.n_repeats, n_positions=n_positions)
        n_reference = n_steps_along(lengths, n_positions=n_positions)
        self._progress = _Progress(self._reporter.progress, n_reference + n_each * len(asked.pairs))
        if n_positions and not self._write_reference(self._job(_F16, asked, lengths, n_positions)):
            n_positions = 0
        for number, pair in enumerate(asked.pairs, 1):
            self._progress.set(n_reference + n_each * (number - 1))
            self._rows.append(self._measure_pair(self._job(pair, asked, lengths, n_positions)))
            self._partial = None
            self._tell_result()
        self._progress.set(self._progress.total)

    def _job(self, pair: CachePair, asked: TypesRequest, lengths: tuple[int, ...], n_positions: int) -> PairJob:
        request = self._request
        return PairJob(
            found=self._found,
            model=replace(request.model, on_log=None, n_parallel=0),
            memory=request.memory,
            pair=pair,
            tokens=self._facts.tokens,
            lengths=lengths,
            n_cells=n_cells_needed(asked),
            n_repeats=request.n_repeats,
            n_decoded=asked.n_decoded,
            n_branches=asked.n_branches,
            n_positions=n_positions,
            reference=self._folder / "logits.f32",
            folder=self._folder,
            wants_log=request.model.on_log is not None,
        )

    def _write_reference(self, job: PairJob) -> bool:
        """Have something to compare outputs with; False where the engine cannot run f16 here."""
        try:
            self._alone(write_reference, job)
        except (UsageError, EngineError) as error:
            _raise_if_for_all(error)
            self._reporter.notice(f"outputs are not compared: with f16 {error.message}")
            return False
        return True

    def _measure_pair(self, job: PairJob) -> TypeResult:
        self._is_open = False
        try:
            row: TypeResult = self._alone(measure_pair, job)
        except (UsageError, EngineError) as error:
            _raise_if_for_all(error)
            nothing = _empty(job.pair)
            if not self._is_open and not isinstance(error, ProcessEndedError):
                return replace(nothing, refused=error.message)
            self._request.on_failure(nothing.label, error)
            return replace(self._partial or nothing, failed=error.message)
        return row

    def _check_disk(self, asked: TypesRequest) -> None:
        """Have room for the longest session file, and for the logits that outputs are compared with.

        Raises:
            WriteError: there is less.
        """
        n_state = self._facts.n_state_bytes * (2 if any("f32" in pair for pair in asked.pairs) else 1)
        n_logits = 4 * self._facts.n_vocab * asked.n_positions if asked.compares_output else 0
        needed, free = n_state + n_logits, shutil.disk_usage(self._folder).free
        if needed > free:
            raise WriteError(
                f"session files of up to {asked.n_tokens:,} tokens need {size(needed)} in {self._request.work_dir}, "
                f"{size(free)} are free",
                path=str(self._request.work_dir),
                needed=needed,
                free=free,
            )

    # ------------------------------------------------------------ strategies

    def _measure_strategies(self) -> None:
        from llamakv.ops.bench.strategies import measure_strategies

        def on_row(rows: StrategiesResult) -> None:
            self._strategies = rows
            self._tell_result()

        self._strategies = measure_strategies(self._request, on_row=on_row)


def _raise_if_for_all(error: LlamakvError) -> None:
    """Go on only where another pair of cache types may do better."""
    if isinstance(error, ModelFileError):
        raise error


def _empty(pair: CachePair) -> TypeResult:
    return TypeResult(
        type_k=pair[0],
        type_v=pair[1],
        refused=None,
        flash_attn=None,
        n_ctx=None,
        state_bytes_per_token=None,
        context_bytes=None,
        peak_rss_bytes=None,
        lengths=(),
        prompt_tokens_per_s=None,
        decode_tokens_per_s=None,
        n_branches=None,
        fork_s=None,
        break_even_warm=None,
        break_even_cold=None,
        output=None,
    )
