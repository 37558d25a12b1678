"""BLAKE3, the one digest of this package."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

N_DIGEST_BYTES = 32
_N_SLICE_BYTES = 64 << 20  # large enough that starting the threads costs nothing, small enough for smooth progress


class Digester:
    """A running digest of bytes; not safe between threads."""

    def __init__(self) -> None:
        self._state = blake3()

    def update(self, data: bytes | memoryview) -> None:
        """Add contiguous bytes."""
        self._state.update(data)

    def digest(self) -> bytes:
        """Return the 32-byte digest of all bytes added so far."""
        return self._state.digest()


def digest_bytes(data: bytes | memoryview) -> bytes:
    """Return the 32-byte digest of ``data``."""
    return blake3(data).digest()


def digest_file(path: Path, on_progress: Callable[[int, int], None] | None = None) -> tuple[str, int]:
    """Return the hex digest of a file's content and its length, hashing it on all cores.

    ``on_progress(n_done, n_bytes)`` is called after every 64 MiB. Raises OSError.
    """
    state = blake3(max_threads=blake3.AUTO)
    with open(path, "rb") as file:
        n_bytes = os.fstat(file.fileno()).st_size
        if n_bytes == 0:
            return state.hexdigest(), 0
        with (
            mmap.mmap(file.fileno(), n_bytes, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as view,
        ):
            for start in range(0, n_bytes, _N_SLICE_BYTES):
                with view[start : start + _N_SLICE_BYTES] as part:
                    state.update(part)
                if on_progress is not None:
                    on_progress(min(start + _N_SLICE_BYTES, n_bytes), n_bytes)
    return state.hexdigest(), n_bytes
