"""Small bars of text, in a column of a table: a share, and which positions are held."""

from __future__ import annotations

import sys
from collections.abc import Iterable

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HELD, _PARTLY, _MISSING = "█", "▒", "·"
_IN_ASCII = str.maketrans({"█": "#", "▒": "+", "·": ".", **dict.fromkeys("▉▊▋▌", "#"), **dict.fromkeys("▍▎▏", " ")})


def share_bar(part: float, n_columns: int) -> str:
    """A bar as long as a share of 0 to 1; something can be seen of any share that is not 0."""
    n_eighths = round(min(max(part, 0.0), 1.0) * 8 * n_columns)
    if part > 0:
        n_eighths = max(n_eighths, 1)
    whole, rest = divmod(n_eighths, 8)
    bar = _EIGHTHS[-1] * whole + (_EIGHTHS[rest] if rest else "")
    return _shown(bar, at_least="-" if part > 0 else "")


def position_bar(ranges: Iterable[tuple[int, int]], n_positions: int, n_columns: int) -> str:
    """Positions ``[0, n_positions)`` from left to right: which of them are in some ``[p0, p1)`` that do not overlap;
    where a column stands for several, it tells all from some and none."""
    if n_positions <= 0:
        return ""
    held = list(ranges)
    columns = []
    for column in range(n_columns):
        first = column * n_positions // n_columns
        last = max(first + 1, (column + 1) * n_positions // n_columns)
        n_held = sum(max(0, min(last, p1) - max(first, p0)) for p0, p1 in held)
        columns.append(_HELD if n_held >= last - first else _PARTLY if n_held else _MISSING)
    return _shown("".join(columns), at_least="")


def _shown(bar: str, *, at_least: str) -> str:
    """A bar in letters that standard output can show."""
    try:
        bar.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return bar.translate(_IN_ASCII).rstrip() or at_least
    return bar
