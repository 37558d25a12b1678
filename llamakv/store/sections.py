"""The rows of the section table, and how they must fit the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from llamakv.records import MemoryKind, SectionKind
from llamakv.store.codec import Encoding


class SectionsError(Exception):
    """Sections that do not fit the tokens; a reader turns it into a DamagedError, a writer into a ValueError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSection:
    """One row of the section table: positions as in ``StateSection``, and where and how the bytes are stored.

    The section's frames follow each other from ``offset``; ``frames`` are their stored lengths, ``n_stored`` is their
    sum plus padding. ``digest`` is the BLAKE3 hex digest of the ``n_raw`` raw bytes. A section ``in_store`` is an
    object of the store the file lies in, ``n_stored`` bytes long, whose own header says how it is stored: ``offset``
    is 0, ``frames`` is empty and ``encoding`` means nothing.
    """

    kind: SectionKind
    p0: int
    p1: int
    p_used: int
    n_raw: int
    n_stored: int
    offset: int
    digest: str
    encoding: Encoding
    frames: tuple[int, ...]
    in_store: bool = False

    @property
    def is_truncated(self) -> bool:
        """Whether a part of its cells is no longer wanted."""
        return self.p_used < self.p1


def truncate_sections(sections: Iterable[StoredSection], n_cells: int) -> tuple[StoredSection, ...]:
    """Return what can be kept of ``sections`` by a session that has only the first ``n_cells`` cells.

    A cells section reaching further has its ``p_used`` lowered, one beginning further is left out; so are tails and
    whole sections taken later than at ``n_cells``. What is missing then (a tail at ``n_cells``, say) is the caller's
    to add.
    """
    kept = []
    for section in sections:
        if section.kind is not SectionKind.CELLS:
            if section.p1 <= n_cells:
                kept.append(section)
        elif section.p0 < n_cells:
            kept.append(replace(section, p_used=min(section.p_used, n_cells)))
    return tuple(kept)


def n_cells_held(kind: MemoryKind, sections: Sequence[StoredSection]) -> int:
    """Return how many leading cells ``sections`` bring back: N - 1 of a session of N tokens that has lost nothing."""
    wholes = [section.p1 for section in sections if section.kind is SectionKind.WHOLE]
    if wholes:
        return max(wholes)
    n_cells = n_cells_in_a_row(sections)
    if kind in (MemoryKind.DENSE, MemoryKind.WINDOWED):
        return n_cells
    reachable = [
        s.p1 for s in sections if s.kind is SectionKind.TAIL and (kind is MemoryKind.RECURRENT or s.p1 <= n_cells)
    ]
    return max(reachable, default=0)


def n_cells_in_a_row(sections: Iterable[StoredSection]) -> int:
    """Return how many leading cells there are cells sections of, whether or not they are enough to go on from."""
    n_cells = 0
    for section in sections:
        if section.kind is SectionKind.CELLS and section.p0 == n_cells:
            n_cells = section.p_used
    return n_cells


def sections_up_to(kind: MemoryKind, sections: Sequence[StoredSection], n_cells: int) -> tuple[StoredSection, ...]:
    """Return what of ``sections`` a session with the first ``n_cells`` tokens' cells keeps, cut at the last place
    before which they can be brought back: ``n_cells_held`` of the result says where that is."""
    kept = truncate_sections(sections, n_cells)
    held = n_cells_held(kind, kept)
    return truncate_sections(kept, held) if held < n_cells else kept


def check_partial(kind: MemoryKind, n_tokens: int, sections: Sequence[StoredSection]) -> None:
    """Check that ``sections`` hold the state of the first tokens of a session, perhaps of none: what is left after
    others were lost.

    Raises: SectionsError.
    """
    held = n_cells_held(kind, sections)
    if held >= n_tokens:
        raise SectionsError(f"{n_tokens} tokens have {n_tokens - 1} cells, but sections hold {held}")
    if held or sections:
        check_sections(kind, held + 1, sections)


def check_sections(kind: MemoryKind, n_tokens: int, sections: Sequence[StoredSection]) -> None:
    """Check that ``sections`` hold the state of ``n_tokens`` tokens, the last one pending.

    Raises: SectionsError, naming both numbers where they differ.
    """
    if n_tokens < 1:
        raise SectionsError("a session has at least one token")
    n_cells = n_tokens - 1
    if n_cells == 0:
        if sections:
            raise SectionsError(f"{len(sections)} sections for a single, pending token")
        return
    for section in sections:
        _check_positions(section, n_cells)
    cells = [section for section in sections if section.kind is SectionKind.CELLS]
    tails = [section for section in sections if section.kind is SectionKind.TAIL]
    wholes = [section for section in sections if section.kind is SectionKind.WHOLE]
    may_be_whole = kind in (MemoryKind.WINDOWED, MemoryKind.HYBRID)
    if wholes and may_be_whole and len(wholes) == len(sections) == 1:
        if wholes[0].p1 != n_cells:
            raise SectionsError(f"{n_tokens} tokens, but a whole section up to {wholes[0].p1}, expected {n_cells}")
        return
    wanted = {
        MemoryKind.DENSE: (bool(cells), False),
        MemoryKind.WINDOWED: (bool(cells), False),
        MemoryKind.RECURRENT: (False, bool(tails)),
        MemoryKind.HYBRID: (bool(cells), bool(tails)),
    }[kind]
    if wholes or (bool(cells), bool(tails)) != wanted or not any(wanted):
        names = ", ".join(f"{len(found)} {found[0].kind}" for found in (cells, tails, wholes) if found) or "none"
        raise SectionsError(f"{n_tokens} tokens, but sections of a {kind} state are: {names}")
    if cells:
        _check_cells(cells, n_tokens)
    if tails:
        _check_tails(tails, n_tokens)
    elif kind is MemoryKind.HYBRID:
        raise SectionsError(f"{n_tokens} tokens, but no tail section at {n_cells}")


def _check_positions(section: StoredSection, n_cells: int) -> None:
    where = f"{section.kind} section [{section.p0}, {section.p1}) used up to {section.p_used}"
    if section.kind is SectionKind.CELLS:
        is_right = 0 <= section.p0 < section.p_used <= section.p1
    elif section.kind is SectionKind.TAIL:
        is_right = 0 < section.p0 == section.p1 == section.p_used
    else:
        is_right = section.p0 == 0 < section.p1 == section.p_used
    if not is_right:
        raise SectionsError(f"impossible {where}")
    if section.p_used > n_cells:
        raise SectionsError(f"{n_cells + 1} tokens have {n_cells} cells, but there is a {where}")


def _check_cells(cells: Sequence[StoredSection], n_tokens: int) -> None:
    position = 0
    for section in cells:
        if section.p0 != position:
            raise SectionsError(f"cells section begins at {section.p0}, expected {position}")
        position = section.p_used
    if position != n_tokens - 1:
        raise SectionsError(f"{n_tokens} tokens but {position} cells, expected {n_tokens - 1}")


def _check_tails(tails: Sequence[StoredSection], n_tokens: int) -> None:
    positions = {section.p1 for section in tails}
    if len(positions) != len(tails):
        raise SectionsError("two tail sections at the same position")
    if n_tokens - 1 not in positions:
        raise SectionsError(f"{n_tokens} tokens, last tail section at {max(positions)}, expected {n_tokens - 1}")
