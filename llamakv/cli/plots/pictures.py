"""Plots as SVG and PNG files. The only user of matplotlib; no display, nothing of the user's own settings."""

from __future__ import annotations

import contextlib
import io
import logging
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from llamakv.cli.plots import scales
from llamakv.cli.plots.data import Bars, Chart, MapRow, Panel, SectionMap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by colour-blind people; yellow, too pale on white, is left out
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX*"
_DASHES: tuple[str | tuple[int, tuple[int, ...]], ...] = ("-", (0, (5, 2)), "-.", ":", (0, (3, 1, 1, 1, 1, 1)))
_HATCHES = ("", "///", "...", "xxx", "\\\\\\")
_SETTINGS = {
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",  # text that can be searched and read aloud
    "svg.hashsalt": "llamakv",  # else ids are random
    "text.parse_math": False,
}
_WIDTH_INCHES = 8.0
_TITLE_SIGNS = 62  # of a bold title of 13 points in a line: measured, 62 wide capital letters are about 8 inches


@contextlib.contextmanager
def _prepared() -> Iterator[None]:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib import style

    with warnings.catch_warnings(), style.context(["default", _SETTINGS], after_reset=True):
        warnings.simplefilter("ignore")  # characters that no font here has
        yield


def draw_panels(title: str, panels: Sequence[Panel], note: str, kind: str) -> bytes:
    """Return the bytes of a picture of a ``kind`` (``svg``, ``png``): panels below each other."""
    with _prepared():
        from matplotlib.figure import Figure

        heights = [_height(panel) for panel in panels]
        figure = Figure(figsize=(_WIDTH_INCHES, sum(heights) + 0.6), layout="constrained")
        places = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
        for (axes,), panel in zip(places, panels, strict=True):
            if isinstance(panel, Chart):
                _draw_lines(axes, panel)
            else:
                _draw_bars(axes, panel)
            if len(panels) > 1:
                axes.set_title(panel.title, loc="left")
        _head(figure, title, note)
        return _bytes(figure, kind)


def _height(panel: Panel) -> float:
    if isinstance(panel, Chart):
        return 4.4
    return 0.95 + 0.3 * len(panel.labels) * len(panel.series) + 0.12 * len(panel.labels)


def _head(figure: Figure, title: str, note: str) -> None:
    figure.suptitle("\n".join(textwrap.wrap(title, _TITLE_SIGNS)), fontsize=13, fontweight="bold")
    if note:
        figure.supxlabel("\n".join(textwrap.wrap(note, 105)), fontsize=8.5, color="#555555", x=0.01, ha="left")


def _bytes(figure: Figure, kind: str) -> bytes:
    target = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    figure.savefig(target, format=kind, dpi=150, metadata=metadata)
    return target.getvalue()


# ---------------------------------------------------------------- lines and bars


def _draw_lines(axes: Axes, chart: Chart) -> None:
    for index, series in enumerate(chart.series):
        shown = scales.points(chart, series.xs, series.ys)
        axes.plot(
            [x for x, _ in shown],
            [y for _, y in shown],
            label="\n".join(textwrap.wrap(series.label, 26)),
            color=_COLOURS[index % len(_COLOURS)],
            marker=_MARKERS[index % len(_MARKERS)],
            linestyle=_DASHES[index % len(_DASHES)],
            linewidth=1.8,
            markersize=6,
            clip_on=False,
        )
    across, up = scales.x_axis(chart), scales.y_axis(chart)
    if across.scale == "log2":
        axes.set_xscale("log", base=2)
    if up.scale == "log2":
        axes.set_yscale("log", base=2)
    axes.set_xticks([at for at, _ in across.ticks], [text for _, text in across.ticks])
    axes.set_yticks([at for at, _ in up.ticks], [text for _, text in up.ticks])
    axes.minorticks_off()
    axes.set_xlim(across.low, across.high)
    axes.set_ylim(up.low, up.high)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel("\n".join(textwrap.wrap(chart.y_label, 48)))
    axes.grid(True)
    if len(chart.series) > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, borderaxespad=0.0)


def _draw_bars(axes: Axes, bars: Bars) -> None:
    n_series = len(bars.series)
    thickness = 0.78 / max(1, n_series)
    values = [value for _, series in bars.series for value in series if value is not None]
    along = scales.value_axis(values, bars.unit)
    for index, (label, series) in enumerate(bars.series):
        places = [group + (index - (n_series - 1) / 2) * thickness for group in range(len(bars.labels))]
        axes.barh(
            places, [value or 0.0 for value in series], height=thickness * 0.9, label=label,
            color=_COLOURS[index % len(_COLOURS)], hatch=_HATCHES[index % len(_HATCHES)], edgecolor="white",
            linewidth=0,
        )  # fmt: skip
        for place, value in zip(places, series, strict=True):
            text = "not measured" if value is None else scales.bar_text(value, bars.unit)
            axes.text((value or 0.0) + 0.008 * along.high, place, text, va="center", fontsize=9.5)
    axes.set_yticks(range(len(bars.labels)), list(bars.labels))
    axes.invert_yaxis()
    axes.set_xlim(0, along.high * 1.08)
    axes.set_xticks([at for at, _ in along.ticks], [text for _, text in along.ticks])
    axes.set_xlabel(bars.value_label)
    axes.grid(True, axis="x")
    axes.tick_params(axis="y", length=0)
    if n_series > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, borderaxespad=0.0)


# ---------------------------------------------------------------- sections


def draw_section_map(section_map: SectionMap, kind: str) -> bytes:
    """Return the bytes of a picture of a session's sections: how large each is, over the positions it holds."""
    kinds = section_map.by_kind()
    with _prepared():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(_WIDTH_INCHES, 1.1 + 2.5 * max(1, len(kinds))), layout="constrained")
        places = figure.subplots(max(1, len(kinds)), 1, squeeze=False, sharex=True)
        for (axes,), (name, rows) in zip(places, kinds.items(), strict=False):
            _draw_sections(axes, name, rows, section_map.n_positions)
        _set_positions(places[-1][0], section_map.n_positions)
        _explain(figure)
        _head(figure, section_map.title, "")
        return _bytes(figure, kind)


def _draw_sections(axes: Axes, name: str, rows: Sequence[MapRow], n_positions: int) -> None:
    thin = max(1.0, n_positions / 150)  # a state at one position: wide enough to be seen
    for row in rows:
        left, width = (row.p0, row.p1 - row.p0) if row.p0 < row.p1 else (row.p1 - thin / 2, thin)
        axes.bar(
            left, row.stored_bytes, width, align="edge", edgecolor="white", linewidth=0.6,
            color=_COLOURS[row.is_shared], hatch="////" if row.is_shared else "",
        )  # fmt: skip
        axes.bar(left, row.raw_bytes, width, align="edge", fill=False, edgecolor="#444444", linewidth=0.7)
    up = scales.value_axis((max(row.raw_bytes, row.stored_bytes) for row in rows), "bytes", n_most=5)
    axes.set_yticks([at for at, _ in up.ticks], [text for _, text in up.ticks])
    axes.set_ylabel("size of a section")
    stored, raw = sum(row.stored_bytes for row in rows), sum(row.raw_bytes for row in rows)
    amounts = f"{scales.bar_text(stored, 'bytes')} stored of {scales.bar_text(raw, 'bytes')} of state"
    axes.set_title(f"{name}: {len(rows):,} section{'' if len(rows) == 1 else 's'}, {amounts}", loc="left")
    axes.grid(True, axis="y")


def _set_positions(axes: Axes, n_positions: int) -> None:
    along = scales.value_axis([n_positions], "", n_most=9)
    axes.set_xticks([at for at, _ in along.ticks], [text for _, text in along.ticks])
    axes.set_xlim(0, max(1, n_positions) * 1.005)
    axes.set_xlabel("position (token) in the session")


def _explain(figure: Figure) -> None:
    from matplotlib.patches import Patch

    figure.legend(
        handles=[
            Patch(color=_COLOURS[0], label="stored for this session only"),
            Patch(facecolor=_COLOURS[1], hatch="////", edgecolor="white", label="stored, shared with others"),
            Patch(fill=False, edgecolor="#444444", label="before compression"),
        ],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
