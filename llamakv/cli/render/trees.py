"""Lines below each other, with guides that show what belongs to what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from llamakv.cli.render.tables import ALARMING, DIM, cut, length, painted, plain

_N_GUIDES = 8
"""Levels whose guides are drawn, the innermost ones: those further out would leave no room for words."""
_STYLES = (DIM, ALARMING)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLine:
    """A line of a tree, ``depth`` levels below the top; ``is_last`` of those next to each other. ``name`` is always
    shown whole, ``details`` as far as there is room; they are something ``is_alarming``, or of lesser importance."""

    depth: int
    is_last: bool
    name: str
    details: str
    is_alarming: bool = False


def tree_text(lines: Iterable[TreeLine], *, width: int, colour: bool) -> str:
    """Return a tree whose lines are no longer than ``width``, but for guides and names."""
    return "".join(line + "\n" for line in _drawn(lines, width, colour))


def _drawn(lines: Iterable[TreeLine], width: int, colour: bool) -> Iterator[str]:
    ends: list[bool] = []  # for the line and each one above it, whether it is the last below its parent
    for line in lines:
        del ends[line.depth :]
        ends.append(line.is_last)
        head = _guides(ends) + plain(line.name) + "  "
        details = cut(plain(line.details), max(0, width - length(head)))
        yield (head + (painted(details, _STYLES[line.is_alarming]) if colour else details)).rstrip(" ")


def _guides(ends: list[bool]) -> str:
    depth = len(ends) - 1
    if depth == 0:
        return ""
    shown = ends[max(1, depth - _N_GUIDES + 1) : -1]
    above = "".join("    " if is_last else "│   " for is_last in shown)
    return ("⋯ " if depth > _N_GUIDES else "") + above + ("└── " if ends[-1] else "├── ")
