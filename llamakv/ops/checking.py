"""Verifying: whether sessions, or a whole store, are what was saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamakv.errors import ConflictError, FormatError, InterruptedByUser, LlamakvError, NotFoundError, ReadError
from llamakv.ops.requests import Reporter
from llamakv.store.checking import BadSection, CheckedObject, Rest, Trouble, bad_sections, check_objects, rest_of
from llamakv.store.checking import trouble_of as trouble_of
from llamakv.store.collector import session_files
from llamakv.store.objects import Objects
from llamakv.store.session_file import SessionInfo, read_session
from llamakv.store.session_reader import folder_of
from llamakv.store.store_folder import read_budget
from llamakv.store.survey import object_lengths

_N_TRIES = 3
"""How often a session is looked at that others save meanwhile."""

_Read = SessionInfo | FormatError | ReadError
"""An index, or why it cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSession:
    """A session that was looked at: ``info`` if its index can be read, else ``error``; ``bad`` are the sections that
    cannot be used, ``rest`` what can be used without them."""

    name: str
    path: Path
    info: SessionInfo | None = None
    error: FormatError | ReadError | None = None
    bad: tuple[BadSection, ...] = ()
    rest: Rest | None = None

    @property
    def is_sound(self) -> bool:
        """Whether nothing wrong was found."""
        return self.error is None and not self.bad


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCheck:
    """A store that was looked at. ``error`` is what is wrong with its ``.store``; ``bad_objects`` cannot be used,
    ``users`` says which sessions each of them hits; ``n_bytes`` were read, of ``n_objects`` and of sections that are in
    session files; ``n_orphans`` objects, ``n_orphan_bytes`` long, belong to no session."""

    root: Path
    error: FormatError | None
    sessions: tuple[CheckedSession, ...]
    bad_objects: tuple[CheckedObject, ...]
    users: dict[str, tuple[str, ...]]
    n_objects: int
    n_bytes: int
    n_orphans: int
    n_orphan_bytes: int
    is_fast: bool

    @property
    def n_wrong(self) -> int:
        """Things that are wrong: files that are damaged, missing or cannot be read, each counted once."""
        objects = {found.digest for found in self.bad_objects}
        own = sum(
            not bad.section.in_store or bad.section.digest not in objects
            for session in self.sessions
            for bad in session.bad
        )
        unreadable = sum(session.error is not None for session in self.sessions)
        return (self.error is not None) + unreadable + len(self.bad_objects) + own


def verify_sessions(paths: Sequence[Path], reporter: Reporter, *, fast: bool = False) -> tuple[CheckedSession, ...]:
    """Look at some sessions: every section's digest, or with ``fast`` only that everything is there and of the right
    length. What is wrong is reported, not raised.

    Raises:
        NotFoundError: one is not there, or was removed meanwhile.
        InterruptedByUser: it was stopped.
    """
    infos = [_read(path) for path in paths]
    wanted: dict[Path, dict[str, int]] = {}
    for info in infos:
        if isinstance(info, SessionInfo):
            lengths = wanted.setdefault(folder_of(info.path), {})
            lengths.update((section.digest, section.n_stored) for section in info.sections if section.in_store)
    n_bytes = sum(sum(lengths.values()) for lengths in wanted.values()) + sum(map(_own_bytes, infos))
    progress = _Progress(reporter, n_bytes)
    checked = {folder: _check_all(folder, lengths, lengths, progress, fast=fast) for folder, lengths in wanted.items()}
    found = [
        _judge(path, info, checked.get(folder_of(path), {}), progress, fast=fast)
        for path, info in zip(paths, infos, strict=True)
    ]
    for path, session in zip(paths, found, strict=True):
        if session is None:
            raise NotFoundError(f"session '{path}' was removed while it was verified", path=str(path))
    return tuple(session for session in found if session is not None)


def verify_store(root: Path, reporter: Reporter, *, fast: bool = False) -> StoreCheck:
    """Look at all of a store: every index, every object once, and its ``.store``. What is wrong is reported, not
    raised.

    Raises:
        NewerFormatError, ReadError: the store itself cannot be read.
        InterruptedByUser: it was stopped.
    """
    error = store_error(root)
    paths = [path for _, path, _ in sorted(session_files(root))]
    infos = [_read_if_there(path) for path in paths]
    lengths = object_lengths(root)
    users = _users(infos)
    order = list(users) + [digest for digest in lengths if digest not in users]
    progress = _Progress(reporter, sum(lengths.values()) + sum(map(_own_bytes, infos)))
    checked = _check_all(root, order, lengths, progress, fast=fast)
    judged = [
        _judge(path, info, checked, progress, fast=fast)
        for path, info in zip(paths, infos, strict=True)
        if info is not None
    ]
    sessions = [session for session in judged if session is not None]
    hit = {section.section.digest for session in sessions for section in session.bad}
    orphans = [digest for digest in lengths if digest not in users]
    is_known = all(session.error is None for session in sessions)
    bad = [
        item
        for digest, item in checked.items()
        if item.trouble is not None and (digest in hit or (digest not in users and item.trouble is not Trouble.MISSING))
    ]
    return StoreCheck(
        root=root,
        error=error,
        sessions=tuple(sessions),
        bad_objects=tuple(bad),
        users={item.digest: users.get(item.digest, ()) for item in bad},
        n_objects=len(lengths),
        n_bytes=0 if fast else progress.n_done,
        n_orphans=len(orphans) if is_known else 0,
        n_orphan_bytes=sum(lengths[digest] for digest in orphans) if is_known else 0,
        is_fast=fast,
    )


def store_error(root: Path) -> FormatError | None:
    """What is wrong with a store's own file, and can be put right.

    Raises:
        NewerFormatError, ReadError.
    """
    try:
        read_budget(root)
    except FormatError as error:
        if not trouble_of(error).is_loss:
            raise
        return error
    return None


class _Progress:
    """Counts bytes that were looked at, and asks whether to go on."""

    def __init__(self, reporter: Reporter, n_total: int) -> None:
        self._reporter, self._n_total = reporter, n_total
        self.n_done = 0

    def add(self, n_bytes: int) -> None:
        self.n_done += n_bytes
        self._reporter.progress("verify", min(self.n_done, self._n_total), self._n_total)
        if self._reporter.should_abort():
            raise InterruptedByUser("interrupted while verifying; nothing was changed", status=130)


def _check_all(
    folder: Path, digests: Iterable[str], lengths: Mapping[str, int], progress: _Progress, *, fast: bool
) -> dict[str, CheckedObject]:
    checked = {}
    for found in check_objects(Objects(folder), digests, fast=fast):
        checked[found.digest] = found
        progress.add(lengths.get(found.digest, 0))
    return checked


def _read(path: Path) -> _Read:
    try:
        return read_session(path)
    except (FormatError, ReadError) as error:
        return error


def _read_if_there(path: Path) -> _Read | None:
    try:
        return _read(path)
    except NotFoundError:
        return None


def _own_bytes(info: SessionInfo | LlamakvError | None) -> int:
    if not isinstance(info, SessionInfo):
        return 0
    return sum(section.n_stored for section in info.sections if not section.in_store)


def _users(infos: Iterable[SessionInfo | LlamakvError | None]) -> dict[str, tuple[str, ...]]:
    users: dict[str, tuple[str, ...]] = {}
    for info in infos:
        if isinstance(info, SessionInfo):
            for digest in dict.fromkeys(section.digest for section in info.sections if section.in_store):
                users[digest] = (*users.get(digest, ()), info.path.stem)
    return users


def _judge(
    path: Path, found: _Read, checked: dict[str, CheckedObject], progress: _Progress, *, fast: bool
) -> CheckedSession | None:
    """What is to be said of a session whose objects were ``checked``. One that was saved since it was read is looked at
    again; None if it was removed."""
    bad: tuple[BadSection, ...] = ()
    now: _Read | None = found
    for _ in range(_N_TRIES):
        if now is None:
            return None
        if not isinstance(now, SessionInfo):
            return CheckedSession(name=path.stem, path=path, error=now)
        info = now
        digests = [section.digest for section in info.sections if section.in_store]
        objects = Objects(folder_of(path))
        new = [digest for digest in digests if digest not in checked or checked[digest].trouble is Trouble.MISSING]
        checked.update((found.digest, found) for found in check_objects(objects, new, fast=fast))
        try:
            bad = bad_sections(info, checked, fast=fast)
            if not bad:
                break
            now = _read(path)
        except ConflictError:
            now = _read_if_there(path)
        except NotFoundError:
            return None
        except (FormatError, ReadError) as error:
            return CheckedSession(name=path.stem, path=path, error=error)
        if isinstance(now, SessionInfo) and now.commit == info.commit:
            break
    progress.add(_own_bytes(info))
    return CheckedSession(name=path.stem, path=path, info=info, bad=bad, rest=rest_of(info, bad))
