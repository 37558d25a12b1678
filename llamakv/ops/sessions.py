"""Keeping house among sessions: references, removing, verifying, compacting."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from llamakv.errors import DamagedError
from llamakv.store.session_file import SessionInfo, compact_session, verify_session
from llamakv.store.session_store import SessionStore


def resolve(root: Path, ref: str) -> Path:
    """The file a session reference means, whether it is there or not.

    Raises:
        UsageError: neither a path nor a possible name.
    """
    return SessionStore(root).resolve(ref)


def resolve_for_writing(root: Path, ref: str) -> Path:
    """As ``resolve``; makes the store's folder (0700) where a name is meant.

    Raises:
        UsageError, WriteError.
    """
    return SessionStore(root).resolve_for_writing(ref)


def session_name(root: Path, ref: str) -> str | None:
    """The name a reference is in the store; None if it is a path."""
    return ref if SessionStore(root).resolve(ref).parent == root and os.sep not in ref else None


def remove_sessions(root: Path, refs: Sequence[str]) -> tuple[Path, ...]:
    """Remove sessions; none is removed unless all can be found. Returns their paths.

    Raises:
        UsageError, NotFoundError, NotASessionError, LockedError, WriteError.
    """
    return SessionStore(root).remove(*refs)


def verify(path: Path) -> SessionInfo:
    """Read every section and check its digest.

    Raises:
        DamagedError: names the first bad section and how many there are.
    """
    report = verify_session(path)
    if not report.is_sound:
        first = report.damaged[0]
        raise DamagedError(
            f"{path} is damaged: {len(report.damaged)} of {report.n_sections} sections, the first at positions "
            f"{first.section.p0} to {first.section.p1}: {first.reason}",
            hint=f"its tokens are whole: llamakv chat --resume {path} --recompute reads them again",
            path=str(path),
        )
    return report.info


def compact(path: Path) -> SessionInfo:
    """Rewrite a session file without dead bytes, after every section was checked.

    Raises:
        DamagedError, LockedError, WriteError, FormatError: the file is as it was.
    """
    verify(path)
    return compact_session(path)
