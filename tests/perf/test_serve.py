"""What serving costs and saves, as ratios within one run. Each test prints its table (pytest -m perf -s -n 0)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import statistics
import time
from pathlib import Path

import pytest

from tests.perf.test_tables import show
from tests.real.fork_worker import PROMPTS
from tests.real.run import run
from tests.real.text import story
from tests.server.load import N_CLIENTS, Answer, Client, Talk, serving

pytestmark = pytest.mark.perf

PREFIX = story(89)  # a thousand tokens of SmolLM2
N_PROMPTS = 96
N_WRITTEN = 16
N_TIMES = 5


async def _ask(url: str, body: dict) -> Answer:
    async with Client(url) as client:
        answer = await client.ask(body)
    assert (answer.status, answer.error) == (200, "")
    return answer


def _question(number: int, *, n_tokens: int = 4, is_stream: bool = True) -> dict:
    talk = Talk(system=PREFIX, questions=(f"{number}. {PROMPTS[number % len(PROMPTS)]}",), n_tokens=(n_tokens,))
    return talk.body([], is_stream=is_stream)


async def _save_all(url: str) -> None:
    async with Client(url) as client:
        for session in await client.sessions():
            await client.act(session["name"], "save")


def test_time_to_first_token_of_a_known_prefix(smollm2_path: Path, tmp_path: Path) -> None:
    """The same questions of a live prefix, and each of one that a server which was just started has in its store."""
    colds: list[Answer] = []
    stored: list[Answer] = []
    live: list[Answer] = []
    hello = {"prompt": "Hello", "max_tokens": 2}  # what a first request costs besides
    questions = [_question(number) for number in range(1, 1 + N_TIMES)]
    with serving(smollm2_path, tmp_path / "first", n_threads=2) as server:
        asyncio.run(_ask(server.url, hello))
        colds.append(asyncio.run(_ask(server.url, _question(0))))
        asyncio.run(_save_all(server.url))
        server.stop()
    for number, question in enumerate(questions):
        shutil.copytree(tmp_path / "first" / "store", tmp_path / str(number) / "store")
        with serving(smollm2_path, tmp_path / str(number), n_threads=2) as server:
            asyncio.run(_ask(server.url, hello))
            stored.append(asyncio.run(_ask(server.url, question)))
            server.stop()
    with serving(smollm2_path, tmp_path / "second", n_threads=2) as server:
        asyncio.run(_ask(server.url, hello))
        colds.append(asyncio.run(_ask(server.url, _question(0))))
        live += [asyncio.run(_ask(server.url, question)) for question in questions]
    cold_s, live_s, stored_s = (statistics.median(one.first_s for one in some) for some in (colds, live, stored))
    show(
        f"time to first token, {colds[0].n_prompt:,} tokens of prompt, SmolLM2 (medians; target: 20 x less)",
        [
            ("cold", f"{cold_s:.2f} s"),
            ("live", f"{live_s:.3f} s = {cold_s / live_s:.0f} x less; {_evaluated(live)} tokens read"),
            ("after a restart", f"{stored_s:.3f} s = {cold_s / stored_s:.0f} x less; {_evaluated(stored)} tokens read"),
        ],
    )
    assert {one.source for one in live} == {"memory"}
    assert {one.source for one in stored} == {"store"}
    assert max(answer.n_prompt - answer.n_cached for answer in live + stored) < 24


def _evaluated(answers: list[Answer]) -> str:
    numbers = [answer.n_prompt - answer.n_cached for answer in answers]
    return f"{min(numbers)} to {max(numbers)}"


async def _ask_all(url: str) -> tuple[float, int]:
    """All prompts by 16 clients; returns seconds and tokens written. A client takes 50 ms to be made, for what it knows
    of certificates, which is not the server's."""
    numbers = list(range(N_PROMPTS))
    n_written = 0

    async def be_client(client: Client) -> None:
        nonlocal n_written
        while numbers:
            n = numbers.pop(0)
            prompt = f"{PREFIX}\n{n}. {PROMPTS[n % len(PROMPTS)]}\n"
            answer = await client.ask({"prompt": prompt, "max_tokens": N_WRITTEN, "temperature": 0})
            assert (answer.status, answer.error) == (200, "")
            n_written += answer.n_generated

    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(url)) for _ in range(N_CLIENTS)]
        started = time.perf_counter()
        await asyncio.gather(*(be_client(client) for client in clients))
        return time.perf_counter() - started, n_written


def test_serving_16_clients_keeps_up_with_fork(smollm2_path: Path, tmp_path: Path) -> None:
    job = {
        "model": smollm2_path,
        "n": 1000,
        "prompts": N_PROMPTS,
        "max_tokens": N_WRITTEN,
        "parallel": 16,
        "scratch": 1,
    }
    served: list[float] = []
    forked: list[float] = []
    for number in range(3):  # in turn: another program may meet one of them only
        found = run("batch", module="tests.real.fork_worker", **job)
        forked.append(found["generated"] / (found["fork_s"] - found["prefill_s"]))
        with serving(smollm2_path, tmp_path / str(number), n_threads=2) as server:
            asyncio.run(_ask(server.url, {"prompt": f"{PREFIX}\n", "max_tokens": 1}))
            elapsed_s, n_written = asyncio.run(_ask_all(server.url))
        served.append(n_written / elapsed_s)
    ratios = [one / other for one, other in zip(served, forked, strict=True)]
    show(
        f"{N_PROMPTS} prompts over a prefix of 1,000 tokens, up to {N_WRITTEN} tokens each, SmolLM2 (target: 0.9)",
        [
            ("fork, 16 at once", ", ".join(f"{one:.1f}" for one in forked) + " tokens/s"),
            ("serve, 16 clients", ", ".join(f"{one:.1f}" for one in served) + " tokens/s"),
            ("ratio", ", ".join(f"{one:.2f}" for one in ratios) + f"; of all {sum(served) / sum(forked):.2f}"),
        ],
    )
    # printed, not asserted: runs take turns, and another program may meet one of them only


def test_streams_beside_a_long_prompt(smollm2_path: Path, tmp_path: Path) -> None:
    long = Talk(system=story(150, seed=8), questions=("What is it about?",), n_tokens=(4,)).body([], is_stream=True)

    async def measure(url: str) -> tuple[Answer, list[Answer]]:
        others = [Answer() for _ in range(4)]
        streams = []
        for number, answer in enumerate(others):
            body = {"prompt": f"{number} Once upon", "max_tokens": 2000, "temperature": 1, "seed": 1, "stream": True}
            body |= {"logprobs": 0, "logit_bias": {"0": -100, "2": -100}}  # it does not end
            streams.append(asyncio.create_task(_fill(url, body, answer)))
        while min(len(answer.came_s) for answer in others) < 40:
            await asyncio.sleep(0.05)
        read = await _ask(url, long)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        return read, others

    with serving(smollm2_path, tmp_path / "many", "--no-store", n_threads=2) as server:
        read, others = asyncio.run(measure(server.url))
    before, beside = [], []
    for answer in others:
        for a, b in itertools.pairwise(answer.came_s):
            if b < read.began_s:
                before.append(b - a)
            elif a < read.came_s[0]:
                beside.append(b - a)
    step_s = statistics.median(beside)
    show(
        f"4 streams beside a prompt of {read.n_prompt:,} tokens, which took {read.first_s:.1f} s, SmolLM2",
        [
            (
                "between two tokens, alone",
                f"{1000 * statistics.median(before):.0f} ms, {1000 * max(before):.0f} at most",
            ),
            ("with 64 tokens read in between", f"{1000 * step_s:.0f} ms, {1000 * max(beside):.0f} at most"),
        ],
    )
    assert len(beside) >= 4 * 0.8 * read.n_prompt / 64


async def _fill(url: str, body: dict, answer: Answer) -> None:
    async with Client(url) as client:
        await client.ask(body, answer=answer)
