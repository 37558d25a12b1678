"""What two lists of tokens have in common."""

from __future__ import annotations

from collections.abc import Sequence


def n_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two lists begin with alike."""
    n = min(len(one), len(other))
    if list(one[:n]) == list(other[:n]):
        return n
    return next(i for i in range(n) if one[i] != other[i])
