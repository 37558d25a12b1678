"""Conversations of a few turns, saved without an engine."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from llamakv.records import Chat, Lineage, MemoryKind, Message, StateSection
from llamakv.store.session_file import SessionInfo, create_session
from llamakv.store.store_folder import make_store
from tests.store import samples

N_EACH = 100
"""Tokens of each message."""

START_S = 1_700_000_000.0


def talk(
    path: Path,
    *words: str,
    system: str | None = None,
    kind: MemoryKind = MemoryKind.DENSE,
    in_store: bool = False,
    **lineage: object,
) -> SessionInfo:
    """Save a conversation: ``words`` are said by the user and the assistant in turns. The same words are the same
    tokens, and the same tokens the same state."""
    if in_store:
        make_store(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    said = ([("system", system)] if system is not None else []) + [
        (("user", "assistant")[i % 2], text) for i, text in enumerate(words)
    ]
    tokens, messages = [], []
    for number, (role, text) in enumerate(said):
        p0 = len(tokens)
        tokens += [zlib.crc32(f"{role} {text} {i}".encode()) % 50_000 for i in range(N_EACH)]
        finish = "stop" if role == "assistant" else None
        time_s = START_S + number
        messages.append(Message(role=role, content=text, p0=p0, p1=len(tokens), finish=finish, time_s=time_s))
    record = samples.make_record(5, kind=kind)
    values = {"session_id": path.stem, "parent_id": None, "parent_position": None, "name": None, "note": "", "tags": ()}
    record = replace(
        record,
        tokens=tuple(tokens),
        chat=Chat(template="t", template_digest="12" * 32, messages=tuple(messages)),
        lineage=replace(record.lineage, **{**values, **lineage}),
    )
    return create_session(path, record, state_of(kind, tokens, messages))


def state_of(kind: MemoryKind, tokens: Sequence[int], messages: Sequence[Message]) -> Iterator[StateSection]:
    """What saves after each turn leave of a state: of recurrent parts the last three."""
    n_cells = len(tokens) - 1
    if kind is not MemoryKind.RECURRENT:
        for p0 in range(0, n_cells, samples.N_PIECE):
            p1 = min(p0 + samples.N_PIECE, n_cells)
            seed = zlib.crc32(repr(tokens[:p1]).encode())
            yield samples.cells(p0, p1, n_bytes=(p1 - p0) * 8, seed=seed)
    if kind in (MemoryKind.RECURRENT, MemoryKind.HYBRID):
        ends = {message.p1 - 1 for message in messages if message.role == "assistant"} | {n_cells}
        yield from map(samples.tail, sorted(ends)[-3:])


def in_words(lineage: Lineage) -> tuple[object, ...]:
    """What the user says of a session."""
    return lineage.name, lineage.note, lineage.tags, lineage.pinned, lineage.ttl_s
