"""Columns of text, however many rows there are: thousands take little longer than to write them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.color import ColorSystem
from rich.style import Style
from rich.text import Text

from llamakv.cli import streams

Cell = str | Text

DIM, ALARMING = "dim", "bold red"

_GAP = "  "


def table_text(
    headings: Sequence[str], rows: Iterable[Sequence[Cell]], *, right: Sequence[int], width: int, colour: bool
) -> str:
    """Return a table no wider than ``width``, if that can be. The first column is folded where it is too long, so that
    nothing of it is lost; the others are cut, numbers (the columns in ``right``) last."""
    lines = [[Text(heading, style="bold") for heading in headings], *rows]
    widths = [_width(list(map(plain, column))) for column in zip(*lines, strict=True)]
    n_wanted = sum(widths)
    _narrow(widths, width, right)
    if sum(widths) < n_wanted:
        lines = [part for line in lines for part in _fitted(line, widths)]
    columns = [
        _padded(column, n, is_right=index in right, colour=colour)
        for index, (column, n) in enumerate(zip(zip(*lines, strict=True), widths, strict=True))
    ]
    return "".join(_GAP.join(line).rstrip(" ") + "\n" for line in zip(*columns, strict=True))


def _width(texts: Sequence[str]) -> int:
    return max(map(len if all(map(str.isascii, texts)) else length, texts))


def _narrow(widths: list[int], width: int, right: Sequence[int]) -> None:
    """Make columns narrower until all fit, step by step: the last one, which is told least by, before the others."""
    last = len(widths) - 1
    texts = [index for index in range(1, last) if index not in right]
    steps = (([last], 8), ([0], 24), (texts, 10), ([0], 12), ([*texts, last], 6), ([last], 1), (range(last + 1), 1))
    widths[:] = [min(n, width) for n in widths]
    n_over = sum(widths) + len(_GAP) * last - width
    for columns, floor in steps:
        while n_over > 0 and (wide := [index for index in columns if widths[index] > floor]):
            widths[max(wide, key=widths.__getitem__)] -= 1
            n_over -= 1


def _fitted(cells: Sequence[Cell], widths: Sequence[int]) -> Iterator[list[Cell]]:
    """The lines of a row."""
    first, *more = chop_cells(plain(cells[0]), widths[0]) or [""]
    others = [_like(cell, cut(plain(cell), n)) for cell, n in zip(cells[1:], widths[1:], strict=True)]
    yield [_like(cells[0], first), *others]
    for part in more:
        yield [_like(cells[0], part), *[""] * len(others)]


def _like(cell: Cell, text: str) -> Cell:
    return text if isinstance(cell, str) else Text(text, style=cell.style)


def _padded(column: Iterable[Cell], width: int, *, is_right: bool, colour: bool) -> list[str]:
    if not colour:
        texts = list(map(plain, column))
        if all(map(str.isascii, texts)):  # the quick way, for thousands of rows
            return [text.rjust(width) for text in texts] if is_right else [text.ljust(width) for text in texts]
    return [_padded_one(cell, width, is_right=is_right, colour=colour) for cell in column]


def _padded_one(cell: Cell, width: int, *, is_right: bool, colour: bool) -> str:
    text = plain(cell)
    space = " " * (width - length(text))
    shown = painted(text, str(cell.style)) if colour and isinstance(cell, Text) else text
    return space + shown if is_right else shown + space


# ---------------------------------------------------------------- texts


def plain(cell: Cell) -> str:
    """A cell's text, harmless and on one line."""
    text = cell if isinstance(cell, str) else cell.plain
    return text if text.isprintable() else streams.one_line(text)


def cut(text: str, n_columns: int) -> str:
    """A text of at most so many columns."""
    if 2 * len(text) <= n_columns or length(text) <= n_columns:  # no character takes more than two
        return text
    return set_cell_size(text, n_columns - 1) + "…" if n_columns > 0 else ""


def painted(text: str, style: str) -> str:
    """A text in a style."""
    return Style.parse(style).render(text, color_system=ColorSystem.STANDARD) if text and style else text


def length(text: str) -> int:
    """How many columns a text takes."""
    return len(text) if text.isascii() else cell_len(text)
