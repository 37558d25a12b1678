"""Plots, into files (matplotlib, an extra) and into the terminal (plotext). Both are imported when drawing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from llamakv.cli.output import has_colour
from llamakv.cli.plots.data import Bars as Bars
from llamakv.cli.plots.data import Chart as Chart
from llamakv.cli.plots.data import MapRow as MapRow
from llamakv.cli.plots.data import Panel as Panel
from llamakv.cli.plots.data import SectionMap as SectionMap
from llamakv.cli.plots.data import Series as Series
from llamakv.errors import UsageError
from llamakv.ops.report_files import check_place, write_report_file

ENDINGS = (".svg", ".png")


def check_plot_file(path: Path, *, overwrite: bool = False) -> None:
    """Find out whether a plot can be written there, before anything is measured.

    Raises:
        UsageError: the ending is neither .svg nor .png, matplotlib is missing, or it is a folder.
        ExistsError: there is a file, and it is not to be replaced.
        WriteError: its folder is missing or cannot be written to.
    """
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(
            f"'{path}' is neither an .svg nor a .png file",
            hint="--plot plot.svg, or - for the terminal",
            path=str(path),
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("plots in files need matplotlib, which is not installed", hint='pip install "llamakv[plot]"')
    check_place(path, overwrite=overwrite)


def write_plot(chart: Chart, path: Path, *, overwrite: bool = False) -> None:
    """Draw a chart into a file, the same bytes for the same chart.

    Raises:
        UsageError, ExistsError, WriteError: as ``check_plot_file``.
    """
    write_panels(chart.title, [chart], path, overwrite=overwrite)


def write_panels(title: str, panels: Sequence[Panel], path: Path, *, note: str = "", overwrite: bool = False) -> None:
    """Draw several panels under one title into a file, with a small ``note`` below.

    Raises:
        UsageError, ExistsError, WriteError: as ``check_plot_file``.
    """
    check_plot_file(path, overwrite=overwrite)
    from llamakv.cli.plots.pictures import draw_panels

    write_report_file(path, draw_panels(title, panels, note, _kind(path)), overwrite=overwrite)


def write_section_map(section_map: SectionMap, path: Path, *, overwrite: bool = False) -> None:
    """Draw a session's sections along positions into a file.

    Raises:
        UsageError, ExistsError, WriteError: as ``check_plot_file``.
    """
    check_plot_file(path, overwrite=overwrite)
    from llamakv.cli.plots.pictures import draw_section_map

    write_report_file(path, draw_section_map(section_map, _kind(path)), overwrite=overwrite)


def _kind(path: Path) -> str:
    return path.suffix.lower().removeprefix(".")


def terminal_plot(panel: Panel, width: int, height: int = 20) -> str:
    """Return a panel as lines for standard output: in colour where that takes it, in ASCII where it is not UTF-8. More
    than 120 columns are not used. It is to be written with ``Output.write_styled``."""
    from llamakv.cli.plots.text import panel_text

    return panel_text(panel, width=width, height=height, colour=has_colour(sys.stdout), unicode=_is_unicode())


def terminal_section_map(section_map: SectionMap, width: int) -> str:
    """Return a session's sections along positions as lines for standard output, as ``terminal_plot`` does."""
    from llamakv.cli.plots.text import map_text

    return map_text(section_map, width=width, colour=has_colour(sys.stdout), unicode=_is_unicode())


def _is_unicode() -> bool:
    return "utf" in (getattr(sys.stdout, "encoding", None) or "").lower()
