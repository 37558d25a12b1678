"""Two results of ``bench`` set against each other: what differs in how they were made, then number by number."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

from llamakv.ops.bench.measures import Measure, measures
from llamakv.ops.bench.results import BenchResult


class Verdict(StrEnum):
    """How B is to A. ``UNCLEAR``: the ranges of repeated measurements overlap, a time was taken once only, or there is
    no better."""

    SAME = "same"
    BETTER = "better"
    WORSE = "worse"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What was not the same when A and B were made, such as ``machine.processor``."""

    field: str
    a: object
    b: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The same thing measured in both."""

    a: Measure
    b: Measure

    @property
    def b_over_a(self) -> float | None:
        """The ratio of the medians; None where there is none."""
        if self.a.median == 0 or not math.isfinite(self.a.median) or not math.isfinite(self.b.median):
            return None
        return self.b.median / self.a.median

    @property
    def verdict(self) -> Verdict:
        """Whether B is better."""
        a, b = self.a, self.b
        if (a.least, a.median, a.most, a.is_at_most) == (b.least, b.median, b.most, b.is_at_most):
            return Verdict.SAME
        if _is_as_large(a, b):
            return Verdict.SAME
        if any(math.isnan(each.median) for each in (a, b)):
            return Verdict.UNCLEAR
        is_noisy = a.unit in ("s", "tokens/s") and min(a.n_runs, b.n_runs) == 1
        if a.better == "neither" or is_noisy or (a.least <= b.most and b.least <= a.most):
            return Verdict.UNCLEAR
        return Verdict.BETTER if (b.median < a.median) == (a.better == "less") else Verdict.WORSE


_VARIES = {"peak_rss_bytes", "peak_bytes", "file_bytes", "bytes_read", "bytes_written"}
_SAME_SHARE = 0.01  # of the smaller one: another run on the same machine differs by as much


def _is_as_large(a: Measure, b: Measure) -> bool:
    """Whether two sizes that another run would find a little different, each taken once, are too close to tell."""
    if a.metric not in _VARIES or (a.n_runs, b.n_runs) != (1, 1):
        return False
    return abs(a.median - b.median) < _SAME_SHARE * min(a.median, b.median)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A and B. ``doubts`` are reasons why the numbers may not be set against each other, each a clause; ``only_a`` and
    ``only_b`` name what one of them alone has (``type q4_0``, ``strategy hybrid``)."""

    differences: tuple[Difference, ...]
    doubts: tuple[str, ...]
    pairs: tuple[Pair, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def compare_results(a: BenchResult, b: BenchResult) -> Comparison:
    """Set two results against each other; what both measured is paired, in the order of A."""
    differences = tuple(_differences(a, b))
    measured_b = {_key(measure): measure for measure in measures(b)}
    pairs = [Pair(a=one, b=measured_b[_key(one)]) for one in measures(a) if _key(one) in measured_b]
    if any(difference.field == "strategies.memory_limit_bytes" for difference in differences):
        pairs = [_without_verdict(pair) if pair.a.metric == "n_users_that_fit" else pair for pair in pairs]
    rows_a, rows_b = _rows(a), _rows(b)
    return Comparison(
        differences=differences,
        doubts=tuple(_doubts(a, b, [difference.field for difference in differences])),
        pairs=tuple(pairs),
        only_a=tuple(row for row in rows_a if row not in rows_b),
        only_b=tuple(row for row in rows_b if row not in rows_a),
    )


def _key(measure: Measure) -> tuple[str, str, int | None, str]:
    return measure.of, measure.name, measure.n_tokens, measure.metric


def _without_verdict(pair: Pair) -> Pair:
    return Pair(a=dataclasses.replace(pair.a, better="neither"), b=dataclasses.replace(pair.b, better="neither"))


def _rows(result: BenchResult) -> list[str]:
    types = [f"type {row.label}" for row in result.types if row.is_measured]
    return types + [f"strategy {row.name}" for row in (result.strategies.rows if result.strategies else ())]


# ---------------------------------------------------------------- how they were made

_NUMBERS = {"started_s", "elapsed_s", "interrupted", "machine", "model", "types", "strategies"}
_ROWS = {"rows", "failed"}


def _differences(a: BenchResult, b: BenchResult) -> Iterator[Difference]:
    yield from _of_fields("machine", a.machine, b.machine)
    yield from _of_fields("model", a.model, b.model)
    yield from _of_fields("", a, b, without=_NUMBERS)
    if a.strategies is not None and b.strategies is not None:
        yield from _of_fields("strategies", a.strategies, b.strategies, without=_ROWS)
    types_b = {row.label: row for row in b.types}
    for row in a.types:
        other = types_b.get(row.label)
        if other is None or None in (row.flash_attn, other.flash_attn):
            continue
        for name in ("flash_attn", "n_ctx", "n_branches"):
            one, two = getattr(row, name), getattr(other, name)
            if one != two:
                yield Difference(field=f"type {row.label}.{name}", a=one, b=two)
        one, two = (tuple(length.n_tokens for length in each.lengths) for each in (row, other))
        if one != two:
            yield Difference(field=f"type {row.label}.lengths", a=one, b=two)


def _of_fields(where: str, a: object, b: object, *, without: Set[str] = frozenset()) -> Iterator[Difference]:
    for field in dataclasses.fields(a):  # type: ignore[arg-type]
        one, two = getattr(a, field.name), getattr(b, field.name)
        if field.name not in without and one != two:
            yield Difference(field=f"{where}.{field.name}" if where else field.name, a=one, b=two)


_DOUBTS = {
    "model.digest": "they are of different models",
    "machine.processor": "they were made on different processors",
    "machine.n_cores": "they had different numbers of cores",
    "n_threads": "they used different numbers of threads",
    "strategies.n_users": "their strategies had different numbers of users",
    "strategies.n_prefix": "their strategies had prefixes of different lengths",
    "strategies.n_question": "their strategies had questions of different lengths",
    "strategies.n_answer": "their strategies had answers of different lengths",
    "strategies.shares_prefix": "only in one of them the users share a prefix",
    "strategies.memory_limit_bytes": "users that fit were counted for different amounts of memory",
    "strategies.type_k": "their strategies used different cache types",
    "strategies.type_v": "their strategies used different cache types",
    "strategies.flash_attn": "their strategies differ in flash attention",
}


def _doubts(a: BenchResult, b: BenchResult, fields: Sequence[str]) -> list[str]:
    found = [_DOUBTS[field] for field in fields if field in _DOUBTS]
    if any(field.endswith(".lengths") for field in fields):
        found.append("they read texts of different lengths")
    for letter, result in (("A", a), ("B", b)):
        if result.interrupted:
            found.append(f"{letter} was interrupted")
    return list(dict.fromkeys(found))
