"""How many bytes a sequence's state will come to, section by section, from what its context takes: nothing is opened.

The sizes are those of llama.cpp's format for one sequence of a unified context (``state_layout`` reads it), the cuts
those that ``StateCutter`` makes. Where a number cannot be told it is None, not guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamakv.engine.memory import CacheKind, CachePart, ContextMemory
from llamakv.records import MemoryKind, SectionKind

_N_HEAD = 8  # magic, sequence id
_N_COUNTS = 8  # streams, cells
_N_CELL = 12  # position, number of sequences, sequence id
_N_LAYOUT = 8  # whether values are transposed, number of layers
_N_ROWS = 12  # type, length of a row: before the keys and the values of each layer
_N_STATE = 4 + 8 + 8  # of a recurrent part: cells; position and number of sequences; the layout
_N_SECTION = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSection:
    """A section that a save would write; positions as in ``StateSection``."""

    kind: SectionKind
    p0: int
    p1: int
    n_bytes: int


def plan_sections(
    memory: ContextMemory, kind: MemoryKind, *, n_window: int, swa_full: bool, p0: int, n_cells: int
) -> tuple[PlannedSection, ...] | None:
    """The sections of ``[p0, n_cells)`` of a sequence, with the tail where the kind has one. None where they cannot be
    told: a hybrid with windowed layers is cut in another way.

    Of windows that keep only themselves the engine gives the last ``n_window`` cells, which was measured for ordinary
    windows (not for the chunks of llama4, which it treats as windows).
    """
    if n_cells == 0:
        return ()
    windowed = [part for part in memory.parts if part.kind is CacheKind.WINDOWED]
    if windowed and kind is MemoryKind.HYBRID:
        return None
    if kind is MemoryKind.WINDOWED and not swa_full:
        n_each = {CacheKind.FULL: n_cells, CacheKind.WINDOWED: min(n_cells, n_window)}
        n_bytes = _N_HEAD + sum(_attention_bytes(part, n_each[part.kind]) for part in memory.parts)
        return (PlannedSection(kind=SectionKind.WHOLE, p0=0, p1=n_cells, n_bytes=n_bytes),)
    attention = [part for part in memory.parts if part.kind is not CacheKind.RECURRENT]
    recurrent = [part for part in memory.parts if part.kind is CacheKind.RECURRENT]
    found: list[PlannedSection] = []
    if kind is not MemoryKind.RECURRENT:
        step = min(_N_SECTION, n_window) if n_window > 0 else _N_SECTION
        for a in range(p0, n_cells, step):
            b = min(a + step, n_cells)
            n_bytes = _N_HEAD + sum(_attention_bytes(part, b - a) for part in attention)
            found.append(PlannedSection(kind=SectionKind.CELLS, p0=a, p1=b, n_bytes=n_bytes))
    if kind in (MemoryKind.RECURRENT, MemoryKind.HYBRID):
        n_bytes = _N_HEAD + sum(map(_recurrent_bytes, recurrent))
        found.append(PlannedSection(kind=SectionKind.TAIL, p0=n_cells, p1=n_cells, n_bytes=n_bytes))
    return tuple(found)


def sum_bytes(sections: Sequence[PlannedSection]) -> int:
    """All of them together."""
    return sum(section.n_bytes for section in sections)


def _attention_bytes(part: CachePart, n_cells: int) -> int:
    n_each = part.n_bytes // part.n_cells  # a cell's row in all layers of the part, keys and values
    n_rows = len(part.layers) * (2 if part.v_bytes else 1)  # latent attention keeps no values
    return _N_COUNTS + _N_LAYOUT + n_cells * (_N_CELL + n_each) + n_rows * _N_ROWS


def _recurrent_bytes(part: CachePart) -> int:
    return _N_STATE + part.n_bytes // part.n_cells + 2 * len(part.layers) * _N_ROWS
