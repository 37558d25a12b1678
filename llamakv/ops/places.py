"""Places inside a session: after a turn, or at a position, and the session as it was there. Where a message ends no
engine is needed for that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llamakv.engine.text import join
from llamakv.errors import NotFoundError, UsageError
from llamakv.records import Message, SessionRecord
from llamakv.store.session_file import SessionInfo, sections_up_to

if TYPE_CHECKING:
    from llamakv.engine.contract import Model
    from llamakv.engine.prompt import ChatTemplate

_TURN = re.compile(r"turn(\d{1,18})", re.ASCII)
_POSITION = re.compile(r"\d{1,18}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What branches begin with: the first tokens of a session, and their words: ``messages``, or ``text`` where it is
    raw."""

    tokens: tuple[int, ...]
    messages: tuple[Message, ...]
    text: str | None


def check_place(at: str) -> None:
    """Refuse what cannot name a place.

    Raises:
        UsageError: neither ``turnN`` nor a position.
    """
    if not _TURN.fullmatch(at) and not _POSITION.fullmatch(at):
        raise UsageError(f"{at!r} is not a place in a session", hint="turn3 is after the third reply, 1200 a position")


def whole(record: SessionRecord) -> Base:
    """A session as it is."""
    messages = record.chat.messages if record.chat is not None else ()
    return Base(tokens=record.tokens, messages=messages, text=record.text)


def position_of(record: SessionRecord, at: str) -> int:
    """How many of a session's tokens come before a place: ``turnN`` is after the N-th reply (``turn0``: before the
    first message), a number is that many tokens.

    Raises:
        UsageError: no place at all, or raw text has no turns.
        NotFoundError: the session does not reach that far.
    """
    check_place(at)
    turn = _TURN.fullmatch(at)
    n_tokens = _end_of_turn(record, int(turn[1])) if turn is not None else int(at)
    if n_tokens > len(record.tokens) or n_tokens == 0:
        raise NotFoundError(
            f"position {n_tokens:,} is not in the session: it has {len(record.tokens):,} tokens", position=n_tokens
        )
    return n_tokens


def cut_at(record: SessionRecord, at: str, model: Model, template: ChatTemplate | None) -> Base:
    """A session as it was at a place (``position_of``). A message that is cut there keeps its beginning. ``template``
    is the session's, None where it is raw text.

    Raises:
        UsageError: no place at all, or one within the text of the chat template.
        NotFoundError: the session does not reach that far.
    """
    n_tokens = position_of(record, at)
    tokens = record.tokens[:n_tokens]
    if record.chat is None or template is None:
        return Base(tokens=tokens, messages=(), text=join(model.token_bytes(token) for token in tokens))
    return Base(tokens=tokens, messages=_messages_at(record, n_tokens, model, template), text=None)


def cut_between_messages(record: SessionRecord, at: str) -> Base:
    """A session as it was at a place where one of its messages ends, or as it is, if that is its end; what is between
    could be told with its model only.

    Raises:
        UsageError: the place is inside a message or raw text; the hint names places nearby.
        NotFoundError: the session does not reach that far.
    """
    n_tokens = position_of(record, at)
    if n_tokens == len(record.tokens):
        return whole(record)
    if record.chat is None:
        raise UsageError(
            f"position {n_tokens:,} is inside raw text, which cannot be cut without the model",
            hint="only all of it can be taken: leave the place out",
        )
    messages = _messages_before(record.chat.messages, n_tokens)
    if messages is None:
        raise UsageError(
            f"position {n_tokens:,} is inside a message, which cannot be cut without the model",
            hint=_nearby(record.chat.messages, n_tokens),
        )
    return Base(tokens=record.tokens[:n_tokens], messages=messages, text=None)


def info_at(info: SessionInfo, at: str | None) -> SessionInfo:
    """What a session's file would say had it been saved at a place (None: as it is). Its sections bring back only the
    first cells where the memory cannot be cut there (``n_cells_held``).

    Raises:
        UsageError, NotFoundError: as ``cut_between_messages``.
    """
    if at is None:
        return info
    record = info.record
    base = cut_between_messages(record, at)
    chat = None if record.chat is None else replace(record.chat, messages=base.messages)
    sections = sections_up_to(record.kind, info.sections, len(base.tokens) - 1)
    return replace(info, record=replace(record, tokens=base.tokens, chat=chat, text=base.text), sections=sections)


def place_at(record: SessionRecord, n_tokens: int) -> str:
    """The best name for a position: ``turn2`` where a reply ends, else the number of tokens before it."""
    replies = [m for m in (record.chat.messages if record.chat is not None else ()) if m.role == "assistant"]
    ends = [number for number, reply in enumerate(replies, 1) if reply.p1 == n_tokens and not _has_no_place(reply)]
    return f"turn{ends[-1]}" if ends else str(n_tokens)


def _end_of_turn(record: SessionRecord, number: int) -> int:
    messages = record.chat.messages if record.chat is not None else ()
    if record.chat is None:
        raise UsageError("raw text has no turns", hint="name a position: --at 1200")
    replies = [message for message in messages if message.role == "assistant"]
    if number > len(replies):
        raise NotFoundError(f"there is no turn {number} in the session: it has {len(replies)}", turn=number)
    if number > 0:
        if _has_no_place(replies[number - 1]):
            raise UsageError(
                f"turn {number} was read together with what follows: where it ends is not known",
                hint=_nearby(messages, replies[number - 1].p1),
            )
        return replies[number - 1].p1
    system = next((message for message in messages if message.role == "system" and message.p1 > 0), None)
    if system is None:
        raise UsageError("there is nothing before turn 1: the session has no system prompt")
    return system.p1


def _messages_at(record: SessionRecord, n_tokens: int, model: Model, template: ChatTemplate) -> tuple[Message, ...]:
    assert record.chat is not None
    messages = record.chat.messages
    before = _messages_before(messages, n_tokens)
    if before is not None:
        return before
    kept = [message for message in messages if message.p1 <= n_tokens]
    cut = next((message for message in messages if message.p0 < n_tokens < message.p1), None)
    content = None if cut is None else _content_at(record, cut, n_tokens, model, template)
    if cut is None or content is None:
        raise UsageError(
            f"position {n_tokens} lies within the chat template's own text, not in a message",
            hint=_nearby(messages, n_tokens),
        )
    finish = "length" if cut.role == "assistant" else None
    # what is cut off a user's message or a system prompt is to be written on
    return (*kept, replace(cut, content=content, p1=n_tokens, finish=finish, is_open=cut.role != "assistant"))


def _messages_before(messages: Sequence[Message], n_tokens: int) -> tuple[Message, ...] | None:
    """The messages that end before a position, if one ends right there; else None."""
    kept = [message for message in messages if message.p1 <= n_tokens]
    while kept and kept[-1].p1 == n_tokens and _has_no_place(kept[-1]):
        kept.pop()  # its words come behind the position
    return tuple(kept) if kept and kept[-1].p1 == n_tokens else None


def _has_no_place(message: Message) -> bool:
    """Whether a message was read together with the one that follows it, so that nobody knows where it ends."""
    return message.p0 == message.p1 and bool(message.content)


def _content_at(
    record: SessionRecord, message: Message, n_tokens: int, model: Model, template: ChatTemplate
) -> str | None:
    """The beginning of a message's content that the tokens up to ``n_tokens`` hold; None where it has not begun, or
    is over."""
    assert record.chat is not None
    if message.role == "assistant":
        return join(model.token_bytes(token) for token in record.tokens[message.p0 : n_tokens])
    read = join(model.token_bytes(token, special=True) for token in record.tokens[message.p0 : message.p1])
    there = join(model.token_bytes(token, special=True) for token in record.tokens[message.p0 : n_tokens])
    there = there.rstrip("\ufffd")  # a character of which a part is there
    messages = record.chat.messages
    before = template.render_open([*messages[: messages.index(message)], replace(message, content="")])
    for content in (message.content, message.content.strip()):
        start = _start_of(content, read, before)
        if start is not None and read.startswith(there) and 0 < len(there) - start < len(content):
            return content[: len(there) - start]
    return None


def _start_of(content: str, read: str, before: str) -> int | None:
    """Where a message's content begins in what it was read as, ``before`` being all that the template writes before
    it: the content may well be a word of the template's own."""
    start = read.find(content)
    while start >= 0:
        if before.endswith(read[:start]):
            return start
        start = read.find(content, start + 1)
    return None


def _nearby(messages: Sequence[Message], n_tokens: int) -> str | None:
    turn = 0
    places = []
    for message in messages:
        turn += message.role == "assistant"
        if _has_no_place(message):
            continue
        places.append((abs(message.p1 - n_tokens), message.p1, f"turn{turn}" if message.role == "assistant" else ""))
    nearest = sorted(places)[:2]
    if not nearest:
        return None
    return "near it are " + " and ".join(f"{place} ({name})" if name else str(place) for _, place, name in nearest)
