"""What is inside a section: all model kinds, and bytes that are something else."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llamakv.engine.llamacpp.model import LlamaModel
from llamakv.engine.memory import CacheKind
from llamakv.engine.state_layout import SectionLayout, UnknownLayoutError, parse_section
from llamakv.records import MemoryKind, SectionKind
from tests.engine.test_sequence import open_sequence, saved, tokens_of
from tests.models import writer

FULL, WINDOWED, RECURRENT = CacheKind.FULL, CacheKind.WINDOWED, CacheKind.RECURRENT
HEAD = struct.pack("<Ii", 0xAF143CD8, 0)
N = 70  # of the tests with an engine: three windows of MS, with a rest

# ---------------------------------------------------------------- sections made by hand


def cell(position: int, *, ext: bool = False) -> bytes:
    return struct.pack("<iI", position, 1) + (struct.pack("<3i", 7, 8, 9) if ext else b"") + struct.pack("<i", 0)


def attention(
    positions: Sequence[int],
    n_layers: int = 2,
    *,
    n_row: int = 4,
    type_k: int = 1,
    v: str | None = "rows",
    ext: bool = False,
) -> bytes:
    """A cache's part: f16 rows of ``n_row`` bytes; values in rows, in columns, or none."""
    n = len(positions)
    if n == 0:
        return struct.pack("<II", 1, 0)
    parts = [struct.pack("<II", 1, n), *(cell(p, ext=ext) for p in positions)]
    parts.append(struct.pack("<II", v == "columns", n_layers))
    parts += [struct.pack("<iQ", type_k, n_row) + bytes([(17 + i) % 256]) * (n * n_row) for i in range(n_layers)]
    if v == "rows":
        parts += [struct.pack("<iQ", 1, n_row) + bytes([(33 + i) % 256]) * (n * n_row) for i in range(n_layers)]
    elif v == "columns":
        parts += [
            struct.pack("<iII", 1, 2, n_row // 2) + bytes([(33 + i) % 256]) * (n * n_row) for i in range(n_layers)
        ]
    return b"".join(parts)


def recurrent(position: int, n_states: int = 2, n_layers: int = 4, *, n_r: int = 8, n_s: int = 16) -> bytes:
    head = struct.pack("<IiIII", 1, position, 0, 0, n_layers)
    rows = [struct.pack("<iQ", 0, n) + bytes(n) for n in [n_r] * n_states + [n_s] * n_states]
    return head + b"".join(rows)


DENSE = HEAD + attention(range(256, 261))
SAMPLES = [
    (DENSE, MemoryKind.DENSE, SectionKind.CELLS),
    (HEAD + attention(range(5), v="columns"), MemoryKind.DENSE, SectionKind.CELLS),
    (HEAD + attention(range(8), 1) + attention(range(4, 8), 3), MemoryKind.WINDOWED, SectionKind.WHOLE),
    (HEAD + attention(range(6)), MemoryKind.HYBRID, SectionKind.CELLS),
    (HEAD + recurrent(41), MemoryKind.HYBRID, SectionKind.TAIL),
    (HEAD + recurrent(41, 3, 3), MemoryKind.RECURRENT, SectionKind.TAIL),
    (HEAD + attention(range(6)) + recurrent(5), MemoryKind.HYBRID, SectionKind.WHOLE),
]


def kinds(layout: SectionLayout) -> list[tuple[CacheKind, int, tuple[tuple[int, int], ...], int]]:
    return [(part.kind, part.n_cells, part.positions, len(part.layers)) for part in layout.parts]


@pytest.mark.parametrize(("data", "memory", "section"), SAMPLES)
def test_all_bytes_are_in_a_layer_or_say_what_is_where(data: bytes, memory: MemoryKind, section: SectionKind) -> None:
    layout = parse_section(data, memory, section)
    extents = [e for layer in layout.layers for e in (layer.k, layer.v) if e is not None]
    inside = sum(e.n_bytes for e in extents)
    assert layout.n_bytes == len(data) == inside + layout.n_other
    assert all(0 < e.offset <= e.offset + e.n_bytes <= len(data) for e in extents)
    ordered = sorted(extents, key=lambda e: e.offset)
    assert all(a.offset + a.n_bytes < b.offset for a, b in pairwise(ordered))


def test_keys_and_values_lie_where_their_layer_is() -> None:
    layout = parse_section(DENSE, MemoryKind.DENSE, SectionKind.CELLS)
    assert kinds(layout) == [(FULL, 5, ((256, 261),), 2)]
    for index, layer in enumerate(layout.layers):
        assert (layer.kind, layer.index, layer.n_bytes, layer.k.type) == (FULL, index, 40, "f16")
        assert DENSE[layer.k.offset :][:20] == bytes([17 + index]) * 20
        assert layer.v is not None
        assert DENSE[layer.v.offset :][:20] == bytes([33 + index]) * 20
    assert (layout.parts[0].n_k_bytes, layout.parts[0].n_v_bytes) == (40, 40)


def test_a_window_kept_whole_holds_its_last_positions() -> None:
    data = HEAD + attention(range(8), 1) + attention(range(4, 8), 3)
    layout = parse_section(data, MemoryKind.WINDOWED, SectionKind.WHOLE)
    assert kinds(layout) == [(FULL, 8, ((0, 8),), 1), (WINDOWED, 4, ((4, 8),), 3)]


def test_latent_attention_has_no_values() -> None:
    for v in (None, "columns"):
        data = HEAD + attention(range(9), 3, v=v)
        layout = parse_section(data, MemoryKind.DENSE, SectionKind.CELLS)
        assert [layer.v is None for layer in layout.layers] == [v is None] * 3


def test_cells_may_have_places_in_a_picture() -> None:
    layout = parse_section(HEAD + attention(range(9), ext=True), MemoryKind.DENSE, SectionKind.CELLS)
    assert kinds(layout) == [(FULL, 9, ((0, 9),), 2)]


def test_gaps_and_disorder_of_cells_show_in_their_ranges() -> None:
    layout = parse_section(HEAD + attention([9, 3, 4, 8, 0]), MemoryKind.DENSE, SectionKind.CELLS)
    assert layout.parts[0].positions == ((0, 1), (3, 5), (8, 10))


def test_the_part_without_cells_has_no_layers() -> None:
    data = HEAD + attention(range(3)) + attention([])
    layout = parse_section(data, MemoryKind.WINDOWED, SectionKind.CELLS)
    assert kinds(layout) == [(FULL, 3, ((0, 3),), 2), (WINDOWED, 0, (), 0)]


def test_the_tail_of_a_hybrid_may_have_a_window() -> None:
    data = HEAD + attention(range(30, 40), 1) + recurrent(39)
    layout = parse_section(data, MemoryKind.HYBRID, SectionKind.TAIL)
    assert kinds(layout) == [(WINDOWED, 10, ((30, 40),), 1), (RECURRENT, 1, ((39, 40),), 2)]
    assert [(layer.k.n_bytes, layer.v and layer.v.n_bytes) for layer in layout.layers[1:]] == [(8, 16), (8, 16)]


@pytest.mark.parametrize(
    ("data", "memory", "section", "why"),
    [
        (b"", MemoryKind.DENSE, SectionKind.CELLS, "shorter than its head"),
        (b"\0" * 100, MemoryKind.DENSE, SectionKind.CELLS, "begins with 0x00000000, expected 0xaf143cd8"),
        (DENSE, MemoryKind.DENSE, SectionKind.TAIL, "no known layout"),
        (DENSE, MemoryKind.WINDOWED, SectionKind.CELLS, "in no way"),
        (DENSE + b"\0", MemoryKind.DENSE, SectionKind.CELLS, "in no way"),
        (HEAD + attention(range(4), type_k=99), MemoryKind.DENSE, SectionKind.CELLS, "in no way"),
        (HEAD + attention(range(4), type_k=8), MemoryKind.DENSE, SectionKind.CELLS, "in no way"),
        (HEAD + attention(range(4), 513), MemoryKind.DENSE, SectionKind.CELLS, "in no way"),
        (HEAD + attention([0, -1]), MemoryKind.DENSE, SectionKind.CELLS, "in no way"),
        (HEAD + recurrent(4, 5, 4), MemoryKind.RECURRENT, SectionKind.TAIL, "in no way"),
        (HEAD + recurrent(4)[:-28], MemoryKind.RECURRENT, SectionKind.TAIL, "in no way"),
        (HEAD + struct.pack("<II", 2, 0) * 2, MemoryKind.WINDOWED, SectionKind.CELLS, "in no way"),
        (HEAD + struct.pack("<II", 1, 2**32 - 1), MemoryKind.DENSE, SectionKind.CELLS, "in no way"),
    ],
)
def test_what_is_laid_out_otherwise_is_not_guessed_at(
    data: bytes, memory: MemoryKind, section: SectionKind, why: str
) -> None:
    with pytest.raises(UnknownLayoutError, match=why):
        parse_section(data, memory, section)


def test_what_can_be_read_in_two_ways_is_not_guessed_at() -> None:
    """Values of ten cells, and no window; or no values, and a window of two cells and no layers."""
    values = struct.pack("<iQ", 1, 2) + struct.pack("<5i", 1, 0, 1, 1, 0) + struct.pack("<II", 1, 0)
    data = HEAD + attention(range(10), 1, v=None) + values
    with pytest.raises(UnknownLayoutError, match="in 2 ways"):
        parse_section(data, MemoryKind.WINDOWED, SectionKind.CELLS)


@settings(max_examples=400)
@example(sample=0, offset=12, flip=0xFF, n_cut=0)
@given(
    sample=st.integers(0, len(SAMPLES) - 1),
    offset=st.integers(0, 400),
    flip=st.integers(0, 255),
    n_cut=st.integers(0, 40),
)
def test_damage_ends_in_an_answer_or_in_a_named_error(sample: int, offset: int, flip: int, n_cut: int) -> None:
    data, memory, section = SAMPLES[sample]
    damaged = bytearray(data)
    damaged[offset % len(data)] ^= flip
    damaged = damaged[: len(damaged) - n_cut]
    try:
        layout = parse_section(memoryview(damaged), memory, section)
    except UnknownLayoutError:
        return
    assert sum(layer.n_bytes for layer in layout.layers) + layout.n_other == len(damaged)


@given(st.binary(max_size=300), st.sampled_from(MemoryKind), st.sampled_from(SectionKind))
def test_any_bytes_end_in_an_answer_or_in_a_named_error(data: bytes, memory: MemoryKind, section: SectionKind) -> None:
    for each in (data, HEAD + data):
        try:
            layout = parse_section(each, memory, section)
        except UnknownLayoutError:
            continue
        assert layout.n_bytes == len(each)


# ---------------------------------------------------------------- the engine's own


def layouts(path, **memory) -> Iterator[tuple[str, int, int, SectionLayout]]:
    """Kind, positions and layout of each section of a text of N tokens."""
    with LlamaModel(path) as model:
        live = open_sequence(model, **memory)
        live.extend(tokens_of(model, N + 1))
        for section in saved(live):
            layout = parse_section(section.data, model.info.kind, section.kind)
            assert sum(layer.n_bytes for layer in layout.layers) + layout.n_other == len(section.data)
            yield section.kind, section.p0, section.p1, layout


HALF, BYTE, NIBBLE = 2.0, 34 / 32, 18 / 32  # bytes of an element of f16, q8_0, q4_0


@pytest.mark.parametrize(
    ("memory", "k", "v"),
    [
        ({}, HALF, HALF),
        ({"flash_attn": False}, HALF, HALF),
        ({"type_k": "q8_0", "type_v": "q4_0", "flash_attn": True}, BYTE, NIBBLE),
        ({"type_k": "q8_0", "flash_attn": False}, BYTE, HALF),
    ],
)
def test_a_dense_models_sections(models, memory: dict, k: float, v: float) -> None:
    ((kind, p0, p1, layout),) = layouts(models("M"), **memory)
    assert (kind, p0, p1) == ("cells", 0, N)
    assert kinds(layout) == [(FULL, N, ((0, N),), 2)]
    rows = {(layer.k.n_bytes / N / k, layer.v.n_bytes / N / v if layer.v else None) for layer in layout.layers}
    assert rows == {(128, 128)}  # two heads of 64


def test_a_windowed_models_sections(models) -> None:
    found = list(layouts(models("MS")))
    assert [(p0, p1) for _, p0, p1, _ in found] == [(0, 32), (32, 64), (64, 70)]
    for _, p0, p1, layout in found:
        assert kinds(layout) == [(FULL, p1 - p0, ((p0, p1),), 1), (WINDOWED, p1 - p0, ((p0, p1),), 3)]


def test_a_window_sized_caches_section(models) -> None:
    ((kind, _, _, layout),) = layouts(models("MS"), swa_full=False)
    assert kind == "whole"
    assert kinds(layout) == [(FULL, N, ((0, N),), 1), (WINDOWED, writer.WINDOW, ((N - writer.WINDOW, N),), 3)]


@pytest.mark.parametrize(("name", "n_states"), [("MH", 2), ("MH2", 2)])
def test_a_hybrid_models_sections(models, name: str, n_states: int) -> None:
    cells, tail = layouts(models(name))
    assert kinds(cells[3]) == [(FULL, N, ((0, N),), 1)]
    assert kinds(tail[3]) == [(RECURRENT, 1, ((N - 1, N),), n_states)]


def test_a_recurrent_models_section(models) -> None:
    ((kind, _, _, layout),) = layouts(models("MR"))
    assert kind == "tail"
    assert kinds(layout) == [(RECURRENT, 1, ((N - 1, N),), 2)]
    assert (layout.parts[0].n_k_bytes, layout.parts[0].n_v_bytes) == (6144, 32768)


@pytest.mark.parametrize("flash_attn", [True, False])
def test_latent_attention_keeps_one_row_a_cell(models, flash_attn: bool) -> None:
    ((_, _, _, layout),) = layouts(models("ML"), flash_attn=flash_attn)
    assert [(part.kind, part.n_cells, part.n_v_bytes) for part in layout.parts] == [(FULL, N, 0)]
    assert {layer.v for layer in layout.layers} == {None}


def test_layers_that_use_the_cells_of_others_have_none(models) -> None:
    found = list(layouts(models("MG")))
    n_layers = {tuple((part.kind, len(part.layers)) for part in layout.parts) for *_, layout in found}
    assert n_layers == {((FULL, 1), (WINDOWED, 2))}  # of five layers
