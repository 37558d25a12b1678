"""What of a session's state others can begin with, in a form that a sorted index finds it by."""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from llamakv.records import EngineVersions, MemoryKind, MemorySettings, ModelIdentity, SectionKind
from llamakv.store.digests import digest_bytes
from llamakv.store.sections import StoredSection, n_cells_in_a_row
from llamakv.store.session_info import SessionInfo

_N_TOKEN_BYTES = 4
_MAX_POINTS = 64  # the latest: a file that claims more would take memory with the square of its length


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusableCells:
    """What can be brought back of a session: any number of its first ``n_cuttable`` cells, or exactly the first
    ``points[i]``."""

    n_cuttable: int
    points: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def space_of(identity: ModelIdentity, settings: MemorySettings, versions: EngineVersions) -> str:
    """Return a digest of what must be equal for one's state to be of use to another: the model's content and adapters,
    the memory settings, and the engine's build. The backend and the Python binding do not matter."""
    parts = {
        "model": identity.digest,
        "adapters": [dataclasses.asdict(adapter) for adapter in identity.adapters],
        "settings": dataclasses.asdict(settings),
        "engine": [versions.llama_cpp, versions.commit, versions.state_version],
    }
    return digest_bytes(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hex()


def reusable_cells(info: SessionInfo) -> ReusableCells:
    """Return what can be brought back of a session; of exact places at most the latest 64."""
    return _reusable(info.record.kind, info.sections)


def _reusable(kind: MemoryKind, sections: Sequence[StoredSection]) -> ReusableCells:
    if any(section.kind is SectionKind.WHOLE for section in sections):
        return _at([section.p1 for section in sections if section.kind is SectionKind.WHOLE])
    n_cells = n_cells_in_a_row(sections)
    if kind in (MemoryKind.DENSE, MemoryKind.WINDOWED):
        return ReusableCells(n_cuttable=n_cells, points=())
    tails = [section.p1 for section in sections if section.kind is SectionKind.TAIL]
    return _at(tails if kind is MemoryKind.RECURRENT else [p for p in tails if p <= n_cells])


def _at(points: Sequence[int]) -> ReusableCells:
    return ReusableCells(n_cuttable=0, points=tuple(sorted(points)[-_MAX_POINTS:]))


# ---------------------------------------------------------------- tokens as sortable bytes


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return tokens as bytes that compare as the tokens do; what begins alike comes together."""
    return struct.pack(f">{len(tokens)}I", *tokens)


def cut_packed(packed: bytes, n_tokens: int) -> bytes:
    """Return the first tokens of packed ones."""
    return packed[: n_tokens * _N_TOKEN_BYTES]


def n_packed(packed: bytes) -> int:
    """Return how many tokens were packed."""
    return len(packed) // _N_TOKEN_BYTES


def n_packed_common(one: bytes, other: bytes) -> int:
    """Return how many tokens two packed lists begin with alike."""
    n = min(len(one), len(other))
    difference = int.from_bytes(one[:n], "big") ^ int.from_bytes(other[:n], "big")
    n_different = (difference.bit_length() + 7) // 8
    return (n - n_different) // _N_TOKEN_BYTES
