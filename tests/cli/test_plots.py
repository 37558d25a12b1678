"""Plots: readable ticks, the same bytes each time, and lines for a terminal of any kind."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
import warnings
from pathlib import Path
from xml.etree import ElementTree

import pytest

from llamakv.cli import plots
from llamakv.cli.plots import Bars, Chart, MapRow, SectionMap, Series, scales
from llamakv.cli.plots.text import map_text, panel_text
from llamakv.errors import ExistsError, UsageError, WriteError

MEMORY = Chart(
    title="memory of [a] model $x$",
    x_label="context length (tokens)",
    y_label="memory",
    series=[
        Series(label="f16", xs=[512, 1024, 2048, 4096], ys=[2**20 * n for n in (16, 32, 64, 128)]),
        Series(label="q8_0", xs=[512, 1024, 2048, 4096], ys=[2**20 * n for n in (8, 16, 32, 64)]),
    ],
    x_scale="log2",
    y_scale="log2",
    y_unit="bytes",
)
BARS = Bars(
    title="wait",
    value_label="time to the first token",
    labels=["none", "hybrid"],
    series=[("median", [4.0, 1.0]), ("worst", [8.0, None])],
    unit="s",
)
SECTIONS = SectionMap(
    title="notes",
    sections=[
        MapRow(p0=0, p1=256, kind="cells", raw_bytes=2_000_000, stored_bytes=1_700_000, is_shared=True),
        MapRow(p0=256, p1=512, kind="cells", raw_bytes=2_000_000, stored_bytes=1_700_000, is_shared=False),
        MapRow(p0=512, p1=512, kind="tail", raw_bytes=900, stored_bytes=800, is_shared=False),
    ],
)


def lines_of(panel: plots.Panel, width: int = 80, *, colour: bool = False, unicode: bool = True) -> list[str]:
    return panel_text(panel, width=width, height=18, colour=colour, unicode=unicode).splitlines()


# ---------------------------------------------------------------- axes


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "bytes", "0 B"), (1536, "bytes", "1.5 kB"), (2**20, "bytes", "1.0 MB"), (3 * 2**30, "bytes", "3.2 GB"),
        (0.0000042, "s", "4.2 µs"), (0.052, "s", "52 ms"), (0.9999, "s", "1 s"), (12.34, "s", "12.3 s"),
        (0, "s", "0 s"), (123.4, "", "123"), (12_000, "", "12,000"), (1.25, "", "1.25"),
    ],
)  # fmt: skip
def test_values_are_short_and_name_their_unit(value: float, unit: scales.Unit, text: str) -> None:
    assert scales.value_text(value, unit) == text


def test_lengths_on_a_logarithmic_axis_are_the_ticks() -> None:
    assert scales.x_axis(MEMORY).ticks == ((512, "512"), (1024, "1,024"), (2048, "2,048"), (4096, "4,096"))


def test_lengths_that_are_too_close_have_one_tick() -> None:
    close = dataclasses.replace(MEMORY, series=[Series(label="f16", xs=[250, 500, 1000, 1024], ys=[1, 2, 3, 4])])
    assert [text for _, text in scales.x_axis(close).ticks] == ["250", "500", "1,000"]


def test_memory_has_ticks_in_the_units_of_tables() -> None:
    assert [text for _, text in scales.y_axis(MEMORY).ticks] == ["10.0 MB", "20.0 MB", "50.0 MB", "100 MB"]


def test_memory_on_a_linear_axis_begins_at_zero_in_round_steps() -> None:
    ticks = scales.y_axis(dataclasses.replace(MEMORY, y_scale="linear")).ticks
    assert [text for _, text in ticks] == [
        "0 B", "20.0 MB", "40.0 MB", "60.0 MB", "80.0 MB", "100 MB", "120 MB", "140 MB",
    ]  # fmt: skip


def test_times_have_ticks_at_one_two_five() -> None:
    times = dataclasses.replace(MEMORY, series=[Series(label="f16", xs=[1, 2], ys=[0.04, 6.0])], y_unit="s")
    assert [text for _, text in scales.y_axis(times).ticks] == [
        "50 ms", "100 ms", "200 ms", "500 ms", "1 s", "2 s", "5 s",
    ]  # fmt: skip


@pytest.mark.parametrize(("x_scale", "y_scale"), [("linear", "linear"), ("log2", "log2")])
@pytest.mark.parametrize("points", [([], []), ([100], [5]), ([0, 1], [0, 0]), ([1, 2], [float("inf"), 3])])
def test_any_points_can_be_drawn(
    tmp_path: Path, x_scale: scales.Scale, y_scale: scales.Scale, points: tuple[list[float], list[float]]
) -> None:
    chart = dataclasses.replace(
        MEMORY, series=[Series(label="f16", xs=points[0], ys=points[1])], x_scale=x_scale, y_scale=y_scale
    )
    assert lines_of(chart)[0] == chart.title
    plots.write_plot(chart, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 1000


# ---------------------------------------------------------------- files


def texts_of(path: Path) -> str:
    root = ElementTree.parse(path).getroot()
    return "\n".join("".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text"))


def test_an_svg_holds_title_labels_units_and_legend_as_text(tmp_path: Path) -> None:
    plots.write_plot(MEMORY, tmp_path / "a.svg")
    shown = texts_of(tmp_path / "a.svg").splitlines()
    for text in (MEMORY.title, "context length (tokens)", "memory", "4,096", "100 MB", "f16", "q8_0"):
        assert text in shown


def test_panels_and_a_map_show_their_numbers(tmp_path: Path) -> None:
    plots.write_panels("both", [MEMORY, BARS], tmp_path / "a.svg", note="measured here")
    shown = texts_of(tmp_path / "a.svg").splitlines()
    assert {"both", "wait", "hybrid", "median", "8 s", "not measured", "measured here"} <= set(shown)
    plots.write_section_map(SECTIONS, tmp_path / "b.svg")
    shown = texts_of(tmp_path / "b.svg").splitlines()
    assert "cells: 2 sections, 3.4 MB stored of 4.0 MB of state" in shown
    assert "tail: 1 section, 800 B stored of 900 B of state" in shown
    assert "stored, shared with others" in shown


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["SVG", "png"])
def test_the_same_plot_is_the_same_file(tmp_path: Path, ending: str) -> None:
    for name in ("a", "b"):
        plots.write_panels("both", [MEMORY, BARS], tmp_path / f"{name}.{ending}")
        plots.write_section_map(SECTIONS, tmp_path / f"map-{name}.{ending}")
    assert (tmp_path / f"a.{ending}").read_bytes() == (tmp_path / f"b.{ending}").read_bytes()
    assert (tmp_path / f"map-a.{ending}").read_bytes() == (tmp_path / f"map-b.{ending}").read_bytes()
    start = (tmp_path / f"a.{ending}").read_bytes()[:8]
    assert start == (b"\x89PNG\r\n\x1a\n" if ending == "png" else b"<?xml ve")


def test_the_users_own_settings_of_matplotlib_are_left_alone_and_unused(tmp_path: Path) -> None:
    import matplotlib

    plots.write_plot(MEMORY, tmp_path / "a.svg")
    with matplotlib.rc_context({"font.size": 30.0, "axes.grid": True}):
        plots.write_plot(MEMORY, tmp_path / "b.svg")
        assert matplotlib.rcParams["font.size"] == 30.0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_characters_that_no_font_has_are_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plots.write_plot(dataclasses.replace(MEMORY, title="模型 \U000f0000"), tmp_path / "a.png")


def test_a_plot_that_is_there_is_replaced_only_when_asked_to(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    path.write_text("mine")
    with pytest.raises(ExistsError) as caught:
        plots.write_plot(MEMORY, path)
    assert (caught.value.exit_status, caught.value.hint, path.read_text()) == (11, "add --force to replace it", "mine")
    plots.write_plot(MEMORY, path, overwrite=True)
    assert path.read_text().startswith("<?xml")
    assert path.stat().st_mode & 0o077 != 0  # unlike a session, a plot is for others


@pytest.mark.parametrize("name", ["a.pdf", "a", "svg", "a.svg.gz"])
def test_other_endings_are_refused_naming_both(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"is neither an \.svg nor a \.png file"):
        plots.check_plot_file(tmp_path / name)


def test_a_place_that_cannot_be_written_is_known_before_anything_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="No such file or directory"):
        plots.check_plot_file(tmp_path / "no" / "a.svg")
    (tmp_path / "b.svg").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        plots.check_plot_file(tmp_path / "b.svg", overwrite=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["b.svg"]


def test_without_matplotlib_the_hint_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    with pytest.raises(UsageError) as caught:
        plots.check_plot_file(tmp_path / "a.svg")
    assert (caught.value.exit_status, caught.value.hint) == (2, 'pip install "llamakv[plot]"')


def test_neither_library_is_imported_before_something_is_drawn() -> None:
    code = "import sys, llamakv.cli.plots; print({'matplotlib', 'plotext', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# ---------------------------------------------------------------- terminals


@pytest.mark.parametrize("width", [20, 80, 120, 10_000])
@pytest.mark.parametrize("panel", [MEMORY, BARS], ids=["lines", "bars"])
def test_a_terminal_plot_fits(panel: plots.Panel, width: int) -> None:
    longest = max(map(len, lines_of(panel, width)))
    assert longest <= min(max(width, 40), 120)


def test_long_titles_and_labels_are_wrapped_never_cut(tmp_path: Path) -> None:
    title = " ".join(f"word{n}" for n in range(30)) + " " + "x" * 150
    chart = dataclasses.replace(MEMORY, title=title, y_label="memory " * 20)
    shown = lines_of(chart)
    assert "".join(shown[:6]).replace(" ", "").startswith(title.replace(" ", ""))
    assert " ".join(shown).count("memory") == 20
    plots.write_plot(chart, tmp_path / "a.svg")
    assert texts_of(tmp_path / "a.svg").replace("\n", "").replace(" ", "").count("memory") == 20


def test_lines_are_told_apart_without_colour() -> None:
    shown = lines_of(MEMORY)
    assert shown[0] == MEMORY.title
    assert shown[-1] == "o f16  x q8_0"
    drawn = [line for line in shown if line.startswith((" ", "1", "6", "3"))]
    assert any(re.search("o+.*x+", line) for line in drawn)
    assert any("100 MB" in line for line in shown)
    assert any(re.search("512 +1,024 +2,048 +4,096", line) for line in shown)


def test_the_line_above_is_higher() -> None:
    shown = lines_of(MEMORY)
    grid = [line for line in shown if "│" in line or "┤" in line]
    first = {sign: next(i for i, line in enumerate(grid) if sign in line.split("┤")[-1]) for sign in "ox"}
    assert first["o"] < first["x"]


def test_there_are_escape_codes_only_with_colour() -> None:
    for panel in (MEMORY, BARS):
        assert "\x1b" not in "".join(lines_of(panel))
        assert "\x1b[" in "".join(lines_of(panel, colour=True))
    assert "\x1b" not in map_text(SECTIONS, width=80, colour=False, unicode=True)
    assert "\x1b[" in map_text(SECTIONS, width=80, colour=True, unicode=True)


def test_all_is_ascii_where_that_is_all_there_is() -> None:
    chart = dataclasses.replace(MEMORY, title="é 模型", series=[Series(label="µ", xs=[1, 2], ys=[1, 2])])
    for panel in (chart, BARS):
        assert "\n".join(lines_of(panel, unicode=False)).isascii()
    assert map_text(SECTIONS, width=80, colour=False, unicode=False).isascii()


def test_bars_are_as_long_as_their_values() -> None:
    shown = lines_of(BARS)
    lengths = {line.split("  ")[0]: line.count("█") for line in shown}
    assert lengths["none, worst"] == pytest.approx(2 * lengths["none, median"], abs=1)
    assert lengths["none, median"] == pytest.approx(4 * lengths["hybrid, median"], abs=4)
    assert any(line.startswith("hybrid, worst") and line.endswith("not measured") for line in shown)


def test_a_map_shows_where_sections_are_shared() -> None:
    shown = map_text(SECTIONS, width=70, colour=False, unicode=True).splitlines()
    assert shown[0] == "notes"
    strip = shown[1].removeprefix("cells  ")
    assert (len(strip), strip.count("▒"), strip.count("█"), strip.count("│")) == (63, 31, 31, 1)
    assert shown[2].strip() == "2 sections, 3.4 MB stored of 4.0 MB of state"
    assert shown[3] == "tail   " + "·" * 62 + "█"
    assert shown[5] == "       0" + " " * 59 + "512"


def test_an_empty_map_is_a_map(tmp_path: Path) -> None:
    empty = SectionMap(title="nothing", sections=[])
    assert map_text(empty, width=80, colour=False, unicode=True).startswith("nothing\n")
    plots.write_section_map(empty, tmp_path / "a.svg")
