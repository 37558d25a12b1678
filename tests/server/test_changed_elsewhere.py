"""What other processes do to the sessions that a server knows, and what it makes of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from llamakv.server.service import LlamaService
from llamakv.store.session_file import read_session
from tests.ops.driver import Driver
from tests.server.service_driver import Heard, answer_to, chat, open_for
from tests.server.test_service import run
from tests.server.test_telling_apart import check_fresh

APPLES, HORSES = "tell me of red apples", "tell me of big horses"  # of as many tokens


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def run_two(model: Path, store: Path, act: Callable[[LlamaService, LlamaService], Awaitable[None]]) -> None:
    """Have two servers over one store."""
    with open_for(model, store) as here, open_for(model, store) as elsewhere:

        async def both(here: LlamaService) -> None:
            try:
                await act(here, elsewhere)
            finally:
                await elsewhere.stop(0.0)

        run(here, both)


async def ask_of_horses(service: LlamaService, reply: str) -> None:
    await answer_to(service, chat(HORSES, reply, "and then?"))


async def resume(service: LlamaService, reply: str) -> None:
    line = await service.resume("notes", "")
    assert (line.first_text, line.n_cells_live) == (HORSES, line.n_tokens - 1)


async def ask_of_apples(service: LlamaService, reply: str) -> None:
    await answer_to(service, chat(APPLES))


@pytest.mark.parametrize("first", [ask_of_apples, ask_of_horses, resume])
def test_a_session_made_anew_under_a_known_name_is_not_taken_for_the_one_before(
    model_path: Path, store: Path, first: Callable[[LlamaService, str], Awaitable[None]]
) -> None:
    async def act(here: LlamaService, elsewhere: LlamaService) -> None:
        await answer_to(elsewhere, chat(APPLES, session="notes"))
        before = await elsewhere.save("notes", None, "")
        assert [line.name for line in await here.sessions("")] == ["notes"]
        await elsewhere.delete("notes", "")
        reply = (await answer_to(elsewhere, chat(HORSES, session="notes"))).text
        after = await elsewhere.save("notes", None, "")
        assert before.n_tokens == after.n_tokens
        await first(here, reply)
        await check_fresh(here, chat(APPLES))

    run_two(model_path, store, act)


def test_a_session_that_went_on_elsewhere_goes_on_here_under_its_name(model_path: Path, store: Path) -> None:
    async def act(here: LlamaService, elsewhere: LlamaService) -> None:
        said = ["hello there", (await answer_to(elsewhere, chat("hello there", session="notes"))).text]
        await elsewhere.save("notes", None, "")
        assert [line.n_turns for line in await here.sessions("")] == [1]
        said.append("and then?")
        said.append((await answer_to(elsewhere, chat(*said, session="notes"))).text)
        await elsewhere.save("notes", None, "")
        await answer_to(here, chat(*said, "why?", session="notes"))
        await here.save("notes", None, "")

    run_two(model_path, store, act)
    assert [path.name for path in store.glob("*.bin")] == ["notes.bin"]
    saved = read_session(store / "notes.bin").record.chat
    assert saved is not None
    assert [one.content for one in saved.messages if one.role == "user"] == ["hello there", "and then?", "why?"]


def test_what_somebody_else_saved_meanwhile_is_left_alone(model_path: Path, store: Path, tmp_path: Path) -> None:
    heard = Heard()

    async def act(service: LlamaService) -> None:
        one = await answer_to(service, chat("hello there", session="notes"))
        await service.save("notes", None, "")
        with Driver(model_path, tmp_path).resume(store / "notes.bin") as conversation:
            conversation.send("from elsewhere", heard.reporter)
        theirs = (store / "notes.bin").read_bytes()
        await answer_to(service, chat("hello there", one.text, "and then?", session="notes"))
        await service.save("notes", None, "")
        assert (store / "notes.bin").read_bytes() == theirs
        assert (store / "notes-2.bin").exists()
        assert "notes-2" in {line.name for line in await service.sessions("")}

    with open_for(model_path, store, heard) as service:
        run(service, act)


def test_what_is_saved_aside_takes_no_name_of_another_conversation(model_path: Path, store: Path) -> None:
    async def act(here: LlamaService, elsewhere: LlamaService) -> None:
        await answer_to(here, chat(APPLES, session="notes"))
        await answer_to(here, chat("something quite different", session="notes-2"))
        await answer_to(elsewhere, chat(HORSES, session="notes"))
        await elsewhere.save("notes", None, "")
        await here.save("notes", None, "")
        lines = await here.sessions("")
        assert {line.name: line.first_text for line in lines} == {
            "notes": HORSES,
            "notes-2": "something quite different",
            "notes-3": APPLES,
        }
        for line in lines:
            await here.delete(line.name, "")
        assert here.counts.n_cells == 0

    run_two(model_path, store, act)
