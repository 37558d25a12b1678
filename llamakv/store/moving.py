"""Sessions from one place to another: renamed, or as the bytes of a file of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from llamakv.errors import ConflictError, NotFoundError, StoreError, UsageError
from llamakv.records import SessionRecord
from llamakv.store import files, format
from llamakv.store.sections import StoredSection
from llamakv.store.session_info import SessionInfo
from llamakv.store.session_reader import SessionReader, read_session, verify_session
from llamakv.store.session_writer import check_writable, create_session
from llamakv.store.store_folder import is_in_store, is_store

_N_COPY = 1 << 20


def move_session(
    path: str | os.PathLike[str], target: str | os.PathLike[str], *, name: str | None, overwrite: bool = False
) -> SessionInfo:
    """Give a session another place; ``name`` is what it is called there (None: as before). Nothing else is changed,
    when it was last used neither. Return it as it is there.

    The new one is durable before the old one is removed: whoever is killed leaves one of them or both, and the same
    call again finishes. Nobody saves the session meanwhile. Sections that nobody refers to any more are left behind.

    Raises: UsageError (both are the same file), NotFoundError, ExistsError, LockedError, ConflictError (replaced
    meanwhile; both are there), FormatError (damaged: nothing is moved), WriteError.
    """
    path, target = Path(path), Path(target)
    _check_differ(path, target)
    with files.locked(path) as fd, SessionReader(path) as source:
        info = source.info
        record = info.record
        if name is not None:
            record = replace(record, lineage=replace(record.lineage, name=name))
        if not _is_moved(target, record, info):
            check_writable(target, overwrite=overwrite)
            if record != info.record or is_store(path.parent) or is_store(target.parent) or not _rename(info, target):
                take(source, replace(info, record=record), target, overwrite=overwrite)
                files.set_time(target, os.fstat(fd).st_mtime_ns)
        if os.path.lexists(path):
            if not files.is_at(fd, path):  # the lock does not keep anybody from renaming
                raise ConflictError(f"'{path}' was replaced while it was moved; a copy is '{target}'", path=str(path))
            files.sync_folder(target.parent)  # also where a killed move had come to its rename
            files.discard(path)
        files.sync_folder(path.parent)
    return read_session(target)


def _check_differ(path: Path, target: Path) -> None:
    """Refuse to move a file to itself; two links to it are what a killed move leaves."""
    with contextlib.suppress(OSError):
        is_same = os.path.samefile(path, target)
        if is_same and (os.path.realpath(path) == os.path.realpath(target) or os.stat(path).st_nlink < 2):
            raise UsageError(f"'{path}' cannot be moved to itself", path=str(path))


def _is_moved(target: Path, record: SessionRecord, info: SessionInfo) -> bool:
    """Whether a killed move got as far as writing the new file."""
    try:
        there = read_session(target)
    except (StoreError, NotFoundError):
        return False
    if there.record != record or [s.digest for s in there.sections] != [s.digest for s in info.sections]:
        return False
    return verify_session(target).is_sound  # else it may only look like it: what it was moved from is to go


def _rename(info: SessionInfo, target: Path) -> bool:
    """Give a file another name, durably; False, with nothing done, if that is on another file system."""
    with contextlib.ExitStack() as stack:
        is_there = target.exists()
        if is_there:
            stack.enter_context(files.locked(target))
        return files.move(info.path, target, overwrite=is_there)


def take(source: SessionReader, info: SessionInfo, target: Path, *, overwrite: bool) -> SessionInfo:
    """Write record and sections of ``info``, which are of ``source``, as a new session. Sections are verified, or
    shared within a store.

    Raises: as ``create_session``.
    """
    source.hold(info.sections)
    if not is_in_store(target):  # else what is copied is verified on the way
        check_sections(source, info.sections)
    return create_session(
        target,
        info.record,
        (),
        source=source,
        keep=info.sections,
        overwrite=overwrite,
        is_partial=_is_partial(info),
    )


def _is_partial(info: SessionInfo) -> bool:
    return info.n_cells_held < len(info.record.tokens) - 1


def check_sections(source: SessionReader, sections: Iterable[StoredSection]) -> None:
    """Verify sections. Raises: DamagedError (names the first bad one), ConflictError, ReadError."""
    for _ in source.read(tuple(sections)):
        pass


def session_bytes(source: SessionReader, info: SessionInfo) -> Iterator[bytes]:
    """Yield the bytes of the file that ``take`` would write outside a store, from first to last.

    Sections are not verified: ``check_sections`` first. Raises: as ``SessionReader.read_stored``.
    """
    rows, offset = [], format.N_HEADER
    for section in info.sections:
        row = replace(source.in_file_form(section), offset=offset)
        rows.append(row)
        offset += row.n_stored
    frame, n_raw = format.pack_index(info.record, rows, is_partial=_is_partial(info))
    yield format.pack_header(format.commit_index(frame, generation=1, index_offset=offset, n_index_raw=n_raw))
    for section in info.sections:
        yield from source.read_stored(section, _N_COPY)
    yield frame


@contextlib.contextmanager
def spooled(folder: Path, pieces: Iterable[bytes]) -> Iterator[Path]:
    """Give the path of a temporary in ``folder`` that holds ``pieces`` and is removed on leaving.

    Raises: WriteError.
    """
    with files.temporary(folder) as (path, fd):
        offset = 0
        for piece in pieces:
            offset = files.write_at(fd, [piece], offset, path)
        yield path
