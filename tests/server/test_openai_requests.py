"""What a request's fields become, and what is refused by its name."""

from __future__ import annotations

import json

import pytest
from starlette.testclient import TestClient

from llamakv.records import Sampling
from llamakv.server.contract import ChatMessage
from tests.server.fake_service import FakeService

HELLO = [{"role": "user", "content": "hi"}]


def post(client: TestClient, **fields: object):
    return client.post("/v1/chat/completions", json={"messages": HELLO, **fields})


def test_all_fields_reach_the_service(client: TestClient, service: FakeService) -> None:
    answer = post(
        client, model="tiny", n=2, stop=["a", "b"], seed=7, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1,
        repeat_penalty=1.1, presence_penalty=-1, frequency_penalty=2, logit_bias={"5": -100, "999": 1.5},
        max_completion_tokens=9, logprobs=True, top_logprobs=4, grammar='root ::= "x"', session="notes", timeout_s=3,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    (ask,) = service.asks
    assert ask.sampling == Sampling(
        temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repeat_penalty=1.1, presence_penalty=-1.0,
        frequency_penalty=2.0, seed=7, logit_bias=((5, -100.0), (999, 1.5)), grammar='root ::= "x"', max_tokens=9,
        stop=("a", "b"),
    )  # fmt: skip
    assert (ask.n_choices, ask.n_top_logprobs, ask.session, ask.timeout_s, ask.space) == (2, 4, "notes", 3.0, "")
    assert ask.prompt == (ChatMessage(role="user", content="hi"),)


def test_what_is_not_said_is_the_servers_default(connect, service: FakeService) -> None:
    client = connect(sampling=Sampling(temperature=0.7, top_k=11), max_tokens=50, max_time_s=30.0)
    assert post(client).status_code == 200
    assert post(client).status_code == 200
    assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    first, second, completion = service.asks
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.max_tokens) == (0.7, 11, 50)
    assert (first.timeout_s, first.n_top_logprobs, first.session, first.n_choices) == (30.0, None, None, 1)
    assert first.sampling.seed != second.sampling.seed
    assert completion.sampling.max_tokens == 16


def test_message_parts_and_roles_become_messages(client: TestClient, service: FakeService) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ada"},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [], "annotations": []},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    ]
    assert post(client, messages=messages).status_code == 200
    told = [(message.role, message.content) for message in service.asks[0].prompt]
    assert told == [("system", "be brief"), ("user", "ab"), ("assistant", "c"), ("tool", "d")]


def test_what_changes_no_answer_is_ignored(client: TestClient) -> None:
    answer = post(
        client, user="u", store=True, metadata={"a": "b"}, service_tier="auto", parallel_tool_calls=True, tools=[],
        functions=None, tool_choice="auto", modalities=["text"], reasoning_effort=None, prediction={"type": "content"},
    )  # fmt: skip
    assert answer.status_code == 200, answer.text


BAD: list[tuple[dict[str, object], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x", "mood": "sad"}]}, "messages[0].mood"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 1e300}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"seed": 2**65}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"logit_bias": {"1000": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": None}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"speed": 2}}, "stream_options.speed"),
    ({"stream": "yes"}, "stream"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"functions": [{}]}, "functions"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"frobnicate": 1}, "frobnicate"),
    ({"session": 5}, "session"),
    ({"session": "x" * 201}, "session"),
    ({"timeout_s": 0}, "timeout_s"),
    ({"timeout_s": 601}, "timeout_s"),
    ({"grammar": ""}, "grammar"),
    ({"grammar": "root ::= \0"}, "grammar"),
    ({"grammar": 'root ::= "x"', "response_format": {"type": "json_object"}}, "grammar"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "text", "colour": 1}}, "response_format.colour"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD, ids=[f"{param}-{i}" for i, (_, param) in enumerate(BAD)])
def test_a_wrong_field_is_a_400_that_names_it(client: TestClient, service: FakeService, fields, param: str) -> None:
    answer = post(client, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["message"]
    assert "\n" not in error["message"]
    assert service.asks == []


def test_response_formats_become_grammars(client: TestClient, service: FakeService) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    named = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": schema}}
    for form in ({"type": "text"}, {"type": "json_object"}, named):
        assert post(client, response_format=form).status_code == 200
    text, any_object, by_schema = (ask.sampling.grammar for ask in service.asks)
    assert text is None
    assert "root ::= object" in any_object
    assert '\\"a\\"' in by_schema


def test_a_schema_that_cannot_be_followed_is_a_400_that_says_why(client: TestClient) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}}
    answer = post(client, response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    assert answer.status_code == 400
    assert "'minimum'" in answer.json()["error"]["message"]


def test_another_model_is_a_404_and_an_alias_is_this_one(connect, service: FakeService) -> None:
    client = connect(model_alias=("gpt-4o",))
    assert post(client, model="gpt-4o").json()["model"] == "tiny"
    for model in ("gpt-5", ["tiny"], 5):
        answer = post(client, model=model)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert len(service.asks) == 1


def test_more_tokens_than_are_allowed_are_refused(connect) -> None:
    client = connect(max_tokens=50)
    assert post(client, max_tokens=50).status_code == 200
    assert post(client, max_completion_tokens=51).json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("prompt", "expected"), [("x", "x"), (["x"], "x"), ([1, 2], (1, 2)), ([[1, 999]], (1, 999)), ([0], (0,))]
)
def test_prompts_of_completions_are_text_or_tokens(client, service: FakeService, prompt, expected) -> None:
    assert client.post("/v1/completions", json={"prompt": prompt}).status_code == 200
    assert service.asks[0].prompt == expected


@pytest.mark.parametrize("prompt", [None, "", [], ["a", "b"], [[1], [2]], [1000], [-1], [True], [1.5], {"a": 1}, 5])
def test_other_prompts_are_refused(client: TestClient, prompt: object) -> None:
    answer = client.post("/v1/completions", json={"prompt": prompt})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"best_of": 2}, "best_of"), ({"suffix": "x"}, "suffix"), ({"echo": True, "logprobs": 1}, "echo"),
     ({"prompt": [1], "echo": True}, "echo"), ({"logprobs": 21}, "logprobs"), ({"messages": HELLO}, "messages")],
)  # fmt: skip
def test_what_completions_do_not_do_is_refused(client: TestClient, fields, param: str) -> None:
    answer = client.post("/v1/completions", json={"prompt": "x", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_seeds_of_any_sign_are_taken_and_equal_ones_stay_equal(client: TestClient, service: FakeService) -> None:
    for seed in (-1, -1, 2**40 + 3):
        assert post(client, seed=seed).status_code == 200
    assert [ask.sampling.seed for ask in service.asks] == [2**32 - 1, 2**32 - 1, 3]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff\xfe", b'{"a": NaN}', b'{"a": -Infinity}', b"\x00",
     b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"[" * 100_000, b'{"a":' * 50_000,
     b'{"n": ' + b"9" * 5000 + b"}"],
    ids=range(14),
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_a_400(client: TestClient, body: bytes) -> None:
    answer = client.post("/v1/chat/completions", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_whole_characters_written_as_escapes_are_taken(client: TestClient, service: FakeService) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "\U0001f600"}]})
    assert "\\ud83d" in body
    assert client.post("/v1/chat/completions", content=body).status_code == 200
    assert service.asks[0].prompt[0].content == "\U0001f600"


@pytest.mark.parametrize(
    ("fields", "n_asked", "n_told"),
    [({"n": 16, "max_tokens": 149, "top_logprobs": 20}, 149, 50_064),
     ({"max_tokens": 4000, "top_logprobs": 12}, 4000, 52_000),
     ({"n": 2, "max_completion_tokens": 10**6, "top_logprobs": 20}, 4096, 172_032)],
)  # fmt: skip
def test_more_log_probabilities_than_can_be_told_at_once_are_refused(
    client: TestClient, service: FakeService, fields, n_asked: int, n_told: int
) -> None:
    answer = post(client, logprobs=True, **fields)
    told = answer.json()["error"]
    assert (answer.status_code, told["param"]) == (400, "max_tokens")
    n, n_top = fields.get("n", 1), fields["top_logprobs"]
    assert told["message"] == (
        f"'n' {n} with {n_asked} tokens each, and {n_top} others told for each of them, are {n_told} log "
        "probabilities; without 'stream' 50000 are told at most"
    )
    assert post(client, logprobs=True, stream=True, **fields).status_code == 200
    assert post(client, **{**fields, "top_logprobs": None}).status_code == 200
    assert len(service.asks) == 2


def test_what_can_be_told_at_once_is_the_limit_where_none_is_named(connect, service: FakeService) -> None:
    client = connect()
    many = {"logprobs": True, "top_logprobs": 20, "n": 16}
    assert post(client, **many).status_code == 200
    assert post(client, **many, max_tokens=148).status_code == 200
    assert post(client, **many, stream=True).status_code == 200
    assert post(connect(max_tokens=9), **many).status_code == 200
    assert [ask.sampling.max_tokens for ask in service.asks] == [148, 148, None, 9]
