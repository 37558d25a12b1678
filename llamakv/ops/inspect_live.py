"""What a context over a model really takes, set against the estimate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llamakv.engine.contract import MemoryRequest, Scheduler
from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.dry_run import LlamaEstimator
from llamakv.engine.llamacpp.native import api
from llamakv.engine.memory import CacheKind, ContextMemory, DeviceBuffer, MemoryEstimator
from llamakv.errors import InterruptedByUser, ModelFileError, NoRoomError
from llamakv.ops.inspect_model import (
    Limit,
    ModelQuestion,
    ModelReport,
    check_model_file,
    check_size,
    default_sizes,
    limits_of,
    report_model,
)
from llamakv.ops.opening import default_threads
from llamakv.ops.process_memory import MappedFile, available_bytes, mapped_file, resident_bytes
from llamakv.ops.requests import Reporter
from llamakv.ops.sizes import size
from llamakv.store.model_files import parts_of

AGREES_WITHIN = 0.02
"""How far what was allocated may be from the estimate and still agree with it."""

_IS_CUT = "is not within the file bounds"  # llama.cpp (llama-model-loader.cpp) of tensors behind the end of a file
_UNQUANTISED = frozenset({"F32", "F16", "BF16"})
_N_CTX = 4096
_N_BATCH = 256
_TEXT = "The quick brown fox jumps over the lazy dog. "


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveQuestion:
    """What a context is opened with to see what it takes; ``n_ctx`` None: 4,096 cells, or what the model was trained
    with if that is less."""

    path: Path
    memory: MemoryRequest
    n_ctx: int | None = None
    n_parallel: int = 0
    n_threads: int | None = None
    n_gpu_layers: int = 0
    on_log: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One part: what the estimate says and what the engine allocated."""

    name: str
    estimated: int
    allocated: int

    @property
    def difference(self) -> float:
        """How much more was allocated, as a part of the estimate; infinite where that is 0."""
        if self.estimated == self.allocated:
            return 0.0
        return (self.allocated - self.estimated) / self.estimated if self.estimated else float("inf")

    @property
    def agrees(self) -> bool:
        """Whether both are the same within 2 %."""
        return abs(self.difference) <= AGREES_WITHIN


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentSteps:
    """Bytes the process had in memory ``before``, with the ``weights`` loaded, with the ``context`` open, and after a
    ``batch`` of tokens was read."""

    before: int
    weights: int
    context: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveReport:
    """What opening a model and a context really took. ``weights`` and ``context`` are the engine's own figures, by
    device; ``estimate`` is the dry run's of the same context.

    ``rss`` is what the process had in memory meanwhile; its last step read ``n_batch`` tokens. ``mapped`` is the model
    file, after that; None where unknown.
    """

    memory: MemoryRequest
    n_gpu_layers: int
    weights: tuple[DeviceBuffer, ...]
    context: ContextMemory
    estimate: ContextMemory
    weights_estimate: int
    rss: ResidentSteps
    n_batch: int
    mapped: MappedFile | None

    @property
    def compared(self) -> tuple[Compared, ...]:
        """Estimate and allocation, part by part, and in all."""
        parts = [Compared(name="weights", estimated=self.weights_estimate, allocated=_sum(self.weights))]
        for kind in CacheKind:
            sizes = [_of_kind(memory, kind) for memory in (self.estimate, self.context)]
            if any(sizes):
                parts.append(Compared(name=str(kind), estimated=sizes[0], allocated=sizes[1]))
        one, other = self.estimate, self.context
        parts.append(Compared(name="compute", estimated=one.compute_bytes, allocated=other.compute_bytes))
        parts.append(Compared(name="output", estimated=one.output_bytes, allocated=other.output_bytes))
        total = [sum(part.estimated for part in parts), sum(part.allocated for part in parts)]
        return (*parts, Compared(name="total", estimated=total[0], allocated=total[1]))

    @property
    def n_beside(self) -> int | None:
        """What the process had in memory after the batch beside the weights and the context as they are estimated: the
        program, the vocabulary, the graph, copies of weights. None where parts of them may lie elsewhere (on a GPU), or
        it had less than what is estimated: not all of it had been used."""
        n_bytes = self.rss.batch - self.weights_estimate - self.estimate.n_bytes
        return None if self.n_gpu_layers or n_bytes < self.rss.before else n_bytes

    @property
    def agrees(self) -> bool:
        """Whether weights, context and all together are what was estimated, within 2 %."""
        weights, *parts, total = self.compared
        estimated, allocated = sum(part.estimated for part in parts), sum(part.allocated for part in parts)
        context = Compared(name="context", estimated=estimated, allocated=allocated)
        return weights.agrees and context.agrees and total.agrees


def _sum(buffers: Sequence[DeviceBuffer]) -> int:
    return sum(buffer.n_bytes for buffer in buffers)


def _of_kind(memory: ContextMemory, kind: CacheKind) -> int:
    return sum(part.n_bytes for part in memory.parts if part.kind is kind)


def measure_live(estimator: MemoryEstimator, question: LiveQuestion, reporter: Reporter) -> LiveReport:
    """Load the model, open a context and read a batch of tokens, and tell what each took.

    Raises:
        UsageError: cache types the engine does not take, or a context larger than is possible.
        NoRoomError, ModelFileError: there is not enough memory, or the engine cannot run the model.
        InterruptedByUser: ``reporter.should_abort`` said so.
    """
    facts = estimator.facts
    if facts.unknown is not None:
        raise ModelFileError(f"{question.path} cannot be opened: {facts.unknown}", path=str(question.path))
    n_ctx = question.n_ctx or _default_n_ctx(facts.n_ctx_train)
    check_size(n_ctx)
    estimate = estimator.estimate(question.memory, n_ctx=n_ctx, n_parallel=question.n_parallel)
    _check_memory(estimate, facts.weights_bytes or 0)
    before = resident_bytes()
    with _load(question, reporter) as model:
        with_weights = resident_bytes()
        scheduler = model.open_scheduler(
            question.memory,
            n_parallel=question.n_parallel,
            n_ctx_min=n_ctx,
            n_ctx_max=n_ctx,
            n_cells_max=n_ctx,
            n_threads=question.n_threads or default_threads(),
        )
        with_context = resident_bytes()
        n_batch = _read_a_batch(model, scheduler, min(_N_BATCH + 1, n_ctx), reporter)
        rss = ResidentSteps(before=before, weights=with_weights, context=with_context, batch=resident_bytes())
        return LiveReport(
            memory=question.memory,
            n_gpu_layers=question.n_gpu_layers,
            weights=tuple(model.weights_by_device),
            context=scheduler.memory,
            estimate=estimate,
            weights_estimate=facts.weights_bytes or 0,
            rss=rss,
            n_batch=n_batch,
            mapped=mapped_file(parts_of(question.path)),
        )


def _check_memory(estimate: ContextMemory, n_weights: int) -> None:
    """Refuse what would take more than there is: systems that promise too much end a process that takes it."""
    n_free = available_bytes()
    if n_weights + estimate.n_bytes > n_free:
        raise NoRoomError(
            f"weights of {size(n_weights)} and a context of {estimate.n_ctx:,} cells, {size(estimate.n_bytes)}, do not "
            f"fit into the {size(n_free)} of memory that are available",
            hint="name a smaller context with --n-ctx",
            needed=n_weights + estimate.n_bytes,
            free=n_free,
        )


def _load(question: LiveQuestion, reporter: Reporter) -> LlamaModel:
    n_bytes = check_model_file(question.path)

    def on_progress(part: float) -> bool:
        reporter.progress("load", int(part * n_bytes), n_bytes)
        return not reporter.should_abort()

    try:
        return LlamaModel(
            question.path, n_gpu_layers=question.n_gpu_layers, on_log=question.on_log, on_progress=on_progress
        )
    except ModelFileError as error:
        if reporter.should_abort():
            raise InterruptedByUser("interrupted while the model was loaded") from error
        raise


def _read_a_batch(model: LlamaModel, scheduler: Scheduler, n_tokens: int, reporter: Reporter) -> int:
    """Read all but the last of so many tokens, so that the buffers of a decode call have been used."""
    tokens = model.tokenize(_TEXT, add_special=False, parse_special=False) or [0]
    some = (tokens * (n_tokens // len(tokens) + 1))[:n_tokens]
    return scheduler.root.extend(
        some,
        on_progress=lambda done, total: reporter.progress("prefill", done, total),
        should_abort=reporter.should_abort,
    )


def ask_about(
    question: ModelQuestion,
    reporter: Reporter,
    *,
    live: LiveQuestion | None = None,
    on_log: Callable[[str], None] | None = None,
) -> tuple[ModelReport, LiveReport | None]:
    """``report_model`` of a model file and, where ``live`` is given, ``measure_live``, whose context is among those of
    the report, and which says what the process takes beside what is estimated. ``on_log`` gets the engine's own log.

    Raises:
        ModelFileError: not a GGUF file, or one that is damaged or cut off; and as those two.
    """
    check_model_file(question.path)
    limits = limits_of(question.memory_bytes)
    with LlamaEstimator(question.path, on_log=on_log) as estimator:
        facts = estimator.facts
        if facts.unknown is not None and _IS_CUT in facts.unknown:
            raise ModelFileError(f"{question.path} is damaged or cut off: {facts.unknown}", path=str(question.path))
        lived = None if live is None else measure_live(estimator, live, reporter)
        if lived is not None:
            limits = tuple(_as_measured(limit, lived) for limit in limits)
            if not question.n_ctx:
                asked = live.n_ctx if live is not None and live.n_ctx else _default_n_ctx(facts.n_ctx_train)
                question = replace(question, n_ctx=tuple(sorted({*default_sizes(facts.n_ctx_train), asked})))
        report = report_model(estimator, question, reporter, limits=limits)
    return replace(report, may_repack=may_repack(facts.quantisation)), lived


def _default_n_ctx(n_ctx_train: int | None) -> int:
    return min(_N_CTX, n_ctx_train or _N_CTX)


def _as_measured(limit: Limit, live: LiveReport) -> Limit:
    return limit if live.n_beside is None else replace(limit, n_own=live.n_beside, is_live=True)


def may_repack(quantisation: str | None) -> bool:
    """Whether the engine here may keep copies of weights in a layout for this processor: it is built with that, and the
    model is quantised, or does not say. A dry run does not show them."""
    with_repack = b" REPACK = 1 " in api.llama_print_system_info()
    return with_repack and quantisation not in _UNQUANTISED
