"""Sessions in other places: moved, copied (and cut), taken out of a store and into it. No engine is needed."""

from __future__ import annotations

import contextlib
import re
import time
import unicodedata
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from llamakv import __version__
from llamakv.errors import DamagedError, ExistsError, FormatError, NotFoundError, StoreError, UsageError
from llamakv.ops.budget import Budget
from llamakv.ops.lineage import split_note
from llamakv.ops.places import info_at
from llamakv.ops.requests import Reporter
from llamakv.records import Lineage
from llamakv.store import moving
from llamakv.store.session_file import SessionInfo, SessionReader, check_writable, read_session
from llamakv.store.session_store import SessionStore, check_name
from llamakv.store.store_folder import is_store, make_store

SUFFIX = ".bin"
_MAX_NAME_BYTES = 255 - len(SUFFIX)
_UNWANTED = re.compile(r"[/\\]|@(?=(turn)?\d+$)")
"""What a name cannot have, apart from control characters and at its ends."""

_FORCE = "add --force to replace it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A copy of a session. ``n_to_read`` of its tokens have no cells: the model's memory could not be cut at their end,
    so they are read again when it is resumed."""

    info: SessionInfo
    n_to_read: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Within:
    """The budget of a store that something is put into, and who is told of sessions that go for it."""

    budget: Budget = field(default_factory=Budget)
    reporter: Reporter = field(default_factory=Reporter)

    def has_limit(self, target: Path) -> bool:
        """Whether room may have to be made for a session at ``target``."""
        return is_store(target.parent) and self.budget.limits(target.parent).max_bytes is not None

    @contextlib.contextmanager
    def room(self, target: Path, n_bytes: int, *, keep: Sequence[str], overwrite: bool) -> Iterator[None]:
        """Make room for ``n_bytes`` at ``target``, which is then written; sessions named in ``keep`` stay.

        Raises:
            NoRoomError: it cannot fit; nothing was removed for it.
        """
        root, replaced = target.parent, target.stem if overwrite else None
        self.budget.before_save(root, n_bytes, keep=keep, replaces=replaced, reporter=self.reporter)
        yield
        self.budget.after_save(root, keep=keep, reporter=self.reporter)


# ---------------------------------------------------------------- within reach


def move_session(
    path: Path, target: Path, *, name: str | None, overwrite: bool = False, within: Within | None = None
) -> SessionInfo:
    """Give a session another place, and the name it has there (None: the one it had). Killed in between, it is in one
    of both places, or in both; then the same again finishes.

    Raises:
        UsageError: both are the same.
        NotFoundError, ExistsError, LockedError, ConflictError, FormatError, WriteError, NoRoomError (the budget of
            the store): it is where it was.
    """
    if path.parent.resolve() == target.parent.resolve():
        with _collecting(target), _hinting(name):
            return moving.move_session(path, target, name=name, overwrite=overwrite)
    with _collecting(path), _collecting(target), _hinting(name):
        is_refused = target.exists() and not overwrite
        n_bytes = 0 if is_refused else read_session(path).n_stored_bytes
        with (within or Within()).room(target, n_bytes, keep=[target.stem], overwrite=overwrite):
            return moving.move_session(path, target, name=name, overwrite=overwrite)


def copy_session(
    path: Path,
    target: Path,
    *,
    at: str | None = None,
    name: str | None = None,
    overwrite: bool = False,
    within: Within | None = None,
) -> Copied:
    """Make a session of its own that begins with another, or with what that was at a place. Within a store both share
    their sections.

    Raises:
        UsageError: the place is inside a message or raw text, or ``target`` is the session itself.
        NotFoundError, ExistsError, FormatError, LockedError, WriteError, NoRoomError (the budget of the store):
            nothing was changed.
    """
    _check_other(path, target)
    with SessionReader(path) as source:
        info = _child_of(source.info, at, name)
        made = _take(source, info, target, name=name, overwrite=overwrite, within=within or Within())
    return Copied(info=made, n_to_read=len(made.record.tokens) - 1 - made.n_cells_held)


def _take(
    source: SessionReader, info: SessionInfo, target: Path, *, name: str | None, overwrite: bool, within: Within
) -> SessionInfo:
    """Write what a session is to be in another place, within the budget of the store that is in."""
    is_same = info.path.parent.resolve() == target.parent.resolve()
    is_shared = is_same and info.in_store
    keep = [target.stem, info.path.stem] if is_same else [target.stem]
    record = replace(info.record, lineage=within.budget.apply_to(info.record.lineage))
    with _collecting(target), _hinting(name):
        check_writable(target, overwrite=overwrite)
        source.hold(info.sections)
        if not is_shared and within.has_limit(target):
            moving.check_sections(source, info.sections)  # before anything is removed for it
        with within.room(target, 0 if is_shared else info.n_stored_bytes, keep=keep, overwrite=overwrite):
            return moving.take(source, replace(info, record=record), target, overwrite=overwrite)


def _child_of(parent: SessionInfo, at: str | None, name: str | None) -> SessionInfo:
    """A session of its own that begins with another, or with what that was at a place."""
    info = info_at(parent, at)
    lineage, now_s, n_tokens = parent.record.lineage, time.time(), len(info.record.tokens)
    is_whole = n_tokens == len(parent.record.tokens)
    child = Lineage(
        session_id=uuid.uuid4().hex,
        parent_id=lineage.session_id,
        parent_position=n_tokens,
        name=name,
        note=split_note(lineage.note)[0] if is_whole else "",
        tags=lineage.tags,
        created_s=now_s,
        updated_s=now_s,
        n_saves=1,
        llamakv_version=__version__,
    )
    return replace(info, record=replace(info.record, lineage=child))


def _check_other(path: Path, target: Path) -> None:
    with contextlib.suppress(OSError):
        if target.samefile(path):
            raise UsageError(f"'{path}' cannot be copied to itself", path=str(path))


# ---------------------------------------------------------------- out of a store and into it


def export_session(path: Path, file: Path, *, at: str | None = None, overwrite: bool = False) -> SessionInfo:
    """Write a session, every section verified, as a file of its own with the very same record; or, as a child of it,
    what it was at a place.

    Raises:
        UsageError: ``file`` lies in a store, where sessions are not files of their own, or is the session itself.
        NotFoundError, ExistsError, FormatError, WriteError: nothing was changed.
    """
    if is_store(file.parent):
        raise UsageError(
            f"{file.parent} is a store: sessions there share their sections, and are not whole files",
            hint=f"llamakv cp {path} {file} makes a session in it; to export, name a file in another folder",
            path=str(file),
        )
    _check_other(path, file)
    with _hinting(), SessionReader(path) as source:
        check_writable(file, overwrite=overwrite)
        return moving.take(source, _as_exported(source.info, at), file, overwrite=overwrite)


def _as_exported(info: SessionInfo, at: str | None) -> SessionInfo:
    return info if at is None else _child_of(info, at, info.record.lineage.name)


@contextlib.contextmanager
def exported(path: Path, *, at: str | None = None) -> Iterator[tuple[SessionInfo, Iterator[bytes]]]:
    """Give a session and the bytes of the file ``export_session`` would write; every section has been verified.

    Raises:
        NotFoundError, FormatError.
    """
    with SessionReader(path) as source:
        info = _as_exported(source.info, at)
        source.hold(info.sections)
        moving.check_sections(source, info.sections)
        yield info, moving.session_bytes(source, info)


def import_session(
    file: Path, root: Path, *, name: str | None = None, overwrite: bool = False, within: Within | None = None
) -> SessionInfo:
    """Take a session file into the store at ``root`` under a name (None: the one it has, or its file's), with the very
    same record but for that. Every section is verified; those the store has already are shared.

    Raises:
        UsageError: an impossible name.
        NotFoundError, FormatError (a section is damaged, or not there), ExistsError, LockedError, WriteError,
            NoRoomError (the budget of the store): nothing stays of it.
    """
    if name is not None:
        _check_new_name(name)
    with SessionReader(file) as source:
        name = name or possible_name(source.info, file.name)
        return _take_in(source, root, name, overwrite=overwrite, within=within)


def import_bytes(
    pieces: Iterable[bytes],
    root: Path,
    *,
    name: str | None = None,
    overwrite: bool = False,
    within: Within | None = None,
) -> SessionInfo:
    """As ``import_session``, of a session file that comes in pieces.

    Raises:
        As ``import_session``.
    """
    if name is not None:
        _check_new_name(name)
    make_store(root)
    with moving.spooled(root, pieces) as file:
        try:
            with SessionReader(file) as source:
                name = name or possible_name(source.info, "")
                return _take_in(source, root, name, overwrite=overwrite, within=within)
        except FormatError as error:
            message = error.message.replace(f"'{file}'", "standard input").replace(str(file), "standard input")
            raise type(error)(message, hint=error.hint) from error


def _take_in(source: SessionReader, root: Path, name: str, *, overwrite: bool, within: Within | None) -> SessionInfo:
    info = source.info
    if info.in_store and not is_store(info.path.parent):
        raise DamagedError(
            f"'{info.path}' is only the index of a session: its sections are in the store it was copied out of",
            hint="in that store: llamakv export NAME FILE",
            path=str(info.path),
        )
    make_store(root)
    target = root / (name + SUFFIX)
    _check_other(info.path, target)
    renamed = replace(info, record=replace(info.record, lineage=replace(info.record.lineage, name=name)))
    try:
        return _take(source, renamed, target, name=name, overwrite=overwrite, within=within or Within())
    except BaseException:
        _collect(root, {section.digest for section in info.sections})
        raise


def _check_new_name(name: str) -> None:
    check_name(name)
    if name.endswith(SUFFIX):
        raise UsageError(f"not a session name: {name!r}: what ends in '{SUFFIX}' is a path", name=name)


def possible_name(info: SessionInfo, file_name: str) -> str:
    """The name a session says it has, or its file's, made one that a store can take."""
    lineage = info.record.lineage
    for wanted in (lineage.name or "", Path(file_name).stem, f"session-{lineage.session_id}"):
        text = "".join(c for c in wanted if unicodedata.category(c) not in ("Cc", "Cs", "Zl", "Zp")).strip()
        while text.endswith(SUFFIX):
            text = text.removesuffix(SUFFIX).rstrip()
        text = _UNWANTED.sub("-", text).lstrip(".-").strip()
        text = text.encode()[:_MAX_NAME_BYTES].decode("utf-8", "ignore")
        with contextlib.suppress(UsageError):
            _check_new_name(text)
            return text
    return "session"


# ---------------------------------------------------------------- around all of them


@contextlib.contextmanager
def _hinting(name: str | None = None) -> Iterator[None]:
    """Say of a session that is there already, by its name if it has one, what to do about it."""
    try:
        yield
    except ExistsError as error:
        error.hint = error.hint or _FORCE
        if name is not None and error.message.endswith("already exists"):
            raise ExistsError(f"session {name!r} already exists", hint=error.hint, **error.fields) from error
        raise


@contextlib.contextmanager
def _collecting(path: Path) -> Iterator[None]:
    """When all went well, remove the sections that only the session at ``path`` as it was before referred to."""
    digests: set[str] = set()
    with contextlib.suppress(StoreError, NotFoundError):
        digests = {section.digest for section in read_session(path).sections if section.in_store}
    yield
    _collect(path.parent, digests)


def _collect(root: Path, digests: set[str]) -> None:
    if digests and is_store(root):
        with contextlib.suppress(StoreError):  # what is left behind costs space, and gc finds it
            SessionStore(root).collect(digests)
