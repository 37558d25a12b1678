"""What a model takes in memory: what its file says, what contexts over it would take and which ones fit. No weights are
loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.memory import ContextMemory, MemoryEstimator, ModelFacts, TokenMemory
from llamakv.errors import EngineError, InterruptedByUser, ModelFileError, UsageError
from llamakv.ops.process_memory import available_bytes, resident_bytes
from llamakv.ops.requests import Reporter
from llamakv.store.model_files import length_of, parts_of

TYPES: tuple[tuple[str, str], ...] = (("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"))
"""Types of keys and values that are told of where none is named."""

N_CELLS_MOST = 1 << 24
"""Cells of the largest context that is asked about: the engine's own table of cells takes real memory (see
``largest_context``), and no model is trained with more."""

_N_UNIT = 256  # cells: llama.cpp rounds contexts up to a multiple of this
_UNKNOWN_N_CTX = 1 << 17  # as far as is looked where a model does not say what it was trained with
_N_CURVE_MIN = 512
_N_FIRST_STEP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuestion:
    """What is asked of a model file.

    ``n_ctx`` are the sizes of contexts, in cells that ``n_parallel`` branches share (0: one sequence alone); none: some
    up to what the model was trained with. ``types`` are pairs of a type for keys and one for values. ``memory_bytes``
    is a memory size that contexts should fit into, beside what this machine has. ``with_curve`` asks for more sizes,
    to be drawn.
    """

    path: Path
    n_ctx: tuple[int, ...] = ()
    n_parallel: int = 0
    types: tuple[tuple[str, str], ...] = TYPES
    flash_attn: bool | None = None
    swa_full: bool = True
    memory_bytes: int | None = None
    with_curve: bool = False

    def memory(self, types: tuple[str, str]) -> MemoryRequest:
        """Settings of a context with these types of keys and values."""
        return MemoryRequest(type_k=types[0], type_v=types[1], flash_attn=self.flash_attn, swa_full=self.swa_full)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """An amount of memory: ``available`` on this machine now, or ``asked`` about.

    ``n_own`` is what the process takes beside weights and context: this program without any model, or, where
    ``is_live``, all that a process with a model and a context was seen to take beside what is estimated. ``n_held`` of
    it are taken already, so that they are not among ``n_bytes``.
    """

    name: str
    n_bytes: int
    n_own: int = 0
    n_held: int = 0
    is_live: bool = False

    @property
    def n_room(self) -> int:
        """What weights and context may take of it."""
        return self.n_bytes + self.n_held - self.n_own


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The largest context that fits into a ``limit`` beside the weights, in cells; None if not even the smallest does.

    ``n_bytes`` is what it takes in all: weights, context and the process itself (``Limit.n_own``); of the smallest
    context where none fits. ``is_all`` says that it is as large as the model was trained with, for each
    sequence, so that more memory brings nothing.
    """

    limit: Limit
    n_ctx: int | None
    n_bytes: int
    is_all: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeReport:
    """What one pair of cache types takes. ``refused`` is the engine's reason where it takes no such context; then all
    else is None or empty. ``contexts`` are in the order of ``ModelReport.n_ctx``, ``fits`` in that of the limits;
    ``curve`` are contexts of growing sizes."""

    type_k: str
    type_v: str
    refused: str | None = None
    per_token: TokenMemory | None = None
    contexts: tuple[ContextMemory, ...] = ()
    fits: tuple[Fit, ...] = ()
    curve: tuple[ContextMemory, ...] = ()

    @property
    def label(self) -> str:
        """``q8_0``, or ``q8_0/q4_0`` for keys and values of different types."""
        return self.type_k if self.type_k == self.type_v else f"{self.type_k}/{self.type_v}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """A model file: ``facts`` of it and, for each pair of cache types, what contexts of ``n_ctx`` cells would take.
    ``types`` is empty where the engine cannot run the model (``facts.unknown``). With ``may_repack`` the engine may
    keep a copy of some weights in another layout, which only loading them tells."""

    path: Path
    file_bytes: int
    facts: ModelFacts
    n_parallel: int
    n_ctx: tuple[int, ...]
    limits: tuple[Limit, ...]
    types: tuple[TypeReport, ...]
    may_repack: bool = False


def check_model_file(path: Path) -> int:
    """The length of a model file; of one in parts, of all of them.

    Raises:
        ModelFileError: it cannot be read, or is no GGUF file.
    """
    if path.exists() and not path.is_file():  # a pipe would be waited for
        what = "a folder" if path.is_dir() else "no regular file"
        raise ModelFileError(f"cannot read the model file {path}: it is {what}", path=str(path))
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        n_bytes = sum(map(length_of, parts_of(path)))
    except OSError as error:
        raise ModelFileError(f"cannot read the model file {path}: {error.strerror}", path=str(path)) from error
    if magic != b"GGUF":
        raise ModelFileError(f"{path} is not a GGUF model file", path=str(path))
    return n_bytes


def report_model(
    estimator: MemoryEstimator, question: ModelQuestion, reporter: Reporter, *, limits: tuple[Limit, ...] | None = None
) -> ModelReport:
    """Tell what a model is and what contexts over it would take; nothing is loaded, and nothing is guessed: each figure
    is the engine's for just that context. ``limits`` None: those of ``limits_of`` now.

    Raises:
        UsageError: a context larger than is possible.
        InterruptedByUser: ``reporter.should_abort`` said so.
    """
    facts = estimator.facts
    sizes = question.n_ctx or default_sizes(facts.n_ctx_train)
    for n_ctx in sizes:
        check_size(n_ctx)
    limits = limits_of(question.memory_bytes) if limits is None else limits
    types: list[TypeReport] = []
    if facts.unknown is None:
        for pair in question.types:
            if reporter.should_abort():
                raise InterruptedByUser("interrupted while the model was looked at")
            types.append(_report_type(estimator, question, pair, sizes, limits))
    return ModelReport(
        path=question.path,
        file_bytes=check_model_file(question.path),
        facts=facts,
        n_parallel=question.n_parallel,
        n_ctx=sizes,
        limits=limits,
        types=tuple(types),
    )


def default_sizes(n_ctx_train: int | None) -> tuple[int, ...]:
    """Context sizes to tell of where none is named: what the model was trained with, a quarter and a sixteenth."""
    most = n_ctx_train or _UNKNOWN_N_CTX
    return tuple(sorted({n for n in (most // 16, most // 4, most) if n >= _N_UNIT} or {most}))


def check_size(n_ctx: int) -> None:
    """Refuse a context that no machine opens.

    Raises:
        UsageError: it has more cells than ``N_CELLS_MOST``.
    """
    if n_ctx > N_CELLS_MOST:
        raise UsageError(
            f"a context of {n_ctx:,} cells is larger than any can be: at most {N_CELLS_MOST:,}",
            hint=f"--n-ctx {N_CELLS_MOST}",
            n_ctx=n_ctx,
            limit=N_CELLS_MOST,
        )


def limits_of(memory_bytes: int | None) -> tuple[Limit, ...]:
    """What this machine has now and, where it is given, an amount that is asked about."""
    n_own = resident_bytes()
    here = Limit(name="available", n_bytes=available_bytes(), n_own=n_own, n_held=n_own)
    if memory_bytes is None:
        return (here,)
    return here, Limit(name="asked", n_bytes=memory_bytes, n_own=n_own)


def _report_type(
    estimator: MemoryEstimator,
    question: ModelQuestion,
    pair: tuple[str, str],
    sizes: Sequence[int],
    limits: Sequence[Limit],
) -> TypeReport:
    memory = question.memory(pair)
    known: dict[int, ContextMemory] = {}

    def estimate(n_ctx: int) -> ContextMemory:
        if n_ctx not in known:
            known[n_ctx] = estimator.estimate(memory, n_ctx=n_ctx, n_parallel=question.n_parallel)
        return known[n_ctx]

    try:
        per_token = estimator.per_token(memory)
        contexts = tuple(map(estimate, sizes))
        fits = tuple(_fit(estimate, estimator.facts, question.n_parallel, limit) for limit in limits)
        curve = tuple(map(estimate, _curve_sizes(sizes, estimator.facts))) if question.with_curve else ()
    except (UsageError, EngineError) as error:
        return TypeReport(type_k=pair[0], type_v=pair[1], refused=error.message)
    return TypeReport(type_k=pair[0], type_v=pair[1], per_token=per_token, contexts=contexts, fits=fits, curve=curve)


def _curve_sizes(sizes: Sequence[int], facts: ModelFacts) -> list[int]:
    """Powers of two up to the largest of some sizes; where there is but one, up to what was trained as well."""
    ends = {max(sizes)}
    if len(sizes) == 1:
        ends.add(min(facts.n_ctx_train or _UNKNOWN_N_CTX, N_CELLS_MOST))
    powers = {_N_CURVE_MIN << power for power in range(32) if _N_CURVE_MIN << power < max(ends)}
    return sorted(powers | ends)


def _fit(estimate: Callable[[int], ContextMemory], facts: ModelFacts, n_parallel: int, limit: Limit) -> Fit:
    weights = (facts.weights_bytes or 0) + limit.n_own
    trained = (facts.n_ctx_train or _UNKNOWN_N_CTX) * max(1, n_parallel)
    most = min(trained, N_CELLS_MOST)

    def cells(n_units: int) -> int:
        return min(n_units * _N_UNIT, most)

    def takes(n_units: int) -> int:
        return weights + estimate(cells(n_units)).n_bytes

    n_units = largest_that_fits(takes, limit.n_bytes + limit.n_held, most=-(-most // _N_UNIT))
    if n_units == 0:
        return Fit(limit=limit, n_ctx=None, n_bytes=takes(1), is_all=False)
    n_ctx = cells(n_units)
    return Fit(
        limit=limit, n_ctx=n_ctx, n_bytes=takes(n_units), is_all=n_ctx == trained and facts.n_ctx_train is not None
    )


def largest_that_fits(takes: Callable[[int], int], limit: int, *, most: int) -> int:
    """The largest of 1 ... ``most`` for which ``takes`` gives ``limit`` or less; 0 where 1 is too much already.

    ``takes`` must never fall. It may be slow: where it grows along a straight line it is asked about five numbers, none
    of them far beyond the one that is returned.
    """
    known: dict[int, int] = {}

    def fits(n: int) -> bool:
        if n not in known:
            known[n] = takes(n)
        return known[n] <= limit

    if not fits(1):
        return 0
    low, high, before, n_up = 1, most + 1, 1, 0
    while low < most and high > most:  # up, to where the line through the last two meets the limit
        n_up += 1
        rise = known[low] - known[before]
        ahead = _N_FIRST_STEP if n_up == 1 else (limit - known[low]) * (low - before) // rise if rise else most
        n = min(low + max(ahead, 1 << max(0, n_up - 3)), most)
        if fits(n):
            before, low = low, n
        else:
            high = n
    n_between = 0
    while high - low > 1:
        n_between += 1
        guess = low + (limit - known[low]) * (high - low) // (known[high] - known[low])
        if n_between % 3 == 0:  # however the line bends
            guess = (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
        for n in (guess, guess + 1 if fits(guess) else guess - 1):
            if low < n < high and fits(n):
                low = n
            elif low < n < high:
                high = n
    return low
