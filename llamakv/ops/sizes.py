"""Amounts in messages: bytes and lists of names, short enough for one line."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_NAMES = 5


def size(n_bytes: int) -> str:
    """Bytes for people, in powers of a thousand: ``12.3 MB``."""
    value = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            digits = 0 if unit == "B" or value >= 99.95 else 1
            return f"{value:.{digits}f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def listed(names: Sequence[str]) -> str:
    """Names for a message: the first few, and how many more there are."""
    shown = list(names[:_MOST_NAMES])
    n_more = len(names) - len(shown)
    if n_more:
        return f"{', '.join(shown)} and {n_more:,} more"
    return ", ".join(shown[:-1]) + (" and " if len(shown) > 1 else "") + "".join(shown[-1:])
