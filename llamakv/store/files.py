"""Durable writes: sync, rename, locks, and the translation of the operating system's errors into ours.

Nothing else in llamakv opens a store file for writing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from llamakv.errors import (
    ExistsError,
    LlamakvError,
    LockedError,
    NotASessionError,
    NotFoundError,
    ReadError,
    WriteError,
)

LOCK_WAIT_S = 5.0  # a save holds the lock for well under a second; longer means somebody is really busy
_LOCK_POLL_S = 0.02
_TEMPORARY_PREFIX = ".llamakv-"
_TEMPORARY_SUFFIX = ".tmp"
_MAX_PARTS = 512  # below IOV_MAX (1024 on Linux and macOS)
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK}


# ---------------------------------------------------------------- errors


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


# ---------------------------------------------------------------- reading


def open_for_reading(path: Path) -> int:
    """Open a regular file; the caller closes the descriptor.

    Raises: NotFoundError, NotASessionError (a folder, pipe, socket or device), ReadError.
    """
    with reading(path):
        mode = os.stat(path).st_mode  # opening first would already act on a device, and fails on a socket
        if stat.S_ISREG(mode):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # O_NONBLOCK: never hang on a pipe
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return fd
            os.close(fd)
    what = "is a folder" if stat.S_ISDIR(mode) else "is not a regular file"
    raise NotASessionError(f"not a llamakv session: '{path}' {what}", path=str(path))


def read_at(fd: int, n_bytes: int, offset: int, path: Path) -> bytes:
    """Return up to ``n_bytes`` from ``offset``; fewer only where the file ends.

    Raises: ReadError.
    """
    with reading(path):
        parts: list[bytes] = []
        n_left = n_bytes
        while n_left:
            part = os.pread(fd, n_left, offset)
            if not part:
                break
            parts.append(part)
            offset += len(part)
            n_left -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def file_length(fd: int) -> int:
    """Return the length of an open file in bytes."""
    return os.fstat(fd).st_size


# ---------------------------------------------------------------- writing


def write_at(fd: int, parts: Sequence[bytes | memoryview], offset: int, path: Path) -> int:
    """Write all of ``parts`` one after the other from ``offset``; return the offset behind them.

    Raises: WriteError, with some of the bytes perhaps written.
    """
    left = [memoryview(part) for part in parts if len(part)]
    left.reverse()
    try:
        while left:
            n_written = os.pwritev(fd, left[: -_MAX_PARTS - 1 : -1], offset)
            offset += n_written
            while n_written:
                part = left.pop()
                if n_written < len(part):
                    left.append(part[n_written:])
                    break
                n_written -= len(part)
    except OSError as error:
        raise write_error(path, error, n_needed=sum(map(len, left))) from error
    return offset


def sync(fd: int, path: Path) -> None:
    """Make the file's bytes and length durable. Raises: WriteError."""
    with writing(path):
        os.fsync(fd)


def cut(fd: int, n_bytes: int, path: Path) -> None:
    """Cut the file off behind ``n_bytes``. Raises: WriteError."""
    with writing(path):
        os.ftruncate(fd, n_bytes)


def sync_folder(folder: Path) -> None:
    """Make renames inside ``folder`` durable. Raises: WriteError."""
    with writing(folder):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _publish(temporary: Path, path: Path, *, overwrite: bool) -> None:
    if overwrite:
        os.rename(temporary, path)
        return
    try:
        os.link(temporary, path, follow_symlinks=False)  # unlike rename, fails where the name is taken
    except FileExistsError:
        raise ExistsError(f"'{path}' already exists", path=str(path)) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):
            raise ExistsError(f"'{path}' already exists", path=str(path)) from error
        os.rename(temporary, path)
        return
    os.unlink(temporary)


@contextlib.contextmanager
def replacement(path: Path, *, overwrite: bool) -> Iterator[int]:
    """Give a descriptor to write a new file with; on leaving it is synced and appears under ``path`` at once.

    The file is a temporary in the same folder until then, locked and of mode 0600 from its first moment. On any
    exception the temporary is removed, ``path`` is as it was, and the exception goes on.

    Raises: ExistsError (``path`` is taken and not ``overwrite``), WriteError.
    """
    with writing(path):
        temporary, fd = _create_temporary(path.parent)
    try:
        try:
            yield fd
            sync(fd, path)
            with writing(path):
                _publish(temporary, path, overwrite=overwrite)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        sync_folder(path.parent)
    finally:
        os.close(fd)


def replace_small_file(path: Path, data: bytes) -> None:
    """Replace ``path`` (mode 0600) by ``data``, atomically and durably. Raises: WriteError."""
    with replacement(path, overwrite=True) as fd:
        write_at(fd, [data], 0, path)


def _create_temporary(folder: Path) -> tuple[Path, int]:
    while True:
        path = folder / f"{_TEMPORARY_PREFIX}{os.urandom(8).hex()}{_TEMPORARY_SUFFIX}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(fd, path):
                return path, fd
        except BlockingIOError:
            pass  # somebody takes it for a stale one and is about to remove it: take another name
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        os.close(fd)


def keep_owner(fd: int, source_fd: int) -> None:
    """Give a new file the owner of the one it replaces, where that is another and the system allows it (to root)."""
    owner = os.fstat(source_fd)
    with contextlib.suppress(OSError):
        os.fchown(fd, owner.st_uid, owner.st_gid)


def check_folder(folder: Path) -> None:
    """Prove that a file can be made in ``folder`` by making and removing one; stale ones go too. Raises: WriteError."""
    remove_stale_temporaries(folder)
    with writing(folder):
        path, fd = _create_temporary(folder)
        os.unlink(path)
        os.close(fd)


def make_private_folder(folder: Path) -> None:
    """Create ``folder`` with mode 0700 (its parents too, where missing); an existing one is left alone.

    Raises: WriteError.
    """
    with writing(folder):
        missing = [level for level in (folder, *folder.parents) if not level.exists()]
        for level in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(level, 0o700)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def is_temporary(name: str) -> bool:
    """Return whether a file name is one of our temporaries."""
    return name.startswith(_TEMPORARY_PREFIX) and name.endswith(_TEMPORARY_SUFFIX)


def remove_stale_temporaries(folder: Path) -> list[Path]:
    """Remove temporaries in ``folder`` whose writers are gone (their lock is free); return what was removed.

    Files that cannot be removed are left, without an error: they are never taken for sessions.
    """
    removed: list[Path] = []
    try:
        names = [entry.name for entry in os.scandir(folder) if is_temporary(entry.name)]
    except OSError:
        return removed
    for name in names:
        path = folder / name
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_at(fd, path):
                    os.unlink(path)
                    removed.append(path)
            finally:
                os.close(fd)
    return removed


def remove(path: Path) -> None:
    """Remove a file nobody is writing. Raises: NotFoundError, LockedError, WriteError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFoundError(f"no such file: '{path}'", path=str(path)) from error
    except OSError:
        fd = -1  # a link, or unreadable: nobody writes it through this name
    try:
        if fd >= 0:
            _lock(fd, path, wait_s=0.0)
        with writing(path):
            os.unlink(path)
        sync_folder(path.parent)
    finally:
        if fd >= 0:
            os.close(fd)


# ---------------------------------------------------------------- locks


def is_at(fd: int, path: Path) -> bool:
    """Return whether ``path`` names the file that is open as ``fd``; a link to it does not count."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _lock(fd: int, path: Path, *, wait_s: float) -> None:
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
            _lock(fd, path, wait_s=wait_s)
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
