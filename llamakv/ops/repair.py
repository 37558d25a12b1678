"""Repairing: what is damaged in sessions is left out, so that the rest can be used, and nothing else is touched."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from llamakv.errors import (
    ConflictError,
    FormatError,
    InterruptedByUser,
    LockedError,
    NotFoundError,
    ReadError,
    WriteError,
)
from llamakv.ops.checking import CheckedSession, store_error, trouble_of, verify_sessions, verify_store
from llamakv.ops.requests import Reporter
from llamakv.store.checking import Trouble
from llamakv.store.collector import collect
from llamakv.store.objects import Objects
from llamakv.store.repair import drop_cache, go_back, move_unreadable, remove_temporaries, rewrite, save_before
from llamakv.store.session_file import SessionInfo
from llamakv.store.store_folder import StoreBudget, check_is_store, is_store, write_budget

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Nothing can be repaired then."""


class Outcome(StrEnum):
    """What became of a session. Nothing was wrong; what is sound of it was kept; its last save cannot be read, and it
    is as the one before left it; its file was moved aside. Or it was left alone: it is being written, of a later
    llamakv, forbidden to read, or nothing of it can be read."""

    SOUND = "sound"
    REPAIRED = "repaired"
    WENT_BACK = "went_back"
    MOVED = "moved"
    LOCKED = "locked"
    NEWER = "newer"
    UNREADABLE = "unreadable"
    LOST = "lost"

    @property
    def is_right(self) -> bool:
        """Whether the session, or what is left of it, is in order now."""
        return self in (Outcome.SOUND, Outcome.REPAIRED, Outcome.WENT_BACK, Outcome.MOVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedSession:
    """A session and what became of it, or would (a dry run): of ``n_tokens`` the state of ``n_cells`` is kept, the rest
    is to be read again. ``wrong`` says in a few words what was wrong, ``reason`` in full; a file that was moved is at
    ``moved_to``."""

    name: str
    path: Path
    outcome: Outcome
    n_tokens: int = 0
    n_cells: int = 0
    wrong: str = ""
    reason: str = ""
    moved_to: Path | None = None

    @property
    def n_to_read(self) -> int:
        """Tokens that the next resume reads again."""
        return max(0, self.n_tokens - 1 - self.n_cells)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What repairing did, or would do (``is_dry_run``). ``is_store_written`` tells that the store's own file was
    written again. Of damaged objects ``n_objects`` were removed, and ``n_objects_left`` belong to sessions that were
    not repaired."""

    sessions: tuple[RepairedSession, ...]
    is_store_written: bool
    n_objects: int
    n_objects_left: int
    n_temporaries: int
    is_dry_run: bool

    @property
    def is_sound(self) -> bool:
        """Whether all is in order now; never so for a dry run that found something to do."""
        if self.is_dry_run:
            return not self.is_store_written and all(s.outcome is Outcome.SOUND for s in self.sessions)
        return all(session.outcome.is_right for session in self.sessions)


def repair_sessions(paths: Sequence[Path], reporter: Reporter, *, is_dry_run: bool = False) -> RepairReport:
    """Repair some sessions; see ``repair_store``. One that is a file outside of stores and cannot be read at all is
    left as it is.

    Raises:
        NotFoundError: one is not there.
        InterruptedByUser, WriteError, ReadError: what was repaired so far is.
    """
    checked = verify_sessions(paths, reporter)
    repaired = _repair_all(checked, reporter, is_dry_run=is_dry_run)
    n_removed = n_left = 0
    for folder in dict.fromkeys(path.parent for path in paths):
        bad = _bad_digests(session for session in checked if session.path.parent == folder)
        n_folder, n_folder_left = (len(bad), 0) if is_dry_run else _remove_objects(folder, bad)
        n_removed, n_left = n_removed + n_folder, n_left + n_folder_left
    return RepairReport(
        sessions=repaired,
        is_store_written=False,
        n_objects=n_removed,
        n_objects_left=n_left,
        n_temporaries=0,
        is_dry_run=is_dry_run,
    )


def repair_store(root: Path, reporter: Reporter, *, is_dry_run: bool = False) -> RepairReport:
    """Put a store in order. A session with sections that are damaged or missing keeps its tokens, messages and the
    state before the first of them. One that cannot be read at all is moved aside. Damaged objects are removed when
    nothing refers to them any more. The store's own file is written again if it is damaged, and what can be computed
    again, or was left by killed writers, is removed. Running it again after it was killed finishes the work.

    Raises:
        UsageError: no store.
        NewerFormatError, ReadError: the store cannot be read.
        InterruptedByUser, WriteError: what was repaired so far is.
    """
    check_is_store(root)
    is_wrong = store_error(root) is not None
    n_temporaries = 0
    if not is_dry_run:
        if is_wrong:
            write_budget(root, StoreBudget())
        n_temporaries = remove_temporaries(root)
        drop_cache(root)
    check = verify_store(root, reporter)
    repaired = _repair_all(check.sessions, reporter, is_dry_run=is_dry_run)
    bad = [found.digest for found in check.bad_objects if found.trouble is Trouble.DAMAGED]
    n_removed, n_left = (len(bad), 0) if is_dry_run else _remove_objects(root, bad)
    return RepairReport(
        sessions=repaired,
        is_store_written=is_wrong,
        n_objects=n_removed,
        n_objects_left=n_left,
        n_temporaries=n_temporaries,
        is_dry_run=is_dry_run,
    )


def _repair_all(
    checked: Iterable[CheckedSession], reporter: Reporter, *, is_dry_run: bool
) -> tuple[RepairedSession, ...]:
    repaired = []
    for session in checked:
        if reporter.should_abort():
            raise InterruptedByUser("interrupted; the same command again repairs the rest", status=130)
        repaired.append(_repair(session, is_dry_run=is_dry_run))
    return tuple(repaired)


def _repair(session: CheckedSession, *, is_dry_run: bool) -> RepairedSession:
    if session.info is None or session.rest is None:
        return _repair_unreadable(session, is_dry_run=is_dry_run)
    n_tokens, n_cells, outcome = len(session.info.record.tokens), session.rest.n_cells, Outcome.SOUND
    wrong = reason = ""
    if session.bad:
        first = min(session.bad, key=lambda found: (found.trouble.is_loss, found.section.p0))
        kinds = " or ".join(sorted({found.trouble.value for found in session.bad}))
        wrong, reason = f"{len(session.bad)} of {len(session.info.sections)} sections {kinds}", first.reason
        outcome = Outcome.REPAIRED if first.trouble.is_loss else Outcome(first.trouble.value)
        if outcome is Outcome.REPAIRED and not is_dry_run:
            try:
                rewrite(session.info, session.rest)
            except (LockedError, ConflictError, NotFoundError) as error:
                outcome, reason = Outcome.LOCKED, error.message
            except (FormatError, ReadError) as error:
                outcome, reason = Outcome.UNREADABLE, error.message
            except WriteError as error:
                if error.fields.get("errno") in _FULL:
                    raise
                outcome, reason = Outcome.UNREADABLE, error.message
    return RepairedSession(
        name=session.name,
        path=session.path,
        outcome=outcome,
        n_tokens=n_tokens,
        n_cells=n_cells,
        wrong=wrong,
        reason=reason,
    )


def _save_before(path: Path) -> SessionInfo | None:
    try:
        return save_before(path)
    except (FormatError, ReadError, NotFoundError):
        return None


def _repair_unreadable(session: CheckedSession, *, is_dry_run: bool) -> RepairedSession:
    assert session.error is not None
    trouble, reason, moved_to = trouble_of(session.error), session.error.message, None
    if not trouble.is_loss:
        outcome = Outcome(trouble.value)
    elif (before := _save_before(session.path)) is not None:
        return _go_back(session, before, is_dry_run=is_dry_run)
    elif not is_store(session.path.parent):
        outcome = Outcome.LOST
    else:
        outcome = Outcome.MOVED
        if not is_dry_run:
            try:
                moved_to = move_unreadable(session.path)
            except (LockedError, ConflictError, NotFoundError) as error:
                outcome, reason = Outcome.LOCKED, error.message
            except ReadError as error:
                outcome, reason = Outcome.UNREADABLE, error.message
    wrong = "its file cannot be read" if trouble.is_loss else f"its file is {trouble}"
    return RepairedSession(
        name=session.name, path=session.path, outcome=outcome, wrong=wrong, reason=reason, moved_to=moved_to
    )


def _go_back(session: CheckedSession, before: SessionInfo, *, is_dry_run: bool) -> RepairedSession:
    assert session.error is not None
    result = RepairedSession(
        name=session.name,
        path=session.path,
        outcome=Outcome.WENT_BACK,
        n_tokens=len(before.record.tokens),
        n_cells=before.n_cells_held,
        wrong="its last save cannot be read, the one before can",
        reason=session.error.message,
    )
    if is_dry_run:
        return result
    try:
        if go_back(session.path) is None:
            raise ConflictError(f"'{session.path}' was saved by somebody else meanwhile", path=str(session.path))
        (checked,) = verify_sessions([session.path], Reporter())  # its sections may be damaged as well
    except (LockedError, ConflictError, NotFoundError) as error:
        return replace(result, outcome=Outcome.LOCKED, reason=error.message)
    repaired = _repair(checked, is_dry_run=False)
    return replace(result, n_cells=repaired.n_cells) if repaired.outcome.is_right else repaired


def _bad_digests(sessions: Iterable[CheckedSession]) -> list[str]:
    found = (bad for session in sessions for bad in session.bad if bad.section.in_store)
    return list(dict.fromkeys(bad.section.digest for bad in found if bad.trouble is Trouble.DAMAGED))


def _remove_objects(root: Path, digests: Sequence[str]) -> tuple[int, int]:
    """Remove damaged objects that nothing refers to any more; return how many, and how many are left."""
    objects = Objects(root)
    there = [digest for digest in digests if objects.has(digest)]
    if there:
        with contextlib.suppress(FormatError):  # a session that cannot be read may refer to them
            collect(root, there)
    n_left = sum(objects.has(digest) for digest in there)
    return len(there) - n_left, n_left
