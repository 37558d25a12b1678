"""What clients send to harm others, and what comes of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from llamakv.errors import NoRoomError
from llamakv.server.contract import Ask, ChatMessage
from llamakv.server.service import LlamaService
from tests.server.service_driver import ENDLESS, GREEDY, answer_to, chat, open_for
from tests.server.test_service import run, until


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = tuple(ChatMessage(role="user", content="x") for _ in range(9000))
    with open_for(models("M"), None) as service:
        monkeypatch.setattr(service._opened.model, "tokenize", lambda *_, **__: pytest.fail("it was tokenised"))
        for prompt, n_least in (("<|im_end|>" * 100_000, 83_334), (messages, 9000)):
            with pytest.raises(NoRoomError, match=f"{n_least:,} tokens at least") as refused:
                asyncio.run(answer_to(service, Ask(prompt=prompt, sampling=GREEDY)))
            assert refused.value.fields["limit"] == 4096


def test_long_prompts_do_not_keep_others_waiting(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "the text of somebody else " * 3000
    may_go_on = threading.Event()
    with open_for(models("M"), None, n_cells=1 << 20) as service:
        model = service._opened.model
        real = model.tokenize

        def slow(given: str, **options: bool) -> list[int]:
            if len(given) >= len(text):
                may_go_on.wait()
            return real(given, **options)

        monkeypatch.setattr(model, "tokenize", slow)

        async def both() -> None:
            long = [asyncio.create_task(service.ask(Ask(prompt=text, sampling=GREEDY))) for _ in range(8)]
            await asyncio.sleep(0.05)
            try:
                answered = await asyncio.wait_for(answer_to(service, chat("hello", system=None)), 30)
            finally:
                may_go_on.set()
                ended = await asyncio.gather(*long, return_exceptions=True)
            assert answered.finish == "length"
            assert [type(one) for one in ended] == [NoRoomError] * 8

        asyncio.run(both())


def test_who_saves_on_a_slow_disk_does_not_keep_others_waiting(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()

    async def act(service: LlamaService) -> None:
        for name in ("one", "two"):
            await answer_to(service, chat("hello there", system=name, session=name))
        real = service._saver.save
        monkeypatch.setattr(service._saver, "save", lambda one: (may_go_on.wait(), real(one)))
        saves = [asyncio.create_task(service.save(name, None, "")) for name in ("one", "two")]
        await asyncio.sleep(0)
        try:
            answered = await asyncio.wait_for(answer_to(service, chat("a prompt that is cold")), 30)
        finally:
            may_go_on.set()
            lines = await asyncio.gather(*saves)
        assert answered.finish == "length"
        assert [line.is_saved for line in lines] == [True, True]

    with open_for(model_path, tmp_path / "store") as service:
        run(service, act)


async def ask_for_many_cells(service: LlamaService) -> None:
    await answer_to(service, Ask(prompt=tuple(range(20, 180)), sampling=GREEDY, space="ann"))


async def resume(service: LlamaService) -> None:
    await service.resume("notes", "ann")


@pytest.mark.parametrize("want_room", [ask_for_many_cells, resume])
def test_who_finds_no_room_is_told_nothing_of_what_others_have(
    model_path: Path, tmp_path: Path, want_room: Callable[[LlamaService], Awaitable[None]]
) -> None:
    async def act(service: LlamaService) -> None:
        await answer_to(service, chat("word " * 60, system=None, space="ann", session="notes"))
        await service.save("notes", None, "ann")
        await answer_to(service, chat("secret " * 20, system=None, space="bob", session="notes"))
        await service.pin("notes", "bob", pinned=True)
        with pytest.raises(NoRoomError) as refused:
            await want_room(service)
        needed = refused.value.fields["needed"]
        assert refused.value.message == f"{needed} tokens do not fit beside what is in memory"
        assert "used" not in refused.value.fields

    with open_for(model_path, tmp_path / "store", n_cells=200, n_sequences=4, prefix_share=0.9) as service:
        run(service, act)


def test_an_answer_that_is_left_while_it_waits_to_be_read_again_leaves_nothing(model_path: Path) -> None:
    async def act(service: LlamaService) -> None:
        leaving = await service.ask(chat("hello there", session="notes", sampling=ENDLESS))
        async for _ in leaving.pieces():
            break
        (job,) = leaving._jobs

        def send_back() -> bool:
            return job.run is not None and service._scheduler.pause(job.run) and service._engine.send_back([job])

        assert service._engine.call(send_back).result()
        leaving.cancel()
        await until(lambda: service.counts.n_active + service.counts.n_waiting == 0)
        assert service.counts.n_cells == 0
        assert (await answer_to(service, chat("hello there", session="notes"))).finish == "length"

    with open_for(model_path, None) as service:
        run(service, act)
