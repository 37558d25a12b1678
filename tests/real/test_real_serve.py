"""A real model served to many: right answers, and what was read before is not read again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.real.text import story
from tests.server.load import (
    N_CLIENTS,
    Answer,
    Client,
    Talk,
    check_nothing_is_left,
    gap_where_they_part,
    noise_between,
    play_alone,
    serving,
)

pytestmark = pytest.mark.real

NOISE = 1.5
"""As the README has it for branches of a fork: how far logits may move where others are decoded beside them."""

PREFIX = story(89)  # a thousand tokens of SmolLM2
QUESTIONS = [
    "Who is the first person?",
    "What was painted? Answer in one sentence.",
    "Say no more than one word: is there a storm?",
    "Which places are named? " + story(6, seed=3),
    "How many letters were there, and who counted them?",
    "Go on with the story. " + story(12, seed=4),
    "What is near the station?",
    "Who described the engine?",
]


def talks_over(prefix: str) -> list[Talk]:
    chosen = random.Random(5)
    return [
        Talk(
            system=prefix,
            questions=(question, "Are you sure?") if index % 4 == 0 else (question,),
            n_tokens=(chosen.choice([2, 8, 16, 24]), 6),
            is_chat=index % 4 != 3,
        )
        for index, question in enumerate(QUESTIONS)
    ]


async def play_together(url: str, talks: Sequence[Talk], alone: dict[Talk, list[Answer]]) -> tuple[list[float], float]:
    """Each talk twice, all at once; returns where answers part from those given alone, and how much others differ."""
    parted, noises = [], [0.0]

    async def play(number: int, talk: Talk) -> None:
        texts: list[str] = []
        async with Client(url) as client:
            for right in alone[talk]:
                answer = await client.ask(talk.body(texts, is_stream=number % 2 == 0, n_top=None if number % 3 else 0))
                assert (answer.status, answer.error) == (200, "")
                assert answer.n_cached >= 990
                noises.append(noise_between(right, answer))
                gap = gap_where_they_part(right, answer)
                if gap:
                    parted.append(gap)
                if answer.text != right.text:
                    return
                texts.append(answer.text)

    await asyncio.gather(*(play(number, talks[number % len(talks)]) for number in range(N_CLIENTS)))
    return parted, max(noises)


def test_16_clients_over_a_thousand_tokens_get_what_each_gets_alone(smollm2_path: Path, tmp_path: Path) -> None:
    talks = talks_over(PREFIX)

    async def run(url: str) -> tuple[list[float], float, int]:
        alone: dict[Talk, list[Answer]] = {}
        async with Client(url) as client:
            for talk in talks:
                alone[talk] = await play_alone(client, talk, forgets=False)
        parted, noise = await play_together(url, talks, alone)
        await check_nothing_is_left(url)
        return parted, noise, alone[talks[0]][0].n_prompt

    with serving(smollm2_path, tmp_path / "many", "--no-store", n_threads=2) as server:
        parted, noise, n_prompt = asyncio.run(run(server.url))
    shown = ", ".join(f"{gap:.2f}" for gap in sorted(parted))
    print(
        f"\n{N_CLIENTS} talks over {n_prompt:,} tokens: {len(parted)} answers part at a near tie ({shown}), "
        f"others differ by {noise:.2f}"
    )
    assert n_prompt > 1000
    assert max([noise, *parted]) < NOISE


def test_a_known_prefix_is_not_read_again_live_or_after_a_restart(smollm2_path: Path, tmp_path: Path) -> None:
    def talk(question: str) -> Talk:
        return Talk(system=PREFIX, questions=(question,), n_tokens=(4,))

    async def ask(url: str, question: str) -> Answer:
        async with Client(url) as client:
            return await client.ask(talk(question).body([], is_stream=True))

    async def save_all(url: str) -> None:
        async with Client(url) as client:
            for session in await client.sessions():
                await client.act(session["name"], "save")

    folder = tmp_path / "many"
    with serving(smollm2_path, folder, n_threads=2) as server:
        asyncio.run(ask_small(server.url))
        cold = asyncio.run(ask(server.url, "Who is it about?"))
        live = asyncio.run(ask(server.url, "What was painted?"))
        asyncio.run(save_all(server.url))
        server.kill()
    with serving(smollm2_path, folder, n_threads=2) as server:
        asyncio.run(ask_small(server.url))
        stored = asyncio.run(ask(server.url, "Is there a market?"))
    print(
        f"\n{cold.n_prompt:,} tokens: first token after {cold.first_s:.2f} s; live {live.first_s:.3f} s = "
        f"{cold.first_s / live.first_s:.0f} x less; after a restart {stored.first_s:.3f} s = "
        f"{cold.first_s / stored.first_s:.0f} x less"
    )
    assert cold.n_prompt > 1000
    assert cold.n_cached < 32
    for found, source in ((live, "memory"), (stored, "store")):
        assert found.source == source
        assert found.n_prompt - found.n_cached < 24
        assert cold.first_s / found.first_s >= 5


async def ask_small(url: str) -> None:
    """What a first request costs beside its prompt: libraries loaded, weights read."""
    async with Client(url) as client:
        assert (await client.ask({"prompt": "Hello", "max_tokens": 2})).status == 200
