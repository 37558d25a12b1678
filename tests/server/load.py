"""What tests under load need: a real ``llamakv serve``, many clients of it, and answers compared with what is right."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import httpx2
import psutil

PATIENCE_S = 120.0
N_CLIENTS = 16
ROOT = Path(__file__).parents[2]
_PROGRAM = (sys.executable, "-m", "llamakv")

# ---------------------------------------------------------------- the server


class Server:
    """A ``llamakv serve`` of its own, ready for requests."""

    def __init__(self, process: subprocess.Popen[str], ready: dict, log: Path) -> None:
        self.process = process
        self.ready = ready
        self.log = log
        self.url = str(ready["url"])
        self.port = int(ready["port"])

    def usage(self) -> tuple[int, int, int]:
        """Bytes of memory it takes, files it has open, and threads."""
        process = psutil.Process(self.process.pid)
        return process.memory_info().rss, process.num_fds(), process.num_threads()

    def kill(self) -> None:
        """End it as the power does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> dict:
        """End it as its owner does; returns what it says at the end."""
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, self.log.read_text()[-3000:]
        return json.loads(out.splitlines()[-1])


@contextlib.contextmanager
def serving(model: Path, folder: Path, *options: object, port: int = 0, n_threads: int = 1) -> Iterator[Server]:
    """A server over a model, with its store in ``folder``; killed at the end if it was not stopped."""
    folder.mkdir(exist_ok=True)
    log = folder / f"serve-{time.monotonic_ns()}.log"
    command = [*_PROGRAM, "serve", "--json", "-m", model, "-t", n_threads, "--port", port, *options]
    if "--no-store" not in options:
        command += ["--store", folder / "store"]
    with log.open("w") as told:
        process = subprocess.Popen(
            [str(word) for word in command], cwd=ROOT, stdout=subprocess.PIPE, stderr=told, text=True,
            env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
        )  # fmt: skip
    try:
        assert process.stdout is not None
        yield Server(process, _ready_line(process.stdout, log), log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _ready_line(out: IO[str], log: Path) -> dict:
    assert select.select([out], [], [], PATIENCE_S)[0], "the server said nothing"
    line = out.readline()
    ready = json.loads(line) if line else {}
    assert ready.get("type") == "ready", line + log.read_text()[-3000:]
    return ready


def run_program(*words: object) -> subprocess.CompletedProcess[str]:
    """Another command of ours."""
    return subprocess.run(
        [*_PROGRAM, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


# ---------------------------------------------------------------- answers


@dataclass(frozen=True)
class Token:
    """A token that was written, its logarithm of probability, and those of the most likely ones."""

    text: str
    logprob: float
    top: dict[str, float]


@dataclass
class Answer:
    """An answer as a client got it. ``came_s`` are the times its pieces came (each of its tokens, where log
    probabilities were asked for; else ``tokens`` is None), ``began_s`` when it was asked for, of the monotonic clock;
    ``error`` is what was told in its stead."""

    status: int = 0
    text: str = ""
    finish: str | None = None
    n_prompt: int = 0
    n_cached: int = 0
    n_generated: int = 0
    source: str = ""
    tokens: list[Token] | None = None
    began_s: float = field(default_factory=time.monotonic)
    came_s: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def first_s(self) -> float:
        """How long its first piece took."""
        return self.came_s[0] - self.began_s

    def take(self, body: dict) -> None:
        """What a whole answer or an event says."""
        before = self.text, len(self.tokens or ())
        if "error" in body:
            self.error = json.dumps(body["error"])
        if body.get("usage"):
            usage, details = body["usage"], body["usage"]["prompt_tokens_details"]
            self.n_prompt, self.n_generated = usage["prompt_tokens"], usage["completion_tokens"]
            self.n_cached, self.source = details["cached_tokens"], details["source"]
        for choice in body.get("choices", []):
            said = choice.get("message") or choice.get("delta") or {}
            self.text += choice.get("text") or said.get("content") or ""
            self.finish = choice["finish_reason"] or self.finish
            if choice.get("logprobs"):
                self.tokens = [*(self.tokens or []), *_tokens(choice["logprobs"])]
        n_came = len(self.tokens) - before[1] if self.tokens is not None else int(self.text != before[0])
        self.came_s += [time.monotonic()] * n_came


def _tokens(told: dict) -> Iterator[Token]:
    if "content" in told:  # a chat's
        for one in told["content"]:
            top = {other["token"]: other["logprob"] for other in one["top_logprobs"]}
            yield Token(one["token"], one["logprob"], top)
        return
    for text, logprob, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        yield Token(text, logprob, top)


def gap_where_they_part(alone: Answer, other: Answer) -> float:
    """How much more likely (natural logarithm) the answer given alone found its own token, where another answer to the
    same question goes another way; 0 where it does not, infinity where nothing likely begins as the other one does."""
    if (alone.text, alone.finish) == (other.text, other.finish):
        return 0.0
    assert alone.tokens is not None
    at, found = 0, math.inf
    for index, token in enumerate(alone.tokens):
        rest = other.text[at:]
        theirs = other.tokens[index].text if other.tokens is not None and index < len(other.tokens) else None
        for text, logprob in token.top.items():
            is_theirs = rest.startswith(text) if theirs is None else text == theirs
            if text != token.text and (is_theirs or not rest):
                found = min(found, token.logprob - logprob)
        if (theirs is not None and theirs != token.text) or not rest.startswith(token.text):
            break
        at += len(token.text)
    return max(found, 0.0)


def noise_between(alone: Answer, other: Answer) -> float:
    """The largest difference of logarithms of probability of the tokens that both begin with; 0 where one of them does
    not tell any."""
    noise = 0.0
    for one, two in zip(alone.tokens or (), other.tokens or (), strict=False):
        if one.text != two.text:
            break
        noise = max(noise, abs(one.logprob - two.logprob))
    return noise


# ---------------------------------------------------------------- clients


class Client:
    """One of many clients; ``key`` is its API key."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.http = httpx2.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def ask(self, body: dict, *, n_pieces: int | None = None, answer: Answer | None = None) -> Answer:
        """Ask for an answer; a stream is left after ``n_pieces`` of it, as a client does that goes away. ``answer`` is
        filled while it comes."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = answer or Answer()
        if not body.get("stream"):
            response = await self.http.post(path, json=body)
            answer.status = response.status_code
            answer.take(response.json())
            return answer
        body = {**body, "stream_options": {"include_usage": True}}
        async with self.http.stream("POST", path, json=body) as response:
            answer.status = response.status_code
            if answer.status != 200:
                answer.take(json.loads(await response.aread()))
                return answer
            async for event in _events(response):
                answer.take(event)
                if n_pieces is not None and len(answer.came_s) >= n_pieces:
                    return answer
        return answer

    async def get(self, path: str) -> dict:
        """What is told at an address."""
        response = await self.http.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    async def counts(self) -> dict:
        """Where the service stands."""
        return (await self.get("/v1/live"))["counts"]

    async def sessions(self) -> list[dict]:
        """Its conversations."""
        return (await self.get("/v1/sessions"))["data"]

    async def metrics(self) -> dict[str, float]:
        """What monitoring is told."""
        text = (await self.http.get("/metrics")).text
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    async def act(self, name: str, act: str, body: dict | None = None) -> dict:
        """Do something with a session."""
        response = await self.http.post(f"/v1/sessions/{name}/{act}", json=body or {})
        assert response.status_code == 200, response.text
        return response.json()

    async def delete_all(self) -> None:
        """Forget all conversations."""
        for session in await self.sessions():
            response = await self.http.delete(f"/v1/sessions/{session['name']}")
            assert response.status_code == 200, response.text

    async def wait_until_idle(self) -> None:
        """Wait until nothing is under way; what a disconnect ends may take a step."""
        for _ in range(round(PATIENCE_S / 0.05)):
            counts = await self.counts()
            if not counts["n_active"] and not counts["n_waiting"]:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"still at work: {counts}")

    async def wait_until_saved(self, n_tokens: int) -> None:
        """Wait until all conversations of at least so many tokens are in the store."""
        while not all(line["is_saved"] or line["n_tokens"] < n_tokens for line in await self.sessions()):
            await asyncio.sleep(0.1)


async def _events(response: httpx2.Response) -> AsyncIterator[dict]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


async def check_nothing_is_left(url: str, *, key: str | None = None) -> None:
    """All conversations deleted, no cell is in use, and monitoring says so too."""
    async with Client(url, key=key) as client:
        await client.wait_until_idle()
        await client.delete_all()
        until_s = time.monotonic() + 10.0  # what came from the store for others to begin with stays for two
        while (await client.counts())["n_cells"] and time.monotonic() < until_s:
            await asyncio.sleep(0.1)
        counts, metrics = await client.counts(), await client.metrics()
        assert await client.sessions() == []
        assert (counts["n_cells"], counts["n_live"], counts["n_active"], counts["n_waiting"]) == (0, 0, 0, 0)
        assert (metrics["llamakv_cells_used"], metrics["llamakv_sequences_live"]) == (0, 0)
        assert metrics["llamakv_cells_free"] == metrics["llamakv_cells_max"] == counts["n_cells_max"]


# ---------------------------------------------------------------- what is said


@dataclass(frozen=True)
class Talk:
    """Questions asked one after the other, each with what was answered before; ``system`` comes first in all. As a chat
    or, without messages, as text. ``n_tokens`` is how long each answer is."""

    system: str
    questions: tuple[str, ...]
    n_tokens: tuple[int, ...]
    is_chat: bool = True

    def body(self, answers: Sequence[str], *, n_top: int | None = None, is_stream: bool = False) -> dict:
        """The request that follows these answers."""
        at = len(answers)
        body: dict = {"temperature": 0, "max_tokens": self.n_tokens[at], "stream": is_stream}
        if self.is_chat:
            messages = [{"role": "system", "content": self.system}]
            for question, answer in zip(self.questions, [*answers, None], strict=False):
                messages.append({"role": "user", "content": question})
                if answer is not None:
                    messages.append({"role": "assistant", "content": answer})
            more = {} if n_top is None else {"logprobs": True, "top_logprobs": n_top}
            return {**body, "messages": messages, **more}
        said = zip(self.questions, [*answers, ""], strict=False)
        text = self.system + "".join(f"\n\nQuestion: {question}\nAnswer:{answer}" for question, answer in said)
        return {**body, "prompt": text, **({} if n_top is None else {"logprobs": n_top})}

    def follow(self, answers: Sequence[str]) -> Talk:
        """The same talk, as far as the question after these answers."""
        n = len(answers) + 1
        return replace(self, questions=self.questions[:n], n_tokens=self.n_tokens[:n])


async def play_alone(client: Client, talk: Talk, *, forgets: bool) -> list[Answer]:
    """Answers with nobody else there; ``forgets``: nor anything in memory before."""
    answers: list[Answer] = []
    for _ in talk.questions:
        answer = await client.ask(talk.body([one.text for one in answers], n_top=5))
        assert (answer.status, answer.error) == (200, "")
        answers.append(answer)
    if forgets:
        await client.delete_all()
    return answers
