"""From how many tokens on resuming is faster, made out from a few measured lengths."""

from __future__ import annotations

import pytest

from llamakv.ops.bench.break_even import (
    Noise,
    break_even,
    break_even_cold,
    break_even_warm,
    noise_cold,
    noise_warm,
)
from llamakv.ops.bench.results import BreakEven, LengthTimes, Spread


def at(n_tokens: int | None) -> BreakEven:
    return BreakEven(n_tokens=n_tokens, at_most=False)


def row(n_tokens: int, read_s: list[float], warm_s: list[float], cold_s: list[float] | None = None) -> LengthTimes:
    return LengthTimes(
        n_tokens=n_tokens,
        prefill_s=Spread.of(read_s),
        save_s=Spread.of([1.0]),
        resume_cold_s=None if cold_s is None else Spread.of(cold_s),
        resume_warm_s=Spread.of(warm_s),
        cold_resident_bytes=None,
        raw_bytes=1,
        file_bytes=1,
    )


def test_between_two_lengths_it_lies_where_the_lines_cross() -> None:
    assert break_even([(10, 1.0, 2.0), (20, 3.0, 2.0)]) == at(15)
    assert break_even([(10, 1.0, 4.0), (20, 3.0, 2.0)]) == at(18)  # 10 + 10 x 3 / 4, rounded up


def test_a_crossing_is_rounded_up_to_whole_tokens_within_its_neighbours() -> None:
    assert break_even([(10, 1.0, 1.0), (20, 3.0, 2.0)]) == at(11)  # at 10 they are equal: no gain yet
    assert break_even([(10, 1.0, 100.0), (11, 2.0, 1.0)]) == at(11)


def test_faster_at_the_shortest_length_is_at_most() -> None:
    assert break_even([(16, 2.0, 1.0), (32, 4.0, 1.0)]) == BreakEven(n_tokens=16, at_most=True)
    assert break_even([(16, 2.0, 1.0)]) == BreakEven(n_tokens=16, at_most=True)


@pytest.mark.parametrize(
    "points",
    [
        [(16, 1.0, 2.0), (32, 2.0, 3.0)],
        [(16, 1.0, 1.0)],
        [(16, 1.0, 2.0), (32, 3.0, 2.0), (64, 4.0, 5.0)],  # at one length only, by chance
        [(16, 2.0, 1.0), (32, 2.0, 3.0)],
    ],
)
def test_never_faster_for_good_is_none(points: list[tuple[int, float, float]]) -> None:
    assert break_even(points) == at(None)


def test_noise_before_the_crossing_that_stays_does_not_count() -> None:
    points = [(8, 2.0, 1.0), (16, 1.0, 2.0), (32, 3.0, 2.0), (64, 1.0, 2.0), (128, 4.0, 1.0), (256, 9.0, 1.0)]
    assert break_even(points) == at(80)  # between 64 and 128: a loss of 1, then a gain of 3


def test_the_order_of_the_points_does_not_matter() -> None:
    assert break_even([(20, 3.0, 2.0), (10, 1.0, 2.0)]) == at(15)


def test_no_points_or_the_same_length_twice_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        break_even([])
    with pytest.raises(ValueError, match="different lengths"):
        break_even([(10, 1.0, 2.0), (10, 1.0, 2.0)])


def test_medians_count() -> None:
    rows = [row(10, [1.0, 1.0, 90.0], [2.0, 2.0, 0.1]), row(20, [3.0, 3.0, 0.1], [2.0, 2.0, 90.0])]
    assert break_even_warm(rows) == at(15)


def test_cold_is_made_out_only_where_every_length_was_cold() -> None:
    short, long = row(10, [1.0], [0.5], [2.0]), row(20, [3.0], [0.5], [2.0])
    assert break_even_cold([short, long]) == at(15)
    assert break_even_cold([short, row(20, [3.0], [0.5])]) is None
    assert break_even_cold([]) is None


def test_noise_is_where_the_fastest_and_the_slowest_repeats_would_have_it() -> None:
    rows = [row(10, [0.5, 1.0, 1.5], [2.0, 2.0, 2.5]), row(20, [2.75, 3.0, 3.5], [1.5, 2.0, 2.5])]
    assert break_even_warm(rows) == at(15)
    assert noise_warm(rows) == Noise(least=at(12), most=at(19))  # losses of 0.5 and 2, gains of 2 and 0.25
    wide = [row(10, [0.5, 3.0], [2.0, 2.5]), row(20, [1.0, 3.5], [1.5, 2.5])]
    assert noise_warm(wide) == Noise(least=BreakEven(n_tokens=10, at_most=True), most=at(None))


def test_what_was_measured_once_says_nothing_about_noise() -> None:
    assert noise_warm([row(10, [1.0], [2.0]), row(20, [3.0], [2.0])]) is None
    assert noise_warm([]) is None
    assert noise_cold([row(10, [1.0, 1.0], [2.0, 2.0]), row(20, [3.0, 3.0], [2.0, 2.0], [2.0, 2.0])]) is None
    assert noise_cold([row(10, [1.0, 1.0], [2.0, 2.0], [0.5, 0.5])]) == Noise(
        least=BreakEven(n_tokens=10, at_most=True), most=BreakEven(n_tokens=10, at_most=True)
    )
