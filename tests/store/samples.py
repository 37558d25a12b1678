"""Records and sections for the store's tests."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from llamakv.records import (
    Adapter,
    Chat,
    EngineVersions,
    Lineage,
    MemoryKind,
    MemorySettings,
    Message,
    ModelIdentity,
    Sampling,
    SectionKind,
    SessionRecord,
    StateSection,
)

N_PIECE = 256


def make_record(
    n_tokens: int = 5, *, kind: MemoryKind = MemoryKind.DENSE, session_id: str = "id-1", n_saves: int = 1
) -> SessionRecord:
    """A record with every optional part filled in."""
    return SessionRecord(
        identity=ModelIdentity(
            digest="ab" * 32,
            n_bytes=98_000_000,
            architecture="llama",
            name="Tiny é 数据",
            quantisation="Q4_1",
            tokenizer_digest="cd" * 32,
            adapters=(Adapter(digest="ef" * 32, scale=0.5),),
        ),
        kind=kind,
        settings=MemorySettings(type_k="f16", type_v="q8_0", flash_attn=False, rope_freq_base=1e4),
        versions=EngineVersions(binding="0.3.36", llama_cpp="0.5.0", commit="0c1e570", state_version=3, backend="cpu"),
        tokens=tuple((i * 7919) % 49152 for i in range(n_tokens)),
        sampling=Sampling(temperature=0.7, logit_bias=((3, -math.inf), (4, 1.5)), stop=("</s>", "\ud83d")),
        lineage=Lineage(
            session_id=session_id,
            parent_id="id-0",
            parent_position=2,
            name="notes",
            note="a 'note'\n",
            tags=("a", "b"),
            created_s=1_700_000_000.25,
            updated_s=1_700_000_001.5 + n_saves,
            n_saves=n_saves,
            llamakv_version="0.1.0",
        ),
        chat=Chat(
            template="{{ messages }}",
            template_digest="12" * 32,
            messages=(
                Message(role="user", content="Hi \U0001f600", p0=0, p1=min(3, n_tokens)),
                Message(role="assistant", content="[/INST]", p0=min(3, n_tokens), p1=n_tokens, finish="stop"),
            ),
        ),
        n_ctx=4096,
    )


def f16_bytes(n_bytes: int, seed: int = 0) -> memoryview:
    """What keys and values look like: normal floats with a scale per channel, as f16."""
    random = np.random.default_rng(seed)
    n_rows = -(-n_bytes // 128)
    scales = np.exp(0.5 * random.standard_normal(64)).astype(np.float32)
    values = (random.standard_normal((n_rows, 64), dtype=np.float32) * scales).astype(np.float16)
    return memoryview(values.tobytes())[:n_bytes]


def cells(p0: int, p1: int, *, n_bytes: int = 100, seed: int | None = None, p_used: int | None = None) -> StateSection:
    """One cells section with bytes that depend on where it is."""
    data = f16_bytes(n_bytes, p0 * 7 + p1 if seed is None else seed)
    return StateSection(kind=SectionKind.CELLS, p0=p0, p1=p1, p_used=p1 if p_used is None else p_used, data=data)


def tail(position: int, *, n_bytes: int = 60) -> StateSection:
    """A recurrent part as it was after ``position`` tokens."""
    data = f16_bytes(n_bytes, 1000 + position)
    return StateSection(kind=SectionKind.TAIL, p0=position, p1=position, p_used=position, data=data)


def whole(position: int, *, n_bytes: int = 80) -> StateSection:
    """Everything up to ``position`` in one piece."""
    data = f16_bytes(n_bytes, 2000 + position)
    return StateSection(kind=SectionKind.WHOLE, p0=0, p1=position, p_used=position, data=data)


def cells_up_to(
    n_cells: int, *, p0: int = 0, bytes_per_cell: int = 8, seed: int | None = None
) -> Iterator[StateSection]:
    """Cells sections of [p0, n_cells), as a save cuts them."""
    for start in range(p0, n_cells, N_PIECE):
        end = min(start + N_PIECE, n_cells)
        yield cells(start, end, n_bytes=(end - start) * bytes_per_cell, seed=seed)


def contents(sections: Iterator[StateSection]) -> list[tuple[str, int, int, int, bytes]]:
    """Sections as values that can be compared."""
    return [(item.kind, item.p0, item.p1, item.p_used, bytes(item.data)) for item in sections]
