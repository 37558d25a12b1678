"""Writing sessions: new files appear by rename; a session file of its own grows and is committed in its header, one of
a store is a small index that is replaced, with its sections beside it as objects."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from llamakv.errors import (
    ConflictError,
    ExistsError,
    FormatError,
    LlamakvError,
    NotASessionError,
    NotFoundError,
    UsageError,
    WriteError,
)
from llamakv.records import Lineage, SessionRecord, StateSection
from llamakv.store import codec, files, format, objects
from llamakv.store.claims import claiming
from llamakv.store.codec import AUTO, CompressOption
from llamakv.store.collector import collect
from llamakv.store.format import Commit
from llamakv.store.objects import Objects
from llamakv.store.section_writers import FileWriter, ObjectWriter, add_all
from llamakv.store.sections import StoredSection
from llamakv.store.session_info import SessionInfo, load_commit, load_info
from llamakv.store.session_reader import SessionReader, read_session
from llamakv.store.store_folder import is_in_store, read_budget

OnSection = Callable[[StoredSection], None]

_MIN_DEAD = 1 << 20  # compacting less is not worth the write


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
    with _object_writer(path) as store:
        if store is not None:
            store.check()


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
    is_partial: bool = False,
    replaces: Commit | None = None,
) -> SessionInfo:
    """Write a new session; it appears under ``path`` complete and durable, or not at all.

    Of a session of a store (a ``.bin`` file in its folder) the sections become objects, and those the store has are not
    written again. Mode 0600 from the first moment. ``keep`` are sections of ``source`` that are taken as they are,
    before ``sections``. ``on_section`` is called after each section of ``sections`` has been written. A section is
    referenced until it is written; two are compressed ahead. Stale temporaries of killed writers in the folder are
    removed. ``is_partial`` allows sections that bring back the first cells only. With ``replaces`` only the session of
    that commit is overwritten. Whatever fails, an exception of
    ``sections`` included, a previous file stays byte for byte.

    Raises: UsageError (no tokens), ExistsError, WriteError, LockedError (the file to be overwritten is being
    written), ConflictError (``source`` was removed meanwhile), DamagedError (a section of ``source``); ValueError
    (sections that do not fit the tokens: the caller's bug).
    """
    path = Path(path)
    _check_tokens(record)
    codec.check_option(compress)
    if keep and source is None:
        raise ValueError("sections to keep need a source")
    check_writable(path, overwrite=overwrite)
    with contextlib.ExitStack() as stack:
        if overwrite:
            with contextlib.suppress(NotFoundError):  # there is nothing, or it was removed just now
                locked_fd = stack.enter_context(files.locked(path))
                if replaces is not None and load_commit(locked_fd, path) != replaces:
                    raise ConflictError(
                        f"'{path}' was saved by somebody else meanwhile", hint="run it again", path=str(path)
                    )
        store = stack.enter_context(_object_writer(path))
        fd = stack.enter_context(files.replacement(path, overwrite=overwrite))
        file = FileWriter(fd, path, format.N_HEADER)
        writer = store or file
        stored = [writer.copy(source, section) for section in keep] if source is not None else []
        stored += _told(add_all(writer, sections, compress), on_section)
        return _finish_new(file, store, fd, path, record, stored, generation=1, is_partial=is_partial)


def extend_session(
    base: SessionInfo,
    record: SessionRecord,
    *,
    keep: Sequence[StoredSection],
    new: Iterable[StateSection],
    compress: CompressOption = AUTO,
    on_section: OnSection | None = None,
    is_partial: bool = False,
    keep_time: bool = False,
) -> SessionInfo:
    """Save ``record`` as the next generation of ``base``'s file, writing only ``new`` sections and the index.

    ``keep`` are sections of ``base``, with ``p_used`` perhaps lowered (``truncate_sections``). Takes the writer's
    lock first; ``new`` is not touched before the file is known to be unchanged. Whatever fails, ``base`` stays the
    session that is read, and what was appended is cut off again where the system allows it. Compacts the file where
    over half of it (and over 1 MiB) has become dead; failing in that is no error. In a store, where the index is
    replaced, a session that came there as a file of its own is taken apart; with ``keep_time`` it was last used when it
    was before.

    Raises: UsageError (no tokens), NotFoundError, LockedError, ConflictError (somebody saved since ``base`` was
    read; nothing is written), FormatError (the file was damaged since, or sections to keep are gone), WriteError;
    ValueError (sections that do not fit: the caller's bug).
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
                f"'{path}' was saved by somebody else since it was read"
                + (
                    f": it is at generation {on_disk.generation}, read was {base.generation}"
                    if on_disk.generation != base.generation
                    else ", as another session"
                ),
                hint="save under another name, or resume it again",
                path=str(path),
                expected=base.generation,
                actual=on_disk.generation,
            )
        if not is_in_store(path) and (gone := next((s for s in keep if s.in_store), None)) is not None:
            raise objects.lost(path, gone.digest)  # the folder is no store any more
        if is_in_store(path):
            used_ns = os.fstat(fd).st_mtime_ns if keep_time else None
            return _replace_index(
                fd,
                base,
                record,
                keep,
                new,
                compress=compress,
                on_section=on_section,
                is_partial=is_partial,
                used_ns=used_ns,
            )
        info = _append(fd, base, record, keep, new, compress=compress, on_section=on_section, is_partial=is_partial)
        if info.n_dead_bytes > max(_MIN_DEAD, info.n_file_bytes // 2):
            with contextlib.suppress(LlamakvError):  # the save is done, whatever becomes of this
                info = replace(_compact(fd, info), n_written=info.n_written)
    return info


def change_lineage(path: str | os.PathLike[str], change: Callable[[Lineage], Lineage]) -> SessionInfo:
    """Change what a session says of itself (name, note, tags, pin, time to live), and nothing else. When it was last
    used stays as it is, too.

    Raises: NotFoundError, FormatError, LockedError, ConflictError, WriteError.
    """
    base = read_session(path)
    record = replace(base.record, lineage=change(base.record.lineage))
    if record == base.record:
        return base
    is_partial = base.n_cells_held < len(record.tokens) - 1
    return extend_session(base, record, keep=base.sections, new=(), is_partial=is_partial, keep_time=True)


def mark_used(path: str | os.PathLike[str]) -> None:
    """Note that a session of a store was used now; of other files, and where the system forbids it, nothing changes."""
    path = Path(path)
    if is_in_store(path):
        files.set_time(path)


def compact_session(path: str | os.PathLike[str]) -> SessionInfo:
    """Rewrite a session file without its dead bytes; a file without any is left alone.

    Sections are copied as they are, so damage in one stays what it is; in a store, where sections of the file's own
    become objects, damage is an error. Readers keep what they have open. On failure the file is as it was.

    Raises: NotFoundError, FormatError, LockedError, ConflictError (replaced meanwhile), WriteError.
    """
    path = Path(path)
    read_session(path)
    files.remove_stale_temporaries(path.parent)
    with files.locked(path) as fd:
        info = load_info(fd, path)
        if not info.n_dead_bytes:
            return info
        if not is_in_store(path):
            return _compact(fd, info)
        is_partial = info.n_cells_held < len(info.record.tokens) - 1
        return _replace_index(
            fd,
            info,
            info.record,
            info.sections,
            (),
            compress=AUTO,
            on_section=None,
            is_partial=is_partial,
            used_ns=os.fstat(fd).st_mtime_ns,
        )


# ---------------------------------------------------------------- private


def _check_tokens(record: SessionRecord) -> None:
    if not record.tokens:
        raise UsageError("nothing to save: a session has at least one token")


@contextlib.contextmanager
def _object_writer(path: Path) -> Iterator[ObjectWriter | None]:
    """A writer of objects if ``path`` lies in a store; None if its session is a file of its own."""
    if not is_in_store(path):
        yield None
        return
    read_budget(path.parent)  # refuses a store of a later version
    store = Objects(path.parent)
    with contextlib.ExitStack() as stack:
        writer = ObjectWriter(store, stack.enter_context(claiming(store)))
        try:
            yield writer
        except Exception:
            stack.close()  # the claim ends before what was written for nothing is removed
            with contextlib.suppress(LlamakvError):
                collect(path.parent, writer.new)
            raise


def _told(stored: Iterator[StoredSection], on_section: OnSection | None) -> Iterator[StoredSection]:
    for section in stored:
        if on_section is not None:
            on_section(section)
        yield section


def _finish_new(
    file: FileWriter,
    store: ObjectWriter | None,
    fd: int,
    path: Path,
    record: SessionRecord,
    stored: Sequence[StoredSection],
    *,
    generation: int,
    is_partial: bool,
) -> SessionInfo:
    if store is not None:
        store.sync()  # objects before what refers to them
    commit = file.finish(record, stored, generation=generation, is_partial=is_partial)
    files.write_at(fd, [format.pack_header(commit)], 0, path)
    n_written = format.N_HEADER + file.n_written + (store.n_written if store is not None else 0)
    return replace(_read_back(fd, path, commit), n_written=n_written)


def _replace_index(
    locked_fd: int,
    base: SessionInfo,
    record: SessionRecord,
    keep: Sequence[StoredSection],
    new: Iterable[StateSection],
    *,
    compress: CompressOption,
    on_section: OnSection | None,
    is_partial: bool,
    used_ns: int | None,
) -> SessionInfo:
    path = base.path
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(_object_writer(path))
        assert store is not None
        store.keep(path, keep, locked_fd)
        stored = list(keep)
        if not all(section.in_store for section in keep):
            source = stack.enter_context(SessionReader(path))
            stored = [store.copy(source, section) for section in keep]
        fd = stack.enter_context(files.replacement(path, overwrite=True))
        stored += _told(add_all(store, new, compress), on_section)
        file = FileWriter(fd, path, format.N_HEADER)
        files.keep_owner(fd, locked_fd)
        info = _finish_new(file, store, fd, path, record, stored, generation=base.generation + 1, is_partial=is_partial)
        if not files.is_at(locked_fd, path):  # the lock does not keep anybody from renaming
            raise objects.replaced(path)
        if used_ns is not None:
            files.set_time_of(fd, used_ns)
        return info


def _append(
    fd: int,
    base: SessionInfo,
    record: SessionRecord,
    keep: Sequence[StoredSection],
    new: Iterable[StateSection],
    *,
    compress: CompressOption,
    on_section: OnSection | None,
    is_partial: bool,
) -> SessionInfo:
    path, n_before, generation = base.path, base.commit.n_file, base.generation + 1
    slot = format.slot_offset(generation)
    slot_before = files.read_at(fd, format.N_SECTOR, slot, path)
    sector_before = files.read_at(fd, format.N_SECTOR, 0, path)
    if files.file_length(fd) > n_before:
        files.cut(fd, n_before, path)  # left by a writer that was killed
    is_slot_written = False
    try:
        writer = FileWriter(fd, path, n_before)
        stored = [*keep, *_told(add_all(writer, new, compress), on_section)]
        commit = writer.finish(record, stored, generation=generation, is_partial=is_partial)
        if sector_before != format.first_sector():
            files.write_at(fd, [format.first_sector()], 0, path)  # a later version reads what earlier ones wrote
        files.sync(fd, path)  # data before what refers to it
        is_slot_written = True
        files.write_at(fd, [format.pack_slot(commit)], slot, path)
        files.sync(fd, path)
        return replace(_read_back(fd, path, commit), n_written=writer.n_written)
    except BaseException:
        with contextlib.suppress(WriteError):
            if is_slot_written:
                files.write_at(fd, [slot_before], slot, path)
                files.sync(fd, path)
            if sector_before != format.first_sector():
                files.write_at(fd, [sector_before], 0, path)
            files.cut(fd, n_before, path)
        raise


def _compact(locked_fd: int, info: SessionInfo) -> SessionInfo:
    path = info.path
    is_partial = info.n_cells_held < len(info.record.tokens) - 1
    with SessionReader(path) as source, files.replacement(path, overwrite=True) as fd:
        if source.info.commit != info.commit:
            raise _replaced(path)
        writer = FileWriter(fd, path, format.N_HEADER)
        stored = [writer.copy(source, section) for section in info.sections]
        commit = writer.finish(info.record, stored, generation=info.generation + 1, is_partial=is_partial)
        files.write_at(fd, [format.pack_header(commit)], 0, path)
        files.keep_owner(fd, locked_fd)
        compacted = _read_back(fd, path, commit)
        if not files.is_at(locked_fd, path):  # the lock does not keep anybody from renaming
            raise _replaced(path)
        return replace(compacted, n_written=compacted.n_file_bytes)


def _replaced(path: Path) -> ConflictError:
    return ConflictError(f"'{path}' was replaced while it was being compacted; nothing was changed", path=str(path))


def _read_back(fd: int, path: Path, commit: Commit) -> SessionInfo:
    info = load_info(fd, path)
    if info.commit != commit:
        raise WriteError(f"cannot write '{path}': what was written does not read back", path=str(path))
    return info
