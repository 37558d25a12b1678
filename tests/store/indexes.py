"""Indexes of sessions whose sections are said to be in a store: fast to write, and there are no objects to open."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from llamakv.records import MemoryKind, SectionKind, SessionRecord
from llamakv.store import format
from llamakv.store.codec import Encoding
from llamakv.store.sections import StoredSection, check_partial, check_sections

N_PIECE = 256


def row(kind: SectionKind, p0: int, p1: int, p_used: int | None = None) -> StoredSection:
    """A row of the section table."""
    return StoredSection(
        kind=kind,
        p0=p0,
        p1=p1,
        p_used=p1 if p_used is None else p_used,
        n_raw=100,
        n_stored=90,
        offset=0,
        digest=f"{p0:032x}{p1:032x}",
        encoding=Encoding.RAW,
        frames=(),
        in_store=True,
    )


def cell_rows(n_cells: int, *, n_piece: int = N_PIECE) -> list[StoredSection]:
    """Cells sections of the first ``n_cells`` positions."""
    return [row(SectionKind.CELLS, p0, min(p0 + n_piece, n_cells)) for p0 in range(0, n_cells, n_piece)]


def tail_rows(points: Iterable[int]) -> list[StoredSection]:
    """Tails at some positions."""
    return [row(SectionKind.TAIL, point, point) for point in points]


def rows_of(kind: MemoryKind, n_cells: int, points: Sequence[int] = ()) -> list[StoredSection]:
    """What a session of a kind has of its first ``n_cells`` cells; ``points`` are places of tails before the last."""
    if n_cells == 0:
        return []
    has_tails = kind in (MemoryKind.RECURRENT, MemoryKind.HYBRID)
    cells = cell_rows(n_cells) if kind is not MemoryKind.RECURRENT else []
    return cells + (tail_rows(sorted({*points, n_cells})) if has_tails else [])


def write_index(path: Path, record: SessionRecord, sections: Sequence[StoredSection], *, lost: bool = False) -> None:
    """Replace a session by one with these sections; where some were ``lost``, they hold less than all of it."""
    (check_partial if lost else check_sections)(record.kind, len(record.tokens), sections)
    frame, n_raw = format.pack_index(record, sections, is_partial=lost)
    commit = format.commit_index(frame, generation=1, index_offset=format.N_HEADER, n_index_raw=n_raw)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(format.pack_header(commit) + frame)
    os.replace(temporary, path)
