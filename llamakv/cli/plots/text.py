"""Plots as lines of a terminal. The only user of plotext, which draws the lines; bars and maps are simple enough."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from llamakv.cli.plots import scales
from llamakv.cli.plots.data import Bars, Chart, MapRow, Panel, SectionMap
from llamakv.cli.render.tables import cut, length, painted
from llamakv.cli.streams import one_line
from llamakv.ops.sizes import size

_MOST_COLUMNS = 120
_LEAST_COLUMNS = 40
_SIGNS = "ox+*#@%&"
"""What the lines are made of, one sign each, so that no colour is needed to tell them apart."""
_COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red")
_PLAIN = str.maketrans("┌┐└┘├┤┬┴┼│─█▒·–µ…", "++++|++++|-#:.-u.")


def panel_text(panel: Panel, *, width: int, height: int, colour: bool, unicode: bool) -> str:
    """Return a panel of at most so many columns, and about so many lines where it is a chart."""
    n_columns = min(max(width, _LEAST_COLUMNS), _MOST_COLUMNS)
    if isinstance(panel, Chart):
        lines = _chart_lines(panel, n_columns, max(height, 8), colour=colour)
    else:
        lines = _bar_lines(panel, n_columns, colour=colour)
    return _joined([*_title(panel.title, n_columns, colour=colour), *lines], unicode=unicode)


def _joined(lines: Sequence[str], *, unicode: bool) -> str:
    text = "".join(line.rstrip(" ") + "\n" for line in lines)
    return text if unicode else text.translate(_PLAIN).encode("ascii", "replace").decode()


def _title(text: str, n_columns: int, *, colour: bool) -> list[str]:
    lines = _wrapped(one_line(text), n_columns)
    return [painted(line, "bold") for line in lines] if colour else lines


def _wrapped(text: str, n_columns: int) -> list[str]:
    """A text in lines, all of it, however wide its characters are."""
    lines, line = [], ""
    for word in text.split(" "):
        joined = f"{line} {word}" if line else word
        if length(joined) <= n_columns:
            line = joined
            continue
        if line:
            lines.append(line)
        line = ""
        for sign in word:  # one that is too long for a line goes on in the next
            if length(line + sign) > n_columns:
                lines.append(line)
                line = ""
            line += sign
    return [*lines, line]


# ---------------------------------------------------------------- lines


def _chart_lines(chart: Chart, n_columns: int, n_lines: int, *, colour: bool) -> list[str]:
    import plotext

    figure = plotext.figure  # the library's only one
    across, up = scales.x_axis(chart), scales.y_axis(chart, n_most=max(3, n_lines // 2 - 2))
    figure.clear()
    try:
        figure.theme("simple" if colour else "colorless")
        figure.plot_size(n_columns, n_lines - 3)
        figure.legend(False)
        for index, series in enumerate(chart.series):
            shown = scales.points(chart, series.xs, series.ys)
            if not shown:
                continue
            sign, paint = _SIGNS[index % len(_SIGNS)], _COLOURS[index % len(_COLOURS)]
            line = figure.signal(
                [across.place(x) for x, _ in shown],
                [up.place(y) for _, y in shown],
                marker=plotext.marker(sign, paint) if colour else sign,
            )
            line.lines(True)
            figure.draw(line)
        for side, axis in (("x", across), ("y", up)):
            ruler = figure.ruler(side)
            ruler.lim(0.0, 1.0)
            ruler.ticks([axis.place(at) for at, _ in axis.ticks], [text for _, text in axis.ticks])
        drawn = str(figure.build())
    finally:
        figure.clear()
    lines = (drawn if colour else plotext.uncolorize(drawn)).splitlines()
    labels = (("up", chart.y_label), ("right", chart.x_label))
    axes = [line for way, label in labels for line in _wrapped(f"{way}: {label}", n_columns)]
    return [*lines, *axes, *_legend([series.label for series in chart.series], n_columns, colour=colour)]


def _legend(labels: Sequence[str], n_columns: int, *, colour: bool) -> list[str]:
    lines: list[str] = []
    used = n_columns
    for index, label in enumerate(labels):
        sign, text = _SIGNS[index % len(_SIGNS)], cut(one_line(label), n_columns - 4)
        shown = painted(sign, _COLOURS[index % len(_COLOURS)]) if colour else sign
        n_needed = 4 + length(text)
        if used + n_needed > n_columns:
            lines.append("")
            used = 0
        lines[-1] += f"{shown} {text}  "
        used += n_needed
    return lines


# ---------------------------------------------------------------- bars


def _bar_lines(bars: Bars, n_columns: int, *, colour: bool) -> list[str]:
    values = [value for _, series in bars.series for value in series if value is not None]
    most = max(values, default=0.0)
    names = [
        (one_line(f"{label}, {name}" if len(bars.series) > 1 else label), value, number)
        for index, label in enumerate(bars.labels)
        for number, (name, value) in enumerate((name, series[index]) for name, series in bars.series)
    ]
    n_name = min(max((length(name) for name, _, _ in names), default=0), n_columns // 3)
    texts = ["not measured" if value is None else scales.bar_text(value, bars.unit) for _, value, _ in names]
    n_room = n_columns - n_name - max(map(len, texts), default=0) - 3
    lines = []
    for (name, value, number), text in zip(names, texts, strict=True):
        name = cut(name, n_name)
        bar = "█" * max(1, round(n_room * value / most)) if value and most > 0 else ""
        shown = painted(bar, _COLOURS[number % len(_COLOURS)]) if colour else bar
        lines.append(f"{name}{' ' * (n_name - length(name))}  {shown}{' ' if bar else ''}{text}")
    return [*lines, cut(bars.value_label, n_columns)]


# ---------------------------------------------------------------- sections


def map_text(section_map: SectionMap, *, width: int, colour: bool, unicode: bool) -> str:
    """Return a line for each kind of section: what is stored for this session alone, what is shared, and nothing."""
    n_columns = min(max(width, _LEAST_COLUMNS), _MOST_COLUMNS)
    kinds = section_map.by_kind()
    n_name = max((len(name) for name in kinds), default=0)
    n_cells = n_columns - n_name - 2
    n_positions = max(1, section_map.n_positions)
    lines = _title(section_map.title, n_columns, colour=colour)
    for name, rows in kinds.items():
        stored, raw = sum(row.stored_bytes for row in rows), sum(row.raw_bytes for row in rows)
        lines.append(f"{name.ljust(n_name)}  {_strip(rows, n_positions, n_cells, colour=colour)}")
        count = f"{len(rows):,} section{'' if len(rows) == 1 else 's'}"
        lines.append(f"{' ' * n_name}  {cut(f'{count}, {size(stored)} stored of {size(raw)} of state', n_cells)}")
    last = f"{section_map.n_positions:,}"
    lines.append(f"{' ' * n_name}  0{' ' * (n_cells - 1 - len(last))}{last}")
    own, shared = (painted("█", "blue"), painted("▒", "yellow")) if colour else ("█", "▒")
    legend = f"positions from left to right   {own} stored for this session only   {shared} shared"
    return _joined([*lines, legend], unicode=unicode)


def _strip(rows: Sequence[MapRow], n_positions: int, n_cells: int, *, colour: bool) -> str:
    cells = ["·"] * n_cells
    for row in rows:
        first = min(n_cells - 1, row.p0 * n_cells // n_positions)
        last = max(first + 1, math.ceil(row.p1 * n_cells / n_positions)) if row.p1 > row.p0 else first + 1
        cells[first:last] = ("▒" if row.is_shared else "█") * (last - first)
        if row.p1 > row.p0 > 0 and (row.p1 - row.p0) * n_cells >= 4 * n_positions:
            cells[first] = "│"  # where a section begins, where there is room to show that
    strip = "".join(cells)
    if not colour:
        return strip
    return re.sub("█+|▒+", lambda run: painted(run[0], "blue" if run[0][0] == "█" else "yellow"), strip)
