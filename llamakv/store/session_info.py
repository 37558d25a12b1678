"""What the header and the index of a session file say."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from llamakv.records import SessionRecord
from llamakv.store import files, format
from llamakv.store.format import Commit
from llamakv.store.sections import StoredSection, n_cells_held


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """A session as one generation of its file tells it; no section has been read.

    ``n_file_bytes`` is the file's length; of these ``n_live_bytes`` belong to this generation and ``n_dead_bytes`` to
    nothing any more; sections in a store are in neither. ``commit`` identifies the generation: a writer checks that it
    is still the newest. ``n_written`` is how many bytes writing it took, 0 where it was only read.
    """

    path: Path
    record: SessionRecord
    sections: tuple[StoredSection, ...]
    generation: int
    n_file_bytes: int
    n_live_bytes: int
    n_dead_bytes: int
    commit: Commit = field(repr=False)
    n_written: int = field(default=0, compare=False)

    @property
    def n_raw_bytes(self) -> int:
        """Bytes of state before compression."""
        return sum(section.n_raw for section in self.sections)

    @property
    def n_stored_bytes(self) -> int:
        """Bytes of state in the file, or in the store, shared or not."""
        return sum(section.n_stored for section in self.sections)

    @property
    def n_cells_held(self) -> int:
        """Leading cells that its sections bring back: one less than its tokens, unless sections were lost."""
        return n_cells_held(self.record.kind, self.sections)

    @property
    def in_store(self) -> bool:
        """Whether its sections are objects of the store it lies in; one without any is as it is written there."""
        return any(section.in_store for section in self.sections)

    @property
    def n_index_bytes(self) -> int:
        """Bytes of the index: everything but state and header."""
        return self.commit.n_index


def load_commit(fd: int, path: Path) -> Commit:
    """Read the newest commit record of an open file. Raises: FormatError, ReadError."""
    header = files.read_at(fd, format.N_HEADER, 0, path)
    return format.parse_header(header, files.file_length(fd), path)


def load_info(fd: int, path: Path) -> SessionInfo:
    """Read header and index of an open file: two small reads. Raises: FormatError, ReadError."""
    commit = load_commit(fd, path)
    frame = files.read_at(fd, commit.n_index, commit.index_offset, path)
    record, sections = format.parse_index(frame, commit, path)
    return make_info(path, record, sections, commit, files.file_length(fd))


def load_digests(fd: int, path: Path) -> set[str]:
    """Read the digests of the objects that an open file refers to. Raises: FormatError, ReadError."""
    commit = load_commit(fd, path)
    return format.parse_digests(files.read_at(fd, commit.n_index, commit.index_offset, path), commit, path)


def make_info(
    path: Path, record: SessionRecord, sections: tuple[StoredSection, ...], commit: Commit, n_file_bytes: int
) -> SessionInfo:
    """Return the info of a parsed index."""
    n_live = format.N_HEADER + commit.n_index + sum(section.n_stored for section in sections if not section.in_store)
    return SessionInfo(
        path=path,
        record=record,
        sections=sections,
        generation=commit.generation,
        n_file_bytes=n_file_bytes,
        n_live_bytes=n_live,
        n_dead_bytes=n_file_bytes - n_live,
        commit=commit,
    )
