"""Tables of ``bench``, whatever they hold: for a terminal of any width, and as Markdown."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from llamakv.cli import render
from llamakv.cli.output import has_colour
from llamakv.cli.render.tables import DIM, length, painted, plain

_MOST_COLUMNS = 100
"""Columns that sentences are wrapped at, where there are more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table and what it says. The first ``n_names`` columns are names, the others numbers. One that ``may_split`` is
    shown as several where it is too wide, each with the names and some of the numbers."""

    title: str
    sentence: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    n_names: int = 1
    may_split: bool = False
    notes: tuple[str, ...] = ()


# ---------------------------------------------------------------- for a terminal


def terminal_text(table: Table) -> str:
    """Return a table for standard output: its title, the table, what it says, and notes."""
    parts = [render.heading(table.title)]
    parts += [
        render.table(headings, rows, right=tuple(range(table.n_names, len(headings))))
        for headings, rows in _columns_that_fit(table, render.width())
        if rows
    ]
    parts += [_wrapped(table.sentence, DIM), *(_wrapped(note) for note in table.notes)]
    return "".join(part for part in parts if part)


def _columns_that_fit(table: Table, width: int) -> Iterator[tuple[Sequence[str], list[Sequence[str]]]]:
    columns = list(zip(table.headings, *table.rows, strict=True))
    widths = [max(map(length, map(plain, column))) + 2 for column in columns]
    names = range(table.n_names)
    shown: list[int] = []
    n_used = n_names = sum(widths[index] for index in names) - 2
    for index in range(table.n_names, len(columns)):
        if shown and table.may_split and n_used + widths[index] > width:
            yield _of_columns(table, [*names, *shown])
            shown, n_used = [], n_names
        shown.append(index)
        n_used += widths[index]
    yield _of_columns(table, [*names, *shown])


def _of_columns(table: Table, indices: Sequence[int]) -> tuple[Sequence[str], list[Sequence[str]]]:
    return [table.headings[i] for i in indices], [[row[i] for i in indices] for row in table.rows]


def _wrapped(text: str, style: str = "") -> str:
    lines = textwrap.wrap(plain(text), min(render.width(), _MOST_COLUMNS))
    shown = (painted(line, style) for line in lines) if style and has_colour(sys.stdout) else lines
    return "".join(f"{line}\n" for line in shown)


# ---------------------------------------------------------------- Markdown


def markdown_text(table: Table) -> str:
    """Return a table as Markdown."""
    dashes = ["---" if index < table.n_names else "---:" for index in range(len(table.headings))]
    grid = [*map(_markdown_row, (table.headings, dashes, *table.rows)), ""] if table.rows else []
    lines = [
        f"### {_escaped(table.title)}",
        "",
        *grid,
        _escaped(table.sentence),
        *([""] if table.notes else []),
        *(f"- {_escaped(note)}" for note in table.notes),
    ]
    return "".join(f"{line}\n" for line in lines)


def markdown_facts(rows: Iterable[tuple[str, str]]) -> str:
    """Return names and what they are as a Markdown list."""
    return "".join(f"- **{_escaped(name)}**: {_escaped(value)}\n" for name, value in rows)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    return plain(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")
