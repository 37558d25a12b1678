"""A folder of sessions with names: an index ``NAME.bin`` each, and the sections they share."""

from __future__ import annotations

import contextlib
import os
import re
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from llamakv.errors import FormatError, LlamakvError, NotASessionError, NotFoundError, StoreError, UsageError
from llamakv.store import files
from llamakv.store.collector import SUFFIX, Collected, collect, digests_of, session_files
from llamakv.store.session_file import SessionInfo, read_session
from llamakv.store.store_folder import make_store, read_budget

_MAX_NAME_BYTES = 255 - len(SUFFIX)  # NAME_MAX of every file system we know
_POSITION = re.compile(r"@(turn)?\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEntry:
    """One file of a store: ``info`` of a valid session, or the ``error`` that reading it gave; never both."""

    name: str
    path: Path
    info: SessionInfo | None
    error: LlamakvError | None


class SessionStore:
    """The sessions in a folder, which need not exist before the first write. Safe between threads and processes."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def resolve(self, ref: str) -> Path:
        """Return the path that a session reference means; the file need not exist.

        A PATH has a separator, names an existing file, or ends in ``.bin``; anything else is a NAME in the store. A
        position (``@1200``, ``@turn3``) is to be split off before.

        Raises: UsageError (neither a path nor a possible name), NewerFormatError and DamagedError (a NAME in a store
        that this llamakv cannot trust).
        """
        if "\0" in ref or not ref:
            raise UsageError(f"not a session name: {ref!r}", name=ref)
        if ref.endswith(os.sep) or os.path.basename(ref) == SUFFIX:
            raise UsageError(f"{ref!r} names a folder or nothing, not a session file", name=ref)
        if _has_separator(ref) or ref.endswith(SUFFIX) or os.path.isfile(ref):
            return Path(ref)
        path = self.root / (check_name(ref) + SUFFIX)
        read_budget(self.root)
        return path

    def resolve_for_writing(self, ref: str) -> Path:
        """As ``resolve``, and makes the store (its folder with mode 0700) where ``ref`` is a NAME.

        Raises: UsageError, WriteError, NewerFormatError, DamagedError.
        """
        path = self.resolve(ref)
        if path.parent == self.root:
            make_store(self.root)
        return path

    def names(self) -> tuple[str, ...]:
        """Return the names of all session files, damaged ones too, in alphabetical order."""
        return tuple(sorted(name for name, _, _ in session_files(self.root)))

    def list(self) -> tuple[StoreEntry, ...]:
        """Return all session files, the newest save first, damaged ones at the end.

        Reads each header and index. Never raises because of one file; a store that does not exist is empty.
        """
        entries = [_read_entry(path) for _, path, _ in session_files(self.root)]
        return tuple(sorted(entries, key=_age))

    def latest(self) -> SessionInfo:
        """Return the session saved last. Raises: NotFoundError (no valid session)."""
        for entry in self.list():
            if entry.info is not None:
                return entry.info
        raise NotFoundError(f"no session in '{self.root}'", path=str(self.root))

    def remove(self, *refs: str) -> tuple[Path, ...]:
        """Remove sessions, and the sections that only they refer to; all references are checked before the first is
        removed. Return the paths.

        Damaged sessions can be removed; outside the store a file that is no session at all is refused.

        Raises: UsageError, NotFoundError, NotASessionError, LockedError (being written), WriteError.
        """
        paths = tuple(dict.fromkeys(self.resolve(ref) for ref in refs))
        for path in paths:
            self._check_removable(path)
        left: set[str] = set()
        for path in paths:
            if path.parent == self.root:
                with contextlib.suppress(StoreError, NotFoundError):
                    left |= digests_of(path)
            files.remove(path)
        if left:
            self.collect(left)
        return paths

    def collect(self, candidates: Collection[str] | None = None) -> Collected | None:
        """Remove sections (of ``candidates``, or of all) that no session refers to. None where that cannot be told,
        because a session cannot be read: then nothing is removed.

        Raises: WriteError, LockedError.
        """
        try:
            return collect(self.root, candidates)
        except FormatError:
            return None

    def _check_removable(self, path: Path) -> None:
        if not os.path.lexists(path):
            raise NotFoundError(f"no session '{path}'", path=str(path))
        if path.is_dir() and not path.is_symlink():
            raise NotASessionError(f"not a llamakv session: '{path}' is a folder", path=str(path))
        if path.parent == self.root:
            return
        try:
            read_session(path)
        except NotASessionError:
            raise
        except FormatError:
            return


def check_name(name: str) -> str:
    """Return ``name`` if it can name a session in a store. Raises: UsageError, saying why not."""
    if not name:
        reason = "it is empty"
    elif _has_separator(name) or "\\" in name:
        reason = "it has a path separator"
    elif name[0] in ".-":
        reason = f"it begins with '{name[0]}'"
    elif name != name.strip():
        reason = "it begins or ends with white space"
    elif any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in name):
        reason = "it has control characters"
    elif _POSITION.search(name):
        reason = "it ends like a position (@turn3, @1200)"
    elif len(name.encode()) > _MAX_NAME_BYTES:
        reason = f"it is longer than {_MAX_NAME_BYTES} bytes"
    else:
        return name
    raise UsageError(f"not a session name: {name!r}: {reason}", name=name)


def _has_separator(ref: str) -> bool:
    return os.sep in ref or (os.altsep is not None and os.altsep in ref)


def _read_entry(path: Path) -> StoreEntry:
    name = path.name.removesuffix(SUFFIX)
    try:
        return StoreEntry(name=name, path=path, info=read_session(path), error=None)
    except LlamakvError as error:
        return StoreEntry(name=name, path=path, info=None, error=error)


def _age(entry: StoreEntry) -> tuple[bool, float, int, str]:
    if entry.info is None:
        return True, 0.0, 0, entry.name
    lineage = entry.info.record.lineage
    return False, -lineage.updated_s, -lineage.n_saves, entry.name
