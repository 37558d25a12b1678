"""What a session file says of itself, without the engine."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llamakv.errors import NotFoundError, StoreError
from llamakv.ops.places import info_at
from llamakv.records import Message
from llamakv.store.codec import Encoding
from llamakv.store.objects import Objects
from llamakv.store.session_file import SessionInfo, read_session
from llamakv.store.session_reader import folder_of
from llamakv.store.sharing import Sharer, find_sharers
from llamakv.store.store_folder import is_store

_N_EXCERPT = 80
_N_VERIFIED = 3  # as many names as are shown
_N_READ_QUICKLY = 64  # indexes, at under a millisecond each


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReport:
    """A session as its file describes it; no section was read.

    ``cells`` is the number of cells its sections restore, ``turns`` the number of replies. ``ratio`` is stored over
    raw bytes of the state (1.0 for a session without cells). ``first_text`` and ``last_text`` are at most 80
    characters from either end of what was said.
    """

    info: SessionInfo
    tokens: int
    cells: int
    turns: int
    raw_bytes: int
    stored_bytes: int
    ratio: float
    first_text: str
    last_text: str

    @property
    def text(self) -> str:
        """All that was said: raw text as it is, or the messages' contents, one after the other. The words that a
        template puts around them are in the tokens only, whose texts the model knows."""
        record = self.info.record
        return record.text or "" if record.chat is None else "\n".join(m.content for m in record.chat.messages)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation; empty for raw text."""
        return self.info.record.chat.messages if self.info.record.chat is not None else ()


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Which of a session's sections other sessions of its store refer to. ``sharers`` begins with the one that has most
    in common with it."""

    info: SessionInfo
    sharers: tuple[Sharer, ...]

    @cached_property
    def names(self) -> dict[str, list[str]]:
        """The names of the others that refer to each section's digest; none for one of its own."""
        found: dict[str, list[str]] = defaultdict(list)
        for sharer in self.sharers:
            for digest in sharer.digests:
                found[digest].append(sharer.name)
        return dict(found)

    @property
    def n_sections(self) -> int:
        """Sections that others refer to as well."""
        return sum(section.digest in self.names for section in self.info.sections)

    @property
    def n_bytes(self) -> int:
        """What those take on disk."""
        stored = {section.digest: section.n_stored for section in self.info.sections}
        return sum(n for digest, n in stored.items() if digest in self.names)

    def n_bytes_with(self, sharer: Sharer) -> int:
        """What of it one of the others has as well."""
        stored = {section.digest: section.n_stored for section in self.info.sections}
        return sum(stored.get(digest, 0) for digest in sharer.digests)


def inspect_session(path: Path, *, at: str | None = None) -> SessionReport:
    """Read the header and the index of a session file: two small reads. With ``at`` the session is told as it was at a
    place in it.

    Raises:
        NotFoundError, NotASessionError, NewerFormatError, DamagedError.
        UsageError: the place is inside a message or raw text.
    """
    return report_of(info_at(read_session(path), at))


def report_of(info: SessionInfo) -> SessionReport:
    """The report of a session that was read already."""
    record = info.record
    messages = record.chat.messages if record.chat is not None else ()
    whole = record.text or ""
    first = messages[0].content if messages else whole
    last = messages[-1].content if messages else whole
    return SessionReport(
        info=info,
        tokens=len(record.tokens),
        cells=info.n_cells_held,
        turns=sum(message.role == "assistant" for message in messages),
        raw_bytes=info.n_raw_bytes,
        stored_bytes=info.n_stored_bytes,
        ratio=info.n_stored_bytes / info.n_raw_bytes if info.n_raw_bytes else 1.0,
        first_text=first[:_N_EXCERPT],
        last_text=last[-_N_EXCERPT:],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionFile:
    """How a section is stored. ``encoding`` is None where that cannot be told: its object ``is_missing`` from the
    store, or cannot be read (``trouble`` says why)."""

    encoding: Encoding | None
    is_missing: bool = False
    trouble: str | None = None


def section_files(info: SessionInfo) -> tuple[SectionFile, ...]:
    """How each section of a session is stored: of one in the store the first bytes of its object are read."""
    objects = Objects(folder_of(info.path))
    known: dict[str, SectionFile] = {}
    found: list[SectionFile] = []
    for section in info.sections:
        if not section.in_store:
            found.append(SectionFile(encoding=section.encoding))
            continue
        if section.digest not in known:
            known[section.digest] = _section_file(objects, section.digest)
        found.append(known[section.digest])
    return tuple(found)


def _section_file(objects: Objects, digest: str) -> SectionFile:
    try:
        opened = objects.open(digest)
    except NotFoundError:
        return SectionFile(encoding=None, is_missing=True)
    except StoreError as error:
        return SectionFile(encoding=None, trouble=error.message)
    os.close(opened.fd)
    return SectionFile(encoding=opened.encoding)


def may_share(info: SessionInfo) -> bool:
    """Whether a session has sections that others may have as well: it lies in a store."""
    return info.in_store and is_store(folder_of(info.path))


def sharing_of(info: SessionInfo, *, is_thorough: bool) -> Sharing | None:
    """Which sessions share a session's sections, as the store's cache knows, the indexes of the first few read again.
    None where that cannot be told: the store cannot be listed or, unless it is to be ``is_thorough``, so many indexes
    have changed since the cache was last used that reading them would take long.
    """
    try:
        sharers = find_sharers(info, n_verified=_N_VERIFIED, n_read_at_most=None if is_thorough else _N_READ_QUICKLY)
    except StoreError:
        return None
    return None if sharers is None else Sharing(info=info, sharers=sharers)
