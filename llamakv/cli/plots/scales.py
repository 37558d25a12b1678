"""Axes: where they begin and end, and ticks that people can read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from llamakv.cli.plots.data import Chart, Scale, Unit
from llamakv.ops.sizes import size

Tick = tuple[float, str]

_CLOSE = 0.06
"""Part of an axis below which two ticks are too close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """From ``low`` to ``high``, with ticks inside."""

    low: float
    high: float
    scale: Scale
    ticks: tuple[Tick, ...]

    def place(self, value: float) -> float:
        """Where on the axis a value is: 0 at its beginning, 1 at its end."""
        low, high, value = (_log(number) if self.scale == "log2" else number for number in (self.low, self.high, value))
        return (value - low) / (high - low)


def x_axis(chart: Chart) -> Axis:
    """The axis along the tokens: on a logarithmic one a tick at each length there is, where there is room."""
    values = sorted({float(x) for series in chart.series for x in series.xs if _can_show(x, chart.x_scale)})
    if chart.x_scale == "linear":
        return _linear(values, "", least=0.0 if values and values[0] >= 0 else None)
    low, high = _apart(*_ends(values))
    axis = Axis(low=low, high=high, scale="log2", ticks=())
    ticks: list[Tick] = []
    for value in values if len(values) <= 12 else _powers(low, high, 8):
        if ticks and axis.place(value) - axis.place(ticks[-1][0]) < _CLOSE * 1.5:
            continue
        ticks.append((value, f"{value:,.0f}"))
    return Axis(low=low, high=high, scale="log2", ticks=tuple(ticks))


def y_axis(chart: Chart, n_most: int = 9) -> Axis:
    """The axis of values."""
    values = sorted(
        {float(y) for series in chart.series for y in series.ys if _can_show(y, chart.y_scale) and math.isfinite(y)}
    )
    if chart.y_scale == "linear":
        return _linear(values, chart.y_unit, least=0.0 if not values or values[0] >= 0 else None, n_most=n_most)
    low, high = _apart(*_ends(values))
    marks = _one_two_five(low, high, n_most)
    ticks = tuple((mark, value_text(mark, chart.y_unit)) for mark in marks)
    return Axis(low=low, high=high, scale="log2", ticks=ticks)


def value_axis(values: Iterable[float], unit: Unit, n_most: int = 6) -> Axis:
    """The axis of bars: from zero, with bytes in powers of a thousand, as in tables."""
    ordered = sorted(values)
    axis = _linear(ordered, "", least=0.0, n_most=n_most)
    return replace(axis, ticks=tuple((at, bar_text(at, unit)) for at, _ in axis.ticks))


def points(chart: Chart, xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """The points of a line that can be shown."""
    return [
        (x, y)
        for x, y in zip(xs, ys, strict=True)
        if _can_show(x, chart.x_scale) and _can_show(y, chart.y_scale) and math.isfinite(y)
    ]


def value_text(value: float, unit: Unit) -> str:
    """A value with its unit, short: ``1.5 MB`` (bytes as tables have them), ``20 ms``, ``1,200``."""
    if unit == "bytes":
        return size(round(value))
    if unit == "s":
        if value == 0:
            return "0 s"
        if value < 0.0009995:
            return f"{_short(value * 1e6)} µs"
        return f"{_short(value * 1000)} ms" if value < 0.9995 else f"{_short(value)} s"
    return _short(value)


def bar_text(value: float, unit: Unit) -> str:
    """What is written beside a bar."""
    return value_text(value, unit)


def _short(value: float) -> str:
    """Three digits that count."""
    far = abs(value)
    digits = 0 if far >= 99.95 or value == round(value) else 1 if far >= 9.995 else 2 if far >= 0.9995 else 3
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


# ---------------------------------------------------------------- where ticks are


def _can_show(value: float, scale: Scale) -> bool:
    return scale == "linear" or value > 0


def _log(value: float) -> float:
    return math.log2(value) if value > 0 else -math.inf


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Both ends of a logarithmic axis, apart from each other whatever there is to show."""
    if not values:
        return 1.0, 2.0
    return (values[0], values[-1]) if values[0] < values[-1] else (values[0] / 2, values[0] * 2)


def _apart(low: float, high: float) -> tuple[float, float]:
    """Both ends a little further out, so that what is drawn there is whole."""
    spread = (high / low) ** 0.04
    return low / spread, high * spread


def _powers(low: float, high: float, n_most: int) -> list[float]:
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    step = next(step for step in range(1, 64) if (last - first) // step < n_most)
    return [2.0**n for n in range(-(-first // step) * step, last + 1, step)]


def _one_two_five(low: float, high: float, n_most: int) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        marks = [factor * 10.0**n for n in decades for factor in factors if low <= factor * 10.0**n <= high]
        if len(marks) <= n_most:
            break
    return marks


def _linear(values: Sequence[float], unit: Unit, *, least: float | None, n_most: int = 8) -> Axis:
    low = values[0] if values and least is None else least or 0.0
    high = values[-1] if values and values[-1] > low else low + 1.0
    step = _step((high - low) / max(1, n_most - 2))
    high = low + math.ceil((high - low) / step - 1e-9) * step
    marks = [low + n * step for n in range(round((high - low) / step) + 1)]
    return Axis(low=low, high=high, scale="linear", ticks=tuple((mark, value_text(mark, unit)) for mark in marks))


def _step(wanted: float) -> float:
    """The next round number: 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= wanted * (1 - 1e-9))
