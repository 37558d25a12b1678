"""Writing session files: new ones appear by rename, existing ones grow and are committed in their header."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from llamakv.errors import (
    ConflictError,
    ExistsError,
    FormatError,
    LlamakvError,
    NotASessionError,
    UsageError,
    WriteError,
)
from llamakv.records import SessionRecord, StateSection
from llamakv.store import codec, files, format
from llamakv.store.codec import AUTO, CompressOption, EncodedSection
from llamakv.store.format import Commit
from llamakv.store.pipeline import map_ahead, n_cores
from llamakv.store.sections import SectionsError, StoredSection, check_sections
from llamakv.store.session_info import SessionInfo, load_commit, load_info
from llamakv.store.session_reader import SessionReader, read_session

OnSection = Callable[[StoredSection], None]

N_AHEAD = 2  # three sections in work, each with its raw and its stored bytes: measured 6.5 sections of 6 MiB
_N_COPY = 1 << 20
_MIN_DEAD = 1 << 20  # compacting less is not worth the write


@dataclass(frozen=True, slots=True)
class _Encoded:
    section: StateSection
    encoded: EncodedSection


# ---------------------------------------------------------------- checks


def check_writable(path: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Raise what saving to ``path`` would raise, before any work is spent on it.

    Makes and removes a temporary in the folder, to be sure; those of killed writers are removed too.

    Raises: ExistsError (there and not ``overwrite``, or not a session file), WriteError (folder missing, not
    writable; ``path`` a folder, link, device or read-only).
    """
    path = Path(path)
    if files.check_target(path):
        if not overwrite:
            raise ExistsError(f"'{path}' already exists", path=str(path))
        _check_replaceable(path)
    files.check_folder(path.parent)


def _check_replaceable(path: Path) -> None:
    try:
        fd = files.open_for_reading(path)
        try:
            if files.file_length(fd) > 0:
                load_commit(fd, path)
        finally:
            os.close(fd)
    except NotASessionError as error:
        raise ExistsError(f"'{path}' exists and is not a session file: not overwritten", path=str(path)) from error
    except FormatError:
        pass  # a damaged session may be replaced


# ---------------------------------------------------------------- public


def create_session(
    path: str | os.PathLike[str],
    record: SessionRecord,
    sections: Iterable[StateSection],
    *,
    compress: CompressOption = AUTO,
    overwrite: bool = False,
    on_section: OnSection | None = None,
    source: SessionReader | None = None,
    keep: Sequence[StoredSection] = (),
) -> SessionInfo:
    """Write a new session file; it appears under ``path`` complete and durable, or not at all.

    Mode 0600 from the first moment. ``keep`` are sections of ``source`` that are copied as they are, before
    ``sections``. ``on_section`` is called after each section of ``sections`` has been written. A section is
    referenced until it is written; two are compressed ahead. Stale temporaries of killed writers in the folder are
    removed. Whatever fails, an exception of ``sections`` included, a previous file stays byte for byte.

    Raises: UsageError (no tokens), ExistsError, WriteError, LockedError (the file to be overwritten is being
    written); ValueError (sections that do not fit the tokens: the caller's bug).
    """
    path = Path(path)
    _check_tokens(record)
    codec.check_option(compress)
    if keep and source is None:
        raise ValueError("sections to keep need a source")
    check_writable(path, overwrite=overwrite)
    with contextlib.ExitStack() as stack:
        if overwrite and path.exists():
            stack.enter_context(files.locked(path))
        fd = stack.enter_context(files.replacement(path, overwrite=overwrite))
        writer = _Writer(fd, path, format.N_HEADER)
        stored = [writer.copy(source, section) for section in keep] if source is not None else []
        stored += writer.add_all(sections, compress, on_section)
        commit = writer.finish(record, stored, generation=1)
        files.write_at(fd, [format.pack_header(commit)], 0, path)
        return _read_back(fd, path, commit)


def extend_session(
    base: SessionInfo,
    record: SessionRecord,
    *,
    keep: Sequence[StoredSection],
    new: Iterable[StateSection],
    compress: CompressOption = AUTO,
    on_section: OnSection | None = None,
) -> SessionInfo:
    """Save ``record`` as the next generation of ``base``'s file, writing only ``new`` sections and the index.

    ``keep`` are sections of ``base``, with ``p_used`` perhaps lowered (``truncate_sections``). Takes the writer's
    lock first; ``new`` is not touched before the file is known to be unchanged. Whatever fails, ``base`` stays the
    session that is read, and what was appended is cut off again where the system allows it. Compacts the file where
    over half of it (and over 1 MiB) has become dead; failing in that is no error.

    Raises: UsageError (no tokens), NotFoundError, LockedError, ConflictError (somebody saved since ``base`` was
    read; nothing is written), FormatError (the file was damaged since), WriteError; ValueError (sections that do not
    fit: the caller's bug).
    """
    _check_tokens(record)
    codec.check_option(compress)
    known = {(section.offset, section.digest) for section in base.sections}
    if any((section.offset, section.digest) not in known for section in keep):
        raise ValueError("a section to keep is not one of the base's")
    path = base.path
    with files.locked(path) as fd:
        if (on_disk := load_commit(fd, path)) != base.commit:
            raise ConflictError(
                f"'{path}' was saved by somebody else since it was read: it is at generation "
                f"{on_disk.generation}, read was {base.generation}",
                hint="save under another name, or resume it again",
                path=str(path),
                expected=base.generation,
                actual=on_disk.generation,
            )
        info = _append(fd, base, record, keep, new, compress, on_section)
        if info.n_dead_bytes > max(_MIN_DEAD, info.n_file_bytes // 2):
            with contextlib.suppress(LlamakvError):  # the save is done, whatever becomes of this
                info = _compact(fd, info)
    return info


def compact_session(path: str | os.PathLike[str]) -> SessionInfo:
    """Rewrite a session file without its dead bytes; a file without any is left alone.

    Sections are copied as they are, so damage in one stays what it is. Readers keep what they have open. On failure
    the file is as it was.

    Raises: NotFoundError, FormatError, LockedError, ConflictError (replaced meanwhile), WriteError.
    """
    path = Path(path)
    read_session(path)
    files.remove_stale_temporaries(path.parent)
    with files.locked(path) as fd:
        info = load_info(fd, path)
        return _compact(fd, info) if info.n_dead_bytes else info


# ---------------------------------------------------------------- private


def _check_tokens(record: SessionRecord) -> None:
    if not record.tokens:
        raise UsageError("nothing to save: a session has at least one token")


def _append(
    fd: int,
    base: SessionInfo,
    record: SessionRecord,
    keep: Sequence[StoredSection],
    new: Iterable[StateSection],
    compress: CompressOption,
    on_section: OnSection | None,
) -> SessionInfo:
    path, n_before, generation = base.path, base.commit.n_file, base.generation + 1
    slot = format.slot_offset(generation)
    slot_before = files.read_at(fd, format.N_SECTOR, slot, path)
    if files.file_length(fd) > n_before:
        files.cut(fd, n_before, path)  # left by a writer that was killed
    is_slot_written = False
    try:
        writer = _Writer(fd, path, n_before)
        stored = [*keep, *writer.add_all(new, compress, on_section)]
        commit = writer.finish(record, stored, generation=generation)
        files.sync(fd, path)  # data before what refers to it
        is_slot_written = True
        files.write_at(fd, [format.pack_slot(commit)], slot, path)
        files.sync(fd, path)
        return _read_back(fd, path, commit)
    except BaseException:
        with contextlib.suppress(WriteError):
            if is_slot_written:
                files.write_at(fd, [slot_before], slot, path)
                files.sync(fd, path)
            files.cut(fd, n_before, path)
        raise


def _compact(locked_fd: int, info: SessionInfo) -> SessionInfo:
    path = info.path
    with SessionReader(path) as source, files.replacement(path, overwrite=True) as fd:
        if source.info.commit != info.commit:
            raise _replaced(path)
        writer = _Writer(fd, path, format.N_HEADER)
        stored = [writer.copy(source, section) for section in info.sections]
        commit = writer.finish(info.record, stored, generation=info.generation + 1)
        files.write_at(fd, [format.pack_header(commit)], 0, path)
        files.keep_owner(fd, locked_fd)
        compacted = _read_back(fd, path, commit)
        if not files.is_at(locked_fd, path):  # the lock does not keep anybody from renaming
            raise _replaced(path)
        return compacted


def _replaced(path: Path) -> ConflictError:
    return ConflictError(f"'{path}' was replaced while it was being compacted; nothing was changed", path=str(path))


def _read_back(fd: int, path: Path, commit: Commit) -> SessionInfo:
    info = load_info(fd, path)
    if info.commit != commit:
        raise WriteError(f"cannot write '{path}': what was written does not read back", path=str(path))
    return info


class _Writer:
    """Appends to an open file from an offset on."""

    def __init__(self, fd: int, path: Path, offset: int) -> None:
        self._fd, self._path, self._offset = fd, path, offset

    def add_all(
        self, sections: Iterable[StateSection], compress: CompressOption, on_section: OnSection | None
    ) -> Iterator[StoredSection]:
        """Compress and write ``sections``, several at a time, in order; yield their rows."""
        threads = min(n_cores(), N_AHEAD + 1)
        with ThreadPoolExecutor(threads, thread_name_prefix="llamakv-write") as executor:
            for item in map_ahead(executor, partial(_encode, compress=compress), sections, N_AHEAD):
                stored = self._add(item)
                del item
                if on_section is not None:
                    on_section(stored)
                yield stored

    def _add(self, item: _Encoded) -> StoredSection:
        section, encoded = item.section, item.encoded
        lengths = encoded.frame_lengths
        padding = format.padding(encoded.n_raw, sum(lengths))
        pieces = [piece for frame in encoded.frames for piece in frame]
        offset, self._offset = (
            self._offset,
            files.write_at(self._fd, [*pieces, padding], self._offset, self._path),
        )
        return StoredSection(
            kind=section.kind,
            p0=section.p0,
            p1=section.p1,
            p_used=section.p_used,
            n_raw=encoded.n_raw,
            n_stored=self._offset - offset,
            offset=offset,
            digest=encoded.digest.hex(),
            encoding=encoded.encoding,
            frames=lengths,
        )

    def copy(self, source: SessionReader, section: StoredSection) -> StoredSection:
        """Write a stored section of another file as it is; return its new row."""
        offset = self._offset
        for piece in source.read_stored(section, _N_COPY):
            self._offset = files.write_at(self._fd, [piece], self._offset, self._path)
        return replace(section, offset=offset)

    def finish(self, record: SessionRecord, stored: Sequence[StoredSection], *, generation: int) -> Commit:
        """Write the index; return the commit record that makes it count. Raises: ValueError, WriteError."""
        try:
            check_sections(record.kind, len(record.tokens), stored)
        except SectionsError as error:
            raise ValueError(f"sections do not fit: {error}") from error
        frame, n_raw = format.pack_index(record, stored)
        commit = format.commit_index(frame, generation=generation, index_offset=self._offset, n_index_raw=n_raw)
        format.parse_index(frame, commit, self._path)  # never commit what cannot be read
        self._offset = files.write_at(self._fd, [frame], self._offset, self._path)
        return commit


def _encode(section: StateSection, compress: CompressOption) -> _Encoded:
    data = section.data
    if data.nbytes == 0:
        raise ValueError(f"{section.kind} section [{section.p0}, {section.p1}) is empty")
    encoded = codec.encode(data, compress)
    return _Encoded(replace(section, data=memoryview(b"")), encoded)  # lets go of the raw bytes
