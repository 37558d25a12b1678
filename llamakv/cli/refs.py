"""What a user's REF means, and whether there is a session or room for a new one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llamakv.errors import ExistsError, NotFoundError


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A REF made out: its file, and its name if it is one of the store's."""

    ref: str
    path: Path
    name: str | None


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


def shown(found: Target) -> str:
    """A session as the user would name it."""
    return found.name or str(found.path)
