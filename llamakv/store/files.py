"""Durable writes: sync, rename and locks.

Nothing else in llamakv opens a store file for writing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from llamakv.errors import ExistsError, NotASessionError, NotFoundError
from llamakv.store.locks import acquire
from llamakv.store.locks import check_target as check_target
from llamakv.store.locks import is_at as is_at
from llamakv.store.locks import is_locked as is_locked
from llamakv.store.locks import lock_of as lock_of
from llamakv.store.locks import locked as locked
from llamakv.store.system_errors import reading as reading
from llamakv.store.system_errors import write_error
from llamakv.store.system_errors import writing as writing

_TEMPORARY_PREFIX = ".llamakv-"
_TEMPORARY_SUFFIX = ".tmp"
_N_FILES_SPARE = 128  # for everything else
MAX_NAME_BYTES = 255  # NAME_MAX of the usual file systems
_MOMENT_S = 0.1
_MAX_PARTS = 512  # below IOV_MAX (1024 on Linux and macOS)
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK}


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


def allow_open_files(n: int) -> None:
    """Let this process hold ``n`` more files open, as far as the system allows it (ulimit -n)."""
    import resource

    n_open = 0
    with contextlib.suppress(OSError):
        n_open = len(os.listdir("/dev/fd"))
    wanted = n_open + n + _N_FILES_SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, soft), hard))


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


def publish(temporary: Path, path: Path, *, overwrite: bool) -> None:
    """Give a file another name on the same file system, at once. Raises: ExistsError (it is taken), OSError."""
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
def replacement(path: Path, *, overwrite: bool, sync_parent: bool = True) -> Iterator[int]:
    """Give a descriptor to write a new file with; on leaving it is synced and appears under ``path`` at once.

    The file is a temporary in the same folder until then, locked and of mode 0600 from its first moment. On any
    exception the temporary is removed, ``path`` is as it was, and the exception goes on. Without ``sync_parent`` the
    name is durable only after ``sync_folder``.

    Raises: ExistsError (``path`` is taken and not ``overwrite``), WriteError.
    """
    with writing(path):
        temporary, fd = _create_temporary(path.parent)
    try:
        try:
            yield fd
            sync(fd, path)
            with writing(path):
                publish(temporary, path, overwrite=overwrite)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if sync_parent:
            sync_folder(path.parent)
    finally:
        os.close(fd)


def move(path: Path, target: Path, *, overwrite: bool) -> bool:
    """Give a file another name, durably; False, with nothing done, if that is on another file system.

    Raises: ExistsError, WriteError.
    """
    with writing(target):
        try:
            publish(path, target, overwrite=overwrite)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            return False
    sync_folder(target.parent)
    return True


@contextlib.contextmanager
def locked_temporary(folder: Path) -> Iterator[int]:
    """Give a descriptor of an empty temporary that is locked until it is removed, on leaving. Raises: WriteError."""
    with temporary(folder) as (_, fd):
        yield fd


@contextlib.contextmanager
def temporary(folder: Path) -> Iterator[tuple[Path, int]]:
    """As ``locked_temporary``, with its path before the descriptor. Raises: WriteError."""
    with writing(folder):
        path, fd = _create_temporary(folder)
    try:
        yield path, fd
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(fd)


def live_temporaries(folder: Path) -> list[bytes]:
    """Return the content of each temporary in ``folder`` whose owner is alive; the others are removed.

    Raises: ReadError.
    """
    remove_stale_temporaries(folder)
    found = []
    for entry in entries(folder):
        if is_temporary(entry.name):
            with reading(Path(entry.path)), contextlib.suppress(FileNotFoundError), open(entry.path, "rb") as file:
                found.append(file.read())
    return found


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return what is in a folder; nothing where there is no such folder. Raises: ReadError."""
    with reading(folder), contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as found:
        return list(found)
    return []


def append(fd: int, data: bytes, path: Path) -> None:
    """Write behind the end of an open file. Raises: WriteError."""
    write_at(fd, [data], file_length(fd), path)


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


def set_time(path: Path, time_ns: int | None = None) -> None:
    """Set a file's modification time (None: now), which in a store says when a session was last used. Where the
    system does not allow it nothing happens."""
    time_ns = time.time_ns() if time_ns is None else time_ns
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time_ns, time_ns), follow_symlinks=False)


def set_time_of(fd: int, time_ns: int) -> None:
    """As ``set_time``, of an open file."""
    with contextlib.suppress(OSError):
        os.utime(fd, ns=(time_ns, time_ns))


def time_of(fd: int) -> float:
    """Return an open file's modification time, in seconds."""
    return os.fstat(fd).st_mtime_ns / 1e9


def make_private_folder(folder: Path) -> None:
    """Create ``folder`` durably, with mode 0700 (its parents too, where missing); an existing one is left alone.

    Raises: WriteError.
    """
    with writing(folder):
        missing = [level for level in (folder, *folder.parents) if not level.exists()]
        for level in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(level, 0o700)
                sync_folder(level.parent)
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


def discard(path: Path) -> int:
    """Remove a file that nobody refers to; return its length, 0 if it was gone. Raises: WriteError."""
    with writing(path):
        try:
            n_bytes = path.stat().st_size
            os.unlink(path)
        except FileNotFoundError:
            return 0
    return n_bytes


def remove(path: Path, *, only_if: Callable[[int], bool] | None = None) -> bool:
    """Remove a file nobody is writing; return whether it was removed. ``only_if`` is asked about the open file while
    it is locked, so that nobody can save it between the answer and the removal.

    Raises: NotFoundError, LockedError, WriteError.
    """
    while True:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFoundError(f"no such file: '{path}'", path=str(path)) from error
        except OSError:
            fd = -1  # a link, or unreadable: nobody writes it through this name
        try:
            if fd >= 0:
                acquire(fd, path, wait_s=_MOMENT_S)  # who only asks whether it is locked holds it for a moment
                if not is_at(fd, path):
                    continue  # saved or removed while we waited
            if only_if is not None and not (fd >= 0 and only_if(fd)):
                return False
            with writing(path):
                os.unlink(path)
            sync_folder(path.parent)
            return True
        finally:
            if fd >= 0:
                os.close(fd)
