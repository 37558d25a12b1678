"""Locks that vanish with their owner, and what must not be written to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from llamakv.errors import LlamakvError, LockedError, NotFoundError, WriteError
from llamakv.store.system_errors import write_error, writing

LOCK_WAIT_S = 5.0  # a save holds the lock for well under a second; longer means somebody is really busy
_LOCK_POLL_S = 0.005


def is_at(fd: int, path: Path) -> bool:
    """Return whether ``path`` names the file that is open as ``fd``; a link to it does not count."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def is_locked(path: Path) -> bool:
    """Return whether somebody is writing a file right now; False where that cannot be told."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
    return False


@contextlib.contextmanager
def lock_of(path: Path, *, shared: bool, wait_s: float) -> Iterator[None]:
    """Hold the lock of a file that exists for nothing else; it is made if it is not there.

    Raises: WriteError, LockedError (busy for longer than ``wait_s``).
    """
    with writing(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        acquire(fd, path, wait_s=wait_s, shared=shared)
        yield
    finally:
        os.close(fd)


def acquire(fd: int, path: Path, *, wait_s: float, shared: bool = False) -> None:
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise LockedError(
                    f"'{path}' is being written by another process (waited {wait_s:g} s)", path=str(path)
                ) from None
        except OSError as error:
            raise write_error(path, error) from error
        time.sleep(_LOCK_POLL_S)


@contextlib.contextmanager
def locked(path: Path, *, wait_s: float = LOCK_WAIT_S) -> Iterator[int]:
    """Hold the writer's lock of an existing file and give a descriptor that reads and writes it.

    The lock is on the file itself: nothing is left beside it, and it vanishes with its owner. While it is held
    ``path`` names the locked file. Links are not followed, and a file nobody may write (0444) is refused even to
    root.

    Raises: NotFoundError, WriteError, LockedError (busy for longer than ``wait_s``).
    """
    while True:
        check_target(path)
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFoundError(f"no such file: '{path}'", path=str(path)) from error
        except OSError as error:
            raise write_error(path, error) from error
        try:
            acquire(fd, path, wait_s=wait_s)
            if is_at(fd, path):  # else it was replaced while we waited
                yield fd
                return
        finally:
            os.close(fd)


def check_target(path: Path) -> bool:
    """Refuse what must not be written to; return whether a regular, writable file is there.

    Raises: WriteError (a link, a folder, a pipe or device, a file with mode 0444, a folder that is missing).
    """
    refusal: LlamakvError
    try:
        mode = os.stat(path, follow_symlinks=False).st_mode
    except FileNotFoundError:
        if path.parent.is_dir():
            return False
        refusal = WriteError(
            f"cannot write '{path}': there is no folder '{path.parent}'",
            hint=f"mkdir -p '{path.parent}'",
            path=str(path),
        )
        raise refusal from None
    except OSError as error:
        raise write_error(path, error) from error
    if stat.S_ISLNK(mode):
        raise WriteError(
            f"cannot write '{path}': it is a symbolic link",
            hint=f"name the file it points to: {os.path.realpath(path)}",
            path=str(path),
        )
    if stat.S_ISDIR(mode):
        raise WriteError(f"cannot write '{path}': it is a folder", path=str(path))
    if not stat.S_ISREG(mode):
        raise WriteError(f"cannot write '{path}': it is not a regular file", path=str(path))
    if not mode & 0o222:
        raise WriteError(f"cannot write '{path}': it is read-only", hint=f"chmod u+w '{path}'", path=str(path))
    return True
