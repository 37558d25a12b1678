"""What is inside a session's sections: by layer, keys against values, and the cells of which positions. Reads them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llamakv.engine.memory import CacheKind
from llamakv.engine.state_layout import Extent, LayerLayout, SectionLayout, UnknownLayoutError, parse_section
from llamakv.errors import InterruptedByUser
from llamakv.ops.resume_cost import unchanged
from llamakv.records import StateSection
from llamakv.store import codec
from llamakv.store.codec import AUTO, NONE, CompressOption, Encoding
from llamakv.store.pipeline import n_cores
from llamakv.store.session_file import SessionInfo, SessionReader, StoredSection

if TYPE_CHECKING:
    from llamakv.ops.requests import Reporter


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSize:
    """What one layer takes in all sections. ``index`` counts the layers of its cache: which of the model's it is, a
    session does not say. ``n_cells`` are cells of attention, or recurrent states. Of a recurrent state ``k`` is the
    part R, ``v`` the part S. ``type_v`` is None where there are no values (latent attention).

    The stored bytes are measured: the layer's keys, and its values, of each section compressed alone. None where that
    was not asked for.
    """

    kind: CacheKind
    index: int
    n_cells: int
    type_k: str
    type_v: str | None
    k_raw: int
    v_raw: int
    k_stored: int | None
    v_stored: int | None

    @property
    def n_raw(self) -> int:
        """Keys and values."""
        return self.k_raw + self.v_raw

    @property
    def n_stored(self) -> int | None:
        """Keys and values."""
        return None if self.k_stored is None or self.v_stored is None else self.k_stored + self.v_stored


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCells:
    """One cache's part of the section with a number: ``n_cells`` cells at the positions of some ranges ``[p0, p1)``,
    and the bytes of their keys and values (of a recurrent state the parts R and S)."""

    section: int
    kind: CacheKind
    n_cells: int
    positions: tuple[tuple[int, int], ...]
    k_raw: int
    v_raw: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownSection:
    """A section whose bytes are laid out in a way that is not known: a sound one, but nothing can be said of it."""

    section: int
    n_raw: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """What is inside a session's sections. ``n_other`` bytes of them say what is where; with ``layers`` and the
    sections that are ``unknown`` they add up to ``n_raw``. ``n_stored`` are the sections as they are stored."""

    layers: tuple[LayerSize, ...]
    parts: tuple[PartCells, ...]
    unknown: tuple[UnknownSection, ...]
    n_other: int
    n_raw: int
    n_stored: int


def look_inside(info: SessionInfo, reporter: Reporter, *, with_stored: bool) -> Inside:
    """Read and check a session's sections, one that several refer to for each of them, and tell what is in them.
    ``with_stored`` compresses the layers one by one, the way their section is.

    Raises:
        DamagedError: a section is not what was saved, or is gone.
        ConflictError: the session was saved again since ``info`` was read.
        InterruptedByUser: stopped.
        ReadError, NotFoundError, NewerFormatError.
    """
    sums: dict[tuple[CacheKind, int], _Sum] = defaultdict(_Sum)
    parts: list[PartCells] = []
    unknown: list[UnknownSection] = []
    n_other = 0
    with unchanged(info) as reader, ThreadPoolExecutor(n_cores(), thread_name_prefix="llamakv-layer") as threads:
        for number, (row, section) in enumerate(_sections(reader, info.sections, reporter)):
            try:
                layout = parse_section(section.data, info.record.kind, section.kind)
            except UnknownLayoutError as error:
                unknown.append(UnknownSection(section=number, n_raw=row.n_raw, reason=error.message))
                continue
            n_other += layout.n_other
            parts.extend(_parts(number, layout))
            _add(sums, layout)
            if with_stored:
                is_raw = reader.in_file_form(row).encoding is Encoding.RAW
                _add_stored(sums, layout, section.data, NONE if is_raw else AUTO, threads)
    return Inside(
        layers=tuple(found.size(kind, index, with_stored=with_stored) for (kind, index), found in sums.items()),
        parts=tuple(parts),
        unknown=tuple(unknown),
        n_other=n_other,
        n_raw=info.n_raw_bytes,
        n_stored=info.n_stored_bytes,
    )


# ---------------------------------------------------------------- private


@dataclass(slots=True)
class _Sum:
    n_cells: int = 0
    k_raw: int = 0
    v_raw: int = 0
    k_stored: int = 0
    v_stored: int = 0
    types_k: set[str] = field(default_factory=set)
    types_v: set[str] = field(default_factory=set)

    def size(self, kind: CacheKind, index: int, *, with_stored: bool) -> LayerSize:
        return LayerSize(
            kind=kind,
            index=index,
            n_cells=self.n_cells,
            type_k="/".join(sorted(self.types_k)),
            type_v="/".join(sorted(self.types_v)) or None,
            k_raw=self.k_raw,
            v_raw=self.v_raw,
            k_stored=self.k_stored if with_stored else None,
            v_stored=self.v_stored if with_stored else None,
        )


def _sections(
    reader: SessionReader, rows: Sequence[StoredSection], reporter: Reporter
) -> Iterator[tuple[StoredSection, StateSection]]:
    n_done, n_total = 0, sum(row.n_raw for row in rows)
    for row, section in zip(rows, reader.read(rows), strict=True):
        yield row, section
        n_done += row.n_raw
        reporter.progress("verify", n_done, n_total)
        if reporter.should_abort():
            raise InterruptedByUser("interrupted while reading; nothing was changed", status=130)


def _parts(number: int, layout: SectionLayout) -> Iterator[PartCells]:
    for part in layout.parts:
        yield PartCells(
            section=number,
            kind=part.kind,
            n_cells=part.n_cells,
            positions=part.positions,
            k_raw=part.n_k_bytes,
            v_raw=part.n_v_bytes,
        )


def _add(sums: dict[tuple[CacheKind, int], _Sum], layout: SectionLayout) -> None:
    for part in layout.parts:
        for layer in part.layers:
            found = sums[layer.kind, layer.index]
            found.n_cells += part.n_cells
            found.k_raw += layer.k.n_bytes
            found.types_k.add(layer.k.type)
            if layer.v is not None:
                found.v_raw += layer.v.n_bytes
                found.types_v.add(layer.v.type)


def _add_stored(
    sums: dict[tuple[CacheKind, int], _Sum],
    layout: SectionLayout,
    data: memoryview,
    compress: CompressOption,
    threads: ThreadPoolExecutor,
) -> None:
    def stored(extent: Extent | None) -> int:
        if extent is None or not extent.n_bytes:
            return 0
        piece = data[extent.offset : extent.offset + extent.n_bytes]
        return sum(codec.encode(piece, compress).frame_lengths)

    def both(layer: LayerLayout) -> tuple[LayerLayout, int, int]:
        return layer, stored(layer.k), stored(layer.v)

    for layer, k, v in threads.map(both, layout.layers):
        found = sums[layer.kind, layer.index]
        found.k_stored += k
        found.v_stored += v
