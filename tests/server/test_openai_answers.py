"""Answers as clients read them: whole, streamed, cut off, failed."""

from __future__ import annotations

import asyncio
import json
import math

import pytest
from starlette.testclient import TestClient

from llamakv.errors import (
    BusyError,
    DamagedError,
    EngineError,
    LlamakvError,
    NoRoomError,
    UsageError,
    WriteError,
)
from llamakv.server import chunks
from llamakv.server.app import make_app
from llamakv.server.contract import AnswerPiece, TokenLogprob
from llamakv.server.errors_http import http_error
from llamakv.server.limits import ServeOptions
from tests.server.fake_service import FOREVER, FakeService, say

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
USAGE = {
    "prompt_tokens": 12, "completion_tokens": 2, "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 8, "source": "memory"},
    "queued_s": 1.235,
}  # fmt: skip


def chat(client: TestClient, **fields: object):
    return client.post("/v1/chat/completions", json={**CHAT, **fields})


def events(text: str) -> list[object]:
    told = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in told]


def test_a_chat_answer_is_openais(client: TestClient) -> None:
    answer = chat(client)
    body = answer.json()
    assert answer.headers["content-type"] == "application/json"
    assert body["id"].startswith("chatcmpl-")
    assert body["system_fingerprint"].startswith("fp_")
    assert (body["object"], body["model"], body["usage"]) == ("chat.completion", "tiny", USAGE)
    message = {"role": "assistant", "content": "Hello", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]


def test_choices_are_told_apart_whatever_order_their_pieces_come_in(client: TestClient, service: FakeService) -> None:
    first, second = say("a", "b"), say("x", "y", index=1, finish="timeout")
    service.script = lambda ask: [second[0], first[0], first[1], second[1], second[2], first[2]]
    choices = chat(client, n=2).json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["ab", "xy"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]
    assert [choice.get("finish_detail") for choice in choices] == [None, "timeout"]


def test_a_completion_is_openais_and_echoes(client: TestClient) -> None:
    body = client.post("/v1/completions", json={"prompt": "Say: ", "echo": True}).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Say: Hello", "logprobs": None, "finish_reason": "stop"}]


LOGPROBS = AnswerPiece(
    index=0,
    text="é!",
    logprobs=(
        TokenLogprob(token=1, text=b"\xc3", logprob=-0.5, top=(TokenLogprob(token=9, text=b"z", logprob=-math.inf),)),
        TokenLogprob(token=2, text=b"\xa9", logprob=-1.0),
        TokenLogprob(token=3, text=b"!", logprob=0.0),
    ),
    finish_reason="stop",
)


def test_log_probabilities_of_chats_have_bytes_and_the_likeliest(client: TestClient, service: FakeService) -> None:
    service.script = lambda ask: [LOGPROBS]
    content = chat(client, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "\ufffd", "logprob": -0.5, "bytes": [195],
        "top_logprobs": [{"token": "z", "logprob": -9999.0, "bytes": [122]}],
    }  # fmt: skip
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "é!"
    assert chat(client).json()["choices"][0]["logprobs"] is None


def test_log_probabilities_of_completions_have_offsets_in_characters(client, service: FakeService) -> None:
    service.script = lambda ask: [LOGPROBS]
    logprobs = client.post("/v1/completions", json={"prompt": "x", "logprobs": 1}).json()["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 0, 1]
    assert logprobs["token_logprobs"] == [-0.5, -1.0, 0.0]
    assert logprobs["top_logprobs"] == [{"z": -9999.0}, {}, {}]


def test_a_stream_is_openais(client: TestClient) -> None:
    answer = chat(client, stream=True, n=2, stream_options={"include_usage": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *told, usage, done = events(answer.text)
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 4)
    assert {event["object"] for event in told} == {"chat.completion.chunk"}
    assert len({event["id"] for event in told}) == 1
    for index in (0, 1):
        mine = [event["choices"][0] for event in told if event["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "Hello"
        assert [choice["finish_reason"] for choice in mine] == [None, None, None, "stop"]


def test_a_streamed_completion_has_text_and_no_usage_unless_asked(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={"prompt": "a", "stream": True, "echo": True})
    *told, done = events(answer.text)
    assert done == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in told) == "aHello"
    assert all("usage" not in event for event in told)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "said"),
    [
        (UsageError("the grammar cannot be read"), 400, "usage", "the grammar cannot be read"),
        (NoRoomError("5000 tokens, 4096 fit"), 400, "context_length_exceeded", "5000 tokens, 4096 fit"),
        (BusyError("the queue is full", retry_after_s=2.2), 429, "rate_limit_exceeded", "the queue is full"),
        (EngineError("llama_decode at /home/me/x.cpp failed"), 500, "engine", "the engine failed"),
        (WriteError("could not write '/home/me/a'"), 500, "write", "the session could not be written"),
        (DamagedError("/home/me/a: bad"), 500, "damaged", "the saved session is damaged or of a newer version"),
        (UsageError("no file /home/me/secret/x.gguf there"), 400, "usage", "no file x.gguf there"),
        (RuntimeError("/home/me"), 500, "internal_error", "something went wrong inside the server"),
    ],
)
def test_errors_before_the_first_piece_have_a_status_and_no_paths(
    client, service: FakeService, error: Exception, status: int, code: str, said: str, is_stream: bool
) -> None:
    for where in ("ask", "pieces"):
        service.refuse_with = error if where == "ask" else None
        service.script = lambda ask: [error]
        answer = chat(client, stream=is_stream)
        body = answer.json()["error"]
        assert (answer.status_code, body["code"], body["message"]) == (status, code, said)
        assert "home" not in answer.text
        assert answer.headers.get("retry-after") == ("3" if status == 429 else None)


def test_one_requests_failure_leaves_the_next_alone(client: TestClient, service: FakeService) -> None:
    service.refuse_with = RuntimeError("boom")
    assert chat(client).status_code == 500
    service.refuse_with = None
    assert chat(client).status_code == 200


def test_an_error_amid_a_stream_is_an_event_and_the_stream_ends(client: TestClient, service: FakeService) -> None:
    service.script = lambda ask: [AnswerPiece(index=0, text="He"), EngineError("boom")]
    answer = chat(client, stream=True)
    *told, last = events(answer.text)
    assert answer.status_code == 200
    assert told[-1]["choices"][0]["delta"] == {"content": "He"}
    assert last["error"] == {"message": "the engine failed", "type": "server_error", "param": None, "code": "engine"}


def test_time_that_was_up_before_anything_came_is_a_408(client: TestClient, service: FakeService) -> None:
    service.script = lambda ask: say(finish="timeout")
    answer = chat(client)
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_service_that_forgets_the_time_is_left(client, service: FakeService, monkeypatch, is_stream: bool) -> None:
    monkeypatch.setattr(chunks, "_GRACE_S", 0.0)
    service.script = lambda ask: [FOREVER]
    assert chat(client, timeout_s=0.02, stream=is_stream).status_code == 408
    assert (service.answers[0].was_cancelled, service.answers[0].was_left) == (True, True)


def test_while_nothing_comes_a_stream_says_that_it_is_there(client, service: FakeService, monkeypatch) -> None:
    monkeypatch.setattr(chunks, "HEADERS_AFTER_S", 0.01)
    monkeypatch.setattr(chunks, "KEEP_ALIVE_S", 0.01)
    service.script = lambda ask: [0.1, *say("late")]
    text = chat(client, stream=True).text
    assert text.index('"role":"assistant"') < text.index(": still at work") < text.index("late")
    assert text.count('"role":"assistant"') == 1


def test_while_the_server_stops_nothing_is_taken(client: TestClient, service: FakeService) -> None:
    service.is_ready = False
    answer = chat(client)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert (client.get("/health").status_code, client.get("/v1/models").status_code) == (503, 200)


class Wire:
    """A connection driven by hand: the client leaves when ``leave`` is set, and reads until ``stalls`` is."""

    def __init__(self, body: dict[str, object]) -> None:
        self.leave, self.stalls = asyncio.Event(), False
        self.sent: list[dict[str, object]] = []
        self._messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
        self.scope = {
            "type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"", "query_string": b"",
            "headers": [(b"host", b"localhost")], "root_path": "", "scheme": "http", "http_version": "1.1",
        }  # fmt: skip

    async def receive(self) -> dict[str, object]:
        if self._messages:
            return self._messages.pop()
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, object]) -> None:
        if self.stalls and message["type"] == "http.response.body":
            await asyncio.sleep(FOREVER)
        self.sent.append(message)


async def until(is_so) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("n_before", [0, 3])
def test_a_client_that_leaves_ends_its_request_at_once(service: FakeService, is_stream: bool, n_before: int) -> None:
    async def run() -> None:
        service.script = lambda ask: [*say(*"abc")[:n_before], FOREVER]
        wire = Wire({**CHAT, "stream": is_stream})
        serving = asyncio.create_task(make_app(service, ServeOptions())(wire.scope, wire.receive, wire.send))
        await until(lambda: service.answers and service.answers[0].n_said == n_before)
        wire.leave.set()
        async with asyncio.timeout(10):
            await serving
        assert (service.answers[0].was_cancelled, service.answers[0].was_left) == (True, True)

    asyncio.run(run())


def test_a_client_that_leaves_while_its_request_is_queued_frees_its_place(service: FakeService) -> None:
    async def run() -> None:
        cancelled = []

        async def queue(ask) -> None:
            try:
                await asyncio.sleep(FOREVER)
            except asyncio.CancelledError:
                cancelled.append(ask)
                raise

        service.ask = queue
        app = make_app(service, ServeOptions(max_concurrent_per_key=1))
        for _ in range(2):
            wire = Wire(CHAT)
            serving = asyncio.create_task(app(wire.scope, wire.receive, wire.send))
            await asyncio.sleep(0.01)
            wire.leave.set()
            async with asyncio.timeout(10):
                await serving
        assert len(cancelled) == 2

    asyncio.run(run())


def test_a_client_that_stops_reading_holds_one_piece_and_is_given_up(service: FakeService, monkeypatch) -> None:
    monkeypatch.setattr(chunks, "_SEND_TIME_S", 0.05)

    async def run() -> None:
        service.script = lambda ask: say(*"abcdefgh")
        wire = Wire({**CHAT, "stream": True})
        wire.stalls = True
        async with asyncio.timeout(10):
            await make_app(service, ServeOptions())(wire.scope, wire.receive, wire.send)
        (answer,) = service.answers
        assert (answer.n_said, answer.was_cancelled, answer.was_left) == (1, True, True)

    asyncio.run(run())


def test_an_answer_that_ended_well_is_not_cancelled(client: TestClient, service: FakeService) -> None:
    chat(client)
    chat(client, stream=True)
    assert [answer.was_cancelled for answer in service.answers] == [False, False]


def test_every_family_of_errors_has_a_status() -> None:
    def all_of(kind: type[LlamakvError]) -> list[type[LlamakvError]]:
        return [kind, *(one for sub in kind.__subclasses__() for one in all_of(sub))]

    for kind in all_of(LlamakvError):
        told = http_error(kind("at /a/b/c.bin", hint="llamakv rm"))
        assert 400 <= told.status < 600
        assert "/a" not in told.message
        assert "rm" not in told.message
