"""Where the sections of a session go: into its file, or into the store as objects that sessions share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from llamakv.records import SessionRecord, StateSection
from llamakv.store import codec, files, format, objects
from llamakv.store.claims import Claim
from llamakv.store.codec import CompressOption, EncodedSection, Encoding
from llamakv.store.format import Commit
from llamakv.store.objects import Objects
from llamakv.store.pipeline import map_ahead, n_cores
from llamakv.store.sections import SectionsError, StoredSection, check_partial, check_sections
from llamakv.store.session_reader import SessionReader

N_AHEAD = 2  # three sections in work, each with its raw and its stored bytes: measured 6.5 sections of 6 MiB
_N_COPY = 1 << 20


@dataclass(frozen=True, slots=True)
class Encoded:
    """A section compressed, its raw bytes let go of."""

    section: StateSection
    encoded: EncodedSection


class SectionWriter(Protocol):
    """Puts sections in their place and says what their rows are. ``n_written`` counts the bytes that took."""

    n_written: int

    def add(self, item: Encoded) -> StoredSection:
        """Write a section; return its row. Raises: WriteError."""
        ...

    def copy(self, source: SessionReader, section: StoredSection) -> StoredSection:
        """Write a stored section of another file as it is; return its row here.

        Raises: WriteError, DamagedError, ReadError, ConflictError (its object was collected before it was held).
        """
        ...


def add_all(
    writer: SectionWriter, sections: Iterable[StateSection], compress: CompressOption
) -> Iterator[StoredSection]:
    """Compress and write ``sections``, several at a time, in order; yield their rows."""
    threads = min(n_cores(), N_AHEAD + 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="llamakv-write") as executor:
        for item in map_ahead(executor, partial(_encode, compress=compress), sections, N_AHEAD):
            stored = writer.add(item)
            del item
            yield stored


def _encode(section: StateSection, compress: CompressOption) -> Encoded:
    data = section.data
    if data.nbytes == 0:
        raise ValueError(f"{section.kind} section [{section.p0}, {section.p1}) is empty")
    encoded = codec.encode(data, compress)
    return Encoded(replace(section, data=memoryview(b"")), encoded)  # lets go of the raw bytes


class FileWriter:
    """Appends to an open file from an offset on: sections, and the index at the end."""

    def __init__(self, fd: int, path: Path, offset: int) -> None:
        self._fd, self._path, self._offset = fd, path, offset
        self.n_written = 0

    def _write(self, parts: Sequence[bytes | memoryview]) -> int:
        """Write ``parts`` at the end; return where they begin."""
        offset, self._offset = self._offset, files.write_at(self._fd, parts, self._offset, self._path)
        self.n_written += self._offset - offset
        return offset

    def add(self, item: Encoded) -> StoredSection:
        """See ``SectionWriter``."""
        section, encoded = item.section, item.encoded
        lengths = encoded.frame_lengths
        pieces = [piece for frame in encoded.frames for piece in frame]
        offset = self._write([*pieces, format.padding(encoded.n_raw, sum(lengths))])
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
        """See ``SectionWriter``."""
        source.hold([section])  # row and bytes of the same object
        row = replace(source.in_file_form(section), offset=self._offset)
        for piece in source.read_stored(section, _N_COPY):
            self._write([piece])
        return row

    def finish(
        self, record: SessionRecord, stored: Sequence[StoredSection], *, generation: int, is_partial: bool = False
    ) -> Commit:
        """Write the index; return the commit record that makes it count. Raises: ValueError, WriteError."""
        try:
            (check_partial if is_partial else check_sections)(record.kind, len(record.tokens), stored)
        except SectionsError as error:
            raise ValueError(f"sections do not fit: {error}") from error
        frame, n_raw = format.pack_index(record, stored, is_partial=is_partial)
        commit = format.commit_index(frame, generation=generation, index_offset=self._offset, n_index_raw=n_raw)
        format.parse_index(frame, commit, self._path)  # never commit what cannot be read
        self._write([frame])
        return commit


class ObjectWriter:
    """Makes sections objects of a store, claimed until the index that refers to them is written."""

    def __init__(self, store: Objects, claim: Claim) -> None:
        self._objects, self._claim = store, claim
        self.n_written = 0
        self.new: set[str] = set()
        """Digests of objects that were not there before."""

    def check(self) -> None:
        """Prove that objects could be claimed now. Raises: WriteError, LockedError."""
        self._claim.add([])

    def add(self, item: Encoded) -> StoredSection:
        """See ``SectionWriter``."""
        section, encoded = item.section, item.encoded
        digest = encoded.digest.hex()
        if self._claim.add([digest]):
            self.new.add(digest)
        self.n_written += self._objects.put(encoded)
        return self._row(
            StoredSection(
                kind=section.kind,
                p0=section.p0,
                p1=section.p1,
                p_used=section.p_used,
                n_raw=encoded.n_raw,
                n_stored=0,
                offset=0,
                digest=digest,
                encoding=Encoding.RAW,
                frames=(),
            )
        )

    def copy(self, source: SessionReader, section: StoredSection) -> StoredSection:
        """See ``SectionWriter``. What comes from elsewhere is verified first: an object is what its name says."""
        is_own = section.in_store and _is_same_folder(source.objects, self._objects)
        if is_own and not self._claim.add([section.digest]):
            return section
        for _ in source.read([section]):
            pass
        row = source.in_file_form(section)
        if self._claim.add([section.digest]):
            self.new.add(section.digest)
        n_padding = row.n_stored - sum(row.frames)
        stored = b"".join(source.read_stored(section, _N_COPY))
        self.n_written += self._objects.put_stored(
            row.digest, row.encoding, row.frames, row.n_raw, [stored[: len(stored) - n_padding]]
        )
        return self._row(row)

    def keep(self, base: Path, sections: Iterable[StoredSection], locked_fd: int) -> None:
        """Claim the objects of sections that an index, open and locked as ``locked_fd``, goes on to refer to.

        Raises: DamagedError (one is not there any more), ConflictError (nor is the index, since somebody put another
        session in its place without having seen it), WriteError.
        """
        missing = self._claim.add(section.digest for section in sections if section.in_store)
        if missing:
            raise objects.lost(base, missing[0]) if files.is_at(locked_fd, base) else objects.replaced(base)

    def sync(self) -> None:
        """Make all of it durable. Raises: WriteError."""
        self._objects.sync()

    def _row(self, section: StoredSection) -> StoredSection:
        return replace(
            section,
            in_store=True,
            offset=0,
            encoding=Encoding.RAW,
            frames=(),
            n_stored=self._objects.n_bytes_of(section.digest),
        )


def _is_same_folder(one: Objects, other: Objects) -> bool:
    return one.root.resolve() == other.root.resolve()
