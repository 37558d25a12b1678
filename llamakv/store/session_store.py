"""A folder of sessions with names: an index ``NAME.bin`` each, and the sections they share."""

from __future__ import annotations

import contextlib
import os
import re
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from llamakv.errors import (
    FormatError,
    LlamakvError,
    LockedError,
    NotASessionError,
    NotFoundError,
    ReadError,
    StoreError,
    UsageError,
)
from llamakv.store import files
from llamakv.store.collector import SUFFIX, Collected, collect, session_files
from llamakv.store.session_file import SessionInfo, read_session
from llamakv.store.session_info import load_digests
from llamakv.store.store_folder import is_store, make_store, read_budget, refuse_newer

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
        if _is_path(ref):
            return Path(ref)
        path = self.root / (check_name(ref) + SUFFIX)
        read_budget(self.root)
        return path

    def resolve_for_writing(self, ref: str) -> Path:
        """As ``resolve``, and makes the store (its folder with mode 0700) where ``ref`` is a NAME. A PATH makes none:
        it is a file of its own, unless its folder is a store already.

        Raises: UsageError, WriteError, NewerFormatError, DamagedError.
        """
        path = self.resolve(ref)
        if not _is_path(ref):
            make_store(self.root)
        return path

    def names(self) -> tuple[str, ...]:
        """Return the names of all session files, damaged ones too, in alphabetical order."""
        return tuple(sorted(name for name, _, _ in session_files(self.root)))

    def list(self) -> tuple[StoreEntry, ...]:
        """Return all session files, the newest save first, damaged ones at the end.

        Reads each header and index. Never raises because of one file; a store that does not exist is empty.

        Raises: NewerFormatError (the store was made by a later llamakv), ReadError (the folder cannot be listed).
        """
        refuse_newer(self.root)
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

        Raises: UsageError, NotFoundError, NotASessionError, NewerFormatError and DamagedError (the store itself cannot
        be trusted), LockedError (being written), WriteError.
        """
        paths = tuple(dict.fromkeys(self.resolve(ref) for ref in refs))
        for path in paths:
            self._check_removable(path)
        left: dict[Path, set[str]] = {}
        try:
            for path in paths:
                left.setdefault(path.parent, set()).update(_remove(path))
        finally:
            for folder, digests in left.items():
                if digests:
                    with contextlib.suppress(StoreError):  # the sessions are gone; the next collection takes the rest
                        collect(folder, digests)
        return paths

    def collect(self, candidates: Collection[str] | None = None) -> Collected | None:
        """Remove sections (of ``candidates``, or of all) that no session refers to. None where that cannot be told,
        because a session cannot be read: then nothing is removed.

        Raises: NewerFormatError and DamagedError (the store itself cannot be trusted), WriteError, LockedError.
        """
        read_budget(self.root)
        try:
            return collect(self.root, candidates)
        except (FormatError, ReadError):
            return None

    def _check_removable(self, path: Path) -> None:
        if not os.path.lexists(path):
            raise NotFoundError(f"no session '{path}'", path=str(path))
        if path.is_dir() and not path.is_symlink():
            raise NotASessionError(f"not a llamakv session: '{path}' is a folder", path=str(path))
        if files.is_locked(path):
            raise LockedError(f"'{path}' is being written by another process", path=str(path))
        if is_store(path.parent):
            read_budget(path.parent)
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


def _is_path(ref: str) -> bool:
    return _has_separator(ref) or ref.endswith(SUFFIX) or os.path.isfile(ref)


def _remove(path: Path) -> set[str]:
    """Remove a session; return the digests of the objects it referred to, as far as that can be told."""
    digests: set[str] = set()

    def note(fd: int) -> bool:
        with contextlib.suppress(FormatError, ReadError):
            digests.update(load_digests(fd, path))
        return True

    if not files.remove(path, only_if=note):  # a link, or a file that may not be read
        files.remove(path)
    return digests


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
