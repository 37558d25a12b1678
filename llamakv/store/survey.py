"""What is in a store, and what each of its sessions takes: all indexes and the lengths of all objects, read at once."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llamakv.records import Lineage, ModelIdentity
from llamakv.store.collector import session_files
from llamakv.store.objects import Objects
from llamakv.store.summary import UnreadableSession

if TYPE_CHECKING:
    from llamakv.store.sharing import ReferringSession


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyedSession:
    """A session of a store: ``n_file_bytes`` is its index, with sections where it still has any of its own; ``digests``
    are the objects it refers to, ``n_object_bytes`` long. ``n_raw_own`` and ``n_stored_own`` count sections in its
    file."""

    name: str
    path: Path
    used_s: float
    lineage: Lineage
    identity: ModelIdentity
    n_tokens: int
    n_cells_held: int
    n_file_bytes: int
    n_raw_own: int
    n_stored_own: int
    n_object_bytes: int
    digests: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Survey:
    """A store as it was found. ``object_bytes`` is the length of each object there is, ``object_raw`` how many bytes of
    state are in each that a session refers to."""

    root: Path
    sessions: tuple[SurveyedSession, ...]
    unreadable: tuple[UnreadableSession, ...]
    object_bytes: dict[str, int] = field(repr=False)
    object_raw: dict[str, int] = field(repr=False)

    @property
    def n_index_bytes(self) -> int:
        """Bytes of all session files."""
        return sum(s.n_file_bytes for s in self.sessions) + sum(s.n_file_bytes for s in self.unreadable)

    @property
    def n_object_bytes(self) -> int:
        """Bytes of all objects, those of no session included."""
        return sum(self.object_bytes.values())

    @property
    def n_bytes(self) -> int:
        """All that counts against a budget."""
        return self.n_index_bytes + self.n_object_bytes

    @cached_property
    def n_users(self) -> Counter[str]:
        """How many sessions refer to each object."""
        return Counter(digest for session in self.sessions for digest in session.digests)

    @cached_property
    def orphans(self) -> tuple[str, ...]:
        """Objects that no session refers to; none where that cannot be told."""
        return () if self.unreadable else tuple(digest for digest in self.object_bytes if digest not in self.n_users)

    def n_bytes_of(self, sessions: Iterable[SurveyedSession]) -> int:
        """Bytes of some sessions, what they share counted once."""
        found = list(sessions)
        digests = {digest for session in found for digest in session.digests}
        return sum(session.n_file_bytes for session in found) + sum(map(self._length, digests))

    def n_unique_bytes(self, session: SurveyedSession) -> int:
        """Bytes that would be free without this session."""
        alone = (digest for digest in session.digests if self.n_users[digest] == 1)
        return session.n_file_bytes + sum(map(self._length, alone))

    def n_shared_bytes(self, session: SurveyedSession) -> int:
        """Bytes of its objects that others refer to as well."""
        return sum(self._length(digest) for digest in session.digests if self.n_users[digest] > 1)

    def _length(self, digest: str) -> int:
        return self.object_bytes.get(digest, 0)


def take_survey(root: Path, *, on_progress: Callable[[int, int], None] | None = None) -> Survey:
    """Look at a store's indexes and measure its objects. Indexes that the store's cache knows as they are now are not
    read again; ``on_progress(n_done, n)`` counts those that are.

    A session removed meanwhile is not there; one that cannot be read is among the ``unreadable``.

    Raises: NewerFormatError (the store was made by a later llamakv), ReadError (the folder cannot be listed).
    """
    from llamakv.store.cache import StoreCache  # late: SQLite is not needed by most commands

    object_bytes = object_lengths(root)
    with StoreCache(root) as cache:
        found, unreadable = cache.referring(on_progress)
    names = {bytes.fromhex(digest): digest for digest in object_bytes}  # one text for each, whoever refers to it
    object_raw: dict[str, int] = {}

    @functools.lru_cache(maxsize=1024)
    def named(sections: tuple[tuple[bytes, int], ...]) -> tuple[frozenset[str], int, int]:
        """The digests, the bytes of those objects, and the bytes of state in all of the sections."""
        raw = {names.get(digest) or names.setdefault(digest, digest.hex()): n_raw for digest, n_raw in sections}
        object_raw.update(raw)
        return frozenset(raw), sum(object_bytes.get(digest, 0) for digest in raw), sum(n_raw for _, n_raw in sections)

    return Survey(
        root=root,
        sessions=tuple(_surveyed(session, *named(session.sections)) for session in found),
        unreadable=unreadable,
        object_bytes=object_bytes,
        object_raw=object_raw,
    )


def _surveyed(
    session: ReferringSession, digests: frozenset[str], n_object_bytes: int, n_raw_in_store: int
) -> SurveyedSession:
    summary = session.summary
    return SurveyedSession(
        name=summary.name,
        path=summary.path,
        used_s=summary.used_s,
        lineage=Lineage(
            session_id=summary.session_id,
            parent_id=summary.parent_id,
            parent_position=summary.parent_position,
            name=session.lineage_name,
            note=summary.note,
            tags=summary.tags,
            pinned=summary.pinned,
            ttl_s=summary.ttl_s,
            created_s=summary.created_s,
            updated_s=summary.updated_s,
            n_saves=summary.n_saves,
            llamakv_version=session.llamakv_version,
        ),
        identity=summary.identity,
        n_tokens=summary.n_tokens,
        n_cells_held=summary.n_cells,
        n_file_bytes=summary.file_bytes,
        n_raw_own=summary.raw_bytes - n_raw_in_store,
        n_stored_own=summary.stored_bytes - summary.object_bytes,
        n_object_bytes=n_object_bytes,
        digests=digests,
    )


def object_lengths(root: Path) -> dict[str, int]:
    """Return the length of each object of a store."""
    found: dict[str, int] = {}
    for digest, entry in Objects(root).all():
        with contextlib.suppress(OSError):  # removed meanwhile
            found[digest] = entry.stat(follow_symlinks=False).st_size
    return found


def n_bytes_on_disk(root: Path) -> int:
    """Return the bytes of a store that count against a budget: session files and objects. Nothing is read."""
    return sum(n for _, _, (_, n, _, _) in session_files(root)) + sum(object_lengths(root).values())
