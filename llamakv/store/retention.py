"""Which sessions of a store stay and which go: rules, time to live and budget. Nothing here touches a file but
``remove_session``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from llamakv.errors import FormatError, NotFoundError
from llamakv.store import files
from llamakv.store.session_info import SessionInfo, load_info
from llamakv.store.store_folder import Limited, limit_of
from llamakv.store.survey import Survey, SurveyedSession
from llamakv.store.usage import names_in_use


class Reason(StrEnum):
    """Why a session stays or goes."""

    PINNED = "pinned"
    IN_USE = "in_use"
    LAST = "last"
    WITHIN = "within"
    TAG = "tag"
    NO_LIMIT = "no_limit"
    FRESH = "fresh"
    EXPIRED = "expired"
    OVER_BUDGET = "over_budget"
    NO_RULE = "no_rule"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What may stay. With any of ``last`` (most recently used sessions), ``within_s`` (used that lately) and ``tags``
    only what one of them keeps, and pinned sessions; else all that did not expire. ``ttl_s`` is for sessions without
    one of their own. Of what is left the least recently used go until ``max_bytes`` are enough."""

    last: int | None = None
    within_s: float | None = None
    tags: tuple[str, ...] = ()
    ttl_s: float | None = None
    max_bytes: int | None = None

    @property
    def has_keep(self) -> bool:
        """Whether there are rules that say what to keep."""
        return self.last is not None or self.within_s is not None or bool(self.tags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of a session, and why. ``limit_s`` is its time to live, where one counts, ``tag`` the one it is
    kept for."""

    session: SurveyedSession
    is_kept: bool
    reason: Reason
    limit_s: float | None = None
    tag: str | None = None


def is_expired(session: Limited, used_s: float, ttl_s: float | None, now_s: float) -> bool:
    """Return whether a session last used at ``used_s`` is to go, its store's limit being ``ttl_s``."""
    limit_s = limit_of(session, ttl_s)
    return limit_s is not None and now_s - used_s > limit_s


def judge(survey: Survey, rules: Rules, *, now_s: float, keep: Collection[str] = ()) -> tuple[Verdict, ...]:
    """Return what becomes of each session, the most recently used first; those named in ``keep`` stay. Where what must
    stay is over the budget, nothing goes for that."""
    sessions = sorted(survey.sessions, key=by_use, reverse=True)
    verdicts = [
        _judge(session, rank, rules, now_s=now_s, is_in_use=session.name in keep)
        for rank, session in enumerate(sessions)
    ]
    if rules.max_bytes is None:
        return tuple(verdicts)
    left = [verdict.session for verdict in verdicts if verdict.is_kept]
    going = set(names_of(make_room(survey, left, rules.max_bytes, safe=keep) or ()))
    return tuple(
        Verdict(session=verdict.session, is_kept=False, reason=Reason.OVER_BUDGET)
        if verdict.session.name in going
        else verdict
        for verdict in verdicts
    )


def _judge(session: SurveyedSession, rank: int, rules: Rules, *, now_s: float, is_in_use: bool) -> Verdict:
    lineage, idle_s = session.lineage, now_s - session.used_s
    tag = next((tag for tag in rules.tags if tag in lineage.tags), None)
    limit_s = limit_of(lineage, rules.ttl_s)
    if lineage.pinned:
        return Verdict(session=session, is_kept=True, reason=Reason.PINNED)
    if is_in_use:
        return Verdict(session=session, is_kept=True, reason=Reason.IN_USE)
    if rules.has_keep:
        if rules.last is not None and rank < rules.last:
            return Verdict(session=session, is_kept=True, reason=Reason.LAST)
        if rules.within_s is not None and idle_s <= rules.within_s:
            return Verdict(session=session, is_kept=True, reason=Reason.WITHIN)
        if tag is not None:
            return Verdict(session=session, is_kept=True, reason=Reason.TAG, tag=tag)
        return Verdict(session=session, is_kept=False, reason=Reason.NO_RULE)
    if limit_s is None:
        return Verdict(session=session, is_kept=True, reason=Reason.NO_LIMIT)
    reason = Reason.EXPIRED if idle_s > limit_s else Reason.FRESH
    return Verdict(session=session, is_kept=reason is Reason.FRESH, reason=reason, limit_s=limit_s)


def make_room(
    survey: Survey,
    sessions: Iterable[SurveyedSession],
    max_bytes: int,
    *,
    n_new: int = 0,
    safe: Collection[str] = (),
) -> tuple[SurveyedSession, ...] | None:
    """Return which of ``sessions``, the only ones there are, must go so that they and ``n_new`` bytes more fit into
    ``max_bytes``: the least recently used, but no pinned ones and none named in ``safe``; None where those alone do not
    fit."""
    left = sorted(sessions, key=by_use)
    staying = {digest for s in left if s.lineage.pinned or s.name in safe for digest in s.digests}
    left.sort(key=lambda session: session.digests <= staying)  # these would free next to nothing: last
    users = Counter(digest for session in left for digest in session.digests)
    n_bytes = survey.n_bytes_of(left) + n_new
    going: list[SurveyedSession] = []
    for session in left:
        if n_bytes <= max_bytes:
            break
        if session.lineage.pinned or session.name in safe:
            continue
        going.append(session)
        users.subtract(session.digests)
        n_bytes -= session.n_file_bytes
        n_bytes -= sum(survey.object_bytes.get(digest, 0) for digest in session.digests if not users[digest])
    return tuple(going) if n_bytes <= max_bytes else None


def by_use(session: SurveyedSession) -> tuple[float, float, int, str]:
    """Sort the least recently used first."""
    lineage = session.lineage
    return session.used_s, lineage.updated_s, lineage.n_saves, session.name


def names_of(sessions: Iterable[SurveyedSession]) -> tuple[str, ...]:
    """Return their names."""
    return tuple(session.name for session in sessions)


# ---------------------------------------------------------------- removing


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """A session that is gone: the bytes of its file, and the objects that it referred to."""

    name: str
    n_bytes: int
    digests: frozenset[str]


def remove_session(path: Path, *, only_if: Callable[[SessionInfo, float], bool]) -> Removed | None:
    """Remove a session's file if ``only_if``, asked about what it is by now and when it was used, still says so; its
    objects are for ``collector.collect``. None where it stays, or is gone already.

    Raises: LockedError (being written), WriteError, ReadError.
    """
    found: list[SessionInfo] = []

    def is_wanted(fd: int) -> bool:
        try:
            info = load_info(fd, path)
        except FormatError:
            return False
        found.append(info)
        return only_if(info, files.time_of(fd)) and path.stem not in names_in_use(path.parent)

    try:
        if not files.remove(path, only_if=is_wanted):
            return None
    except NotFoundError:
        return None
    info = found[0]
    digests = frozenset(section.digest for section in info.sections if section.in_store)
    return Removed(name=path.stem, n_bytes=info.n_file_bytes, digests=digests)
