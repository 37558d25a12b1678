"""What ``bench`` is asked to measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from llamakv.errors import LlamakvError
from llamakv.ops.bench.results import BenchResult
from llamakv.ops.requests import MemoryOptions, ModelRequest, Reporter

CachePair = tuple[str, str]
"""Cache types of keys and of values."""

STRATEGIES = ("none", "in-process", "cross-process", "hybrid")


@dataclass(frozen=True, slots=True, kw_only=True)
class TypesRequest:
    """Measure each pair of cache types: texts of up to ``n_tokens`` tokens, ``n_decoded`` tokens written behind the
    longest, forked to ``n_branches`` sequences. With ``compares_output`` what they do to the output is measured over
    ``n_positions`` positions behind the longest text."""

    pairs: tuple[CachePair, ...]
    n_tokens: int
    n_decoded: int
    n_branches: int
    compares_output: bool
    n_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategiesRequest:
    """Answer ``n_users`` in each of the ``names``; the rest as in ``StrategiesResult``. ``memory_limit_bytes`` None is
    the memory of this machine that is available now."""

    n_users: int
    n_prefix: int
    n_question: int
    n_answer: int
    shares_prefix: bool
    names: tuple[str, ...] = STRATEGIES
    memory_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """``memory`` is for all that does not say otherwise. ``text`` is what to read (cut or repeated to the lengths that
    are needed); None for one of our own. Session files go to a folder made under ``work_dir`` and removed again,
    however it ends (a ``kill -9`` apart).

    ``n_repeats`` is at least 1, after one run that does not count.
    """

    model: ModelRequest
    memory: MemoryOptions
    n_repeats: int
    types: TypesRequest | None
    strategies: StrategiesRequest | None
    text: str | None
    work_dir: Path
    reporter: Reporter
    on_result: Callable[[BenchResult], None] = field(default=lambda _: None)
    """Gets what is there so far, whenever a row is done, so that an interrupted run is not lost."""
    on_failure: Callable[[str, LlamakvError], None] = field(default=lambda _, __: None)
    """Gets why a row, by its name, could not be measured to its end, where others go on."""
