"""What people see: reports, tables and progress. The only user of ``rich``; never given markup, only text."""

from __future__ import annotations

import io
import shutil
import sys
import time
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from llamakv.cli import streams
from llamakv.cli.output import has_colour
from llamakv.cli.render.tables import ALARMING, DIM, table_text
from llamakv.cli.render.tables import Cell as Cell
from llamakv.cli.render.trees import TreeLine as TreeLine
from llamakv.cli.render.trees import tree_text
from llamakv.ops.sizes import size as size

WIDE = 10_000
"""Columns of something that is not a terminal: nothing is wrapped or cut there."""


# ---------------------------------------------------------------- numbers


def count(number: int, singular: str, plural: str | None = None) -> str:
    """A number with its noun: ``1,234 tokens``."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def seconds(elapsed_s: float) -> str:
    """A duration for people: ``0.05 s``, ``12.3 s``, ``2 min 05 s``."""
    if elapsed_s < 9.995:
        return f"{elapsed_s:.2f} s"
    if elapsed_s < 59.95:
        return f"{elapsed_s:.1f} s"
    minutes, rest = divmod(round(elapsed_s), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min"


def span(elapsed_s: float) -> str:
    """A stretch of time in its largest unit: ``7 d``, ``1.5 h``, ``30 min``."""
    for unit, length in (("y", 365 * 86400), ("d", 86400), ("h", 3600), ("min", 60)):
        if elapsed_s >= length:
            return f"{elapsed_s / length:.1f}".removesuffix(".0") + f" {unit}"
    return f"{elapsed_s:.0f} s"


def rate(n_tokens: int, elapsed_s: float) -> str:
    """Tokens per second, or nothing where there is nothing to tell."""
    if n_tokens <= 0 or elapsed_s <= 0:
        return ""
    speed = n_tokens / elapsed_s
    return f"{speed:,.0f} tokens/s" if speed >= 9.95 else f"{speed:.1f} tokens/s"


def age(then_s: float, now_s: float) -> str:
    """How long ago, roughly."""
    passed = max(0.0, now_s - then_s)
    for unit, length in (("y", 365 * 86400), ("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= length:
            return f"{int(passed // length)} {unit} ago"
    return "just now"


def moment(then_s: float) -> str:
    """A point in time in the user's own time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(then_s))


def excerpt(text: str, n_most: int | None = None) -> str:
    """A text on one line, cut after ``n_most`` characters."""
    line = " ".join(streams.harmless(text).split())
    return line if n_most is None or len(line) <= n_most else line[: n_most - 1] + "…"


def fitted(text: str, n_columns: int) -> str:
    """A text on one line, cut to so many columns of a terminal."""
    line = Text(excerpt(text[: 8 * n_columns]))  # what is cut anyway need not be measured
    line.truncate(n_columns, overflow="ellipsis")
    return line.plain


# ---------------------------------------------------------------- reports


def width() -> int:
    """Columns of stdout's terminal; very many if it is none."""
    if not streams.is_terminal(sys.stdout):
        return WIDE
    return max(20, shutil.get_terminal_size().columns)


def _console() -> Console:
    colour = has_colour(sys.stdout)
    return Console(
        file=io.StringIO(),
        width=width(),
        force_terminal=colour,
        color_system="standard" if colour else None,
        no_color=not colour,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )


def _rendered(*parts: Table | Text) -> str:
    console = _console()
    for part in parts:
        console.print(part)
    file = console.file
    assert isinstance(file, io.StringIO)
    return "".join(line.rstrip(" ") + "\n" for line in file.getvalue().splitlines())


def report(rows: Iterable[tuple[str, Cell]]) -> str:
    """Two columns: what, and its value."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, value if isinstance(value, Text) else Text(streams.harmless(value)))
    return _rendered(table)


def table(headings: Sequence[str], rows: Iterable[Sequence[Cell]], *, right: Sequence[int] = ()) -> str:
    """A table; the columns whose numbers are in ``right`` are aligned there."""
    return table_text(headings, rows, right=right, width=width(), colour=has_colour(sys.stdout))


def tree(lines: Iterable[TreeLine]) -> str:
    """A tree, from the top down."""
    return tree_text(lines, width=width(), colour=has_colour(sys.stdout))


def heading(text: str) -> str:
    """A line that begins a part of a report."""
    return _rendered(Text(streams.one_line(text), style="bold"))


def dim(text: str) -> Text:
    """Text of lesser importance."""
    return Text(text, style=DIM)


def alarm(text: str) -> Text:
    """Text that must not be missed."""
    return Text(text, style=ALARMING)
