"""Removing objects that no session refers to, while others save and resume (see ``claims`` for why that is safe)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from llamakv.errors import FormatError, NotFoundError
from llamakv.store import files
from llamakv.store.claims import claimed, store_lock
from llamakv.store.objects import Objects
from llamakv.store.session_info import load_digests
from llamakv.store.store_folder import SUFFIX as SUFFIX
from llamakv.store.store_folder import is_session_name, is_store, read_budget

_N_BATCH = 1000  # removals for which the lock is held at a time
_MIN_AGE_NS = 2_000_000_000  # younger files may change again within a tick of the clock, under the same inode number

Stamp = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What was removed, or would be: objects, their bytes, and temporaries of killed writers."""

    n_objects: int
    n_bytes: int
    n_temporaries: int


class Marks:
    """Which objects the sessions of a store refer to, kept up to date by reading the indexes that changed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._by_name: dict[str, tuple[Stamp, frozenset[str]]] = {}

    def update(self) -> set[str]:
        """Return the digests that sessions refer to now.

        Raises: FormatError (an index cannot be read: what it refers to is unknown), ReadError.
        """
        before, self._by_name = self._by_name, {}
        settled_ns = time.time_ns() - _MIN_AGE_NS
        found: set[str] = set()
        for name, path, stamp in session_files(self._root):
            known = before.get(name)
            digests = known[1] if known is not None and known[0] == stamp else digests_of(path)
            if max(stamp[2:]) < settled_ns:
                self._by_name[name] = stamp, digests
            found |= digests
        return found


def session_files(root: Path) -> Iterator[tuple[str, Path, Stamp]]:
    """Yield name, path and what changes when it does (inode, length, both times) of each session file in a folder."""
    for name, stamp in session_stamps(root).items():
        yield name, root / (name + SUFFIX), stamp


def session_stamps(root: Path) -> dict[str, Stamp]:
    """Return the stamp of each session file in a folder by its name; a folder that is not there has none.

    Raises: ReadError.
    """
    found: dict[str, Stamp] = {}
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                name = entry.name
                if not is_session_name(name):
                    continue
                try:
                    if entry.is_file():
                        stat = entry.stat()
                        stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
                        found[name[: -len(SUFFIX)]] = stamp
                except FileNotFoundError:
                    continue
                except OSError:
                    if not entry.is_symlink():  # where what a session refers to is unknown, nothing may be removed
                        raise
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        with files.reading(root):
            raise error
    return found


def collect(
    root: Path,
    candidates: Collection[str] | None = None,
    *,
    dry_run: bool = False,
    without: Collection[str] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> Collected:
    """Remove the objects that no session refers to, of ``candidates`` or of all; and what killed writers left.

    Others may save and resume meanwhile. ``dry_run`` removes nothing and counts, as if the sessions named in
    ``without`` were gone. ``on_progress(n_done, n)`` counts objects.

    Raises: FormatError (an index, or the store, cannot be read: nothing is removed), ReadError, WriteError,
    LockedError.
    """
    objects = Objects(root)
    read_budget(root)  # refuses a store of a later version
    if not is_store(root):
        return Collected(n_objects=0, n_bytes=0, n_temporaries=0)
    if dry_run:
        return _count(root, objects, candidates, without)
    n_temporaries = len(objects.remove_stale_temporaries()) + len(files.remove_stale_temporaries(root))
    marks = Marks(root)
    wanted = marks.update()
    names = candidates if candidates is not None else (digest for digest, _ in objects.all())
    unused = [digest for digest in names if digest not in wanted]
    n_objects = n_bytes = 0
    batches = iter(unused)
    while batch := list(islice(batches, _N_BATCH)):
        with store_lock(objects, shared=False):
            kept = claimed(objects)
            kept |= marks.update()
            unclaimed = [digest for digest in batch if digest not in kept]
            if unclaimed:
                files.sync_folder(root)  # references before what they refer to
            for digest in unclaimed:
                if n_removed := objects.remove(digest):
                    n_objects += 1
                    n_bytes += n_removed
        if on_progress is not None:
            on_progress(n_objects, len(unused))
    return Collected(n_objects=n_objects, n_bytes=n_bytes, n_temporaries=n_temporaries)


def _count(root: Path, objects: Objects, candidates: Collection[str] | None, without: Collection[str]) -> Collected:
    wanted: set[str] = set()
    for name, path, _ in session_files(root):
        if name not in without:
            wanted |= digests_of(path)
    with_store = {digest: entry for digest, entry in objects.all() if candidates is None or digest in candidates}
    unused = [entry for digest, entry in with_store.items() if digest not in wanted]
    return Collected(n_objects=len(unused), n_bytes=sum(map(_length, unused)), n_temporaries=0)


def _length(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except OSError:
        return 0


def digests_of(path: Path) -> frozenset[str]:
    """Return the digests of the objects a session refers to; none if it is gone. Raises: FormatError, ReadError."""
    try:
        fd = files.open_for_reading(path)
    except NotFoundError:
        return frozenset()
    try:
        return frozenset(load_digests(fd, path))
    except FormatError as error:
        error.hint = error.hint or f"what it refers to is unknown: llamakv repair {path}, or llamakv rm {path.stem}"
        raise
    finally:
        os.close(fd)
