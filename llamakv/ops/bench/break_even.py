"""From how many tokens on it pays to bring a session back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llamakv.ops.bench.results import BreakEven, LengthTimes, Spread


def break_even_warm(lengths: Sequence[LengthTimes]) -> BreakEven:
    """Where resuming from a file in the page cache begins to be faster, going by median times."""
    return break_even([(row.n_tokens, row.prefill_s.median, row.resume_warm_s.median) for row in lengths])


def break_even_cold(lengths: Sequence[LengthTimes]) -> BreakEven | None:
    """The same for a file that is not in the page cache; None if that was not measured at each length."""
    points = [
        (row.n_tokens, row.prefill_s.median, row.resume_cold_s.median)
        for row in lengths
        if row.resume_cold_s is not None
    ]
    return break_even(points) if points and len(points) == len(lengths) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How certain a break-even is: it lies between ``least`` and ``most``, where the luckiest repeats of resuming meet
    the slowest of reading, and the other way round."""

    least: BreakEven
    most: BreakEven


def noise_warm(lengths: Sequence[LengthTimes]) -> Noise | None:
    """The noise of ``break_even_warm``; None if all was measured once only, which says nothing of it."""
    return _noise([(row.n_tokens, row.prefill_s, row.resume_warm_s) for row in lengths])


def noise_cold(lengths: Sequence[LengthTimes]) -> Noise | None:
    """The same for ``break_even_cold``; None, too, where there is none."""
    times = [(row.n_tokens, row.prefill_s, row.resume_cold_s) for row in lengths if row.resume_cold_s is not None]
    return _noise(times) if len(times) == len(lengths) else None


def _noise(times: Sequence[tuple[int, Spread, Spread]]) -> Noise | None:
    if max((read.n_runs for _, read, _ in times), default=1) == 1:
        return None
    return Noise(
        least=break_even([(n, read.most, resume.least) for n, read, resume in times]),
        most=break_even([(n, read.least, resume.most) for n, read, resume in times]),
    )


def break_even(points: Sequence[tuple[int, float, float]]) -> BreakEven:
    """The smallest number of tokens from which on resuming is faster at every length measured.

    A point is a number of tokens and the seconds that reading and resuming take. Between two neighbouring lengths both
    times are taken to lie on straight lines, and a crossing is rounded up to whole tokens. Equal times are no gain.
    Where resuming is faster for a while and then is not, what counts is where it is so for good.

    Raises:
        ValueError: no points, or two of the same length.
    """
    ordered = sorted(points)
    if not ordered or len({n for n, _, _ in ordered}) < len(ordered):
        raise ValueError("break-even needs points of different lengths")
    gains = [(n, read_s - resume_s) for n, read_s, resume_s in ordered]
    first = len(gains)
    while first > 0 and gains[first - 1][1] > 0:
        first -= 1
    if first == len(gains):
        return BreakEven(n_tokens=None, at_most=False)
    if first == 0:
        return BreakEven(n_tokens=gains[0][0], at_most=True)
    (n0, loss), (n1, gain) = gains[first - 1], gains[first]
    crossing = n0 + (n1 - n0) * -loss / (gain - loss)
    return BreakEven(n_tokens=min(n1, max(n0 + 1, math.ceil(crossing))), at_most=False)
