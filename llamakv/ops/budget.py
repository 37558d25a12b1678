"""What a store may take, kept to with every save: sessions that expired go, and the least recently used ones where
there is not enough room."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llamakv.errors import LockedError, NoRoomError, ReadError, StoreError
from llamakv.ops.requests import Reporter
from llamakv.ops.sizes import listed, size
from llamakv.records import Lineage
from llamakv.store import files
from llamakv.store.collector import collect, session_files
from llamakv.store.retention import Removed, Rules, is_expired, make_room, names_of, remove_session
from llamakv.store.session_file import SessionInfo
from llamakv.store.store_folder import StoreBudget, is_store, make_store, read_budget, write_budget
from llamakv.store.summary import SessionSummary
from llamakv.store.survey import Survey, SurveyedSession, n_bytes_on_disk, take_survey
from llamakv.store.usage import names_in_use

_EXPIRY_PERIOD_S = 60.0
"""A chat saves every turn; looking for expired sessions that often is enough."""

UNLIMITED = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetReport:
    """A store's own budget, what overrides it now, and what the store takes."""

    root: Path
    budget: StoreBudget
    max_bytes: int | None
    ttl_s: float | None
    n_sessions: int
    n_bytes: int

    @property
    def n_over(self) -> int:
        """Bytes that are too many."""
        return 0 if self.max_bytes is None else max(0, self.n_bytes - self.max_bytes)


class Budget:
    """What a command that saves must keep to. ``max_bytes`` (``UNLIMITED`` for none) and ``store_ttl_s`` count instead
    of the store's own; ``ttl_s`` becomes the saved session's own (``UNLIMITED``: it has none any more). None is what
    the store or the session says.

    Remembers when it last looked for expired sessions, so one ``Budget`` serves a command from its beginning to its
    end. Not to be shared by threads.
    """

    def __init__(
        self, *, max_bytes: float | None = None, ttl_s: float | None = None, store_ttl_s: float | None = None
    ) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._store_ttl_s = store_ttl_s
        self._looked_s: dict[Path, float] = {}
        self._warned = False

    def apply_to(self, lineage: Lineage) -> Lineage:
        """What is saved of a session: with its own time to live, if the command sets one."""
        if self._ttl_s is None:
            return lineage
        return replace(lineage, ttl_s=None if self._ttl_s == UNLIMITED else self._ttl_s)

    def limits(self, root: Path) -> StoreBudget:
        """What counts for a store now.

        Raises:
            NewerFormatError, DamagedError, ReadError.
        """
        return limits_of(root, max_bytes=self._max_bytes, ttl_s=self._store_ttl_s)

    def before_save(
        self,
        root: Path,
        n_new_bytes: int | None,
        *,
        keep: Collection[str],
        replaces: str | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        """Make room in the store at ``root`` for ``n_new_bytes`` more (None: unknown), before they are written.

        ``keep`` are the names of sessions that must stay, the one that is saved among them; ``replaces`` is its name if
        what is under it now goes with the save. Does nothing where ``root`` is no store, and next to nothing where it
        has no limits. Trouble with other sessions is a warning.

        Raises:
            NoRoomError: it cannot fit, whatever else is removed; nothing was removed for it.
            NewerFormatError, DamagedError: the store itself.
        """
        if not is_store(root):
            return
        reporter = reporter or Reporter()
        try:
            self._make_room(root, n_new_bytes or 0, keep, replaces, reporter)
        except ReadError as error:  # somebody else's file: no reason not to save
            self._warn(reporter, f"the store's budget could not be kept to: {error.message}")

    def _make_room(
        self, root: Path, n_new: int, keep: Collection[str], replaces: str | None, reporter: Reporter
    ) -> None:
        limits = self.limits(root)
        self._expire(root, limits, keep, reporter)
        if limits.max_bytes is None or n_bytes_on_disk(root) + n_new <= limits.max_bytes:
            return
        survey = take_survey(root)
        left = [session for session in survey.sessions if session.name != replaces]
        safe = {*keep, *_locked(survey)}
        if make_room(survey, left, limits.max_bytes, n_new=n_new, safe=safe) is None:
            staying = [session for session in left if session.lineage.pinned or session.name in safe]
            raise no_room(limits.max_bytes, n_new, survey.n_bytes_of(staying), staying)
        self._remove_oldest(survey, left, limits.max_bytes, n_new, safe, reporter)

    def after_save(self, root: Path, *, keep: Collection[str], reporter: Reporter | None = None) -> None:
        """Keep the store to its budget now that a session was saved. Never fails because of the budget: what was saved
        stays, with a warning where it is too much, or where that cannot be told.
        """
        if not is_store(root):
            return
        reporter = reporter or Reporter()
        try:
            self._keep_to_budget(root, keep, reporter)
        except StoreError as error:
            self._warn(reporter, f"the store's budget could not be kept to: {error.message}")

    def _warn(self, reporter: Reporter, message: str) -> None:
        if not self._warned:
            self._warned = True
            reporter.warning(message)

    def _keep_to_budget(self, root: Path, keep: Collection[str], reporter: Reporter) -> None:
        limits = self.limits(root)
        if limits.max_bytes is None or n_bytes_on_disk(root) <= limits.max_bytes:
            return
        survey = take_survey(root)
        self._remove_oldest(survey, survey.sessions, limits.max_bytes, 0, {*keep, *_locked(survey)}, reporter)
        n_bytes = n_bytes_on_disk(root)
        if n_bytes > limits.max_bytes and not survey.unreadable:
            self._warn(
                reporter,
                f"the store takes {size(n_bytes)}, more than its budget of {size(limits.max_bytes)}: what is left "
                "is in use or pinned",
            )

    def _expire(self, root: Path, limits: StoreBudget, keep: Collection[str], reporter: Reporter) -> None:
        now_s = time.time()
        if now_s - self._looked_s.get(root, -UNLIMITED) < _EXPIRY_PERIOD_S:
            return
        self._looked_s[root] = now_s

        def is_over(info: SessionInfo, used_s: float) -> bool:
            return is_expired(info.record.lineage, used_s, limits.ttl_s, time.time())

        safe = {*keep, *names_in_use(root)}
        paths = [path for name, path in _expired(root, limits.ttl_s, now_s) if name not in safe]
        removed = _remove_all(root, ((path, is_over) for path in paths), reporter)
        if removed:
            names = listed([session.name for session in removed])
            reporter.notice(f"removed {names}: unused for longer than the time to live")

    def _remove_oldest(
        self,
        survey: Survey,
        sessions: Iterable[SurveyedSession],
        max_bytes: int,
        n_new: int,
        safe: Collection[str],
        reporter: Reporter,
    ) -> None:
        if survey.unreadable:
            self._warn(
                reporter,
                f"the store is over its budget of {size(max_bytes)}, and nothing can be removed while "
                f"{survey.unreadable[0].name!r} is damaged (llamakv repair)",
            )
            return
        going = make_room(survey, sessions, max_bytes, n_new=n_new, safe=safe) or ()
        if going or survey.orphans:
            removed = _remove_all(survey.root, ((s.path, is_as_surveyed(s)) for s in going), reporter, all_objects=True)
            if removed:
                reporter.notice(
                    f"removed {listed([session.name for session in removed])}: unused for longest, and the store's "
                    f"budget is {size(max_bytes)}"
                )


def effective(own: StoreBudget, *, max_bytes: float | None, ttl_s: float | None) -> StoreBudget:
    """A store's budget with what overrides it (``UNLIMITED`` for no limit, None for nothing)."""
    if max_bytes is not None:
        own = replace(own, max_bytes=None if max_bytes == UNLIMITED else int(max_bytes))
    if ttl_s is not None:
        own = replace(own, ttl_s=None if ttl_s == UNLIMITED else ttl_s)
    return own


def rules_of(
    root: Path,
    *,
    last: int | None,
    within_s: float | None,
    tags: tuple[str, ...],
    max_bytes: float | None,
    ttl_s: float | None,
    default_max_bytes: float | None,
    default_ttl_s: float | None,
) -> Rules:
    """What pruning a store goes by: what is given (``UNLIMITED`` for no limit), or else the defaults, or else the
    store's own budget. Where it is said what to keep, that decides, and only a ``max_bytes`` that is given counts.

    Raises:
        NewerFormatError, DamagedError, ReadError.
    """
    own = effective(read_budget(root), max_bytes=default_max_bytes, ttl_s=default_ttl_s)
    rules = Rules(last=last, within_s=within_s, tags=tags)
    now = effective(StoreBudget() if rules.has_keep else own, max_bytes=max_bytes, ttl_s=ttl_s)
    return replace(rules, max_bytes=now.max_bytes, ttl_s=now.ttl_s)


def is_as_surveyed(session: SurveyedSession) -> Callable[[SessionInfo, float], bool]:
    """A check that nobody has used or changed a session since it was surveyed."""

    def check(info: SessionInfo, used_s: float) -> bool:
        return info.record.lineage == session.lineage and used_s == session.used_s

    return check


def budget_report(root: Path, *, max_bytes: float | None = None, ttl_s: float | None = None) -> BudgetReport:
    """What a store may take and takes; ``max_bytes`` and ``ttl_s`` override its own limits.

    Raises:
        NewerFormatError, DamagedError, ReadError.
    """
    own = read_budget(root)
    now = effective(own, max_bytes=max_bytes, ttl_s=ttl_s)
    return BudgetReport(
        root=root,
        budget=own,
        max_bytes=now.max_bytes,
        ttl_s=now.ttl_s,
        n_sessions=sum(1 for _ in session_files(root)),
        n_bytes=n_bytes_on_disk(root),
    )


def limits_of(root: Path, *, max_bytes: float | None, ttl_s: float | None) -> StoreBudget:
    """The limits that count for a store, ``max_bytes`` and ``ttl_s`` overriding its own.

    Raises:
        NewerFormatError, DamagedError, ReadError.
    """
    return effective(read_budget(root), max_bytes=max_bytes, ttl_s=ttl_s)


def set_budget(root: Path, *, max_bytes: float | None, ttl_s: float | None) -> None:
    """Set a store's limits (``UNLIMITED`` for none); None leaves one as it is. Removes nothing. The store is made if it
    is not there.

    Raises:
        NewerFormatError, DamagedError, ReadError, WriteError.
    """
    make_store(root)
    write_budget(root, effective(read_budget(root), max_bytes=max_bytes, ttl_s=ttl_s))


def _locked(survey: Survey) -> set[str]:
    return {session.name for session in survey.sessions if files.is_locked(session.path)} | names_in_use(survey.root)


def _expired(root: Path, ttl_s: float | None, now_s: float) -> list[tuple[str, Path]]:
    """Sessions that seem to have expired; to be looked at again before they go."""
    from llamakv.store.cache import StoreCache  # late: SQLite is not needed by most commands

    try:
        with StoreCache(root) as cache:
            known = cache.summaries()
    except StoreError:
        return []
    return [
        (session.name, session.path)
        for session in known
        if isinstance(session, SessionSummary) and is_expired(session, session.used_s, ttl_s, now_s)
    ]


def _remove_all(
    root: Path,
    wanted: Iterable[tuple[Path, Callable[[SessionInfo, float], bool]]],
    reporter: Reporter,
    *,
    all_objects: bool = False,
) -> list[Removed]:
    """Remove sessions that are still to go, then the objects that only they referred to."""
    removed: list[Removed] = []
    try:
        for path, check in wanted:
            try:
                gone = remove_session(path, only_if=check)
            except LockedError:
                continue
            if gone is not None:
                removed.append(gone)
        if removed or all_objects:
            collect(root, None if all_objects else {digest for session in removed for digest in session.digests})
    except StoreError as error:
        reporter.warning(f"room in the store could not be made: {error.message}")
    return removed


def no_room(max_bytes: int, n_new: int, n_kept: int, staying: Sequence[SurveyedSession]) -> NoRoomError:
    """The error for ``n_new`` bytes that do not fit beside the ``n_kept`` of sessions that must stay."""
    parts = [f"{size(n_new)} to save"] if n_new else []
    if n_kept:
        parts.append(f"the {size(n_kept)} that must stay ({listed(names_of(staying))})")
    return NoRoomError(
        f"the store's budget of {size(max_bytes)} is too small for {' and '.join(parts)}",
        hint="--max-bytes SIZE allows more for this command, llamakv unpin and rm make room, llamakv inspect --store "
        "shows what takes it",
        needed_bytes=n_new + n_kept,
        max_bytes=max_bytes,
    )
