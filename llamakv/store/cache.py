"""What was read from a store's indexes and kept: a listing, which objects sessions refer to, and the longest saved
prefix of a list of tokens.

Only a cache: all of it comes from the files, and what the file system says of each decides which are read anew.
"""

from __future__ import annotations

import contextlib
import struct
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from llamakv.errors import LlamakvError, NotFoundError
from llamakv.store.cache_database import CacheDatabase, DatabaseError, WrongRowError
from llamakv.store.collector import SUFFIX, Stamp, session_stamps
from llamakv.store.reuse import cut_packed, n_packed, n_packed_common, pack_tokens, reusable_cells
from llamakv.store.reuse import space_of as space_of
from llamakv.store.session_info import SessionInfo
from llamakv.store.session_reader import read_session
from llamakv.store.sharing import (
    ReferringSession,
    decode_referring,
    find_common,
    pack_origin,
    pack_sections,
    referring_session,
)
from llamakv.store.store_folder import refuse_newer
from llamakv.store.summary import SessionSummary, UnreadableSession, decode_summaries, encode_summary, summarise

OnProgress = Callable[[int, int], None]

_STAMP = struct.Struct("<4q")
_MOST = 2**63 - 1  # times beyond it (the year 2262) count as that
_UNSETTLED = b""  # the stamp of a file that may be written once more without a change of its times
_SETTLED_NS = 2_000_000_000  # the coarsest clock of a file system (FAT)
_N_BATCH_BYTES = 8 << 20  # written at a time: others wait for that long, and what was read lies in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHint:
    """A session that could bring back the first ``n_cells`` of some tokens when it was last looked at: to be verified
    by whoever uses it."""

    name: str
    path: Path
    n_cells: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """What is kept of a session; of each of its ``prefixes`` whether it is a point, and its packed tokens."""

    name: bytes
    stamp: bytes
    facts: bytes
    model: bytes
    origin: bytes
    sections: bytes
    space: str
    prefixes: tuple[tuple[bool, bytes], ...]

    @property
    def n_bytes(self) -> int:
        n_tokens = sum(len(tokens) for _, tokens in self.prefixes)
        return len(self.facts) + len(self.model) + len(self.sections) + n_tokens


class StoreCache:
    """What is known of the sessions in a folder. A context manager.

    Safe between processes, however they end; not to be shared by threads. Deleting or damaging the database changes
    nothing but the time it takes. A folder that is no store is read, and nothing is left in it. No object is opened.

    Raises (on opening): NewerFormatError (the store was made by a later llamakv).
    """

    def __init__(self, root: Path) -> None:
        refuse_newer(root)
        self._root = root
        self._stamps: dict[bytes, bytes] = {}
        self._unreadable: dict[bytes, UnreadableSession] = {}
        self._database = CacheDatabase(root)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the database; calling it again does nothing."""
        self._database.close()

    # ---------------------------------------------------------------- results

    def refresh(self, on_progress: OnProgress | None = None) -> None:
        """Make the cache what the files are now: read those that changed, forget those that are gone.
        ``on_progress(n_done, n)`` counts files read.

        Raises: ReadError (the folder cannot be listed).
        """
        self._database.attempt(lambda: self._refresh(on_progress))

    def summaries(self, on_progress: OnProgress | None = None) -> tuple[SessionSummary | UnreadableSession, ...]:
        """Return all sessions as they are now, the newest save first, those that cannot be read at the end.

        Raises: ReadError.
        """
        return self._database.attempt(lambda: self._summaries(on_progress))

    def referring(
        self, on_progress: OnProgress | None = None
    ) -> tuple[tuple[ReferringSession, ...], tuple[UnreadableSession, ...]]:
        """Return all sessions as they are now with the objects they refer to, and those that cannot be read, both in
        alphabetical order. ``on_progress(n_done, n)`` counts files read.

        Raises: ReadError.
        """
        return self._database.attempt(lambda: self._referring(on_progress))

    def sharing(
        self, digests: Collection[str], *, n_read_at_most: int | None = None
    ) -> dict[str, frozenset[str]] | None:
        """Return the names of the sessions that refer to any of some objects, and to which. None where more than
        ``n_read_at_most`` files would have to be read to know that.

        Looks at the files again if any was added, replaced or removed since. Raises: ReadError.
        """
        return self._database.attempt(lambda: self._sharing(digests, n_read_at_most))

    def longest_prefix(self, space: str, tokens: Sequence[int]) -> PrefixHint | None:
        """Return the session of a ``space`` (``space_of``) that brings back most leading cells of ``tokens``, of which
        the last is pending; None where there is none.

        Looks at the files again if any was added, replaced or removed since. Raises: ReadError.
        """
        prompt = pack_tokens(tokens[: max(0, len(tokens) - 1)])
        return self._database.attempt(lambda: self._longest_prefix(space, prompt))

    # ---------------------------------------------------------------- keeping up

    def _refresh(self, on_progress: OnProgress | None = None, n_read_at_most: int | None = None) -> bool:
        """Whether it did: not if it would have to read more files than that."""
        folder, now_ns = _folder_stamp(self._root), time.time_ns()
        known: dict[bytes, bytes] = dict(self._database.rows("SELECT name, stamp FROM sessions"))
        stamps = session_stamps(self._root)  # later: what is known but not there was removed
        self._stamps = {_to_bytes(name): _pack_stamp(stamp) for name, stamp in stamps.items()}
        self._unreadable = {}
        if known != self._stamps:
            self._forget([(name, stamp) for name, stamp in known.items() if name not in self._stamps])
            changed = [name for name, stamp in self._stamps.items() if known.get(name) != stamp]
            if n_read_at_most is not None and len(changed) > n_read_at_most:
                return False
            for batch in _batches(self._read(changed, on_progress)):
                self._remember(batch)
            self._forget([(name, known[name]) for name in self._unreadable if name in known])
        if folder is not None and _is_settled(folder, now_ns):
            self._note_folder(_pack_stamp(folder))
        return True

    def _refresh_if_changed(self, n_read_at_most: int | None = None) -> bool:
        """Whether it is what the files are, without reading more of them than that."""
        folder = _folder_stamp(self._root)
        if folder is None or self._noted_folder() != _pack_stamp(folder):
            return self._refresh(n_read_at_most=n_read_at_most)
        return True

    def _noted_folder(self) -> object:
        return next((stamp for (stamp,) in self._database.rows("SELECT stamp FROM folder")), None)

    def _note_folder(self, stamp: bytes) -> None:
        if self._noted_folder() != stamp:
            with contextlib.suppress(DatabaseError), self._database.transaction():  # it saves time, no more
                self._database.change("DELETE FROM folder", [()])
                self._database.change("INSERT INTO folder VALUES (?)", [(stamp,)])

    def _read(self, names: Sequence[bytes], on_progress: OnProgress | None) -> Iterator[_Row]:
        for n_done, name in enumerate(names, 1):
            info = self._read_one(name)
            if info is not None:
                yield self._row(name, info)
            if on_progress is not None:
                on_progress(n_done, len(names))

    def _read_one(self, name: bytes) -> SessionInfo | None:
        path = self._path(name)
        try:
            return read_session(path)
        except NotFoundError:
            del self._stamps[name]
        except LlamakvError as error:
            n_bytes = _STAMP.unpack(self._stamps[name])[1]
            self._unreadable[name] = UnreadableSession(
                name=_to_text(name), path=path, n_file_bytes=n_bytes, error=error
            )
        return None

    def _row(self, name: bytes, info: SessionInfo) -> _Row:
        stamp = self._stamps[name]
        record, cells = info.record, reusable_cells(info)
        lengths = [(False, cells.n_cuttable), *((True, point) for point in cells.points)]
        packed = pack_tokens(record.tokens)
        facts, model = encode_summary(summarise(info, _to_text(name), 0.0))
        return _Row(
            name=name,
            stamp=stamp if _is_settled(_STAMP.unpack(stamp), time.time_ns()) else _UNSETTLED,
            facts=facts,
            model=model,
            origin=pack_origin(record.lineage),
            sections=pack_sections(info),
            space=space_of(record.identity, record.settings, record.versions),
            prefixes=tuple((is_point, cut_packed(packed, n)) for is_point, n in lengths if n),
        )

    def _remember(self, rows: Sequence[_Row]) -> None:
        with self._database.transaction():
            self._database.change("DELETE FROM prefixes WHERE name = ?", ((row.name,) for row in rows))
            self._database.change(
                "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?)",
                (
                    (row.name, row.stamp, row.facts, row.model, _checksum(row.name, row.facts, row.model))
                    for row in rows
                ),
            )
            self._database.change(
                "INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?)",
                ((row.name, row.origin, row.sections, _checksum(row.name, row.origin, row.sections)) for row in rows),
            )
            self._database.change(
                "INSERT INTO prefixes VALUES (?, ?, ?, ?)",
                ((row.name, row.space, is_point, tokens) for row in rows for is_point, tokens in row.prefixes),
            )

    def _forget(self, gone: Sequence[tuple[bytes, bytes]]) -> None:
        """Forget sessions, unless somebody else has read a newer one of that name meanwhile."""
        if gone:
            with self._database.transaction():
                for name, stamp in gone:
                    if self._database.change("DELETE FROM sessions WHERE name = ? AND stamp = ?", [(name, stamp)]):
                        self._database.change("DELETE FROM prefixes WHERE name = ?", [(name,)])
                        self._database.change("DELETE FROM objects WHERE name = ?", [(name,)])

    # ---------------------------------------------------------------- the list

    def _summaries(self, on_progress: OnProgress | None) -> tuple[SessionSummary | UnreadableSession, ...]:
        self._refresh(on_progress)
        rows = self._database.rows("SELECT name, facts, model, checksum FROM sessions")
        if not all(_is_sound(*row) for row in rows):
            raise WrongRowError
        kept = [
            (_to_text(name), self._used_s(name), facts, model)
            for name, facts, model, _ in rows
            if name in self._stamps and name not in self._unreadable
        ]
        found = list(decode_summaries(self._root, kept))
        missing = self._stamps.keys() - {row[0] for row in rows} - self._unreadable.keys()
        for name in missing:  # somebody has just forgotten them
            info = self._read_one(name)
            if info is not None:
                found.append(summarise(info, _to_text(name), self._used_s(name)))
        found.sort(key=lambda summary: (-summary.updated_s, -summary.n_saves, summary.name))
        return (*found, *sorted(self._unreadable.values(), key=lambda session: session.name))

    # ---------------------------------------------------------------- objects

    def _referring(
        self, on_progress: OnProgress | None
    ) -> tuple[tuple[ReferringSession, ...], tuple[UnreadableSession, ...]]:
        self._refresh(on_progress)
        rows = self._database.rows(
            "SELECT s.name, facts, model, s.checksum, origin, sections, o.checksum"
            " FROM sessions AS s LEFT JOIN objects AS o ON o.name = s.name"
        )
        if not all(_is_sound(*row[:4]) and _is_sound(row[0], *row[4:]) for row in rows):
            raise WrongRowError
        kept = [row for row in rows if row[0] in self._stamps and row[0] not in self._unreadable]
        summaries = decode_summaries(self._root, [(_to_text(r[0]), self._used_s(r[0]), r[1], r[2]) for r in kept])
        found = list(decode_referring(summaries, [(origin, sections) for *_, origin, sections, _ in kept]))
        for name in self._stamps.keys() - {row[0] for row in rows} - self._unreadable.keys():  # just forgotten
            info = self._read_one(name)
            if info is not None:
                found.append(referring_session(info, _to_text(name), self._used_s(name)))
        found.sort(key=lambda session: session.summary.name)
        return tuple(found), tuple(sorted(self._unreadable.values(), key=lambda session: session.name))

    def _sharing(self, wanted: Collection[str], n_read_at_most: int | None) -> dict[str, frozenset[str]] | None:
        if not self._refresh_if_changed(n_read_at_most):
            return None
        rows = self._database.rows("SELECT name, origin, sections, checksum FROM objects")
        if not all(_is_sound(*row) for row in rows):
            raise WrongRowError
        return find_common(wanted, ((_to_text(name), sections) for name, _, sections, _ in rows))

    def _used_s(self, name: bytes) -> float:
        used_ns: int = _STAMP.unpack(self._stamps[name])[2]
        return used_ns / 1e9

    def _path(self, name: bytes) -> Path:
        return self._root / (_to_text(name) + SUFFIX)

    # ---------------------------------------------------------------- the longest prefix

    def _longest_prefix(self, space: str, prompt: bytes) -> PrefixHint | None:
        self._refresh_if_changed()
        n_cells, name = max(self._best_cuttable(space, prompt), self._best_point(space, prompt))
        return PrefixHint(name=_to_text(name), path=self._path(name), n_cells=n_cells) if n_cells else None

    def _best_cuttable(self, space: str, prompt: bytes) -> tuple[int, bytes]:
        """Of all that can be cut anywhere one that sorts right before or behind the prompt has most in common."""
        before = self._neighbours(space, False, "<= ? ORDER BY tokens DESC", prompt)
        behind = self._neighbours(space, False, "> ? ORDER BY tokens", prompt)
        return max(((n_packed_common(prompt, tokens), name) for name, tokens in before + behind), default=(0, b""))

    def _best_point(self, space: str, prompt: bytes) -> tuple[int, bytes]:
        """The longest point that the prompt begins with sorts before it. What lies between them has that point in
        common with the prompt, or more: the prompt can be cut where the nearest one differs."""
        while prompt:
            for name, tokens in self._neighbours(space, True, "<= ? ORDER BY tokens DESC", prompt):
                n_common = n_packed_common(prompt, tokens)
                if n_common == n_packed(tokens):
                    return n_common, name
                prompt = cut_packed(prompt, n_common)
                break
            else:
                break
        return 0, b""

    def _neighbours(self, space: str, is_point: bool, where: str, prompt: bytes) -> list[tuple[bytes, bytes]]:
        """The next one in a direction; none where there is none."""
        query = f"SELECT name, tokens FROM prefixes WHERE space = ? AND is_point = ? AND tokens {where} LIMIT 1"
        found = self._database.rows(query, (space, is_point, prompt))
        if not all(isinstance(name, bytes) and isinstance(tokens, bytes) and tokens for name, tokens in found):
            raise WrongRowError
        return [(name, tokens) for name, tokens in found]


# ---------------------------------------------------------------- private


def _batches(rows: Iterable[_Row]) -> Iterator[list[_Row]]:
    batch: list[_Row] = []
    n_bytes = 0
    for row in rows:
        batch.append(row)
        n_bytes += row.n_bytes
        if n_bytes >= _N_BATCH_BYTES:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch


def _is_sound(name: object, facts: object, model: object, checksum: object) -> bool:
    if not (isinstance(name, bytes) and isinstance(facts, bytes) and isinstance(model, bytes)):
        return False
    return _checksum(name, facts, model) == checksum


def _checksum(name: bytes, facts: bytes, model: bytes) -> int:
    return zlib.crc32(model, zlib.crc32(facts, zlib.crc32(name)))


def _folder_stamp(root: Path) -> Stamp | None:
    try:
        found = root.stat()
    except OSError:
        return None
    return found.st_ino, 0, found.st_mtime_ns, found.st_ctime_ns


def _is_settled(stamp: Stamp, now_ns: int) -> bool:
    """Whether whatever happens to a file from now on shows in its stamp."""
    return abs(now_ns - stamp[3]) > _SETTLED_NS


def _pack_stamp(stamp: Stamp) -> bytes:
    return _STAMP.pack(*(max(-_MOST, min(number, _MOST)) for number in stamp))


def _to_bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _to_text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
