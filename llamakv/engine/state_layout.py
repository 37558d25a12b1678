"""What is inside a section: which layers' keys and values, and the cells of which positions.

Reads the bytes that llama.cpp writes for one sequence of a unified context (``state_write`` of llama-kv-cache.cpp and
llama-memory-recurrent.cpp, format 0xaf143cd8). Needs no engine. What the bytes do not say is not made up: the layers of
a cache have numbers in it, not in the model, and a section that can be read in no way, or in two, has no layout.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from llamakv.engine.memory import CacheKind
from llamakv.errors import FormatError
from llamakv.records import MemoryKind, SectionKind

_MAGIC = 0xAF143CD8
_HEAD = struct.Struct("<Ii")  # magic, sequence id
_COUNT = struct.Struct("<I")
_TWO = struct.Struct("<II")
_ROWS = struct.Struct("<iQ")  # type, bytes of a row
_COLUMNS = struct.Struct("<iII")  # type, bytes of an element, number of columns
_CELL = struct.Struct("<iIi")  # position, number of sequences, sequence id
_CELL_EXT = struct.Struct("<iI12xi")  # with the places that M-RoPE needs
_STATE_CELL = struct.Struct("<iI")
_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS

_TYPES = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    20: ("iq4_nl", 32, 18),
    30: ("bf16", 1, 2),
}
"""Cache types by their number in ggml.h: name, elements of a block, bytes of a block."""

_PARTS = {
    (MemoryKind.DENSE, SectionKind.CELLS): ((CacheKind.FULL,),),
    (MemoryKind.WINDOWED, SectionKind.CELLS): ((CacheKind.FULL, CacheKind.WINDOWED),),
    (MemoryKind.WINDOWED, SectionKind.WHOLE): ((CacheKind.FULL, CacheKind.WINDOWED),),
    (MemoryKind.HYBRID, SectionKind.CELLS): ((CacheKind.FULL,),),
    (MemoryKind.HYBRID, SectionKind.TAIL): ((CacheKind.RECURRENT,), (CacheKind.WINDOWED, CacheKind.RECURRENT)),
    (MemoryKind.HYBRID, SectionKind.WHOLE): (
        (CacheKind.FULL, CacheKind.RECURRENT),
        (CacheKind.FULL, CacheKind.WINDOWED, CacheKind.RECURRENT),
    ),
    (MemoryKind.RECURRENT, SectionKind.TAIL): ((CacheKind.RECURRENT,),),
}
"""The caches whose bytes follow each other, by the kind of memory and of section; hybrids may have windows too."""


class UnknownLayoutError(FormatError):
    """The bytes of a section are not laid out in a way that is known here; they may be sound all the same."""

    code = "unknown_layout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Bytes ``[offset, offset + n_bytes)`` of a section, of values of a cache type."""

    offset: int
    n_bytes: int
    type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLayout:
    """Where one layer's bytes are. ``index`` counts the layers of its cache, in the model's order. ``k`` and ``v`` are
    its keys and values, of a recurrent state the parts R and S; ``v`` is None where there is only one (latent
    attention)."""

    kind: CacheKind
    index: int
    k: Extent
    v: Extent | None

    @property
    def n_bytes(self) -> int:
        """Both."""
        return self.k.n_bytes + (self.v.n_bytes if self.v is not None else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLayout:
    """One cache's part of a section. ``positions`` are the ranges ``[p0, p1)`` of its ``n_cells`` cells, in order; a
    recurrent state has one cell, at the last position it has read."""

    kind: CacheKind
    n_cells: int
    positions: tuple[tuple[int, int], ...]
    layers: tuple[LayerLayout, ...]

    @property
    def n_k_bytes(self) -> int:
        """Keys of all its layers, or the part R."""
        return sum(layer.k.n_bytes for layer in self.layers)

    @property
    def n_v_bytes(self) -> int:
        """Values of all its layers, or the part S."""
        return sum(layer.v.n_bytes for layer in self.layers if layer.v is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionLayout:
    """A section of ``n_bytes``, all of which are in a layer or among the ``n_other`` that say what is where."""

    n_bytes: int
    parts: tuple[PartLayout, ...]

    @property
    def layers(self) -> tuple[LayerLayout, ...]:
        """The layers of all parts."""
        return tuple(layer for part in self.parts for layer in part.layers)

    @property
    def n_other(self) -> int:
        """Bytes of cells' positions, types and counts."""
        return self.n_bytes - sum(layer.n_bytes for layer in self.layers)


def parse_section(data: bytes | memoryview, memory: MemoryKind, section: SectionKind) -> SectionLayout:
    """Return where in a section what is. Time and memory are linear in its length; values are not looked at.

    Raises:
        UnknownLayoutError: it cannot be read so, byte for byte, in exactly one way.
    """
    raw = memoryview(data).cast("B")
    orders = _PARTS.get((memory, section))
    if orders is None:
        raise UnknownLayoutError(f"a {section} section of a {memory} state has no known layout")
    try:
        magic, seq_id = _HEAD.unpack_from(raw)
    except struct.error:
        raise UnknownLayoutError(f"a section of {len(raw)} bytes is shorter than its head") from None
    if magic != _MAGIC:
        raise UnknownLayoutError(f"a section begins with {magic:#010x}, expected {_MAGIC:#010x}")
    found = [parts for order in orders for parts in _read_parts(_Bytes(raw, seq_id), _HEAD.size, order)]
    if len(found) != 1:
        how = "in no way" if not found else f"in {len(found)} ways"
        raise UnknownLayoutError(f"a {section} section of {len(raw)} bytes can be read {how} as a {memory} state's")
    return SectionLayout(n_bytes=len(raw), parts=found[0])


# ---------------------------------------------------------------- private


class _Misread(Exception):
    """These bytes are not what was expected here."""


@dataclass(frozen=True, slots=True)
class _Bytes:
    raw: memoryview
    seq_id: int

    def unpack(self, form: struct.Struct, offset: int) -> tuple[int, ...]:
        try:
            return form.unpack_from(self.raw, offset)
        except struct.error:
            raise _Misread from None

    def extent(self, offset: int, n_bytes: int, name: str) -> Extent:
        if offset + n_bytes > len(self.raw):
            raise _Misread
        return Extent(offset=offset, n_bytes=n_bytes, type=name)


def _read_parts(data: _Bytes, offset: int, kinds: tuple[CacheKind, ...]) -> Iterator[tuple[PartLayout, ...]]:
    """All ways in which the bytes from an offset on are these caches, and nothing more."""
    if not kinds:
        if offset == len(data.raw):
            yield ()
        return
    kind, *rest = kinds
    for part, end in _ways(data, offset, kind):
        for more in _read_parts(data, end, tuple(rest)):
            yield (part, *more)


def _ways(data: _Bytes, offset: int, kind: CacheKind) -> Iterator[tuple[PartLayout, int]]:
    """The ways to read a cache's part: the bytes do not say whether cells have places in a picture, nor whether layers
    have values (of latent attention they have none)."""
    if kind is CacheKind.RECURRENT:
        tries: Iterable[tuple[struct.Struct, bool]] = ((_CELL, True),)
    else:
        tries = ((_CELL, True), (_CELL, False), (_CELL_EXT, True), (_CELL_EXT, False))
    is_empty_found = False
    for cell, has_values in tries:
        try:
            if kind is CacheKind.RECURRENT:
                yield _read_recurrent(data, offset)
                continue
            part, end = _read_attention(data, offset, kind, cell, has_values=has_values)
        except _Misread:
            continue
        if not part.layers:  # the same in every way
            if is_empty_found:
                continue
            is_empty_found = True
        yield part, end


def _read_attention(
    data: _Bytes, offset: int, kind: CacheKind, cell: struct.Struct, *, has_values: bool
) -> tuple[PartLayout, int]:
    n_streams, n_cells = data.unpack(_TWO, offset)
    offset += _TWO.size
    if n_streams != 1:
        raise _Misread
    if n_cells == 0:
        return PartLayout(kind=kind, n_cells=0, positions=(), layers=()), offset
    end = offset + n_cells * cell.size
    if end > len(data.raw):
        raise _Misread
    positions = []
    for position, n_sequences, seq_id in cell.iter_unpack(data.raw[offset:end]):
        if position < 0 or n_sequences != 1 or seq_id != data.seq_id:
            raise _Misread
        positions.append(position)
    is_turned, n_layers = data.unpack(_TWO, end)
    offset = end + _TWO.size
    if is_turned > 1 or n_layers > _MAX_LAYERS:
        raise _Misread
    keys, values = [], []
    for _ in range(n_layers):
        extent, offset = _read_rows(data, offset, n_cells)
        keys.append(extent)
    for _ in range(n_layers if has_values else 0):
        extent, offset = (_read_columns if is_turned else _read_rows)(data, offset, n_cells)
        values.append(extent)
    layers = _layers(kind, keys, values)
    return PartLayout(kind=kind, n_cells=n_cells, positions=_ranges(positions), layers=layers), offset


def _read_recurrent(data: _Bytes, offset: int) -> tuple[PartLayout, int]:
    """The last part of a section: R of each layer that has a state, then S of each; nothing says how many there are."""
    n_cells, position, n_sequences = *data.unpack(_COUNT, offset), *data.unpack(_STATE_CELL, offset + _COUNT.size)
    offset += _COUNT.size + _STATE_CELL.size
    is_turned, n_layers = data.unpack(_TWO, offset)
    offset += _TWO.size
    if n_cells != 1 or position < 0 or n_sequences or is_turned or n_layers > _MAX_LAYERS:
        raise _Misread
    extents = []
    while offset < len(data.raw):
        extent, offset = _read_rows(data, offset, 1)
        extents.append(extent)
        if len(extents) > 2 * n_layers:
            raise _Misread
    n_states = len(extents) // 2
    first, second = extents[:n_states], extents[n_states:]
    if len({(e.n_bytes, e.type) for e in first}) > 1 or len({(e.n_bytes, e.type) for e in second}) > 1:
        raise _Misread  # all layers' states are alike: an odd number of them, or the PLE history beside R
    layers = _layers(CacheKind.RECURRENT, first, second)
    return PartLayout(kind=CacheKind.RECURRENT, n_cells=1, positions=((position, position + 1),), layers=layers), offset


def _read_rows(data: _Bytes, offset: int, n_rows: int) -> tuple[Extent, int]:
    type_number, n_row = data.unpack(_ROWS, offset)
    name, _, n_block = _type(type_number)
    offset += _ROWS.size
    if n_row % n_block:
        raise _Misread
    extent = data.extent(offset, n_rows * n_row, name)
    return extent, offset + extent.n_bytes


def _read_columns(data: _Bytes, offset: int, n_cells: int) -> tuple[Extent, int]:
    type_number, n_element, n_columns = data.unpack(_COLUMNS, offset)
    name, n_in_block, n_block = _type(type_number)
    offset += _COLUMNS.size
    if n_in_block != 1 or n_element != n_block:
        raise _Misread
    extent = data.extent(offset, n_cells * n_columns * n_element, name)
    return extent, offset + extent.n_bytes


def _type(number: int) -> tuple[str, int, int]:
    if number not in _TYPES:
        raise _Misread
    return _TYPES[number]


def _layers(kind: CacheKind, keys: list[Extent], values: list[Extent]) -> tuple[LayerLayout, ...]:
    if values and len(values) != len(keys):
        raise _Misread
    return tuple(
        LayerLayout(kind=kind, index=index, k=k, v=values[index] if values else None) for index, k in enumerate(keys)
    )


def _ranges(positions: list[int]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for position in sorted(set(positions)):
        if found and found[-1][1] == position:
            found[-1] = found[-1][0], position + 1
        else:
            found.append((position, position + 1))
    return tuple(found)
