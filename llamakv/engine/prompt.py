"""Chat templates, and how a turn becomes the text that still has to be read.

History is never tokenised again unless the template itself rewrites it. A turn renders the template for the old
messages and for the new ones, both now, and what the new text adds behind the old one is all that is tokenised. The
old text is only a way to find that place: the tokens already read stay as they are, even where they are not the ones
the tokeniser would choose today.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from llamakv.errors import UsageError
from llamakv.records import Message

_GAP = "\u2063llamakv\u2063"
"""Stands for the text a user has yet to write; two invisible separators that templates do not trim."""

_BETWEEN = "\n\n"
"""What stands between an open message (a document) and what continues it (a question about it)."""


def template_digest(source: str) -> str:
    """SHA-256 hex digest of a template's text."""
    return hashlib.sha256(source.encode()).hexdigest()


class ChatTemplate:
    """A model's own Jinja chat template, run in a sandbox with the names such templates expect.

    ``now_s`` is what the template takes for the present (seconds since the epoch, UTC): a session passes the time it
    was made, so that a template that writes today's date renders the same text tomorrow.
    """

    def __init__(self, source: str, *, bos: str, eos: str, now_s: float) -> None:
        self.source = source
        self.digest = template_digest(source)
        self._names = {"bos_token": bos, "eos_token": eos}
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        moment = datetime.datetime.fromtimestamp(now_s, datetime.UTC)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = moment.strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UsageError(
                f"the model's chat template cannot be read: {error}", hint="use --raw to send text as it is"
            ) from error

    def render(self, messages: Sequence[Message], *, open_reply: bool) -> str:
        """The text of a conversation; with ``open_reply`` it ends where the assistant is to speak.

        Raises:
            UsageError: the template refuses these messages (roles that do not alternate, say).
        """
        turns = [{"role": message.role, "content": message.content} for message in merge_open(messages)]
        try:
            return self._template.render(messages=turns, add_generation_prompt=open_reply, **self._names)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise UsageError(
                f"the model's chat template refuses these messages: {error}",
                hint="use --raw to send text as it is",
            ) from error

    def render_open(self, messages: Sequence[Message]) -> str:
        """The text of a conversation up to the middle of its last message, which somebody is still writing."""
        last = messages[-1]
        whole = self.render([*messages[:-1], replace(last, content=last.content + _GAP)], open_reply=True)
        before, gap, _ = whole.partition(_GAP)
        if not gap:
            raise UsageError("the model's chat template leaves the user's message out", hint="use --raw")
        return before


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def merge_open(messages: Sequence[Message]) -> list[Message]:
    """The messages as a template is to see them: an open message and what continues it are one."""
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1].is_open and message.role == merged[-1].role:
            before = merged.pop()
            between = _BETWEEN if before.content else ""
            message = replace(message, content=before.content + between + message.content, p0=before.p0)
        merged.append(message)
    return merged


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text to read, up to the end of message ``index``; tokenised by itself, so that the message's range is known."""

    index: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """How to go on: keep the first ``n_keep`` tokens, then read the pieces: messages from ``first_new`` on.

    ``replace_pending`` says that the last kept token is an end-of-reply token which the pieces write again.
    ``rewritten_from`` is the index of the first old message that has to be read again, None if all stay as read.
    """

    n_keep: int
    pieces: tuple[Piece, ...]
    first_new: int = 0
    replace_pending: bool = False
    rewritten_from: int | None = None


def plan_turn(
    template: ChatTemplate,
    old: Sequence[Message],
    new: Sequence[Message],
    *,
    n_tokens: int,
    ends_with_end_token: bool,
) -> TurnPlan:
    """Find what of ``new`` (a conversation that wants a reply) has been read already as ``old``.

    ``n_tokens`` tokens have been read in all. Where the template writes the old messages in another way now than it
    did then (it drops earlier thinking, or the system prompt changed), the plan goes back to the last reply whose
    start both have in common, or to the very beginning.
    """
    text = template.render(new, open_reply=True)
    if old and n_tokens > 0:
        for read in _texts_as_read(template, old):
            if text.startswith(read):
                first = min(len(old), len(new) - 1)
                return TurnPlan(
                    n_keep=n_tokens,
                    pieces=_cut_at_messages(template, new, text, first=first, start=len(read)),
                    first_new=first,
                    replace_pending=ends_with_end_token and old[-1].role == "assistant",
                )
        for index in range(len(old) - 1, 0, -1):
            if old[index].role == "assistant" and old[index].p0 > 0:
                read = template.render(old[:index], open_reply=True)
                if text.startswith(read):
                    pieces = _cut_at_messages(template, new, text, first=index, start=len(read))
                    return TurnPlan(n_keep=old[index].p0, pieces=pieces, first_new=index, rewritten_from=index)
    pieces = _cut_at_messages(template, new, text, first=0, start=0)
    return TurnPlan(n_keep=0, pieces=pieces, rewritten_from=0 if old and n_tokens > 0 else None)


def plan_open(template: ChatTemplate, messages: Sequence[Message]) -> TurnPlan:
    """Read a conversation up to the middle of its last message, which somebody is still writing."""
    text = template.render_open(messages)
    return TurnPlan(n_keep=0, pieces=_cut_at_messages(template, messages, text, first=0, start=0))


def plan_again(template: ChatTemplate, messages: Sequence[Message]) -> TurnPlan:
    """Read a conversation that ends with a reply (or with an open message) from the beginning, wanting no reply."""
    if messages[-1].role != "assistant":
        return replace(plan_open(template, messages), rewritten_from=0)
    text = template.render(messages[:-1], open_reply=True)
    pieces = _cut_at_messages(template, messages[:-1], text, first=0, start=0)
    last = Piece(index=len(messages) - 1, text=messages[-1].content)
    return TurnPlan(n_keep=0, pieces=(*pieces, last), rewritten_from=0)


def _texts_as_read(template: ChatTemplate, old: Sequence[Message]) -> list[str]:
    """The texts that the tokens read so far may be, best guess first."""
    last = old[-1]
    if last.is_open:
        return [template.render_open(old)]
    if last.role != "assistant":
        return [template.render(old, open_reply=last.role != "system")]
    before, content = template.render(old[:-1], open_reply=True), last.content
    return [before + way for way in (content, content.rstrip(), content.lstrip(), content.strip())]


def _cut_at_messages(
    template: ChatTemplate, new: Sequence[Message], text: str, *, first: int, start: int
) -> tuple[Piece, ...]:
    """Cut ``text[start:]`` where messages from ``first`` on end, as far as the template shows where that is."""
    pieces: list[Piece] = []
    for index in range(first, len(new) - 1):
        opens_reply = new[index + 1].role == "assistant"
        if new[index].is_open or (not opens_reply and new[index].role != "system"):
            continue
        try:
            before = template.render(new[: index + 1], open_reply=opens_reply)
        except UsageError:  # templates may refuse a part of a conversation: its messages are then not told apart
            continue
        if len(before) > start and text.startswith(before):
            pieces.append(Piece(index=index, text=text[start : len(before)]))
            start = len(before)
    return (*pieces, Piece(index=len(new) - 1, text=text[start:]))
