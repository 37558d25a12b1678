"""Reading session files. Readers take no lock: what they have opened never changes under them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from llamakv.errors import ConflictError, FormatError, LlamakvError, ReadError
from llamakv.records import StateSection
from llamakv.store import codec, files, objects
from llamakv.store.codec import CodecError
from llamakv.store.format import damaged
from llamakv.store.objects import Objects, OpenObject
from llamakv.store.pipeline import map_ahead, n_cores
from llamakv.store.sections import StoredSection
from llamakv.store.session_info import SessionInfo, load_info
from llamakv.store.system_errors import is_lost

N_AHEAD = 5  # seven sections of memory, the one being consumed included; decoding adds about 1 MiB each
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
_N_FILES_SPARE = 16  # for what is read ahead, and everything else
_N_INLINE_RAW = 512 << 10  # less than this is decoded faster than threads start


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedSection:
    """A section that cannot be used, and why."""

    section: StoredSection
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What verifying found. ``n_sections`` and ``n_raw_bytes`` count what was read and digested: 0 when ``fast``."""

    info: SessionInfo
    n_sections: int
    n_raw_bytes: int
    damaged: tuple[DamagedSection, ...]

    @property
    def is_sound(self) -> bool:
        """Whether nothing wrong was found."""
        return not self.damaged


def read_session(path: str | os.PathLike[str]) -> SessionInfo:
    """Return what header and index say: two small reads, no section is touched, no lock is taken.

    Raises: NotFoundError, NotASessionError, NewerFormatError, DamagedError, ReadError.
    """
    fd = files.open_for_reading(Path(path))
    try:
        return load_info(fd, Path(path))
    finally:
        os.close(fd)


class SessionReader:
    """A session file held open: its sections stay readable whatever happens to the path meanwhile; those that are
    objects of a store, from the first call of ``read`` or ``hold`` on.

    A context manager. ``info`` is as of opening. Not to be shared by threads (it uses its own inside).

    Raises (on opening): as ``read_session``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._executor: ThreadPoolExecutor | None = None
        self._objects = Objects(folder_of(self._path))
        self._held: dict[str, OpenObject] = {}
        self._fd = files.open_for_reading(self._path)
        try:
            self.info = load_info(self._fd, self._path)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead and close the file; calling it again does nothing."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        while self._held:
            os.close(self._held.popitem()[1].fd)

    @property
    def objects(self) -> Objects:
        """The objects that sections in the store refer to."""
        return self._objects

    def hold(self, sections: Sequence[StoredSection]) -> None:
        """Open the objects of ``sections``: from now on nobody can take them away. Of more than the system lets a
        process have open (ulimit -Hn), only as many as it does.

        Raises: ConflictError (the session was saved or removed by somebody else meanwhile, and its objects collected:
        read it again), DamagedError, NewerFormatError, ReadError.
        """
        wanted = {section.digest: section for section in sections if section.in_store}
        missing = [section for digest, section in wanted.items() if digest not in self._held]
        files.allow_open_files(len(self._held) + len(missing))
        for section in missing:
            try:
                self._held[section.digest] = self._open(section)
            except ReadError as error:
                if error.fields.get("errno") not in _TOO_MANY_FILES:
                    raise
                for _ in range(min(len(self._held), _N_FILES_SPARE)):  # these and the rest are opened when needed
                    os.close(self._held.popitem()[1].fd)
                return

    def _is_changed(self) -> bool:
        try:
            return read_session(self._path).commit != self.info.commit
        except LlamakvError:
            return True

    def _open(self, section: StoredSection) -> OpenObject:
        try:
            return objects.open_for(self._path, self._objects, section.digest, section.n_raw)
        except FormatError as error:
            if self._is_changed():
                raise ConflictError(
                    f"'{self._path}' was saved or removed by somebody else while it was read",
                    hint="the same command again reads what is there now",
                    path=str(self._path),
                ) from error
            raise

    def in_file_form(self, section: StoredSection) -> StoredSection:
        """Return the row of a section as it would be in a file of its own, but for the offset.

        Raises: as ``hold``.
        """
        with self._located(section) as (_, _, _, row):
            return row

    @contextlib.contextmanager
    def _located(self, section: StoredSection) -> Iterator[tuple[int, Path, int, StoredSection]]:
        """Where a section's bytes are: an open file, its path and an offset; and its row as it would be in a file."""
        if not section.in_store:
            yield self._fd, self._path, section.offset, section
            return
        held = self._held.get(section.digest)
        found = held or self._open(section)
        n_stored = found.n_bytes - objects.N_HEAD
        try:
            yield (
                found.fd,
                found.path,
                objects.N_HEAD,
                replace(section, in_store=False, encoding=found.encoding, frames=found.frames, n_stored=n_stored),
            )
        finally:
            if held is None:
                os.close(found.fd)

    def read(self, sections: Sequence[StoredSection]) -> Iterator[StateSection]:
        """Return the given sections of ``info`` (or of ``truncate_sections``) with their bytes, in the order given.

        Reading, decompressing and verifying begin at once and run ahead on all cores, with at most seven sections in
        memory, the one being consumed included. Each section's bytes belong to the caller. Iterate before the reader
        is closed.

        Raises: as ``hold``; while iterating, DamagedError before a section that is not what was saved, ReadError.
        """
        known = {(section.offset, section.digest) for section in self.info.sections}
        if any((section.offset, section.digest) not in known for section in sections):
            raise ValueError("a section is not one of this file's")
        self.hold(sections)
        if len(sections) == 1 or sum(section.n_raw for section in sections) <= _N_INLINE_RAW:
            return map(self._decode, sections)
        return map_ahead(self._threads(), self._decode, sections, N_AHEAD)

    def read_stored(self, section: StoredSection, n_bytes: int) -> Iterator[bytes]:
        """Yield a section's stored bytes as they are (``in_file_form``), in pieces of ``n_bytes``, unverified.

        Raises: DamagedError (the file has become shorter), ReadError.
        """
        with self._located(section) as (fd, path, start, row):
            end = start + row.n_stored
            for offset in range(start, end, n_bytes):
                n_wanted = min(n_bytes, end - offset)
                piece = files.read_at(fd, n_wanted, offset, path)
                if len(piece) < n_wanted:
                    raise damaged(path, f"file ends at {offset + len(piece)}, inside a section")
                yield piece

    def find_damage(self, sections: Sequence[StoredSection] | None = None) -> Iterator[DamagedSection | None]:
        """Read and verify sections of ``info``, all unless they are given; yield None for one that is sound.

        Raises: while iterating, ConflictError (as ``hold``), ReadError.
        """
        wanted = self.info.sections if sections is None else sections
        return map_ahead(self._threads(), self._find_damage, wanted, N_AHEAD)

    def _threads(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(min(n_cores(), N_AHEAD), thread_name_prefix="llamakv-read")
        return self._executor

    def _find_damage(self, section: StoredSection) -> DamagedSection | None:
        try:
            if section.in_store:
                found = self._open(section)
                try:
                    objects.check_object(found)
                finally:
                    os.close(found.fd)
            else:
                self._decode(section)
        except (FormatError, ReadError) as error:
            if isinstance(error, ReadError) and not is_lost(error):
                raise
            return DamagedSection(section=section, reason=error.message)
        return None

    def _decode(self, section: StoredSection) -> StateSection:
        with self._located(section) as (fd, path, start, row):
            try:
                data = codec.decode(
                    lambda n_bytes, offset: files.read_at(fd, n_bytes, offset, path),
                    encoding=row.encoding,
                    offset=start,
                    frames=row.frames,
                    n_raw=section.n_raw,
                    digest=bytes.fromhex(section.digest),
                )
            except CodecError as error:
                where = f"{section.kind} section [{section.p0}, {section.p1})"
                raise damaged(self._path, f"{where}: {error}") from error
        return StateSection(kind=section.kind, p0=section.p0, p1=section.p1, p_used=section.p_used, data=data)


def verify_session(path: str | os.PathLike[str], *, fast: bool = False) -> VerifyReport:
    """Read a session and report every section that is damaged; ``fast`` checks header and index only.

    Read only. Raises: as ``read_session``, and ConflictError (it was saved or removed, and its sections collected,
    meanwhile); damaged sections are reported, not raised.
    """
    with SessionReader(path) as reader:
        info = reader.info
        if fast:
            return VerifyReport(info=info, n_sections=0, n_raw_bytes=0, damaged=())
        found = tuple(damage for damage in reader.find_damage() if damage is not None)
    return VerifyReport(info=info, n_sections=len(info.sections), n_raw_bytes=info.n_raw_bytes, damaged=found)


def folder_of(path: Path) -> Path:
    """Return the folder a file is really in, where its objects are: the path may be a link."""
    return Path(os.path.realpath(path)).parent if os.path.islink(path) else path.parent
