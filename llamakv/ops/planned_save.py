"""The sections that a save would write, and their bytes on disk: as ``keeping`` makes them, before there are any."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from llamakv.engine.contract import ModelInfo
from llamakv.engine.memory import ContextMemory
from llamakv.engine.state_sizes import PlannedSection, plan_sections
from llamakv.errors import NoRoomError, StoreError
from llamakv.ops.budget import no_room
from llamakv.ops.keeping import sections_to_keep, without_scraps
from llamakv.records import MemoryKind, MemorySettings, ModelIdentity, SectionKind, SessionRecord
from llamakv.store import format
from llamakv.store.codec import Encoding
from llamakv.store.objects import N_HEAD
from llamakv.store.retention import make_room
from llamakv.store.session_file import SessionInfo, StoredSection
from llamakv.store.summary import SessionSummary
from llamakv.store.survey import take_survey

_N_MORE = 64  # bytes that a section which cannot be compressed takes more, beside 1 %: see ``codec.encode``


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the state of sessions with the same model and settings came to on disk."""

    n_sessions: int
    raw_bytes: int
    stored_bytes: int

    @property
    def raw_over_stored(self) -> float:
        """How many raw bytes a stored byte holds."""
        return self.raw_bytes / self.stored_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What the sequence begins with: the first ``n_cells`` cells of a session; ``is_own`` is the one at the path that
    is saved to, which is extended."""

    base: SessionInfo | None = None
    n_cells: int = 0
    is_own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """Sections that are taken as they are stored, and those to be written (None: they cannot be told)."""

    keep: tuple[StoredSection, ...]
    new: tuple[PlannedSection, ...] | None


def plan_save(info: ModelInfo, context: ContextMemory, begun: Begun, *, swa_full: bool, n_cells: int) -> SavePlan:
    """The two parts of a state of ``n_cells`` cells: what is stored, and what is not."""
    kind = info.kind
    keep: tuple[StoredSection, ...] = ()
    n_kept = begun.n_cells
    if begun.base is not None and n_kept:
        stored = begun.base.sections
        if not begun.is_own and kind in (MemoryKind.DENSE, MemoryKind.WINDOWED):
            n_kept = without_scraps(stored, n_kept)
        keep = sections_to_keep(stored, n_kept)
        keep = tuple(s for s in keep if s.kind is not SectionKind.WHOLE or s.p1 == n_cells)
    there = {s.kind for s in keep if s.kind is not SectionKind.CELLS and s.p1 == n_cells}
    if SectionKind.WHOLE in there:
        return SavePlan(keep=keep, new=())
    new = plan_sections(
        context,
        kind,
        n_window=info.n_window,
        swa_full=swa_full,
        p0=n_kept,
        n_cells=n_cells,
    )
    return SavePlan(keep=keep, new=None if new is None else tuple(s for s in new if s.kind not in there))


def measure_stored(store: Path | None, identity: ModelIdentity, settings: MemorySettings) -> Measured | None:
    """What the sessions of a store with the same model and settings came to; None where there are none."""
    from llamakv.store.cache import StoreCache  # late: SQLite is not needed by most commands

    if store is None or not store.is_dir():
        return None
    try:
        with StoreCache(store) as cache:
            known = cache.summaries()
    except StoreError:
        return None
    same = [
        session
        for session in known
        if isinstance(session, SessionSummary)
        and (session.identity, session.settings) == (identity, settings)
        and session.stored_bytes
    ]
    if not same:
        return None
    return Measured(
        n_sessions=len(same),
        raw_bytes=sum(session.raw_bytes for session in same),
        stored_bytes=sum(session.stored_bytes for session in same),
    )


def measure_session(info: SessionInfo | None) -> Measured | None:
    """What one session came to; None where there is none, or nothing of it is stored."""
    if info is None or not info.n_stored_bytes:
        return None
    return Measured(n_sessions=1, raw_bytes=info.n_raw_bytes, stored_bytes=info.n_stored_bytes)


def budget_error(
    path: Path, max_bytes: int, n_new: int, *, reused_from: Path | None, overwrite: bool
) -> NoRoomError | None:
    """The error of a save to a ``path`` in a store whose budget is too small for ``n_new`` bytes more, whatever else is
    removed; None where removing sessions that may go makes the room. Nothing is removed."""
    survey = take_survey(path.parent)
    is_replaced = overwrite and reused_from != path
    left = [session for session in survey.sessions if not (is_replaced and session.name == path.stem)]
    safe = {there.stem for there in (path, reused_from) if there is not None and there.parent == path.parent}
    if make_room(survey, left, max_bytes, n_new=n_new, safe=safe) is not None:
        return None
    staying = [session for session in left if session.lineage.pinned or session.name in safe]
    return no_room(max_bytes, n_new, survey.n_bytes_of(staying), staying)


def stored_sizes(plan: SavePlan, measured: Measured | None, *, in_store: bool) -> list[int] | None:
    """Bytes of each new section on disk: as was measured, or as many as there can be."""
    if plan.new is None:
        return None
    if measured is not None:
        return [round(section.n_bytes / measured.raw_over_stored) for section in plan.new]
    head = N_HEAD if in_store else 0
    return [section.n_bytes + section.n_bytes // 100 + _N_MORE + head for section in plan.new]


def index_bytes(record: SessionRecord, plan: SavePlan, sizes: list[int] | None, *, in_store: bool) -> int | None:
    """The length of the index frame, packed as a save packs it; digests, which do not compress, are random."""
    if plan.new is None or sizes is None:
        return None
    rows = list(plan.keep)
    offset = format.N_HEADER
    for section, n_stored in zip(plan.new, sizes, strict=True):
        low = section.n_bytes // 2
        rows.append(
            StoredSection(
                kind=section.kind,
                p0=section.p0,
                p1=section.p1,
                p_used=section.p1,
                n_raw=section.n_bytes,
                n_stored=n_stored,
                offset=0 if in_store else offset,
                digest=secrets.token_hex(32),
                encoding=Encoding.RAW if in_store else Encoding.PLANES,
                frames=() if in_store else (low, max(n_stored - low, 1)),
                in_store=in_store,
            )
        )
        offset += n_stored
    return len(format.pack_index(record, rows)[0])
