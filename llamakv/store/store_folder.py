"""The folder of a store: what makes it one, its version and its budget."""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llamakv.errors import (
    DamagedError,
    ExistsError,
    NewerFormatError,
    NotASessionError,
    NotFoundError,
    ReadError,
    UsageError,
)
from llamakv.store import files
from llamakv.store.objects import FOLDER

MARKER = ".store"
SUFFIX = ".bin"
VERSION = 1
_VERSION_KEY = "llamakv_store"
_MAX_MARKER = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBudget:
    """What a store may take: ``max_bytes`` on disk, and ``ttl_s`` seconds that a session may stay unused; None is no
    limit."""

    max_bytes: int | None = None
    ttl_s: float | None = None


class Limited(Protocol):
    """What says of itself whether it may expire: a session's lineage or summary."""

    @property
    def pinned(self) -> bool: ...

    @property
    def ttl_s(self) -> float | None: ...


def limit_of(session: Limited, ttl_s: float | None) -> float | None:
    """Return how long a session may stay unused: as long as it says itself, else as its store does; None: for ever."""
    if session.pinned:
        return None
    return session.ttl_s if session.ttl_s is not None else ttl_s


def is_store(folder: Path) -> bool:
    """Return whether ``folder`` is a store."""
    return os.path.lexists(folder / MARKER) or os.path.isdir(folder / FOLDER)


def check_is_store(folder: Path) -> None:
    """Refuse a folder that is something else before sessions in it are removed or moved. One that does not exist, or
    in which nothing looks like a session, is an empty store.

    Raises: UsageError.
    """
    try:
        is_other = not is_store(folder) and any(map(is_session_name, os.listdir(folder)))
    except OSError:
        return
    if is_other:
        raise UsageError(
            f"'{folder}' is not a store: nothing was ever saved into it by name",
            hint=f"llamakv budget --ttl none --store '{folder}' makes it one",
            path=str(folder),
        )


def is_session_name(name: str) -> bool:
    """Return whether a file of that name in a store is one of its sessions."""
    return name.endswith(SUFFIX) and not name.startswith(".")


def is_in_store(path: Path) -> bool:
    """Return whether a session saved at ``path`` shares its sections: it would be one of a store's sessions. (Of other
    files in its folder nobody would know what they refer to.)"""
    return is_session_name(path.name) and is_store(path.parent)


def make_store(root: Path) -> None:
    """Make a folder a store (mode 0700 if it is new); one that is there already, made meanwhile even, is left alone.

    Raises: WriteError, NewerFormatError, DamagedError.
    """
    if is_store(root):
        read_budget(root)
        return
    files.make_private_folder(root)
    path = root / MARKER
    with contextlib.suppress(ExistsError), files.replacement(path, overwrite=False) as fd:
        files.write_at(fd, [_pack(StoreBudget())], 0, path)


def read_budget(root: Path) -> StoreBudget:
    """Return a store's budget; no limits where none was ever set.

    Raises: NewerFormatError (the store was made by a later llamakv), DamagedError, ReadError.
    """
    path = root / MARKER
    try:
        fd = files.open_for_reading(path)
    except NotFoundError:
        return StoreBudget()
    try:
        data = files.read_at(fd, _MAX_MARKER, 0, path)
    finally:
        os.close(fd)
    try:
        values = json.loads(data)
        version = values[_VERSION_KEY]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path) from error
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise _damaged(path)
    if version > VERSION:
        raise NewerFormatError(
            f"the store '{root}' has format version {version}, this llamakv knows up to {VERSION}",
            hint="pip install --upgrade llamakv",
            path=str(root),
            expected=VERSION,
            actual=version,
        )
    max_bytes, ttl_s = values.get("max_bytes"), values.get("ttl_s")
    if not (max_bytes is None or (type(max_bytes) is int and max_bytes > 0)):
        raise _damaged(path)
    if not (ttl_s is None or (type(ttl_s) in (int, float) and math.isfinite(ttl_s) and ttl_s > 0)):
        raise _damaged(path)
    return StoreBudget(max_bytes=max_bytes, ttl_s=None if ttl_s is None else float(ttl_s))


def refuse_newer(root: Path) -> None:
    """Raise NewerFormatError if a store was made by a later llamakv. Of a budget that cannot be read nothing is said:
    the sessions may be sound all the same."""
    with contextlib.suppress(DamagedError, NotASessionError, ReadError):
        read_budget(root)


def write_budget(root: Path, budget: StoreBudget) -> None:
    """Set a store's budget. Raises: WriteError."""
    files.replace_small_file(root / MARKER, _pack(budget))


def _pack(budget: StoreBudget) -> bytes:
    values = {_VERSION_KEY: VERSION, "max_bytes": budget.max_bytes, "ttl_s": budget.ttl_s}
    return json.dumps(values).encode() + b"\n"


def _damaged(path: Path) -> DamagedError:
    return DamagedError(
        f"damaged store: '{path}' is not what llamakv writes",
        hint=f"llamakv repair --store {path.parent} writes it again, without a budget",
        path=str(path),
    )
