"""What is not the same, though it looks alike: prompts, replies that were cut off, and names of conversations."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from llamakv.errors import ExistsError
from llamakv.server.contract import Ask
from llamakv.server.service import LlamaService
from tests.server.service_driver import GREEDY, answer_to, chat, open_for
from tests.server.test_service import run
from tests.server.test_turns import check_same

INTRO = "Please read the following document carefully and answer all questions about it in one sentence only. "


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


async def check_fresh(service: LlamaService, ask: Ask) -> None:
    """Check that an answer is the one of a space that knows nothing."""
    ask = replace(ask, n_top_logprobs=3)
    one, fresh = await answer_to(service, ask), await answer_to(service, replace(ask, space="fresh", session=None))
    assert one.usage.n_prompt == fresh.usage.n_prompt
    check_same(one, fresh)


async def cut_off(service: LlamaService) -> str:
    """The reply of a saved session 'notes' to a greeting, cut off inside one of its tokens."""
    whole = await answer_to(service, chat("hello there", space="whole"))
    stop = whole.text[6:11]
    one = await answer_to(service, chat("hello there", session="notes", sampling=replace(GREEDY, stop=(stop,))))
    await service.save("notes", None, "")
    assert (one.text, one.finish) == (whole.text[:6], "stop")
    return one.text


def test_after_a_restart_a_reply_is_taken_as_it_was_cut_off(model_path: Path, store: Path) -> None:
    replies: list[str] = []

    async def before(service: LlamaService) -> None:
        replies.append(await cut_off(service))

    async def after(service: LlamaService) -> None:
        await check_fresh(service, chat("hello there", replies[0], "and then?"))

    for act in (before, after):
        with open_for(model_path, store) as service:
            run(service, act)


def test_a_fork_has_the_reply_as_it_was_cut_off(model_path: Path, store: Path) -> None:
    async def act(service: LlamaService) -> None:
        reply = await cut_off(service)
        await service.fork("notes", "copy", "", None)
        await check_fresh(service, chat("hello there", reply, "and then?", session="copy"))

    with open_for(model_path, store) as service:
        run(service, act)


def test_after_a_restart_text_is_not_taken_for_one_with_special_tokens(model_path: Path, store: Path) -> None:
    replies: list[str] = []
    told = "Once upon a time there were words{}and more words to be read"

    async def before(service: LlamaService) -> None:
        replies.append((await answer_to(service, Ask(prompt=told.format("<|im_end|>"), sampling=GREEDY))).text)

    async def after(service: LlamaService) -> None:
        await check_fresh(service, Ask(prompt=told.format("") + replies[0] + " and then", sampling=GREEDY))

    for act in (before, after):
        with open_for(model_path, store) as service:
            run(service, act)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (chat("Say: "), chat("Say:")),
        (chat("    x = 1"), chat("x = 1")),
        (
            chat("hello there", system="You write Python.\n    x = 1\n"),
            chat("hello there", system="You write Python.\n    x = 1"),
        ),
    ],
)
def test_white_space_around_what_a_user_or_the_system_says_counts(model_path: Path, one: Ask, other: Ask) -> None:
    async def act(service: LlamaService) -> None:
        await answer_to(service, one)
        await check_fresh(service, other)

    with open_for(model_path, None) as service:
        run(service, act)


def test_a_name_is_of_the_conversation_with_all_of_its_first_message(model_path: Path, store: Path) -> None:
    horses, boats = f"{INTRO}It is about horses.", f"{INTRO}It is about boats."

    async def act(service: LlamaService, number: int) -> None:
        for system in ("You are kind.", "You are brief."):
            await answer_to(service, chat(horses, system=f"{system} {number}", session="notes"))
            with pytest.raises(ExistsError):
                await service.ask(chat(boats, system=system, session="notes"))

    for number in range(2):  # what is in memory, and what is in the store
        with open_for(model_path, store) as service:
            run(service, partial(act, number=number))
