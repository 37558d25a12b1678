"""The steps of a repair. Each is done completely or not at all, and may be done again."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from llamakv.errors import ConflictError, ExistsError, FormatError, ReadError, WriteError
from llamakv.store import files, format
from llamakv.store.checking import Rest
from llamakv.store.locks import acquire
from llamakv.store.objects import Objects
from llamakv.store.session_file import SessionInfo, extend_session, read_session
from llamakv.store.session_info import load_info, make_info
from llamakv.store.system_errors import is_lost

ENDING = ".damaged"
CACHE = ".cache"


def rewrite(info: SessionInfo, rest: Rest) -> SessionInfo:
    """Save a session again with what is sound of its state: its tokens and messages, and when it was last used, stay.

    Raises: NotFoundError, LockedError, ConflictError (saved since ``info`` was read), FormatError, WriteError: it is as
    it was.
    """
    is_partial = rest.n_cells < len(info.record.tokens) - 1
    return extend_session(info, info.record, keep=rest.sections, new=(), is_partial=is_partial, keep_time=True)


def save_before(path: Path) -> SessionInfo | None:
    """Return the save before the last of a session file whose last one cannot be read; None where that cannot be read
    either, as in a store, where each save is a new file.

    Raises: NotFoundError, NotASessionError, ReadError.
    """
    with open(files.open_for_reading(path), "rb", buffering=0) as file:
        found = _save_before(file.fileno(), path)
    return found[0] if found is not None else None


def go_back(path: Path) -> SessionInfo | None:
    """Take back the last save of a session file, which cannot be read: the slot of the header that names it is wiped.
    Return what is read now; None, and nothing changes, where there is no save before it or somebody saved meanwhile.

    Raises: NotFoundError, LockedError, ReadError, WriteError.
    """
    with files.locked(path) as fd:
        if _is_readable(fd, path) or (found := _save_before(fd, path)) is None:
            return None
        before, slot = found
        files.write_at(fd, [bytes(format.N_SECTOR)], slot, path)
        files.sync(fd, path)
        return before


def _is_readable(fd: int, path: Path) -> bool:
    try:
        load_info(fd, path)
    except FormatError:
        return False
    return True


def _save_before(fd: int, path: Path) -> tuple[SessionInfo, int] | None:
    """A save that could be read if a slot of the header was empty, and where that slot is."""
    header = files.read_at(fd, format.N_HEADER, 0, path)
    n_file = files.file_length(fd)
    for slot in map(format.slot_offset, (0, 1)):
        without = header[:slot] + bytes(format.N_SECTOR) + header[slot + format.N_SECTOR :]
        with contextlib.suppress(FormatError):
            commit = format.parse_header(without, n_file, path)
            frame = files.read_at(fd, commit.n_index, commit.index_offset, path)
            record, sections = format.parse_index(frame, commit, path)
            return make_info(path, record, sections, commit, n_file), slot
    return None


def move_unreadable(path: Path) -> Path:
    """Give a session file that cannot be read another name, under which it is no session any more; return its path:
    its own with ``.damaged`` behind, numbered where that is taken.

    Raises: NotFoundError, LockedError, ConflictError (it can be read by now), WriteError.
    """
    with open(files.open_for_reading(path), "rb", buffering=0) as file:
        acquire(file.fileno(), path, wait_s=0.1)
        try:
            read_session(path)
        except (FormatError, ReadError) as error:
            if isinstance(error, ReadError) and not is_lost(error):
                raise
            place = next(place for place in _places(path) if _is_moved(path, place))
            files.sync_folder(path.parent)
            return place
    raise ConflictError(f"'{path}' was saved by somebody else meanwhile", path=str(path))


def _places(path: Path) -> Iterator[Path]:
    for number in itertools.count(1):
        ending = ENDING if number == 1 else f"{ENDING}-{number}"
        stem = os.fsencode(path.name)[: files.MAX_NAME_BYTES - len(ending)]
        yield path.with_name(stem.decode("utf-8", "ignore") + ending)


def _is_moved(path: Path, place: Path) -> bool:
    """Move a file where nothing is; return whether it is there now."""
    try:
        with files.writing(path):
            files.publish(path, place, overwrite=False)
    except ExistsError:
        if not place.samefile(path):
            return False
        files.discard(path)  # whoever began to move it was killed
    return True


def remove_temporaries(root: Path) -> int:
    """Remove what killed writers left in a store; return how many files."""
    return len(Objects(root).remove_stale_temporaries()) + len(files.remove_stale_temporaries(root))


def drop_cache(root: Path) -> None:
    """Throw away what was computed from a store's files, at once for whoever looks; what cannot be removed is left."""
    old = root / f"{CACHE}.old"
    with contextlib.suppress(OSError, WriteError):
        if (root / CACHE).is_symlink():
            files.discard(root / CACHE)
        if old.is_symlink():
            files.discard(old)
        shutil.rmtree(old, ignore_errors=True)
        files.publish(root / CACHE, old, overwrite=True)
        shutil.rmtree(old, ignore_errors=True)
