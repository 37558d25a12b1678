"""OpenAI's own client against the application behind a real server on a free port."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import openai
import pytest
import uvicorn

from llamakv.errors import BusyError, EngineError, NoRoomError
from llamakv.server.app import make_app
from llamakv.server.contract import AnswerPiece, TokenLogprob
from llamakv.server.limits import ServeOptions
from tests.server.fake_service import FOREVER, FakeService, say

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeService, str]]:
    service = FakeService()
    app = make_app(service, ServeOptions(keys={"ada": "secret"}))
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield service, f"http://127.0.0.1:{port}/v1"
    server.should_exit = True
    thread.join(20)


@pytest.fixture
def service(served: tuple[FakeService, str]) -> FakeService:
    """The service, as new."""
    served[0].__init__()
    return served[0]


@pytest.fixture
def client(served: tuple[FakeService, str], service: FakeService) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served[1], api_key="secret", max_retries=0, timeout=20) as client:
        yield client


def test_it_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, n=2, seed=1, extra_body={"top_k": 5})
    assert [choice.message.content for choice in answer.choices] == ["Hello", "Hello"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 8
    assert answer.usage.total_tokens == 12 + 4


def test_it_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
    assert chunks[-1].usage.completion_tokens == 2


def test_it_completes(client: openai.OpenAI) -> None:
    assert client.completions.create(model="tiny", prompt="x", max_tokens=4, echo=True).choices[0].text == "xHello"
    parts = client.completions.create(model="tiny", prompt=[1, 2, 3], stream=True)
    assert "".join(part.choices[0].text for part in parts) == "Hello"


def test_it_reads_log_probabilities(client: openai.OpenAI, service: FakeService) -> None:
    token = TokenLogprob(token=5, text=b"x", logprob=-0.25, top=(TokenLogprob(token=5, text=b"x", logprob=-0.25),))
    service.script = lambda ask: [AnswerPiece(index=0, text="x", logprobs=(token,), finish_reason="stop")]
    told = client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=1)
    (content,) = told.choices[0].logprobs.content
    assert (content.token, content.logprob, content.bytes, content.top_logprobs[0].token) == ("x", -0.25, [120], "x")
    told = client.completions.create(model="tiny", prompt="a", logprobs=1)
    assert told.choices[0].logprobs.token_logprobs == [-0.25]


def test_it_asks_for_json(client: openai.OpenAI, service: FakeService) -> None:
    from pydantic import BaseModel

    class Step(BaseModel):
        what: str
        next: Step | None

    service.script = lambda ask: say(json.dumps({"what": "a", "next": None}))
    told = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Step)
    assert told.choices[0].message.parsed == Step(what="a", next=None)
    assert "root ::=" in service.asks[0].sampling.grammar


def test_it_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "llamakv"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("huge")


def test_it_raises_its_own_errors(client: openai.OpenAI, service: FakeService) -> None:
    def ask(client: openai.OpenAI = client, **fields: object) -> None:
        client.chat.completions.create(model="tiny", messages=HELLO, **fields)

    with pytest.raises(openai.BadRequestError) as refused:
        ask(temperature=9)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        ask(client.with_options(api_key="wrong"))
    service.refuse_with = BusyError("full", retry_after_s=3)
    with pytest.raises(openai.RateLimitError) as busy:
        ask()
    assert busy.value.response.headers["retry-after"] == "3"
    service.refuse_with = NoRoomError("too long")
    with pytest.raises(openai.BadRequestError) as long:
        ask()
    assert long.value.code == "context_length_exceeded"
    service.refuse_with = RuntimeError("boom")
    with pytest.raises(openai.InternalServerError):
        ask()


def test_it_raises_what_fails_amid_a_stream(client: openai.OpenAI, service: FakeService) -> None:
    service.script = lambda ask: [AnswerPiece(index=0, text="He"), EngineError("boom")]
    with pytest.raises(openai.APIError, match="the engine failed"):
        list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))


@pytest.mark.parametrize("is_stream", [True, False])
def test_closing_it_ends_the_request(client: openai.OpenAI, service: FakeService, is_stream: bool) -> None:
    service.script = lambda ask: [AnswerPiece(index=0, text="He"), FOREVER]
    if is_stream:
        stream = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        next(iter(stream))
        stream.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).chat.completions.create(model="tiny", messages=HELLO)
    deadline = time.monotonic() + 20
    while not service.answers[0].was_cancelled and time.monotonic() < deadline:
        time.sleep(0.005)
    assert (service.answers[0].was_cancelled, service.answers[0].was_left) == (True, True)
