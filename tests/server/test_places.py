"""Recurrent and hybrid models: users who begin with the same system prompt read it once, also after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from llamakv.engine.llamacpp.kept import N_WORTH_WAITING
from llamakv.records import SectionKind
from llamakv.server.contract import Ask
from llamakv.server.service import LlamaService
from llamakv.store.session_file import read_session
from tests.server.load import check_nothing_is_left, serving
from tests.server.service_driver import ENDLESS, LONG, answer_to, chat, open_for
from tests.server.test_load import be_unsteady, learn_all, play_many, some_talks
from tests.server.test_service import run, until

N_USERS = 8


@pytest.fixture(scope="module", params=["MR", *(pytest.param(name, marks=pytest.mark.slow) for name in ("MH", "MH2"))])
def recurrent(request: pytest.FixtureRequest, models: Callable[[str], Path]) -> Path:
    return models(request.param)


async def n_system(service: LlamaService) -> int:
    """Tokens of the system message, as read by whoever comes first."""
    await answer_to(service, chat("who am I?", session="first"))
    messages = service._answers._conversations.get("", "first").messages
    return messages[0].p1


def test_users_with_one_system_prompt_and_other_questions_read_it_once(recurrent: Path) -> None:
    alone: list[str] = []

    async def one_by_one(service: LlamaService) -> None:
        for n in range(N_USERS):
            alone.append((await answer_to(service, chat(f"question {n}"))).text)
            for line in await service.sessions(""):
                await service.delete(line.name, "")
            assert (service.counts.n_cells, service.counts.n_live) == (0, 0)

    async def together(service: LlamaService) -> None:
        answers = await asyncio.gather(*(answer_to(service, chat(f"question {n}")) for n in range(N_USERS)))
        assert [one.text for one in answers] == alone
        cached = sorted(one.usage.n_cached for one in answers)
        later = await answer_to(service, chat("another question"))
        assert cached[0] == 0
        assert all(later.usage.n_cached - N_WORTH_WAITING < n <= later.usage.n_cached for n in cached[1:])
        assert later.usage.n_cached > len(LONG) // 4
        assert later.usage.source == "memory"
        sessions = await service.sessions("")
        assert len(sessions) == N_USERS + 1
        for line in sessions:
            await service.delete(line.name, "")
        assert (service.counts.n_cells, service.counts.n_live) == (0, 0)

    with open_for(recurrent, None) as service:
        run(service, one_by_one)
    with open_for(recurrent, None) as service:
        run(service, together)


def test_a_question_that_is_put_in_other_words_or_asked_again_begins_where_it_may(recurrent: Path) -> None:
    async def act(service: LlamaService) -> None:
        one = await answer_to(service, chat("hello there"))
        two = await answer_to(service, chat("hello there", one.text, "and then?"))
        n_two = two.usage.n_prompt
        again = await answer_to(service, chat("hello there", one.text, "and then?"))
        assert (again.text, again.usage.n_cached) == (two.text, n_two - 1)
        other = await answer_to(service, chat("hello there", one.text, "or something else?"))
        assert other.usage.n_cached >= one.usage.n_prompt + one.usage.n_generated - 1

    with open_for(recurrent, None) as service:
        run(service, act)


def test_a_text_that_begins_like_one_being_read_waits_for_that(recurrent: Path) -> None:
    async def act(service: LlamaService) -> None:
        asks = [Ask(prompt=f"{LONG} {n} is the number", sampling=chat("").sampling) for n in range(4)]
        answers = await asyncio.gather(*(answer_to(service, ask) for ask in asks))
        cached = sorted(one.usage.n_cached for one in answers)
        assert (cached[0], cached[1] > len(LONG) // 4) == (0, True)

    with open_for(recurrent, None) as service:
        run(service, act)


def test_what_a_user_who_went_away_had_read_goes_too(recurrent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamakv.server.saver.VISIT_S", 0.0)
    monkeypatch.setattr("llamakv.server.saver._IDLE_S", 0.01)

    async def act(service: LlamaService) -> None:
        answer = await service.ask(chat("hello there", sampling=ENDLESS))
        async for _ in answer.pieces():
            break
        answer.cancel()
        await until(lambda: service.counts.n_active + service.counts.n_waiting == 0)
        await until(lambda: service._scheduler.counts.n_cells == 0)

    with open_for(recurrent, None) as service:
        run(service, act)


def test_after_a_restart_the_system_prompt_comes_from_the_store(recurrent: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    places: list[int] = []
    texts: list[str] = []

    async def before(service: LlamaService) -> None:
        places.append(await n_system(service))
        texts.append((await answer_to(service, chat("a question", session="second"))).text)
        await service.delete("second", "")

    async def after(service: LlamaService) -> None:
        second = await answer_to(service, chat("a question"))
        assert (second.text, second.usage.n_cached, second.usage.source) == (texts[0], places[0], "store")
        third = await answer_to(service, chat("another question"))
        assert (third.usage.n_cached, third.usage.source) == (places[0], "memory")

    async def beside(service: LlamaService) -> None:
        await service.resume("first", "")  # it cannot be shared before its end
        other = await answer_to(service, chat("yet another"))
        assert (other.usage.n_cached, other.usage.source) == (places[0], "store")

    with open_for(recurrent, store) as service:
        run(service, before)
    sections = read_session(store / "first.bin").sections
    assert [section.p1 for section in sections if section.kind is SectionKind.TAIL][:-1] == places
    with open_for(recurrent, store) as service:
        run(service, after)
    with open_for(recurrent, store) as service:
        run(service, beside)
    tails = [
        section.digest
        for path in store.glob("*.bin")
        for section in read_session(path).sections
        if section.kind is SectionKind.TAIL and section.p1 == places[0]
    ]
    assert (len(tails), len(set(tails))) == (4, 1)  # of four sessions, and there once


@pytest.mark.slow
@pytest.mark.parametrize("n_cells", [3000, 30_000])
def test_many_users_some_of_whom_go_away_get_right_answers_and_leave_nothing(
    recurrent: Path, tmp_path: Path, n_cells: int
) -> None:
    talks = some_talks(8)
    book = learn_all(recurrent, tmp_path / "alone", talks, cold=True, flash_attn="off")

    async def be_many(url: str) -> None:
        is_over = asyncio.Event()
        unsteady = [asyncio.create_task(be_unsteady(url, talks, book, number, is_over)) for number in range(4)]
        await play_many(url, talks, book, for_s=5.0, n_clients=6)
        is_over.set()
        await asyncio.gather(*unsteady)

    with serving(recurrent, tmp_path / "many", "--flash-attn", "off", "--cells", n_cells) as server:
        asyncio.run(be_many(server.url))
        asyncio.run(check_nothing_is_left(server.url))
        counts = server.stop()["data"]["counts"]
    print(f"\n{dict(book.seen)}, noise {book.noise:.4f}, {counts}")
    assert book.wrong == []
    assert book.seen["left streams"] > 0
    assert counts["n_reused_memory"] > 10 * 1000
