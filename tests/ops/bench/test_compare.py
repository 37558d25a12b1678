"""Two results set against each other: what differs, and which of them is better, where that can be told."""

from __future__ import annotations

import dataclasses
import math

import pytest

from llamakv.ops.bench.compare import Comparison, Pair, Verdict, compare_results
from llamakv.ops.bench.measures import measures
from llamakv.ops.bench.results import BenchResult, BreakEven, OutputChange, Spread
from tests.cli import bench_samples as samples


def of_f16(**changes: object) -> BenchResult:
    """A result of f16 alone."""
    return samples.result(types=(samples.type_result(**changes),), strategies=None)


def pair(found: Comparison, metric: str, n_tokens: int | None = None) -> Pair:
    (one,) = [each for each in found.pairs if each.a.metric == metric and each.a.n_tokens == n_tokens]
    return one


def speeds(*values: float) -> BenchResult:
    return of_f16(prompt_tokens_per_s=Spread.of(values))


def test_a_result_is_the_same_as_itself() -> None:
    found = compare_results(samples.result(), samples.result())
    assert (found.differences, found.doubts, found.only_a, found.only_b) == ((), (), (), ())
    assert {each.verdict for each in found.pairs} == {Verdict.SAME}
    assert len(found.pairs) == len(measures(samples.result())) > 100


@pytest.mark.parametrize(
    ("a", "b", "ratio", "verdict"),
    [
        (speeds(100, 110, 120), speeds(200, 220, 240), 2.0, Verdict.BETTER),
        (speeds(200, 220, 240), speeds(100, 110, 120), 0.5, Verdict.WORSE),
        (speeds(100, 110, 120), speeds(119, 121, 130), 1.1, Verdict.UNCLEAR),
        (speeds(100), speeds(200), 2.0, Verdict.UNCLEAR),
        (speeds(100), speeds(100), 1.0, Verdict.SAME),
    ],
)
def test_more_speed_is_better_where_the_ranges_are_apart(
    a: BenchResult, b: BenchResult, ratio: float, verdict: Verdict
) -> None:
    found = pair(compare_results(a, b), "prompt_tokens_per_s")
    assert found.b_over_a == pytest.approx(ratio)
    assert found.verdict is verdict


def test_less_time_and_less_memory_are_better() -> None:
    a = of_f16(fork_s=Spread.of([1.0, 1.1]), context_bytes=100)
    b = of_f16(fork_s=Spread.of([0.5, 0.6]), context_bytes=101)
    found = compare_results(a, b)
    assert pair(found, "fork_s").verdict is Verdict.BETTER
    assert pair(found, "context_bytes").verdict is Verdict.WORSE


def test_never_is_told_and_has_no_ratio() -> None:
    a = of_f16(break_even_warm=BreakEven(n_tokens=None, at_most=False))
    found = pair(compare_results(a, of_f16()), "break_even_warm")
    assert (found.a.median, found.b.median, found.b_over_a) == (math.inf, 62, None)
    assert found.verdict is Verdict.UNCLEAR


def test_nothing_over_nothing_has_no_ratio() -> None:
    a, b = samples.result(), samples.result()
    found = [each for each in compare_results(a, b).pairs if each.a.metric == "bytes_read" and each.a.name == "none"]
    assert [each.b_over_a for each in found] == [None]


def test_times_are_paired_by_length() -> None:
    short = of_f16(lengths=(samples.length(62), samples.length(300)))
    found = compare_results(of_f16(), short)
    assert {each.a.n_tokens for each in found.pairs if each.a.metric == "prefill_s"} == {62}
    assert "they read texts of different lengths" in found.doubts


def test_what_only_one_has_is_named() -> None:
    a = samples.result(types=(samples.type_result(), samples.refused("q4_0")))
    b = samples.result(
        types=(samples.type_result("q4_0"),), strategies=samples.strategies(rows=(samples.strategy("none"),))
    )
    found = compare_results(a, b)
    assert found.only_a == ("type f16", "strategy in-process", "strategy cross-process", "strategy hybrid")
    assert found.only_b == ("type q4_0",)
    assert {each.a.name for each in found.pairs} == {"none"}


@pytest.mark.parametrize(
    ("b", "field", "values", "doubt"),
    [
        (samples.result(n_threads=4), "n_threads", (2, 4), "they used different numbers of threads"),
        (
            samples.result(model=dataclasses.replace(samples.MODEL, digest="cd")),
            "model.digest", ("ab" * 32, "cd"), "they are of different models",
        ),
        (
            samples.result(machine=dataclasses.replace(samples.MACHINE, processor="Other")),
            "machine.processor", ("Example CPU 3000 @ 2.60GHz", "Other"), "they were made on different processors",
        ),
        (
            samples.result(strategies=samples.strategies(shares_prefix=False)),
            "strategies.shares_prefix", (True, False), "only in one of them the users share a prefix",
        ),
    ],
)  # fmt: skip
def test_what_differs_is_told_and_doubted(
    b: BenchResult, field: str, values: tuple[object, object], doubt: str
) -> None:
    found = compare_results(samples.result(), b)
    assert [(each.field, each.a, each.b) for each in found.differences] == [(field, *values)]
    assert found.doubts == (doubt,)


def test_another_version_is_told_and_no_doubt() -> None:
    b = samples.result(machine=dataclasses.replace(samples.MACHINE, llamakv="0.2.0"), n_repeats=5)
    found = compare_results(samples.result(), b)
    assert [each.field for each in found.differences] == ["machine.llamakv", "n_repeats"]
    assert found.doubts == ()


def test_an_interrupted_result_is_doubted() -> None:
    assert compare_results(samples.result(), samples.result(interrupted=True)).doubts == ("B was interrupted",)


def of_strategies(**changes: object) -> BenchResult:
    """Strategies of the sample, each with some changes."""
    found = samples.result().strategies
    assert found is not None
    limit = changes.pop("memory_limit_bytes", found.memory_limit_bytes)
    rows = tuple(dataclasses.replace(row, **changes) for row in found.rows)  # type: ignore[arg-type]
    return samples.result(types=(), strategies=dataclasses.replace(found, rows=rows, memory_limit_bytes=limit))


def test_how_long_users_of_one_run_waited_is_no_range_of_repeats() -> None:
    a, b = of_strategies(first_token_s=Spread.of([1.0, 1.1])), of_strategies(first_token_s=Spread.of([2.0, 2.1]))
    waits = [each for each in compare_results(a, b).pairs if each.a.metric == "first_token_s"]
    assert {(each.a.n_runs, each.a.least, each.a.most) for each in waits} == {(1, 1.0, 1.1)}
    assert {each.verdict for each in waits} == {Verdict.UNCLEAR}


def test_users_that_fit_different_amounts_of_memory_are_not_better_or_worse() -> None:
    a, b = of_strategies(n_users_that_fit=10), of_strategies(n_users_that_fit=20)
    same = [each.verdict for each in compare_results(a, b).pairs if each.a.metric == "n_users_that_fit"]
    assert set(same) == {Verdict.BETTER}
    b = of_strategies(n_users_that_fit=20, memory_limit_bytes=1 << 40)
    found = compare_results(a, b)
    assert {each.verdict for each in found.pairs if each.a.metric == "n_users_that_fit"} == {Verdict.UNCLEAR}
    assert found.doubts == ("users that fit were counted for different amounts of memory",)


def test_what_is_not_a_number_is_neither_better_nor_worse() -> None:
    a = of_f16(output=OutputChange(n_positions=1, mean_kl=math.nan, most_kl=math.nan, top_agreement=1.0))
    b = of_f16(output=OutputChange(n_positions=1, mean_kl=0.1, most_kl=0.1, top_agreement=1.0))
    assert pair(compare_results(a, b), "mean_kl").verdict is Verdict.UNCLEAR


@pytest.mark.parametrize(("n_bytes", "verdict"), [(1009, Verdict.SAME), (991, Verdict.SAME), (1010, Verdict.WORSE)])
def test_memory_measured_once_that_differs_by_less_than_a_hundredth_is_the_same(n_bytes: int, verdict: Verdict) -> None:
    found = compare_results(of_f16(peak_rss_bytes=1000), of_f16(peak_rss_bytes=n_bytes))
    assert pair(found, "peak_rss_bytes").verdict is verdict


def test_sizes_that_no_run_finds_otherwise_are_told_apart() -> None:
    found = compare_results(of_f16(context_bytes=10_000), of_f16(context_bytes=10_001))
    assert pair(found, "context_bytes").verdict is Verdict.WORSE


def test_so_many_or_fewer_is_not_the_same_as_so_many() -> None:
    a, b = (of_f16(break_even_warm=BreakEven(n_tokens=62, at_most=at_most)) for at_most in (True, False))
    found = pair(compare_results(a, b), "break_even_warm")
    assert (found.a.is_at_most, found.b.is_at_most, found.verdict) == (True, False, Verdict.UNCLEAR)


def test_a_row_without_any_times_is_no_row_of_a_result() -> None:
    failed = samples.result(
        types=(samples.type_result(), dataclasses.replace(samples.refused(), refused=None, failed="x"))
    )
    assert compare_results(failed, of_f16()).only_a == tuple(
        f"strategy {row.name}" for row in samples.strategies().rows
    )
