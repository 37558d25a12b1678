"""What a session file says of itself, without the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llamakv.ops.places import info_at
from llamakv.records import Message
from llamakv.store.session_file import SessionInfo, read_session

_N_EXCERPT = 80


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
    def messages(self) -> tuple[Message, ...]:
        """The conversation; empty for raw text."""
        return self.info.record.chat.messages if self.info.record.chat is not None else ()


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
