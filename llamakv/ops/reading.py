"""The template a conversation is read through, and the way from planned text to tokens and messages' places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llamakv.engine.prompt import ChatTemplate, Piece, TurnPlan
from llamakv.errors import UsageError
from llamakv.ops.opening import OpenModel
from llamakv.records import Chat, Message
from llamakv.store.session_file import SessionInfo


def chat_of(info: SessionInfo) -> Chat:
    """The conversation a session holds.

    Raises:
        UsageError: it holds raw text.
    """
    if info.record.chat is None:
        raise UsageError(
            f"{info.path} holds raw text, not a conversation", hint=f"continue it with: llamakv load {info.path}"
        )
    return info.record.chat


def template_of(opened: OpenModel, stored: str | None, *, now_s: float) -> ChatTemplate:
    """The stored chat template, or else the model's.

    Raises:
        UsageError: there is none.
    """
    source = stored if stored is not None else opened.info.template
    if source is None:
        raise UsageError(
            f"the model {opened.info.name} has no chat template, so it cannot hold a conversation",
            hint="continue raw text instead: llamakv save --raw -f FILE REF, then llamakv load REF",
        )
    return ChatTemplate(source, bos=opened.info.bos, eos=opened.info.eos, now_s=now_s)


def tokenise(opened: OpenModel, pieces: Sequence[Piece], *, at_start: bool) -> list[tuple[int, list[int]]]:
    """Token ids of each piece, with the index of the message it ends. ``at_start``: the first piece begins the
    sequence; the model's start token is added there unless the text begins with it.

    Raises:
        UsageError: there is no token in any of them.
    """
    found: list[tuple[int, list[int]]] = []
    for piece in pieces:
        is_first = at_start and not found
        add_special = is_first and not (opened.info.bos and piece.text.startswith(opened.info.bos))
        tokens = opened.model.tokenize(piece.text, add_special=add_special, parse_special=True)
        found.append((piece.index, tokens))
    if not any(tokens for _, tokens in found):
        raise UsageError("the text is empty: it gives no token")
    return found


def with_system(messages: tuple[Message, ...], system: tuple[Message, ...]) -> tuple[Message, ...]:
    """A conversation with another system prompt (none, where ``system`` is empty)."""
    rest = messages[1:] if messages and messages[0].role == "system" else messages
    return (*system, *rest)


def placed(
    opened: OpenModel,
    wanted: Sequence[Message],
    plan: TurnPlan,
    pieces: Sequence[tuple[int, list[int]]],
    *,
    end: int,
    time_s: float,
) -> tuple[Message, ...]:
    """The messages with the token ranges they were read at: those a plan keeps as they are keep theirs, the last one
    ends at ``end``. Messages that no piece tells apart from a later one get an empty range before it. Where the end
    token of the reply before gave way to other text, that reply ends before it: going back to it must not leave that
    text behind. Those that were never read before get ``time_s``."""
    first = next(tokens[0] for _, tokens in pieces if tokens)
    end_gives_way = plan.replace_pending and not opened.model.is_end(first)
    index = plan.first_new
    messages = [m if m.p1 or m.time_s is not None else replace(m, time_s=time_s) for m in wanted]
    begin, position = plan.n_keep - end_gives_way, plan.n_keep - plan.replace_pending
    if end_gives_way:
        messages[index - 1] = replace(messages[index - 1], p1=begin)
    for last, tokens in pieces:
        for i in range(index, last):
            messages[i] = replace(messages[i], p0=begin, p1=begin)
        begun = plan.rewritten_from is None and messages[last].p1 > messages[last].p0  # one that was left open
        position += len(tokens)
        messages[last] = replace(messages[last], p0=messages[last].p0 if begun else begin, p1=position)
        index, begin = last + 1, position
    messages[-1] = replace(messages[-1], p1=end)
    return tuple(messages)
