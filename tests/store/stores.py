"""Stores for tests of what is done with whole sessions: made quickly, of any age, and harmed at will."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from llamakv.records import MemoryKind, StateSection
from llamakv.store.objects import FOLDER, Objects
from llamakv.store.session_file import SessionInfo, create_session, read_session
from llamakv.store.store_folder import make_store
from tests.store.samples import N_PIECE, cells, make_record

DAY_S = 86_400.0


def add_session(
    root: Path,
    name: str,
    n_tokens: int = 2,
    *,
    text: int = 0,
    idle_s: float = 0.0,
    kind: MemoryKind = MemoryKind.DENSE,
    sections: Iterable[StateSection] | None = None,
    bytes_per_cell: int = 64,
    pinned: bool = False,
    tags: tuple[str, ...] = (),
    ttl_s: float | None = None,
) -> SessionInfo:
    """A session last used ``idle_s`` ago; those of the same ``text`` share the sections of whole pieces."""
    make_store(root)
    record = make_record(n_tokens, kind=kind, session_id=name)
    lineage = replace(
        record.lineage, name=name, parent_id=None, parent_position=None, note="", tags=tags, pinned=pinned, ttl_s=ttl_s
    )
    if sections is None:
        sections = _pieces(n_tokens - 1, text, bytes_per_cell)
    path = root / f"{name}.bin"
    create_session(path, replace(record, lineage=lineage), sections, overwrite=True)
    set_idle(path, idle_s)
    return read_session(path)


def _pieces(n_cells: int, text: int, bytes_per_cell: int) -> Iterable[StateSection]:
    for p0 in range(0, n_cells, N_PIECE):
        p1 = min(p0 + N_PIECE, n_cells)
        yield cells(p0, p1, n_bytes=(p1 - p0) * bytes_per_cell, seed=100_000 * text + 7 * p0 + p1)


def set_idle(path: Path, idle_s: float) -> None:
    """Make a session one that was last used so long ago."""
    used_ns = time.time_ns() - int(idle_s * 1e9)
    os.utime(path, ns=(used_ns, used_ns))


def object_of(root: Path, name: str, index: int) -> Path:
    """The file of a session's section."""
    return Objects(root).path_of(read_session(root / f"{name}.bin").sections[index].digest)


def flip(path: Path, where: Callable[[int], int] = lambda n_bytes: n_bytes // 2) -> None:
    """Change one byte of a file, at an offset made of its length."""
    data = bytearray(path.read_bytes())
    data[where(len(data))] ^= 0xFF
    path.write_bytes(data)


def files_of(root: Path) -> dict[str, bytes]:
    """What is in a store, by its place: all but locks, claims and the cache."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts if part != FOLDER)
    }


def n_bytes_on_disk(root: Path) -> int:
    """Bytes of a store's sessions and objects."""
    return sum(len(data) for data in files_of(root).values())
