"""Bounds on what a client may send and hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx2
import pytest
from starlette.testclient import TestClient

from llamakv.server import limits
from llamakv.server.app import make_app
from llamakv.server.limits import ServeOptions
from tests.server.fake_service import FakeService, say

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


def test_a_body_over_the_limit_is_refused_and_one_at_it_is_read(connect) -> None:
    body = json.dumps(CHAT).encode()
    assert connect(max_body_bytes=len(body)).post(PATH, content=body).status_code == 200
    answer = connect(max_body_bytes=len(body) - 1).post(PATH, content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def read_with(messages: Iterator[dict[str, object]], headers: list[tuple[bytes, bytes]], n_max: int = 100) -> int:
    """The status of a request whose body comes as these messages."""
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        message = next(messages, None)
        if message is None:
            await asyncio.sleep(3600)
        return message

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": PATH, "raw_path": b"", "query_string": b"", "root_path": "",
        "headers": [(b"host", b"localhost"), *headers], "scheme": "http", "http_version": "1.1",
    }  # fmt: skip
    app = make_app(FakeService(), ServeOptions(max_body_bytes=n_max))
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 10))
    return sent[0]["status"] if sent else 0


def test_a_body_of_pieces_without_end_is_cut_off_at_the_limit() -> None:
    n_read = 0

    def pieces() -> Iterator[dict[str, object]]:
        nonlocal n_read
        while True:
            n_read += 1
            yield {"type": "http.request", "body": b"x" * 40, "more_body": True}

    assert read_with(pieces(), []) == 413
    assert n_read == 3


@pytest.mark.parametrize("declared", [b"101", b"9" * 5000])
def test_a_body_that_is_announced_as_too_large_is_not_read(declared: bytes) -> None:
    def none() -> Iterator[dict[str, object]]:
        raise AssertionError("the body was read")
        yield {}

    assert read_with(none(), [(b"content-length", declared)]) == 413


def test_a_body_that_does_not_come_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(limits, "_BODY_TIME_S", 0.02)
    assert read_with(iter([{"type": "http.request", "body": b"{", "more_body": True}]), []) == 408


def test_a_client_that_leaves_amid_its_body_is_no_failure() -> None:
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    assert read_with(messages, []) in (0, 499)


def test_a_key_has_so_many_requests_under_way_and_others_theirs(service: FakeService) -> None:
    async def run() -> list[int]:
        go = asyncio.Event()
        service.script = lambda ask: [go, *say("x")]
        app = make_app(service, ServeOptions(keys={"a": "A", "b": "B"}, max_concurrent_per_key=2))
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:

            async def ask(key: str) -> httpx2.Response:
                return await client.post(PATH, json=CHAT, headers={"Authorization": f"Bearer {key}"})

            held = [asyncio.create_task(ask(key)) for key in "AAB"]
            async with asyncio.timeout(10):
                while len(service.asks) < 3:
                    await asyncio.sleep(0.001)
            refused = await ask("A")
            assert refused.headers["retry-after"] == "1"
            go.set()
            done = [(await task).status_code for task in held]
            return [refused.status_code, *done, (await ask("A")).status_code]

    assert asyncio.run(run()) == [429, 200, 200, 200, 200]


def test_places_are_given_back_after_failures(connect, service: FakeService) -> None:
    client = connect(max_concurrent_per_key=1)
    service.refuse_with = RuntimeError("boom")
    assert [client.post(PATH, json=CHAT).status_code for _ in range(3)] == [500] * 3
    assert [client.post(PATH, content=b"{").status_code for _ in range(3)] == [400] * 3
    service.refuse_with = None
    assert client.post(PATH, json=CHAT).status_code == 200


@pytest.mark.parametrize("number", ["9" * 5000, "-" + "1" * 4301])
def test_a_number_of_thousands_of_digits_is_refused_in_our_words(client: TestClient, number: str) -> None:
    answer = client.post(PATH, content=f'{{"messages": [], "max_tokens": {number}}}')
    told = answer.json()["error"]
    assert (answer.status_code, told["code"]) == (400, "invalid_json")
    assert told["message"] == "a number in the request's body has more than 4300 digits"


def test_what_is_no_json_number_is_refused_by_its_name(client: TestClient) -> None:
    answer = client.post(PATH, content='{"temperature": NaN}')
    assert answer.json()["error"]["message"] == "the request's body is not JSON: NaN is not a JSON number"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("GET", "/nothing", 404, "unknown_url"), ("GET", PATH, 405, "method_not_allowed"),
     ("DELETE", "/v1/models", 405, "method_not_allowed"), ("GET", "/static/../app.py", 404, "unknown_url"),
     ("GET", "/static/%2e%2e%2fapp.py", 404, "unknown_url"), ("GET", "/v1/models/x/y", 404, "model_not_found")],
)  # fmt: skip
def test_wrong_addresses_and_methods_are_error_objects(client: TestClient, method, path, status, code) -> None:
    answer = client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/chat/completions", "nothing is at this address; did you mean /v1/chat/completions?"),
        ("/api/v1/models", "nothing is at this address; did you mean /v1/models?"),
        ("/v1/embeddings", "nothing is at this address; of OpenAI's, chats, completions and models are served"),
        ("/nothing", "nothing is at this address"),
    ],
)
def test_who_is_at_a_wrong_address_is_told_of_the_right_one(client: TestClient, path: str, told: str) -> None:
    assert client.post(path, json=CHAT).json()["error"]["message"] == told


def test_who_uses_a_wrong_method_is_told_of_the_right_one(client: TestClient) -> None:
    assert client.get(PATH).json()["error"]["message"] == "GET is not for this address, POST is"


def test_a_parameter_with_a_slip_is_told_as_it_should_be(client: TestClient) -> None:
    told = client.post(PATH, json={**CHAT, "temprature": 1}).json()["error"]["message"]
    assert told == "'temprature' is not supported by this server; did you mean 'temperature'?"


def test_the_page_is_served_with_types_and_may_load_nothing_foreign(client: TestClient) -> None:
    for path, kind in [("/", "text/html"), ("/app.js", "text/javascript"), ("/static/style.css", "text/css")]:
        answer = client.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
        assert answer.headers["cache-control"] == "no-cache"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
