"""Byte planes of 16-bit values, with numpy. Imported when the first section is coded: numpy takes 0.1 s to import,
which listing and inspecting sessions need not wait for."""

from __future__ import annotations

import numpy as np


def allocate(n_bytes: int) -> memoryview:
    """Return writable memory of ``n_bytes`` with any content."""
    return np.empty(n_bytes, np.uint8).data


def split(pairs: memoryview, low: memoryview, high: memoryview) -> None:
    """Fill ``low`` with the bytes at even offsets of ``pairs`` and ``high`` with those at odd ones."""
    values = np.frombuffer(pairs, "<u2")
    np.copyto(np.frombuffer(low, np.uint8), values, casting="unsafe")
    np.right_shift(values, 8, out=np.frombuffer(high, np.uint8), casting="unsafe")


def merge(low: memoryview, high: memoryview, pairs: memoryview) -> None:
    """Fill ``pairs`` with what ``split`` would make into ``low`` and ``high``."""
    values = np.frombuffer(pairs, "<u2")
    np.left_shift(np.frombuffer(high, np.uint8), 8, out=values, dtype=np.uint16, casting="unsafe")
    np.bitwise_or(values, np.frombuffer(low, np.uint8), out=values)
