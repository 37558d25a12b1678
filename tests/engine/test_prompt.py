"""Planning a turn: what of a conversation has been read, and where the rest begins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamakv.engine.prompt import ChatTemplate, plan_open, plan_turn
from llamakv.errors import UsageError
from llamakv.records import Message

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TRIMS = CHATML.replace("m.content }}", "m.content | trim }}")
DROPS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def template_of(source: str, now_s: float = 0.0) -> ChatTemplate:
    return ChatTemplate(source, bos="<s>", eos="</s>", now_s=now_s)


def said(*words: str, system: str | None = None) -> tuple[Message, ...]:
    """User and assistant in turn, ten tokens each."""
    roles = [*(["system"] if system is not None else []), *["user", "assistant"] * len(words)]
    contents = [*([system] if system is not None else []), *words]
    return tuple(
        Message(role=role, content=content, p0=10 * i, p1=10 * i + 10)
        for i, (role, content) in enumerate(zip(roles, contents, strict=False))
    )


def plan(template: ChatTemplate, old: tuple[Message, ...], new: tuple[Message, ...], ends: bool = True):
    return plan_turn(template, old, new, n_tokens=10 * len(old), ends_with_end_token=ends)


def test_a_first_turn_is_read_whole_with_the_system_prompt_by_itself() -> None:
    found = plan(template_of(CHATML), (), said("Hi.", system="Be kind."))
    assert [(p.index, p.text) for p in found.pieces] == [
        (0, "<|system|>Be kind.<|end|>\n"),
        (1, "<|user|>Hi.<|end|>\n<|assistant|>"),
    ]
    assert (found.n_keep, found.rewritten_from) == (0, None)


@pytest.mark.parametrize("ends", [True, False])
def test_a_next_turn_reads_only_what_is_new(ends: bool) -> None:
    found = plan(template_of(CHATML), said("Hi.", "Hello."), said("Hi.", "Hello.", "And?"), ends)
    assert [p.text for p in found.pieces] == ["<|end|>\n<|user|>And?<|end|>\n<|assistant|>"]
    assert (found.n_keep, found.replace_pending, found.rewritten_from) == (20, ends, None)


def test_a_reply_that_the_template_trims_counts_as_read() -> None:
    found = plan(template_of(TRIMS), said("Hi.", "  Hello. \n"), said("Hi.", "  Hello. \n", "And?"))
    assert (found.n_keep, found.rewritten_from) == (20, None)


def test_a_reply_that_the_template_rewrites_is_read_again_from_its_start() -> None:
    old = said("Hi.", "<think>hm</think>Hello.")
    found = plan(template_of(DROPS), old, (*old, *said("And?")))
    assert (found.n_keep, found.rewritten_from, found.replace_pending) == (10, 1, False)
    assert "".join(p.text for p in found.pieces) == "Hello.<|end|>\n<|user|>And?<|end|>\n<|assistant|>"


def test_only_the_last_thinking_is_read_again_when_earlier_ones_were() -> None:
    old = said("Hi.", "<think>a</think>One.", "So?", "<think>b</think>Two.")
    found = plan(template_of(DROPS), old, (*old, *said("And?")))
    assert (found.n_keep, found.rewritten_from) == (30, 3)


def test_another_system_prompt_reads_everything_again_in_pieces() -> None:
    old = said("Hi.", "Hello.", system="Old.")
    new = (replace(old[0], content="New."), *old[1:], Message(role="user", content="And?", p0=0, p1=0))
    found = plan(template_of(CHATML), old, new)
    assert (found.n_keep, found.rewritten_from) == (0, 0)
    assert [p.index for p in found.pieces] == [0, 1, 3]
    assert "".join(p.text for p in found.pieces) == template_of(CHATML).render(new, open_reply=True)


def test_an_open_message_is_continued_in_place() -> None:
    document = Message(role="user", content="Long text.", p0=0, p1=10, is_open=True)
    template = template_of(TRIMS)
    opened = plan_open(template, (document,))
    assert [p.text for p in opened.pieces] == ["<|user|>Long text."]
    found = plan(template, (document,), (document, Message(role="user", content="Why?", p0=0, p1=0)))
    assert [p.text for p in found.pieces] == ["\n\nWhy?<|end|>\n<|assistant|>"]
    assert (found.n_keep, found.replace_pending) == (10, False)


def test_a_date_in_a_template_is_the_day_the_session_was_made() -> None:
    template = template_of("{{ strftime_now('%Y-%m-%d') }}", now_s=86400.0 * 365)
    assert template.render((), open_reply=False) == "1971-01-01"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{% for x in 5 %}{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_a_template_that_fails_is_a_usage_error(source: str) -> None:
    with pytest.raises(UsageError, match="refuses these messages"):
        template_of(source).render(said("Hi."), open_reply=True)


def test_a_template_that_cannot_be_read_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        template_of("{% for %}")
