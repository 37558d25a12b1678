"""What of a file the system holds in memory, so that reading it can be measured with and without."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from llamakv.store import files
from llamakv.store.system_errors import reading


def drop_from_memory(path: Path) -> bool:
    """Ask the system to forget what it holds of a file, whose bytes must be durable already; False where it cannot be
    asked (macOS). Whether it did: ``n_resident_bytes``. What disks themselves remember is not touched.

    Raises: NotFoundError, NotASessionError, ReadError.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    fd = files.open_for_reading(path)
    try:
        with reading(path):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return True


def n_resident_bytes(path: Path) -> int | None:
    """Return how many bytes of a file are in memory, in whole pages of it; None where the system does not tell. Of
    a file that is not ours and that we may not write to, Linux says that all of it is: that counts as not told.

    Raises: NotFoundError, NotASessionError, ReadError.
    """
    mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
    fd = files.open_for_reading(path)
    try:
        n_bytes = files.file_length(fd)
        if mincore is None or not _may_be_told(fd, path):
            return None
        if n_bytes == 0:
            return 0
        pages = (ctypes.c_ubyte * -(-n_bytes // mmap.PAGESIZE))()
        # a private mapping that is never written to: ctypes tells the address of writable memory only
        with reading(path), mmap.mmap(fd, n_bytes, access=mmap.ACCESS_COPY) as mapped:
            start = ctypes.c_char.from_buffer(mapped)
            failed = mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(n_bytes), pages)
            del start
        return None if failed else min(n_bytes, sum(page & 1 for page in pages) * mmap.PAGESIZE)
    finally:
        os.close(fd)


def _may_be_told(fd: int, path: Path) -> bool:
    """As Linux decides it (``can_do_mincore``): the owner's file, or one that may be written to."""
    return os.fstat(fd).st_uid == os.geteuid() or os.access(path, os.W_OK)
