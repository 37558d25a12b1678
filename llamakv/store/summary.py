"""What a listing needs of a session: everything about it but its tokens, its text and its sections."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamakv.errors import LlamakvError
from llamakv.records import Adapter, MemoryKind, MemorySettings, ModelIdentity
from llamakv.store.collector import SUFFIX
from llamakv.store.session_info import SessionInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSummary:
    """A session without its tokens and text.

    ``n_cells`` are those its sections bring back, ``turn_ends`` the positions at which its replies end (none in raw
    text, which ``is_raw``). ``file_bytes`` is the length of its file, ``stored_bytes`` of its state wherever that is,
    ``object_bytes`` of those sections that are objects of the store, shared or not. ``used_s`` is the file's
    modification time: in a store, when the session was last used. The rest is as in ``Lineage``.
    """

    folder: Path
    name: str
    session_id: str
    parent_id: str | None
    parent_position: int | None
    kind: MemoryKind
    identity: ModelIdentity
    settings: MemorySettings
    n_tokens: int
    n_cells: int
    turn_ends: tuple[int, ...]
    is_raw: bool
    raw_bytes: int
    stored_bytes: int
    object_bytes: int
    n_sections: int
    file_bytes: int
    created_s: float
    updated_s: float
    used_s: float
    n_saves: int
    note: str
    tags: tuple[str, ...]
    pinned: bool
    ttl_s: float | None

    @property
    def path(self) -> Path:
        """Its file."""
        return self.folder / (self.name + SUFFIX)

    @property
    def n_turns(self) -> int:
        """Its replies."""
        return len(self.turn_ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableSession:
    """A session file that cannot be read: what it refers to is unknown."""

    name: str
    path: Path
    n_file_bytes: int
    error: LlamakvError


def summarise(info: SessionInfo, name: str, used_s: float) -> SessionSummary:
    """Return the summary of a session that is called ``name`` and was last used at ``used_s``."""
    record, lineage = info.record, info.record.lineage
    messages = record.chat.messages if record.chat is not None else ()
    return SessionSummary(
        name=name,
        folder=info.path.parent,
        session_id=lineage.session_id,
        parent_id=lineage.parent_id,
        parent_position=lineage.parent_position,
        kind=record.kind,
        identity=record.identity,
        settings=record.settings,
        n_tokens=len(record.tokens),
        n_cells=info.n_cells_held,
        turn_ends=tuple(message.p1 for message in messages if message.role == "assistant"),
        is_raw=record.chat is None,
        raw_bytes=info.n_raw_bytes,
        stored_bytes=info.n_stored_bytes,
        object_bytes=sum(section.n_stored for section in info.sections if section.in_store),
        n_sections=len(info.sections),
        file_bytes=info.n_file_bytes,
        created_s=lineage.created_s,
        updated_s=lineage.updated_s,
        used_s=used_s,
        n_saves=lineage.n_saves,
        note=lineage.note,
        tags=lineage.tags,
        pinned=lineage.pinned,
        ttl_s=lineage.ttl_s,
    )


# ---------------------------------------------------------------- as bytes

_ELSEWHERE = {"name", "folder", "used_s"}  # the file's own to say
_MODEL = {"identity", "settings"}
_FACTS = tuple(item.name for item in dataclasses.fields(SessionSummary) if item.name not in _ELSEWHERE | _MODEL)


def encode_summary(summary: SessionSummary) -> tuple[bytes, bytes]:
    """Return what ``decode_summaries`` takes: the session's own facts, and those that all others of its model have."""
    facts = json.dumps([getattr(summary, name) for name in _FACTS]).encode()
    return facts, _encode_model(summary.identity, summary.settings)


def decode_summaries(folder: Path, rows: Sequence[tuple[str, float, bytes, bytes]]) -> Iterator[SessionSummary]:
    """Yield a summary for each name, time of use, and what ``encode_summary`` gave."""
    for start in range(0, len(rows), _N_DECODED):
        some = rows[start : start + _N_DECODED]
        all_facts = json.loads(b"[" + b",".join(facts for _, _, facts, _ in some) + b"]")
        for (name, used_s, _, model), facts in zip(some, all_facts, strict=True):
            values = dict(zip(_FACTS, facts, strict=True))
            identity, settings = _decode_model(model)
            values["kind"] = _KINDS[values["kind"]]
            values["turn_ends"] = tuple(values["turn_ends"])
            values["tags"] = tuple(values["tags"])
            yield SessionSummary(
                name=name, folder=folder, used_s=used_s, identity=identity, settings=settings, **values
            )


_N_DECODED = 256  # at a time: a third of the time of one by one, and few objects that live for long
_KINDS = {kind.value: kind for kind in MemoryKind}


@functools.lru_cache(maxsize=64)
def _encode_model(identity: ModelIdentity, settings: MemorySettings) -> bytes:
    return json.dumps([dataclasses.asdict(identity), dataclasses.asdict(settings)]).encode()


@functools.lru_cache(maxsize=64)
def _decode_model(data: bytes) -> tuple[ModelIdentity, MemorySettings]:
    identity, settings = json.loads(data)
    identity["adapters"] = tuple(Adapter(**adapter) for adapter in identity["adapters"])
    return ModelIdentity(**identity), MemorySettings(**settings)
