"""What a user's REF means, and whether there is a session or room for a new one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from llamakv.cli import config
from llamakv.errors import ExistsError, NotFoundError

_PLACE = re.compile(r"(.+)@(turn\d{1,18}|\d{1,18})", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A REF made out: its file, and its name if it is one of the store's."""

    ref: str
    path: Path
    name: str | None


def existing_store(option: Path | None) -> Path:
    """The store to look into: one that was named must be there.

    Raises:
        NotFoundError: it is not.
    """
    root = config.store_dir(option)
    if option is not None and not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise NotFoundError(f"there is no store '{root}': it {what}", hint="llamakv ls", path=str(root))
    return root


def existing(root: Path, ref: str, *, hint: str | None = "llamakv ls") -> Target:
    """A REF that must be there.

    Raises:
        UsageError: it is no possible name.
        NotFoundError: it is not there.
    """
    from llamakv.ops import sessions

    found = Target(ref=ref, path=sessions.resolve(root, ref), name=sessions.session_name(root, ref))
    if not _is_there(found.path):
        raise NotFoundError(f"session {shown(found)!r} does not exist", hint=hint, path=str(found.path))
    return found


def existing_at(root: Path, ref: str, *, hint: str | None = "llamakv ls") -> tuple[Target, str | None]:
    """A REF that must be there, and the place in it that the user named: ``plan@turn2``, ``plan@1200``; None where
    all of it is meant, as it is by the name of a file that ends so.

    Raises:
        UsageError, NotFoundError: as ``existing``; whether the session has that place is for the op to say.
    """
    found = _PLACE.fullmatch(ref)
    if found is None or os.path.isfile(ref):
        return existing(root, ref, hint=hint), None
    return existing(root, found[1], hint=hint), found[2]


def target(root: Path, ref: str) -> Target:
    """A REF to write to; the store's folder is made if it is a name.

    Raises:
        UsageError: it is no possible name.
        WriteError: the folder cannot be made.
    """
    from llamakv.ops import sessions

    path = sessions.resolve_for_writing(root, ref)
    return Target(ref=ref, path=path, name=sessions.session_name(root, ref))


def fresh(root: Path, ref: str, *, overwrite: bool, hint: str) -> Target:
    """A REF to write to that must not be there yet, unless it may be overwritten. A folder or device that is there is
    left for the op to refuse.

    Raises:
        ExistsError: it is there; ``hint`` says what to do about it.
    """
    found = target(root, ref)
    if found.path.is_file() and not overwrite:
        raise ExistsError(f"session {shown(found)!r} already exists", hint=hint, path=str(found.path))
    return found


def _is_there(path: Path) -> bool:
    """Whether there is something; where that cannot be told for want of permission, the op is to say so."""
    try:
        path.lstat()
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


def shown(found: Target, at: str | None = None) -> str:
    """A session, or a place in it, as the user would name it."""
    name = found.name or str(found.path)
    return name if at is None else f"{name}@{at}"
