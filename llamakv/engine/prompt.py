"""Chat templates, and how a turn becomes the text that still has to be read.

History is never tokenised again. A turn renders the template for the old messages and for the new ones, both now, and
what the new text adds behind the old one is all that is tokenised. The old text is only a way to find that place: the
tokens already read stay as they are, even where they are not the ones the tokeniser would choose today.
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
        turns = [{"role": message.role, "content": message.content} for message in messages]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """How to go on: keep the first ``n_keep`` tokens, then read ``text``.

    ``replace_pending`` says that the last kept token is an end-of-reply token which ``text`` writes again.
    ``rewritten_from`` is the index of the first old message that has to be read again, None if all stay as read.
    """

    n_keep: int
    text: str
    replace_pending: bool = False
    rewritten_from: int | None = None


def with_user_text(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """The messages with the user's next words: a new message, or the rest of an open one."""
    if messages and messages[-1].is_open:
        return (*messages[:-1], replace(messages[-1], content=messages[-1].content + text, is_open=False))
    end = messages[-1].p1 if messages else 0
    return (*messages, Message(role="user", content=text, p0=end, p1=end))


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
    if not old or n_tokens == 0:
        return TurnPlan(n_keep=0, text=text)
    last = old[-1]
    if last.is_open:
        read = template.render_open(old)
        if text.startswith(read):
            return TurnPlan(n_keep=n_tokens, text=text[len(read) :])
    elif last.role == "assistant":
        before = template.render(old[:-1], open_reply=True)
        for content in (last.content, last.content.rstrip(), last.content.lstrip(), last.content.strip()):
            read = before + content
            if text.startswith(read):
                return TurnPlan(n_keep=n_tokens, text=text[len(read) :], replace_pending=ends_with_end_token)
    else:
        read = template.render(old, open_reply=True)
        if text.startswith(read):
            return TurnPlan(n_keep=n_tokens, text=text[len(read) :])
    return _plan_from_boundary(template, old, text)


def _plan_from_boundary(template: ChatTemplate, old: Sequence[Message], text: str) -> TurnPlan:
    for index in range(len(old) - 1, 0, -1):
        if old[index].role != "assistant" or old[index].p0 == 0:
            continue
        read = template.render(old[:index], open_reply=True)
        if text.startswith(read):
            return TurnPlan(n_keep=old[index].p0, text=text[len(read) :], rewritten_from=index)
    return TurnPlan(n_keep=0, text=text, rewritten_from=0)
