"""Which sessions of a store refer to the same objects."""

from __future__ import annotations

import functools
import json
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamakv.errors import LlamakvError
from llamakv.records import Lineage
from llamakv.store.collector import SUFFIX, digests_of
from llamakv.store.session_info import SessionInfo
from llamakv.store.session_reader import folder_of
from llamakv.store.store_folder import is_store
from llamakv.store.summary import SessionSummary, summarise

_OBJECT = struct.Struct("<32sQ")  # of a section in the store: digest, raw bytes
_N_REMEMBERED = 1024  # lists of sections: those who share most have the same ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharer:
    """Another session of the store, and the digests of the objects it has in common with the one that was asked
    about. ``is_verified``: its index was read just now; else that is what the cache knew of it, going by what the file
    system says of its file."""

    name: str
    digests: frozenset[str]
    is_verified: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferringSession:
    """A session and the objects it refers to: of each of its sections in the store, in their order, the digest and how
    many bytes of state it holds. ``lineage_name`` and ``llamakv_version`` are of its lineage, whose rest is in the
    summary."""

    summary: SessionSummary
    lineage_name: str | None
    llamakv_version: str
    sections: tuple[tuple[bytes, int], ...]


def find_sharers(
    info: SessionInfo, *, n_verified: int = 0, n_read_at_most: int | None = None
) -> tuple[Sharer, ...] | None:
    """Return the other sessions of a session's store that refer to objects it refers to, those first that have most in
    common with it; none of one outside a store. None where the store's cache is so old that more than
    ``n_read_at_most`` indexes would have to be read. The indexes of those that come first, ``n_verified`` of all and of
    those that have a section, are read in any case.

    Raises: NewerFormatError (the store was made by a later llamakv), ReadError (its folder cannot be listed).
    """
    from llamakv.store.cache import StoreCache  # late: SQLite is not needed by most commands

    wanted = frozenset(section.digest for section in info.sections if section.in_store)
    root = folder_of(info.path)
    if not wanted or not is_store(root):
        return ()
    with StoreCache(root) as cache:
        found = cache.sharing(wanted, n_read_at_most=n_read_at_most)
    if found is None:
        return None
    own = {path.name.removesuffix(SUFFIX) for path in (info.path, info.path.resolve())}
    hints = [
        Sharer(name=name, digests=digests, is_verified=False) for name, digests in found.items() if name not in own
    ]
    hints.sort(key=_order)
    shown = _first_of_each(hints, n_verified, len(wanted))
    sharers = [_verified(root, hint, info.path, wanted) if hint.name in shown else hint for hint in hints]
    return tuple(sorted((sharer for sharer in sharers if sharer.digests), key=_order))


def _first_of_each(sharers: Sequence[Sharer], n: int, n_objects: int) -> set[str]:
    """The names of the first, of all and of those that have an object in common."""
    found = {sharer.name for sharer in sharers[:n]}
    n_found: Counter[str] = Counter()
    n_left = n * n_objects
    for sharer in sharers:
        if n_left <= 0:
            break
        for digest in sharer.digests:
            if n_found[digest] < n:
                found.add(sharer.name)
                n_found[digest] += 1
                n_left -= 1
    return found


def _verified(root: Path, hint: Sharer, own: Path, wanted: frozenset[str]) -> Sharer:
    path = root / (hint.name + SUFFIX)
    try:
        digests = frozenset() if path.samefile(own) else digests_of(path) & wanted
    except (LlamakvError, OSError):  # damaged or removed a moment ago
        digests = frozenset()
    return Sharer(name=hint.name, digests=digests, is_verified=True)


def _order(sharer: Sharer) -> tuple[int, str]:
    return -len(sharer.digests), sharer.name


# ---------------------------------------------------------------- as bytes


def pack_sections(info: SessionInfo) -> bytes:
    """Return the sections of a session that are objects, as ``decode_referring`` and ``find_common`` take them."""
    return b"".join(_OBJECT.pack(*pair) for pair in _sections_of(info))


def pack_origin(lineage: Lineage) -> bytes:
    """Return what a session's summary leaves out of its lineage."""
    return json.dumps([lineage.name, lineage.llamakv_version]).encode()


def referring_session(info: SessionInfo, name: str, used_s: float) -> ReferringSession:
    """Return what a session that was read refers to."""
    lineage = info.record.lineage
    return ReferringSession(
        summary=summarise(info, name, used_s),
        lineage_name=lineage.name,
        llamakv_version=lineage.llamakv_version,
        sections=_sections_of(info),
    )


def decode_referring(
    summaries: Iterable[SessionSummary], rows: Sequence[tuple[bytes, bytes]]
) -> Iterator[ReferringSession]:
    """Yield each summary with what ``pack_origin`` and ``pack_sections`` gave of its session."""

    @functools.lru_cache(maxsize=_N_REMEMBERED)
    def unpacked(sections: bytes) -> tuple[tuple[bytes, int], ...]:
        return tuple(_OBJECT.iter_unpack(sections))

    for summary, (origin, sections) in zip(summaries, rows, strict=True):
        lineage_name, llamakv_version = json.loads(origin)
        yield ReferringSession(
            summary=summary,
            lineage_name=lineage_name,
            llamakv_version=llamakv_version,
            sections=unpacked(sections),
        )


def find_common(wanted: Collection[str], rows: Iterable[tuple[str, bytes]]) -> dict[str, frozenset[str]]:
    """Return which of some digests are among the packed sections of each session; none has none."""
    digests = {bytes.fromhex(digest): digest for digest in wanted}

    @functools.lru_cache(maxsize=_N_REMEMBERED)
    def common(sections: bytes) -> frozenset[str]:
        return frozenset(digests[digest] for digest, _ in _OBJECT.iter_unpack(sections) if digest in digests)

    return {name: found for name, sections in rows if (found := common(sections))}


def _sections_of(info: SessionInfo) -> tuple[tuple[bytes, int], ...]:
    return tuple((bytes.fromhex(section.digest), section.n_raw) for section in info.sections if section.in_store)
