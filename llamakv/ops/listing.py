"""The sessions of a store, as its cache tells them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamakv.errors import LlamakvError, StoreError
from llamakv.store.store_folder import limit_of, read_budget
from llamakv.store.summary import SessionSummary, UnreadableSession


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSession:
    """One session file of a store: what it says of itself, or why it cannot be read. ``n_bytes`` is what it takes, with
    what it shares with others; ``expires_s`` when it will have expired if it is not used, None if it never will."""

    name: str
    n_bytes: int
    summary: SessionSummary | None
    unreadable: UnreadableSession | None
    expires_s: float | None

    @property
    def path(self) -> Path:
        """Its file."""
        found = self.summary or self.unreadable
        assert found is not None
        return found.path

    @property
    def error(self) -> LlamakvError | None:
        """Why it cannot be read."""
        return None if self.unreadable is None else self.unreadable.error


def session_names(root: Path) -> tuple[str, ...]:
    """The names of a store's sessions, in alphabetical order; no file is read.

    Raises:
        ReadError: the folder cannot be listed.
    """
    from llamakv.store.session_store import SessionStore

    return SessionStore(root).names()


def list_sessions(
    root: Path, *, ttl_s: float | None = None, on_progress: Callable[[int, int], None] | None = None
) -> tuple[ListedSession, ...]:
    """All sessions of a store, the newest first; damaged ones last, with what is wrong. ``ttl_s`` (infinite: none)
    counts instead of the store's own time to live. ``on_progress(n_done, n)`` counts files that must be read.

    Raises:
        ReadError: the folder cannot be listed.
    """
    from llamakv.store.cache import StoreCache  # late: SQLite is not needed by most commands

    with StoreCache(root) as cache:
        found = cache.summaries(on_progress)
    ttl_s = _ttl_of(root, ttl_s)
    return tuple(
        _unreadable(session) if isinstance(session, UnreadableSession) else _listed(session, ttl_s) for session in found
    )


def _listed(summary: SessionSummary, ttl_s: float | None) -> ListedSession:
    limit_s = limit_of(summary, ttl_s)
    return ListedSession(
        name=summary.name,
        n_bytes=summary.file_bytes + summary.object_bytes,
        summary=summary,
        unreadable=None,
        expires_s=None if limit_s is None else summary.used_s + limit_s,
    )


def _unreadable(session: UnreadableSession) -> ListedSession:
    return ListedSession(
        name=session.name,
        n_bytes=session.n_file_bytes,
        summary=None,
        unreadable=session,
        expires_s=None,
    )


def _ttl_of(root: Path, ttl_s: float | None) -> float | None:
    """How long sessions without a time to live of their own may stay; a store whose budget cannot be read has none."""
    if ttl_s is not None:
        return ttl_s if math.isfinite(ttl_s) else None
    try:
        return read_budget(root).ttl_s
    except StoreError:
        return None


def having_tags(sessions: Sequence[ListedSession], tags: Sequence[str]) -> tuple[ListedSession, ...]:
    """Those of some sessions that have all of ``tags``; of damaged ones nobody knows."""
    wanted = set(tags)
    return tuple(
        session for session in sessions if session.summary is not None and wanted.issubset(session.summary.tags)
    )
