"""Places inside a session: after a turn, or at a position, and the session as it was there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llamakv.engine.contract import Model
from llamakv.engine.prompt import ChatTemplate
from llamakv.engine.text import join
from llamakv.errors import NotFoundError, UsageError
from llamakv.records import Message, SessionRecord

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


def cut_at(record: SessionRecord, at: str, model: Model, template: ChatTemplate | None) -> Base:
    """A session as it was at a place: ``turnN`` is after the N-th reply (``turn0``: before the first message),
    a number is that many of its tokens. A message that is cut there keeps its beginning. ``template`` is the session's,
    None where it is raw text.

    Raises:
        UsageError: no place at all, or one within the text of the chat template.
        NotFoundError: the session does not reach that far.
    """
    check_place(at)
    turn = _TURN.fullmatch(at)
    n_tokens = _end_of_turn(record, int(turn[1])) if turn is not None else int(at)
    if n_tokens > len(record.tokens) or n_tokens == 0:
        raise NotFoundError(
            f"position {n_tokens:,} is not in the session: it has {len(record.tokens):,} tokens", position=n_tokens
        )
    tokens = record.tokens[:n_tokens]
    if record.chat is None or template is None:
        return Base(tokens=tokens, messages=(), text=join(model.token_bytes(token) for token in tokens))
    return Base(tokens=tokens, messages=_messages_at(record, n_tokens, model, template), text=None)


def _end_of_turn(record: SessionRecord, number: int) -> int:
    messages = record.chat.messages if record.chat is not None else ()
    if record.chat is None:
        raise UsageError("raw text has no turns", hint="name a position: --at 1200")
    ends = [message.p1 for message in messages if message.role == "assistant"]
    if number > len(ends):
        raise NotFoundError(f"there is no turn {number} in the session: it has {len(ends)}", turn=number)
    if number > 0:
        return ends[number - 1]
    system = next((message for message in messages if message.role == "system" and message.p1 > 0), None)
    if system is None:
        raise UsageError("there is nothing before turn 1: the session has no system prompt")
    return system.p1


def _messages_at(record: SessionRecord, n_tokens: int, model: Model, template: ChatTemplate) -> tuple[Message, ...]:
    assert record.chat is not None
    messages = record.chat.messages
    kept = [message for message in messages if message.p1 <= n_tokens]
    if kept and kept[-1].p1 == n_tokens:
        return tuple(kept)
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


def _nearby(messages: Sequence[Message], n_tokens: int) -> str:
    turn = 0
    places = []
    for message in messages:
        turn += message.role == "assistant"
        places.append((abs(message.p1 - n_tokens), message.p1, f"turn{turn}" if message.role == "assistant" else ""))
    nearest = sorted(places)[:2]
    return "near it are " + " and ".join(f"{place} ({name})" if name else str(place) for _, place, name in nearest)
