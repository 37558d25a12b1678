"""What clients send to harm others, and what comes of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from llamakv.errors import NoRoomError
from llamakv.server.contract import Ask, ChatMessage
from tests.server.service_driver import GREEDY, answer_to, chat, open_for


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
