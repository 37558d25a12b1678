"""What was said in a session, turn by turn, and what each turn takes. No engine is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from llamakv.errors import StoreError
from llamakv.ops.places import info_at
from llamakv.records import Message, SectionKind, SessionRecord
from llamakv.store.session_file import SessionInfo, StoredSection, read_session


class EntryKind(StrEnum):
    """``SYSTEM``: the system prompt. ``TURN``: what was asked and the reply. ``OPEN``: what has no reply yet.
    ``SECTION``: a piece of raw text, as it is stored."""

    SYSTEM = "system"
    TURN = "turn"
    OPEN = "open"
    SECTION = "section"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One step of a session: positions ``[p0, p1)``, which follow each other without a gap.

    ``n_bytes`` is what is stored for them: a section that more than one of them shares counts for each in proportion.
    ``turn`` is the number of the reply it ends with. ``time_s`` is when it ended, None where that was not recorded.
    """

    kind: EntryKind
    turn: int | None
    p0: int
    p1: int
    n_bytes: int
    time_s: float | None
    messages: tuple[Message, ...]
    section: StoredSection | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """Where a session branched off. ``name`` is the parent's, if it is in the store, and ``place`` what the position
    is called there (``turn2``, where a reply ends)."""

    session_id: str
    position: int | None
    name: str | None
    place: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLog:
    """A session from its beginning."""

    info: SessionInfo
    parent: Parent | None
    entries: tuple[LogEntry, ...]


def log_session(path: Path, root: Path, *, at: str | None = None) -> SessionLog:
    """Tell a session from its beginning to its end, or to a place in it. ``root`` is the store its parent is looked
    for in.

    Raises:
        NotFoundError, FormatError.
        UsageError: the place is inside a message or raw text.
    """
    info = info_at(read_session(path), at)
    record = info.record
    entries = _of_sections(info) if record.chat is None else _of_messages(info, record.chat.messages)
    return SessionLog(info=info, parent=parent_of(record, root), entries=tuple(entries))


def parent_of(record: SessionRecord, root: Path) -> Parent | None:
    """The session that another branched off from, None where there was none."""
    lineage = record.lineage
    if lineage.parent_id is None:
        return None
    from llamakv.store.cache import StoreCache  # late: SQLite is not needed by most commands
    from llamakv.store.summary import SessionSummary

    position = lineage.parent_position
    name = place = None
    try:
        with StoreCache(root) as cache:
            found = [s for s in cache.summaries() if isinstance(s, SessionSummary)]
    except StoreError:
        found = []
    for summary in found:
        if summary.session_id == lineage.parent_id:
            name = summary.name
            if position in summary.turn_ends:
                place = f"turn{summary.turn_ends.index(position) + 1}"
            break
    return Parent(session_id=lineage.parent_id, position=position, name=name, place=place)


# ---------------------------------------------------------------- entries


def _of_messages(info: SessionInfo, messages: Sequence[Message]) -> Iterator[LogEntry]:
    """The system prompt, then turn by turn."""
    n_tokens, position, turn = len(info.record.tokens), 0, 0
    held: list[Message] = []
    for index, message in enumerate(messages):
        held.append(message)
        is_last = index == len(messages) - 1
        if message.role == "assistant":
            turn += 1
            kind = EntryKind.TURN
        elif message.role == "system" and index == 0:
            kind = EntryKind.SYSTEM
        elif is_last:
            kind = EntryKind.OPEN
        else:
            continue
        p1 = n_tokens if is_last else max(position, message.p1)
        yield LogEntry(
            kind=kind,
            turn=turn if kind is EntryKind.TURN else None,
            p0=position,
            p1=p1,
            n_bytes=_n_bytes(info.sections, position, p1),
            time_s=message.time_s,
            messages=tuple(held),
            section=None,
        )
        held, position = [], p1


def _of_sections(info: SessionInfo) -> Iterator[LogEntry]:
    """Raw text, section by section; the last token is pending and has no cell."""
    for section in info.sections:
        yield LogEntry(
            kind=EntryKind.SECTION,
            turn=None,
            p0=section.p0,
            p1=section.p_used,
            n_bytes=section.n_stored,
            time_s=None,
            messages=(),
            section=section,
        )


def _n_bytes(sections: Sequence[StoredSection], p0: int, p1: int) -> int:
    return _n_bytes_before(sections, p1) - _n_bytes_before(sections, p0)


def _n_bytes_before(sections: Sequence[StoredSection], position: int) -> int:
    """What is stored for the positions before one, a section that goes beyond in proportion; tails are at their end."""
    n_bytes = 0
    for section in sections:
        if section.kind is SectionKind.TAIL or section.p_used <= position:
            n_bytes += section.n_stored if section.p_used <= position else 0
        elif section.p0 < position:
            n_bytes += section.n_stored * (position - section.p0) // (section.p_used - section.p0)
    return n_bytes
