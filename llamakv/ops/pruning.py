"""Taking sessions out of a store by rules, and what is left behind of sessions that are gone."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from llamakv.errors import LockedError, UsageError
from llamakv.ops.budget import is_as_surveyed, no_room
from llamakv.ops.requests import Reporter
from llamakv.store import files
from llamakv.store.collector import Collected, collect
from llamakv.store.retention import Rules, Verdict, judge, remove_session
from llamakv.store.store_folder import check_is_store, read_budget
from llamakv.store.survey import Survey, take_survey
from llamakv.store.usage import names_in_use


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What pruning did, or would do (``is_dry_run``). ``verdicts`` are of all sessions, the most recently used first;
    ``skipped`` names those that should go but are being written or were used meanwhile. ``n_bytes_freed`` is what the
    disk got back, ``n_orphan_bytes`` of it of objects that no session referred to before, ``n_bytes_left`` what the
    store takes now. ``collected`` counts objects and temporaries."""

    root: Path
    rules: Rules
    verdicts: tuple[Verdict, ...]
    skipped: tuple[str, ...]
    collected: Collected
    n_bytes_freed: int
    n_orphan_bytes: int
    n_bytes_left: int
    is_dry_run: bool

    @property
    def removed(self) -> tuple[Verdict, ...]:
        """Sessions that went, or would go."""
        return tuple(v for v in self.verdicts if not v.is_kept and v.session.name not in self.skipped)

    @property
    def n_over(self) -> int:
        """Bytes over the budget that could not be freed."""
        return 0 if self.rules.max_bytes is None else max(0, self.n_bytes_left - self.rules.max_bytes)


def prune(root: Path, rules: Rules, reporter: Reporter, *, is_dry_run: bool = False) -> PruneReport:
    """Remove the sessions that ``rules`` do not keep, then all that no session refers to. A session that is being
    written, or was used or changed since the rules were applied, stays and is named in ``skipped``.

    Raises:
        UsageError: no store, or a tag that no session has.
        NoRoomError: what is pinned or open is over the budget; nothing is removed.
        FormatError: the store or a session in it cannot be read; nothing is removed.
        ReadError, WriteError, LockedError.
    """
    check_is_store(root)
    survey = surveyed(root, reporter)
    for tag in rules.tags:
        if not any(tag in session.lineage.tags for session in survey.sessions):
            raise UsageError(f"no session has the tag {tag!r}: nothing was removed", hint="llamakv ls shows the tags")
    verdicts = judge(survey, rules, now_s=time.time(), keep=names_in_use(root))
    left = [verdict.session for verdict in verdicts if verdict.is_kept]
    if rules.max_bytes is not None and survey.n_bytes_of(left) > rules.max_bytes:
        in_use = names_in_use(root)
        staying = [session for session in left if session.lineage.pinned or session.name in in_use]
        raise no_room(rules.max_bytes, 0, survey.n_bytes_of(staying), staying)
    going = [verdict for verdict in verdicts if not verdict.is_kept]
    if is_dry_run:
        skipped = tuple(v.session.name for v in going if files.is_locked(v.session.path))
        gone = [v for v in going if v.session.name not in skipped]
        collected = collect(root, dry_run=True, without={v.session.name for v in gone})
    else:
        gone, skipped = _remove(going)
        collected = collect(root, on_progress=lambda n_done, n: reporter.progress("collect", n_done, n))
    n_freed = sum(v.session.n_file_bytes for v in gone) + collected.n_bytes
    return PruneReport(
        root=root,
        rules=rules,
        verdicts=verdicts,
        skipped=skipped,
        collected=collected,
        n_bytes_freed=n_freed,
        n_orphan_bytes=sum(survey.object_bytes[digest] for digest in survey.orphans),
        n_bytes_left=survey.n_bytes - n_freed,
        is_dry_run=is_dry_run,
    )


def _remove(going: Collection[Verdict]) -> tuple[list[Verdict], tuple[str, ...]]:
    gone: list[Verdict] = []
    skipped: list[str] = []
    for verdict in going:
        session = verdict.session
        try:
            removed = remove_session(session.path, only_if=is_as_surveyed(session))
        except LockedError:
            removed = None
        if removed is not None:
            gone.append(verdict)
        elif session.path.exists():
            skipped.append(session.name)
    return gone, tuple(skipped)


def what_would_go(survey: Survey, rules: Rules) -> int:
    """Bytes that ``prune`` would free now, objects of no session included."""
    verdicts = judge(survey, rules, now_s=time.time(), keep=names_in_use(survey.root))
    left = [verdict.session for verdict in verdicts if verdict.is_kept]
    return survey.n_bytes - survey.n_bytes_of(left) if not survey.unreadable else 0


def gc(root: Path, reporter: Reporter, *, is_dry_run: bool = False) -> Collected:
    """Remove what no session of a store refers to, and what killed writers left.

    Raises:
        FormatError: the store or a session in it cannot be read; nothing is removed.
        ReadError, WriteError, LockedError.
    """
    check_is_store(root)
    read_budget(root)
    return collect(root, dry_run=is_dry_run, on_progress=lambda n_done, n: reporter.progress("collect", n_done, n))


def surveyed(root: Path, reporter: Reporter) -> Survey:
    """A store whose sessions can all be read.

    Raises:
        FormatError, ReadError: the store or one of its sessions cannot; its hint says what to do.
    """
    read_budget(root)
    survey = take_survey(root, on_progress=lambda n_done, n: reporter.progress("survey", n_done, n))
    for session in survey.unreadable:
        error = session.error
        error.hint = error.hint or f"what it refers to is unknown: llamakv repair {session.name}"
        raise error
    return survey
