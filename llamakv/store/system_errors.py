"""The operating system's errors, as ours."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from llamakv.errors import NotASessionError, NotFoundError, ReadError, WriteError


def write_error(path: Path, error: OSError, *, n_needed: int | None = None) -> WriteError:
    """Return the error for a refused write: path, the system's words, and bytes needed and free where known."""
    text = f"cannot write '{path}': {os.strerror(error.errno) if error.errno else error}"
    n_free: int | None = None
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and n_needed is not None:
        with contextlib.suppress(OSError):
            system = os.statvfs(path.parent)
            n_free = system.f_bavail * system.f_frsize
            text += f" ({n_needed} more bytes needed, {n_free} free)"
    return WriteError(text, path=str(path), errno=error.errno, needed_bytes=n_needed, free_bytes=n_free)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn any OSError inside into a WriteError about ``path``."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any OSError inside into the error of reading ``path``.

    Raises: NotFoundError, NotASessionError (a folder), ReadError.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(f"no such file: '{path}'", path=str(path)) from error
    except IsADirectoryError as error:
        raise NotASessionError(f"not a llamakv session: '{path}' is a folder", path=str(path)) from error
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ReadError(f"cannot read '{path}': {reason}", path=str(path), errno=error.errno) from error


def is_lost(error: ReadError) -> bool:
    """Return whether what could not be read is gone (a failing disk), not only forbidden."""
    return error.fields.get("errno") == errno.EIO
