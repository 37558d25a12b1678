"""A result as a list of single measurements: for tables of numbers, and to set two results against each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from llamakv.ops.bench.results import BenchResult, BreakEven, LengthTimes, Spread, StrategyResult, TypeResult

Unit = Literal["bytes", "s", "tokens/s", "tokens", "nats", "ratio", "users", "processes"]
Better = Literal["less", "more", "neither"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One thing that was measured: of a cache type or a strategy (``of``, ``name``), with a text of ``n_tokens`` where
    it depends on that. ``least`` and ``most`` equal ``median`` where it was measured once, but for the wait of several
    users in one run (``first_token_s``: ``n_runs`` is 1, ``least`` and ``most`` are theirs). A number of tokens may be
    infinite: never; it is derived from noisy times, so neither more nor less is called better. ``is_at_most``: it may
    be smaller, the shortest text measured was no shorter."""

    of: Literal["type", "strategy"]
    name: str
    n_tokens: int | None
    metric: str
    unit: Unit
    better: Better
    n_runs: int
    least: float
    median: float
    most: float
    is_at_most: bool = False


def measures(result: BenchResult) -> tuple[Measure, ...]:
    """All that was measured, in the order of the result; what was not is left out."""
    return (
        *(measure for row in result.types for measure in _of_type(row)),
        *(measure for row in (result.strategies.rows if result.strategies else ()) for measure in _of_strategy(row)),
    )


_Value = float | Spread | BreakEven | None


def _of_type(row: TypeResult) -> Iterator[Measure]:
    values: tuple[tuple[str, Unit, Better, _Value], ...] = (
        ("break_even_warm", "tokens", "neither", row.break_even_warm),
        ("break_even_cold", "tokens", "neither", row.break_even_cold),
        ("state_bytes_per_token", "bytes", "less", row.state_bytes_per_token),
        ("context_bytes", "bytes", "less", row.context_bytes),
        ("peak_rss_bytes", "bytes", "less", row.peak_rss_bytes),
        ("prompt_tokens_per_s", "tokens/s", "more", row.prompt_tokens_per_s),
        ("decode_tokens_per_s", "tokens/s", "more", row.decode_tokens_per_s),
        ("fork_s", "s", "less", row.fork_s),
        ("mean_kl", "nats", "less", None if row.output is None else row.output.mean_kl),
        ("most_kl", "nats", "less", None if row.output is None else row.output.most_kl),
        ("top_agreement", "ratio", "more", None if row.output is None else row.output.top_agreement),
    )
    yield from _measures("type", row.label, None, values)
    for length in row.lengths:
        yield from _measures("type", row.label, length.n_tokens, _of_length(length))


def _of_length(length: LengthTimes) -> tuple[tuple[str, Unit, Better, _Value], ...]:
    return (
        ("prefill_s", "s", "less", length.prefill_s),
        ("save_s", "s", "less", length.save_s),
        ("resume_warm_s", "s", "less", length.resume_warm_s),
        ("resume_cold_s", "s", "less", length.resume_cold_s),
        ("raw_bytes", "bytes", "less", length.raw_bytes),
        ("file_bytes", "bytes", "less", length.file_bytes),
    )


def _of_strategy(row: StrategyResult) -> Iterator[Measure]:
    values: tuple[tuple[str, Unit, Better, _Value], ...] = (
        ("peak_bytes", "bytes", "less", row.peak_bytes),
        ("weights_bytes", "bytes", "less", row.weights_bytes),
        ("context_bytes", "bytes", "less", row.context_bytes),
        ("cell_bytes", "bytes", "less", row.cell_bytes),
        ("first_token_s", "s", "less", row.first_token_s),
        ("elapsed_s", "s", "less", row.elapsed_s),
        ("preparation_s", "s", "less", row.preparation_s),
        ("tokens_per_s", "tokens/s", "more", row.tokens_per_s),
        ("hit_rate", "ratio", "more", row.hit_rate),
        ("bytes_read", "bytes", "less", row.bytes_read),
        ("bytes_written", "bytes", "less", row.bytes_written),
        ("n_users_that_fit", "users", "more", row.n_users_that_fit),
        ("n_processes", "processes", "neither", row.n_processes),
    )
    for measure in _measures("strategy", row.name, None, values):
        yield replace(measure, n_runs=1) if measure.metric == "first_token_s" else measure


def _measures(
    of: Literal["type", "strategy"],
    name: str,
    n_tokens: int | None,
    values: tuple[tuple[str, Unit, Better, _Value], ...],
) -> Iterator[Measure]:
    for metric, unit, better, value in values:
        is_at_most = isinstance(value, BreakEven) and value.at_most
        if isinstance(value, BreakEven):
            value = math.inf if value.n_tokens is None else value.n_tokens
        if value is None:
            continue
        spread = value if isinstance(value, Spread) else Spread.of([value])
        yield Measure(
            of=of,
            name=name,
            n_tokens=n_tokens,
            metric=metric,
            unit=unit,
            better=better,
            n_runs=spread.n_runs,
            least=spread.least,
            median=spread.median,
            most=spread.most,
            is_at_most=is_at_most,
        )
