"""What the user says of a session: its tags, its note, its pin. The state is not touched."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from llamakv.errors import ConflictError, NotFoundError, UsageError
from llamakv.records import Lineage
from llamakv.store.session_file import SessionInfo, StoredSection, change_lineage, read_session

INCOMPLETE = "incomplete:"
"""How the note of a session begins whose text was not read to its end; the user's own note follows on the next line."""

_MAX_TAG = 64  # characters, so that a few of them fit a line
_N_TRIES = 3  # a save takes moments: who meets a second one by chance does not meet a third


# ---------------------------------------------------------------- changes


def change_tags(path: Path, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> SessionInfo:
    """Give a session tags, and take some away. Returns it as it is now; its tags are sorted.

    Raises:
        UsageError: an impossible tag.
        NotFoundError: one to be removed is not there; nothing was changed.
        LockedError, ConflictError, WriteError.
    """
    new = {check_tag(tag) for tag in add}

    def change(lineage: Lineage) -> Lineage:
        missing = sorted(set(remove) - set(lineage.tags))
        if missing:
            names = ", ".join(repr(tag) for tag in missing)
            raise NotFoundError(f"{path} has no tag {names}", hint=f"llamakv tag {path} shows its tags", path=str(path))
        return replace(lineage, tags=tuple(sorted((set(lineage.tags) | new) - set(remove))))

    return _change(path, change)


def check_tag(tag: str) -> str:
    """Return what can be a tag.

    Raises:
        UsageError: says why it cannot.
    """
    if not tag:
        reason = "it is empty"
    elif len(tag) > _MAX_TAG:
        reason = f"it is longer than {_MAX_TAG} characters"
    elif any(character.isspace() for character in tag):
        reason = "it has white space"
    elif "," in tag:
        reason = "it has a comma"
    elif any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in tag):
        reason = "it has control characters"
    else:
        return tag
    raise UsageError(f"not a tag: {tag!r}: {reason}", tag=tag)


def set_note(path: Path, text: str) -> SessionInfo:
    """Set a session's note; an empty one removes it. That its text was not read to its end stays noted.

    Raises:
        UsageError: it begins as only the program's own notes do.
        LockedError, ConflictError, WriteError.
    """
    own = text.strip()
    if own.startswith(INCOMPLETE):
        raise UsageError(f"a note cannot begin with '{INCOMPLETE}': that marks texts that were not read to their end")
    return _change(path, lambda lineage: replace(lineage, note=join_note(split_note(lineage.note)[0], own)))


def set_pinned(path: Path, pinned: bool) -> SessionInfo:
    """Pin a session, so that making room in its store leaves it alone, or let go of it.

    Raises:
        LockedError, ConflictError, WriteError.
    """
    return _change(path, lambda lineage: replace(lineage, pinned=pinned))


def _change(path: Path, change: Callable[[Lineage], Lineage]) -> SessionInfo:
    for n_left in reversed(range(_N_TRIES)):
        try:
            return change_lineage(path, change)
        except ConflictError as error:  # a chat saved it in the same moment
            if not n_left:
                error.hint = "the same command again"
                raise
    raise AssertionError


# ---------------------------------------------------------------- notes


def split_note(note: str) -> tuple[str, str]:
    """The program's mark of an incomplete session (empty if it is none), and the user's own words."""
    if not note.startswith(INCOMPLETE):
        return "", note
    mark, _, own = note.partition("\n")
    return mark, own


def join_note(mark: str, own: str) -> str:
    """A note of the program's mark and the user's own words."""
    return f"{mark}\n{own}" if mark and own else mark or own


# ---------------------------------------------------------------- while a chat runs


def relabelled(base: SessionInfo) -> SessionInfo | None:
    """A session as it is on disk now, if nothing else was changed since ``base`` was read than what the user says of
    it; None if it was saved.

    Raises:
        NotFoundError, FormatError, ReadError: it cannot be read any more.
    """
    now = read_session(base.path)
    lineage = with_labels(now.record.lineage, before=now.record.lineage, now=base.record.lineage)
    same_words = replace(now.record, lineage=lineage) == base.record
    return now if same_words and _shape(now.sections) == _shape(base.sections) else None


def _shape(sections: Sequence[StoredSection]) -> list[tuple[object, ...]]:
    """What sections are, wherever they are stored."""
    return [(section.kind, section.p0, section.p1, section.p_used, section.digest) for section in sections]


def with_labels(lineage: Lineage, *, before: Lineage, now: Lineage) -> Lineage:
    """A lineage with what the user changed between two others."""
    return replace(
        lineage,
        name=now.name if now.name != before.name else lineage.name,
        note=join_note(split_note(lineage.note)[0], split_note(now.note)[1]),
        tags=now.tags,
        pinned=now.pinned,
        ttl_s=now.ttl_s if now.ttl_s != before.ttl_s else lineage.ttl_s,
    )
