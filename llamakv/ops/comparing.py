"""Where two sessions part, and what each stores for itself. No engine is needed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from llamakv.engine.prefix import n_common
from llamakv.ops.places import info_at
from llamakv.records import Message, SessionRecord
from llamakv.store.session_file import SessionInfo, StoredSection, read_session

N_AROUND = 200
"""Characters told of what is said before and after the place where two sessions part."""


class Relation(StrEnum):
    """How the tokens of one session, A, are to those of another, B."""

    SAME = "same"
    BEGINNING = "beginning"
    CONTINUATION = "continuation"
    PARTED = "parted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field of two sessions with other values, such as ``identity.digest`` or ``settings.type_k``."""

    field: str
    a: object
    b: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of two sessions, seen from where they part.

    ``turn`` is the number of the turn in which that is, and ``role`` whose message it is in (both None in raw text, and
    where the session is over). ``text_before`` is what that message, or the text, says before they part, and
    ``text_after`` what it says from there on, at most ``N_AROUND`` characters each. ``own_sections`` are stored for
    this session, and not for the other.
    """

    info: SessionInfo
    n_own_tokens: int
    turn: int | None
    role: str | None
    text_before: str
    text_after: str
    own_sections: tuple[StoredSection, ...]

    @property
    def n_own_bytes(self) -> int:
        """Stored bytes of the sections that the other does not have."""
        return sum(section.n_stored for section in self.own_sections)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two sessions side by side. ``n_common`` leading tokens are alike. Shared sections have the same digest; they are
    ``stored_once`` if both sessions lie in the same store."""

    a: Side
    b: Side
    n_common: int
    relation: Relation
    differences: tuple[Difference, ...]
    shared_sections: tuple[StoredSection, ...]
    stored_once: bool

    @property
    def n_shared_bytes(self) -> int:
        """Stored bytes of the sections that both have."""
        return sum(section.n_stored for section in self.shared_sections)

    def agrees_on(self, *groups: str) -> bool:
        """Whether none of the differences is in one of these (``identity``, ``settings``)."""
        return not any(difference.field.split(".")[0] in groups for difference in self.differences)


def compare_sessions(a: Path, b: Path, *, at_a: str | None = None, at_b: str | None = None) -> Comparison:
    """Compare two sessions, each as it is or as it was at a place.

    Raises:
        NotFoundError, FormatError.
        UsageError: a place is inside a message or raw text.
    """
    one, other = info_at(read_session(a), at_a), info_at(read_session(b), at_b)
    n = n_common(one.record.tokens, other.record.tokens)
    return Comparison(
        a=_side(one, other, n),
        b=_side(other, one, n),
        n_common=n,
        relation=_relation(len(one.record.tokens), len(other.record.tokens), n),
        differences=tuple(_differences(one.record, other.record)),
        shared_sections=_sections(one, other, shared=True),
        stored_once=one.in_store and other.in_store and _is_same_folder(one.path, other.path),
    )


def _is_same_folder(one: Path, other: Path) -> bool:
    return os.path.realpath(one.parent) == os.path.realpath(other.parent)


def _relation(n_a: int, n_b: int, n: int) -> Relation:
    if n == n_a == n_b:
        return Relation.SAME
    if n == n_a:
        return Relation.BEGINNING
    return Relation.CONTINUATION if n == n_b else Relation.PARTED


def _sections(one: SessionInfo, other: SessionInfo, *, shared: bool) -> tuple[StoredSection, ...]:
    """The sections of one session that another has, too, or has not; each once."""
    there = {section.digest for section in other.sections}
    found = {section.digest: section for section in one.sections if (section.digest in there) is shared}
    return tuple(found.values())


def _side(info: SessionInfo, other: SessionInfo, n: int) -> Side:
    turn, role, before, after = _parting(info.record, other.record, n)
    return Side(
        info=info,
        n_own_tokens=len(info.record.tokens) - n,
        turn=turn,
        role=role,
        text_before=before[-N_AROUND:],
        text_after=after[:N_AROUND],
        own_sections=_sections(info, other, shared=False),
    )


# ---------------------------------------------------------------- where they part


def _parting(record: SessionRecord, other: SessionRecord, n: int) -> tuple[int | None, str | None, str, str]:
    """Turn, role, and the text before and after the place where a session parts from another."""
    if record.chat is None:
        text = record.text or ""
        n_alike = _n_alike(text, other.text) if other.text is not None else 0
        return None, None, text[:n_alike], text[n_alike:]
    messages = record.chat.messages
    theirs = other.chat.messages if other.chat is not None else ()
    index = _first_other(messages, theirs)
    n_alike = 0
    if index == len(messages) == len(theirs):  # the same words, perhaps as other tokens
        index = next((i for i, message in enumerate(messages) if message.p1 > n), index)
    elif index < min(len(messages), len(theirs)) and messages[index].role == theirs[index].role:
        n_alike = _n_alike(messages[index].content, theirs[index].content)
    if index == len(messages):
        return None, None, messages[-1].content if messages else "", ""
    content = messages[index].content
    turn = 1 + sum(message.role == "assistant" for message in messages[:index])
    return turn, messages[index].role, content[:n_alike], content[n_alike:]


def _first_other(messages: Sequence[Message], theirs: Sequence[Message]) -> int:
    """The index of the first message that is another one, or of the first behind the shorter conversation."""
    n = min(len(messages), len(theirs))
    return next((i for i in range(n) if _words(messages[i]) != _words(theirs[i])), n)


def _words(message: Message) -> tuple[str, str]:
    return message.role, message.content


def _n_alike(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# ---------------------------------------------------------------- what else differs


def _differences(a: SessionRecord, b: SessionRecord) -> Iterator[Difference]:
    """Fields with other values, model and memory settings first."""
    if a.kind != b.kind:
        yield Difference(field="kind", a=a.kind.value, b=b.kind.value)
    for group in ("identity", "settings", "versions", "sampling"):
        one, other = getattr(a, group), getattr(b, group)
        for field in dataclasses.fields(one):
            values = getattr(one, field.name), getattr(other, field.name)
            if values[0] != values[1]:
                yield Difference(field=f"{group}.{field.name}", a=values[0], b=values[1])
    if (a.chat is None) != (b.chat is None):
        words = ["raw text" if record.chat is None else "a conversation" for record in (a, b)]
        yield Difference(field="form", a=words[0], b=words[1])
    elif a.chat is not None and b.chat is not None and a.chat.template_digest != b.chat.template_digest:
        yield Difference(field="chat.template_digest", a=a.chat.template_digest, b=b.chat.template_digest)
