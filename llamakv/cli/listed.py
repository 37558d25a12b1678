"""Sessions in a list or a tree, in words: what ``ls`` shows to people."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from llamakv.cli import describe, render
from llamakv.ops.lineage import split_note
from llamakv.ops.listing import ListedSession
from llamakv.ops.tree import TreeEntry, tree_of

if TYPE_CHECKING:
    from llamakv.store.summary import SessionSummary


def table(sessions: Sequence[ListedSession]) -> str:
    """A row each; the column of labels is there if any has one."""
    now_s = time.time()
    rows = [_row(session, now_s) for session in sessions]
    headings: tuple[str, ...] = ("NAME", "TOKENS", "TURNS", "SIZE", "SAVED", "LABELS", "MODEL")
    if not any(row[5] for row in rows):
        headings = (*headings[:5], *headings[6:])
        rows = [(*row[:5], *row[6:]) for row in rows]
    return render.table(headings, rows, right=(1, 2, 3))


def tree(shown: Sequence[ListedSession], everything: Sequence[ListedSession]) -> str:
    """Each below the one it was branched off from."""
    now_s = time.time()
    return render.tree(_tree_line(entry, now_s) for entry in tree_of(shown, everything))


def _row(session: ListedSession, now_s: float) -> tuple[render.Cell, ...]:
    summary, size = session.summary, render.size(session.n_bytes)
    if summary is None:
        return (session.name, "", "", size, render.alarm("damaged"), "", render.dim(_reason(session)))
    return (
        session.name,
        f"{summary.n_tokens:,}",
        "raw" if summary.is_raw else f"{summary.n_turns:,}",
        size,
        render.age(summary.updated_s, now_s),
        " ".join(_labels(session, summary, now_s)),
        describe.model_name(summary.identity),
    )


def _labels(session: ListedSession, summary: SessionSummary, now_s: float) -> Iterator[str]:
    """What the user said of it, and what becomes of it."""
    if split_note(summary.note)[0]:
        yield "incomplete"
    if summary.pinned:
        yield "pinned"
    for tag in summary.tags:
        yield f"#{tag}"
    if session.expires_s is not None:
        left_s = session.expires_s - now_s
        yield f"{render.span(left_s)} left" if left_s > 0 else "expired"


def _tree_line(entry: TreeEntry, now_s: float) -> render.TreeLine:
    session, summary = entry.session, entry.session.summary
    if summary is None:
        details = f"damaged · {_reason(session)}"
    else:
        parts = [
            _origin(entry, summary),
            render.count(summary.n_tokens, "token"),
            "raw" if summary.is_raw else render.count(summary.n_turns, "turn"),
            render.size(session.n_bytes),
            render.age(summary.updated_s, now_s),
            " ".join(_labels(session, summary, now_s)),
        ]
        details = " · ".join(part for part in parts if part)
    return render.TreeLine(
        depth=entry.depth,
        is_last=entry.is_last,
        name=session.name,
        details=details,
        is_alarming=summary is None,
    )


def _origin(entry: TreeEntry, summary: SessionSummary) -> str:
    """Where a session was branched off, and from what, unless that is the line above."""
    if summary.parent_id is None:
        return ""
    place = "" if summary.parent_position is None else f"at {summary.parent_position:,}"
    if entry.turn:
        place = f"after turn {entry.turn:,}"
    if entry.is_orphan:
        return f"from one that is gone {place}".rstrip()
    if entry.depth == 0 and entry.parent is not None:
        return f"from {entry.parent.name} {place}".rstrip()
    return place


def _reason(session: ListedSession) -> str:
    return session.error.message if session.error is not None else "unreadable"
