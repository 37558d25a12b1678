"""Beginning with what the store has already: the longest saved prefix of what is to be read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llamakv.engine.prefix import n_common
from llamakv.errors import EngineError, NotFoundError, StoreError
from llamakv.ops.keeping import Keeper
from llamakv.ops.opening import OpenModel, restore_sections
from llamakv.ops.requests import Reporter
from llamakv.store.reuse import reusable_cells, space_of
from llamakv.store.session_file import SessionInfo, SessionReader, mark_used, sections_up_to

N_WORTH = 16
"""Cells that are worth a look into another session: reading fewer tokens takes a few calls at most."""


def begin_with_prefix(
    opened: OpenModel, keeper: Keeper, root: Path | None, tokens: Sequence[int], reporter: Reporter
) -> int:
    """Make the live sequence, which is empty, the longest beginning of ``tokens`` that a session in the store at
    ``root`` has the cells of, and say so. Returns the number of cells; 0 where there is none worth it, and where
    ``root`` is None or the sequence was saved before. A session that cannot be used after all is passed over: its
    tokens are read like all others.
    """
    if root is None or keeper.stored is not None or len(tokens) <= N_WORTH:
        return 0  # what a sequence was saved as and what it begins with must be the same session
    from llamakv.store.cache import StoreCache  # late: SQLite is not needed by most commands

    space = space_of(opened.identity, opened.model.settings, opened.model.versions)
    try:
        with StoreCache(root) as cache:
            hint = cache.longest_prefix(space, tokens)
    except StoreError:
        return 0
    if hint is None or hint.n_cells < N_WORTH:
        return 0
    sequence = opened.sequence
    try:
        with SessionReader(hint.path) as reader:
            info = reader.info
            if space_of(info.record.identity, info.record.settings, info.record.versions) != space:
                return 0
            n_cells = usable_cells(info, tokens)
            if n_cells < N_WORTH:
                return 0
            sections = sections_up_to(info.record.kind, info.sections, n_cells)
            restore_sections(sequence, tokens, reader, sections, n_cells, reporter)
    except (StoreError, NotFoundError, EngineError) as error:
        reporter.notice(f"{hint.path}, which begins alike, cannot be used: {error.message}")
        if sequence.tokens:
            sequence.rewind(0)
        return 0
    mark_used(info.path)
    keeper.begins_with(info)
    reporter.notice(f"{n_cells:,} of {len(tokens):,} tokens are in the store, in {hint.name!r}: reused")
    return n_cells


def usable_cells(info: SessionInfo, tokens: Sequence[int]) -> int:
    """How many leading cells of a session are those of ``tokens``, of which the last is pending, and can be brought
    back by themselves."""
    cells = reusable_cells(info)
    most = min(n_common(info.record.tokens, tokens), len(tokens) - 1)
    return max(min(cells.n_cuttable, most), *(point for point in (0, *cells.points) if point <= most))
