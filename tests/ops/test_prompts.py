"""Prompts of a batch as people write them: what is taken, what is refused, and that the line at fault is named."""

from __future__ import annotations

import csv
import io
import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamakv.engine.llamacpp import LlamaModel
from llamakv.errors import UsageError
from llamakv.ops.prompts import Prompt, given_prompts, read_prompts
from llamakv.ops.requests import SamplingOptions

KEYS = (
    "id, prompt, messages, system, timeout_s, temperature, top_k, top_p, min_p, repeat_penalty, frequency_penalty, "
    "presence_penalty, penalty_last_n, seed, logit_bias, grammar, max_tokens, stop"
)


def texts(text: str, name: str = "q.txt", **more) -> list[str | None]:
    return [prompt.text for prompt in read_prompts(text, name=name, **more)]


def one(**values: object) -> Prompt:
    """The prompt of one JSON line."""
    return read_prompts(json.dumps(values), name="q.jsonl")[0]


def refused(text: str, name: str = "q.jsonl", **more) -> UsageError:
    """What a text is refused with."""
    with pytest.raises(UsageError) as error:
        read_prompts(text, name=name, **more)
    assert error.value.exit_status == 2
    assert "\n" not in error.value.message
    assert len(error.value.message) < 12_000
    return error.value


# ---------------------------------------------------------------- lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("one\ntwo", ["one", "two"]),
        ("one\r\ntwo\r\n", ["one", "two"]),
        ("\ufeffone\ntwo\n", ["one", "two"]),
        ("one\n\n  \n\t\ntwo\n", ["one", "two"]),
        ("\r\n\r\none\r\n", ["one"]),
        ("  one \n\ttwo\t\n", ["  one ", "\ttwo\t"]),
        ("one\u2028still one\u2029and\x85on\x0band\x0con\n", ["one\u2028still one\u2029and\x85on\x0band\x0con"]),
        ("one\rstill one\n", ["one\rstill one"]),
        ("é 数据 🙂\n", ["é 数据 🙂"]),
        ("a\0b\n", ["a\0b"]),
        ('{"not json\n', ['{"not json']),
        ("{ a set }\n", ["{ a set }"]),
        ("[1, 2]\n", ["[1, 2]"]),
        ("{braces} and %s and \\n\n", ["{braces} and %s and \\n"]),
        ("", []),
        ("\n \n", []),
        ("\ufeff", []),
    ],
)
def test_a_prompt_is_a_line_as_it_stands(text: str, expected: list[str]) -> None:
    assert texts(text) == expected


def test_prompts_are_numbered_without_blank_lines_and_know_their_line() -> None:
    prompts = read_prompts("one\n\n\ntwo\n", name="q.txt")
    assert [(prompt.id, prompt.where) for prompt in prompts] == [(0, "q.txt line 1"), (1, "q.txt line 4")]
    assert (prompts[0].messages, prompts[0].system, prompts[0].timeout_s) == ((), None, None)
    assert prompts[0].sampling == SamplingOptions()


@given(st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]))))
def test_every_line_that_is_not_blank_is_one_prompt(lines: list[str]) -> None:
    text = "".join(line + "\n" for line in lines)
    expected = [line.rstrip("\r") for line in text.removeprefix("\ufeff").split("\n") if line.strip()]
    assert texts(text, kind="text") == expected


def test_given_prompts_are_taken_as_they_are() -> None:
    prompts = given_prompts(["one", "", "two\nlines", ' {"id": 1}', "one"])
    assert [prompt.text for prompt in prompts] == ["one", "", "two\nlines", ' {"id": 1}', "one"]
    assert [prompt.id for prompt in prompts] == [0, 1, 2, 3, 4]
    assert [prompt.where for prompt in prompts][:2] == ["prompt 0", "prompt 1"]
    assert given_prompts([]) == []


# ---------------------------------------------------------------- which of them it is


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("q.txt", '{"prompt": "a"}\n', ["a"]),
        ("q.txt", '\n\n  {"prompt": "a"}\n', ["a"]),
        ("standard input", '{"prompt": "a"}\n', ["a"]),
        ("q", '\ufeff{"prompt": "a"}\r\n', ["a"]),
        ("q.txt", "a\nb\n", ["a", "b"]),
        ("q.csv", "prompt\na\n", ["a"]),
        ("q.CSV", "prompt\na\n", ["a"]),
        ("q.tsv", "id\tprompt\n1\ta, b\n", ["a, b"]),
        ("q.jsonl", '{"prompt": "a"}\n', ["a"]),
        ("q.ndjson", '{"prompt": "a"}\n', ["a"]),
        ("Q.JSON", '{"prompt": "a"}\n', ["a"]),
    ],
)
def test_what_it_is_is_told_by_its_name_and_first_line(name: str, text: str, expected: list[str]) -> None:
    assert texts(text, name) == expected


def test_what_it_is_can_be_said() -> None:
    assert texts('{"prompt": "a"}', "q.jsonl", kind="text") == ['{"prompt": "a"}']
    assert texts('{"prompt": "a"}', "q.csv", kind="jsonl") == ["a"]
    assert texts("prompt,x\na,b", "q.txt", kind="csv") == ["a"]
    assert refused("a", "q.txt", kind="jsonl").message.startswith("q.txt line 1: not JSON: ")


def test_once_json_lines_always_json_lines() -> None:
    assert refused('{"prompt": "a"}\nb\n', "q").message.startswith("q line 2: not JSON: ")


# ---------------------------------------------------------------- JSON lines


def test_all_keys_are_taken() -> None:
    values = {
        "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0, "repeat_penalty": 1.5, "frequency_penalty": -1,
        "presence_penalty": 2, "penalty_last_n": 7, "seed": 4294967295, "grammar": "root ::= [a-z]", "max_tokens": 3,
    }  # fmt: skip
    prompt = one(id="a", prompt="q", system="s", timeout_s=1.5, logit_bias={"5": -1, "7": "-inf"}, stop="x", **values)
    assert (prompt.id, prompt.text, prompt.system, prompt.timeout_s) == ("a", "q", "s", 1.5)
    assert prompt.sampling == SamplingOptions(**values, stop=("x",), logit_bias=((5, -1.0), (7, -math.inf)))
    assert set(SamplingOptions.__dataclass_fields__) == {*values, "stop", "logit_bias"}


def test_null_is_as_if_the_key_were_not_there() -> None:
    names = [name for name in KEYS.split(", ") if name != "prompt"]
    assert one(prompt="q", **dict.fromkeys(names)) == one(prompt="q")
    assert one(prompt=None).text is None
    assert one().text is None


def test_texts_are_taken_literally() -> None:
    assert one(prompt="  a\n\tb\u2028 ").text == "  a\n\tb\u2028 "
    assert one(prompt="").text == ""
    assert one(system="").system == ""


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("temperature", 0, 100),
        ("top_k", 0, 2**31 - 1),
        ("top_p", 0, 1),
        ("min_p", 0, 1),
        ("repeat_penalty", 0.01, 100),
        ("frequency_penalty", -100, 100),
        ("presence_penalty", -100, 100),
        ("penalty_last_n", 0, 2**31 - 1),
        ("seed", -1, 2**32 - 1),
        ("max_tokens", -1, 2**31 - 1),
    ],
)
def test_numbers_have_ranges(name: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(one(prompt="q", **{name: value}).sampling, name) == value
    beyond = 1 if isinstance(low, int) else 0.01
    for value in (low - beyond, high + 1, 10**30, -(10**30)):
        message = refused(json.dumps({"prompt": "q", name: value})).message
        assert message.startswith(f"q.jsonl line 1: {name!r} must be ")
        assert "not " in message


@pytest.mark.parametrize("name", ["temperature", "top_p", "timeout_s", "top_k", "seed", "max_tokens"])
@pytest.mark.parametrize("value", [True, False, "1", "", [1], {}, {"a": 1}])
def test_a_number_is_a_number(name: str, value: object) -> None:
    assert refused(json.dumps({"prompt": "q", name: value})).message.startswith(f"q.jsonl line 1: {name!r} must be a ")


@pytest.mark.parametrize("name", ["top_k", "seed", "max_tokens", "penalty_last_n"])
@pytest.mark.parametrize("value", ["1.5", "1.0", "1e3"])
def test_a_whole_number_has_no_point(name: str, value: str) -> None:
    message = refused(f'{{"prompt": "q", "{name}": {value}}}').message
    assert message == f"q.jsonl line 1: {name!r} must be a whole number, not a number"


@pytest.mark.parametrize("name", ["temperature", "top_p", "repeat_penalty", "timeout_s"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 400, "-" + "9" * 400])
def test_a_number_is_finite(name: str, value: str) -> None:
    message = refused(f'{{"prompt": "q", "{name}": {value}}}').message
    assert message.startswith(f"q.jsonl line 1: {name!r} must be ")


@pytest.mark.parametrize("name", ["max_tokens", "seed", "top_k", "id", "temperature", "unknown"])
@pytest.mark.parametrize("n_digits", [30, 4000, 5000, 100_000])
def test_numbers_of_thousands_of_digits_do_no_harm(name: str, n_digits: int) -> None:
    text = f'{{"prompt": "q", "{name}": {"9" * n_digits}}}'
    if name == "id" and n_digits <= 4000:
        assert read_prompts(text, name="q.jsonl")[0].id == int("9" * n_digits)
    else:
        assert refused(text).message.startswith("q.jsonl line 1: ")


def test_timeouts_are_seconds() -> None:
    assert one(prompt="q", timeout_s=0).timeout_s == 0.0
    assert one(prompt="q", timeout_s=86400.5).timeout_s == 86400.5
    assert refused('{"prompt": "q", "timeout_s": -0.1}').message.startswith("q.jsonl line 1: 'timeout_s' must be ")


@pytest.mark.parametrize("name", ["prompt", "system", "grammar"])
@pytest.mark.parametrize(
    ("value", "kind"), [(1, "a number"), (True, "true or false"), (["a"], "a list"), ({"a": 1}, "an object")]
)
def test_a_text_is_a_text(name: str, value: object, kind: str) -> None:
    values = {"prompt": "q", name: value}
    assert refused(json.dumps(values)).message == f"q.jsonl line 1: {name!r} must be a text, not {kind}"


@pytest.mark.parametrize("value", ["", " \n"])
def test_a_grammar_is_not_empty(value: str) -> None:
    assert refused(json.dumps({"grammar": value})).message == "q.jsonl line 1: 'grammar' must not be empty"


def test_stop_is_a_text_or_a_list_of_texts() -> None:
    assert one(stop="a").sampling.stop == ("a",)
    assert one(stop=["a", " ", "\n"]).sampling.stop == ("a", " ", "\n")
    assert one(stop=[]).sampling.stop == ()
    for value in ("", [""], ["a", ""], 1, [1], ["a", None], {"a": 1}, [["a"]], True):
        message = refused(json.dumps({"prompt": "q", "stop": value})).message
        assert message == "q.jsonl line 1: 'stop' must be a text or a list of texts, none of them empty"


def test_biases_are_tokens_and_finite_numbers_or_minus_infinity() -> None:
    assert one(logit_bias={}).sampling.logit_bias == ()
    assert one(logit_bias={"0": 1.5, "12": -2}).sampling.logit_bias == ((0, 1.5), (12, -2.0))
    for forbid in ('"-inf"', '"-Infinity"', "-Infinity"):
        prompt = read_prompts(f'{{"logit_bias": {{"3": {forbid}}}}}', name="q.jsonl")[0]
        assert prompt.sampling.logit_bias == ((3, -math.inf),)
    for value in (
        "1", "[]", "[[1, 2]]", '"1=2"', '{"a": 1}', '{"-1": 1}', '{"1.0": 1}', '{"": 1}', '{" 1": 1}', '{"1": "2"}',
        '{"1": true}', '{"1": null}', '{"1": [1]}', '{"1": {}}', '{"1": NaN}', '{"1": Infinity}', '{"1": 1e400}',
        '{"1": "inf"}', '{"1": ' + "9" * 400 + "}", '{"' + "9" * 5000 + '": 1}', '{"²": 1}',
    ):  # fmt: skip
        assert refused(f'{{"logit_bias": {value}}}').message.startswith("q.jsonl line 1: 'logit_bias' ")


def test_ids_are_texts_or_whole_numbers() -> None:
    lines = ['{"id": "a b é"}', '{"id": 7}', '{"id": -1}', '{"id": "x/y"}', '{"id": 123456789012345678901234567890}']
    prompts = read_prompts("\n".join(lines), name="q.jsonl")
    assert [prompt.id for prompt in prompts] == ["a b é", 7, -1, "x/y", 123456789012345678901234567890]
    for value in ("1.5", "1.0", "true", "false", '""', "[]", "{}", "NaN", "Infinity"):
        message = refused(f'{{"id": {value}}}').message
        assert message.startswith("q.jsonl line 1: 'id' must be a text or a whole number, not ")


def test_without_an_id_a_prompt_has_its_number() -> None:
    prompts = read_prompts('{"id": "a"}\n\n{"prompt": "q"}\n{"id": null}\n', name="q.jsonl")
    assert [prompt.id for prompt in prompts] == ["a", 1, 2]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"id": 1}', '{"id": 1}'], "q.jsonl line 2: id 1 is that of q.jsonl line 1 already"),
        (['{"id": "a"}', "", '{"id": "a"}'], "q.jsonl line 3: id 'a' is that of q.jsonl line 1 already"),
        (['{"id": 1}', '{"id": "1"}'], "q.jsonl line 2: id '1' is that of q.jsonl line 1 already"),
        (['{"prompt": "a"}', '{"id": 0}'], "q.jsonl line 2: id 0 is that of q.jsonl line 1 already"),
        (['{"id": 1}', '{"prompt": "b"}'], "q.jsonl line 2: id 1 is that of q.jsonl line 1 already"),
    ],
)
def test_an_id_is_there_once(lines: list[str], message: str) -> None:
    assert refused("\n".join(lines)).message == message


def test_an_unknown_key_is_refused_with_its_line_and_the_keys_there_are() -> None:
    error = refused('{"prompt": "a"}\n\n{"prompt": "b", "max_token": 3}\n')
    assert error.message == "q.jsonl line 3: unknown key 'max_token'"
    assert error.hint == f"the keys are {KEYS}"
    for name in ("Prompt", "text", "model", "n", "", "é", "__class__"):
        assert refused(json.dumps({name: None, "prompt": "a"})).message == f"q.jsonl line 1: unknown key {name!r}"


@pytest.mark.parametrize("inside", ["prompt", "id", "x"])
def test_a_key_that_is_there_twice_is_refused(inside: str) -> None:
    assert refused(f'{{"{inside}": "a", "{inside}": "a"}}').message == f"q.jsonl line 1: {inside!r} is there twice"


def test_a_key_that_is_there_twice_further_inside_is_refused() -> None:
    assert refused('{"logit_bias": {"1": 2, "1": 3}}').message == "q.jsonl line 1: '1' is there twice"
    message = refused('{"messages": [{"role": "user", "role": "user", "content": "a"}]}').message
    assert message == "q.jsonl line 1: 'role' is there twice"


@pytest.mark.parametrize(
    ("line", "kind"),
    [("[1]", "a list"), ('"a"', "a text"), ("1", "a number"), ("1.5", "a number"), ("true", "true or false"),
     ("null", "null")],
)  # fmt: skip
def test_a_line_is_an_object(line: str, kind: str) -> None:
    assert refused('{"prompt": "a"}\n' + line).message == f"q.jsonl line 2: expected an object, found {kind}"


@pytest.mark.parametrize(
    "line", ["{", '{"prompt": "a"', "{'prompt': 'a'}", '{"prompt": "a"} {}', '{"prompt": "a",}', "a"]
)
def test_a_line_that_is_not_json_is_refused_with_its_number(line: str) -> None:
    assert refused('{"prompt": "a"}\n\n' + line).message.startswith("q.jsonl line 3: not JSON: ")


# ---------------------------------------------------------------- messages


def test_messages_are_roles_and_texts() -> None:
    messages = [("system", "s"), ("user", "a"), ("assistant", ""), ("user", " b\n")]
    prompt = one(messages=[{"role": role, "content": content} for role, content in messages])
    assert (prompt.messages, prompt.text) == (tuple(messages), None)


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "must be a list of messages, with at least one"),
        ("a", "must be a list of messages, with at least one"),
        (USER, "must be a list of messages, with at least one"),
        (["a"], "must be objects with 'role' and 'content', and nothing else"),
        ([{}], "must be objects with 'role' and 'content', and nothing else"),
        ([{"role": "user"}], "must be objects with 'role' and 'content', and nothing else"),
        ([{**USER, "name": "x"}], "must be objects with 'role' and 'content', and nothing else"),
        ([{"role": "tool", "content": "a"}], "must have a role of user, assistant, system, and a text as content"),
        ([{"role": "User", "content": "a"}], "must have a role of user, assistant, system, and a text as content"),
        ([{"role": ["user"], "content": "a"}], "must have a role of user, assistant, system, and a text as content"),
        ([{"role": {}, "content": "a"}], "must have a role of user, assistant, system, and a text as content"),
        ([{"role": "user", "content": None}], "must have a role of user, assistant, system, and a text as content"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "must have a role of user, assistant, system, and a text as content",
        ),
        (
            [USER, {"role": "assistant", "content": "b"}],
            "must end with a user's message, not one of role 'assistant'",
        ),
        ([{"role": "system", "content": "b"}], "must end with a user's message, not one of role 'system'"),
        ([USER, {"role": "system", "content": "b"}, USER], "may have a system prompt at the beginning only"),
    ],
)
def test_messages_that_cannot_be_are_refused(messages: object, message: str) -> None:
    assert refused(json.dumps({"messages": messages})).message == f"q.jsonl line 1: 'messages' {message}"


def test_a_prompt_and_messages_do_not_go_together() -> None:
    message = refused(json.dumps({"prompt": "", "messages": [USER]})).message
    assert message == "q.jsonl line 1: 'prompt' and 'messages' cannot go together"


# ---------------------------------------------------------------- hostile input


@pytest.mark.parametrize("depth", [1_000, 100_000, 1_000_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_json_nested_too_deeply_is_refused(depth: int, opening: str) -> None:
    closing = {"[": "]", '{"a":': "}"}[opening]
    for value in (opening * depth + "1" + closing * depth, opening * depth):
        assert refused('{"prompt": "a"}\n{"prompt": ' + value + "}").message.startswith("q.jsonl line 2: ")


def test_a_first_line_that_only_looks_like_json_is_text() -> None:
    for line in ('{"a":' * 100_000, '{"a": [' + "[" * 100_000, "{" * 10, '{"a": ' + "9" * 10_000):
        assert texts(line, "q.txt") == [line]


SURROGATES = ["\\ud800", "\\udfff", "a\\ud83d", "\\ude00\\ud83d", "\\udcff"]


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "%s"}',
        '{"prompt": "a", "id": "%s"}',
        '{"prompt": "a", "system": "%s"}',
        '{"prompt": "a", "stop": "%s"}',
        '{"prompt": "a", "stop": ["a", "%s"]}',
        '{"prompt": "a", "grammar": "%s"}',
        '{"messages": [{"role": "user", "content": "%s"}]}',
        '{"prompt": "a", "%s": 1}',
        '{"prompt": "a", "logit_bias": {"%s": 1}}',
        '{"messages": [{"role": "%s", "content": "a"}]}',
    ],
)
def test_half_a_surrogate_pair_is_refused_in_a_message_that_can_be_printed(line: str, surrogate: str) -> None:
    error = refused('{"prompt": "a"}\n' + line.replace("%s", surrogate))
    assert error.message.startswith("q.jsonl line 2: ")
    error.message.encode()


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert texts('{"prompt": "\\ud83d\\ude00"}', "q.jsonl") == ["\U0001f600"]


def test_half_a_surrogate_pair_in_a_template_is_refused() -> None:
    assert refused('{"a": "\\ud800"}', template="{a}").message.startswith("q.jsonl line 1: 'a' ")
    assert refused('{"a": ["\\ud800"]}', template="{a}").message.startswith("q.jsonl line 1: 'a' ")


def test_what_was_no_utf8_on_the_command_line_is_refused() -> None:
    """Bytes of an argument that are no UTF-8 arrive as lone surrogates."""
    with pytest.raises(UsageError, match="prompt 1 is not UTF-8 text"):
        given_prompts(["a", "b\udcff"])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
json_keys = st.sampled_from(KEYS.split(", ")) | st.text(max_size=4)


@given(st.dictionaries(json_keys, json_values, max_size=4), st.sampled_from([None, "{prompt}", "{a} {id}"]))
@example({"prompt": "a", "stop": ["\ud800"]}, None)
@example({"a": float("nan")}, "{a} {id}")
@pytest.mark.slow
def test_any_json_line_is_taken_or_refused_and_what_is_taken_can_be_used(values: dict, template: str | None) -> None:
    prompts, message = outcome(json.dumps(values), "q.jsonl", template)
    assert (len(prompts), message[:16]) in [(1, ""), (0, "q.jsonl line 1: ")]
    message.encode()
    for prompt in prompts:
        check_is_unicode(prompt)


def outcome(text: str, name: str, template: str | None) -> tuple[list[Prompt], str]:
    """What is taken, or what it is refused with."""
    try:
        return read_prompts(text, name=name, template=template), ""
    except UsageError as error:
        return [], error.message


def check_is_unicode(prompt: Prompt) -> None:
    for text in (str(prompt.id), prompt.text, prompt.system, prompt.sampling.grammar, *(prompt.sampling.stop or ())):
        assert text is None or text.encode().decode() == text
    assert all(content.encode() is not None for _, content in prompt.messages)


@pytest.mark.slow
@given(st.text(), st.sampled_from(["q.txt", "q.jsonl", "q.csv", "q.tsv"]), st.none() | st.text(max_size=12))
@example("\n\n", "q.csv", None)
@example('"', "q.csv", "{a}")
@example("\0", "q.csv", None)
def test_any_text_is_taken_or_refused(text: str, name: str, template: str | None) -> None:
    prompts, message = outcome(text, name, template)
    message.encode()
    for prompt in prompts:
        assert prompt.where.startswith(f"{name} line ")
        check_is_unicode(prompt)


def test_what_is_taken_can_be_tokenised(model_path) -> None:  # type: ignore[no-untyped-def]
    odd = ["\0", "\uffff", "\ufdd0", "\U0010ffff", "\u202e", "a\u0301", "<|im_end|>", "\x1b[2J", "\ufeff", "é" * 1000]
    prompts = read_prompts("\n".join(json.dumps({"prompt": text}) for text in odd), name="q.jsonl")
    with LlamaModel(model_path) as model:
        counts = [len(model.tokenize(p.text or "", add_special=False, parse_special=True)) for p in prompts]
    assert min(counts) >= 1


# ---------------------------------------------------------------- tables


def table(text: str, name: str = "q.csv", template: str | None = None) -> list[tuple[object, str | None]]:
    return [(prompt.id, prompt.text) for prompt in read_prompts(text, name=name, template=template)]


def test_a_table_has_a_prompt_for_each_row() -> None:
    assert table("prompt\na\nb\n") == [(0, "a"), (1, "b")]
    assert table("\ufeffid,prompt\r\nx,a\r\ny,b\r\n") == [("x", "a"), ("y", "b")]
    assert table("id,prompt\n7,a\n") == [("7", "a")]
    assert table("id,prompt\n,a\nx,b\n") == [(0, "a"), ("x", "b")]
    assert table("prompt\n") == []
    assert table("") == []


def test_cells_are_taken_literally() -> None:
    text = 'prompt,id\n"a, b ""c""\n d\r\ne\u2028f", x \n  g  ,y\n{x},z\n'
    assert table(text) == [(" x ", 'a, b "c"\n d\r\ne\u2028f'), ("y", "  g  "), ("z", "{x}")]
    assert table('prompt\tid\n"a\tb"\tx\nc, d\ty\n', "q.tsv") == [("x", "a\tb"), ("y", "c, d")]


def test_blank_rows_are_left_out_and_an_empty_cell_is_an_empty_prompt() -> None:
    assert table("prompt,x\n\na,1\n\r\n,2\n\n") == [(0, "a"), (1, "")]


def test_rows_know_their_line() -> None:
    prompts = read_prompts('prompt\na\n"b\nc"\nd\n', name="q.csv")
    assert [prompt.where for prompt in prompts] == ["q.csv line 2", "q.csv line 3", "q.csv line 5"]


def test_a_cell_may_be_long() -> None:
    long = "word " * 50_000
    assert table(f'prompt\n"{long}"\n') == [(0, long)]


@given(st.lists(st.tuples(*[st.text(st.characters(exclude_categories=["Cs"]))] * 2), min_size=1))
def test_what_the_csv_module_writes_is_read_back(rows: list[tuple[str, str]]) -> None:
    file = io.StringIO(newline="")
    csv.writer(file, quoting=csv.QUOTE_ALL).writerows([("prompt", "other"), *rows])
    assert [text for _, text in table(file.getvalue())] == [prompt for prompt, _ in rows]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,b\na\n", "q.csv line 2: 1 cells, there are 2 columns"),
        ("prompt,b\na,b\nc,d,e\n", "q.csv line 3: 3 cells, there are 2 columns"),
        ("prompt,b,prompt\na,b,c\n", "q.csv line 1: column 'prompt' is there twice"),
        ("prompt,,\na,b,c\n", "q.csv line 1: column '' is there twice"),
        ("question,b\na,c\n", "q.csv has no column 'prompt', but question, b"),
        ("Prompt\na\n", "q.csv has no column 'prompt', but Prompt"),
        ('prompt\n"a\n', "q.csv line 2: unexpected end of data"),
        ('prompt\n"a"b\n', "q.csv line 2: ',' expected after '\"'"),
        ("\nprompt\na\n", "q.csv line 1: expected the names of columns, found an empty line"),
        ("id,prompt\nx,a\nx,b\n", "q.csv line 3: id 'x' is that of q.csv line 2 already"),
        ("id,prompt\n1,a\n,b\n", "q.csv line 3: id 1 is that of q.csv line 2 already"),
    ],
)
def test_a_table_that_cannot_be_is_refused_with_its_line(text: str, message: str) -> None:
    assert refused(text, "q.csv").message == message


def test_a_table_without_a_prompt_column_says_how_to_make_one() -> None:
    assert refused("title,body\na,b\n", "q.csv").hint == "say what to ask: --template 'Summarise: {body}'"
    assert table("title,body\na,b\n", template="Summarise: {body}") == [(0, "Summarise: b")]


# ---------------------------------------------------------------- templates


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{a}", "1"),
        ("{a}{b}{a}", "1{a}1"),
        ("{{a}} {a} {{}} }}", "{a} 1 {} }"),
        ("{a b}: {b}", "3: {a}"),
        ("x\n{a}\n%s \\n", "x\n1\n%s \\n"),
        ("{a.b}{0}{é}", "456"),
        ("{{{a}}}", "{1}"),
    ],
)
def test_a_template_puts_columns_in_their_places(template: str, expected: str) -> None:
    assert table("a,b,a b,a.b,0,é\n1,{a},3,4,5,6\n", template=template) == [(0, expected)]


def test_a_template_is_filled_from_lines_and_arguments() -> None:
    assert texts("one\ntwo\n", template="Q: {prompt}!") == ["Q: one!", "Q: two!"]
    assert [prompt.text for prompt in given_prompts(["one", "{x}"], template="Q: {prompt}")] == ["Q: one", "Q: {x}"]


def test_a_template_is_filled_from_json_lines() -> None:
    line = '{"id": 7, "prompt": "p", "n": 1.50, "x": [1, "é"], "o": {"a": null}, "b": true, "max_tokens": 3}'
    (prompt,) = read_prompts(line, name="q.jsonl", template="{id} {prompt} {n} {x} {o} {b}")
    assert prompt.text == '7 p 1.5 [1, "é"] {"a": null} true'
    assert (prompt.id, prompt.sampling.max_tokens) == (7, 3)


def test_keys_that_the_template_does_not_name_are_unknown() -> None:
    error = refused('{"title": "a", "body": "b"}', template="{body}")
    assert error.message == "q.jsonl line 1: unknown key 'title'"


def test_a_template_and_messages_do_not_go_together() -> None:
    message = refused(json.dumps({"messages": [USER], "a": "b"}), template="{a}").message
    assert message == "q.jsonl line 1: 'messages' and a template cannot go together"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("q.txt", "one", "q.txt line 1: the template's {body} is not there; there is prompt"),
        ("q.csv", "a,b\n1,2", "q.csv line 2: the template's {body} is not there; there is a, b"),
        (
            "q.jsonl",
            '{"prompt": "a", "id": 1}',
            "q.jsonl line 1: the template's {body} is not there; there is id, prompt",
        ),
        ("q.jsonl", '{"body": null}', "q.jsonl line 1: the template's {body} is not there; there is nothing"),
        ("q.jsonl", '{"body": "x"}\n{}', "q.jsonl line 2: the template's {body} is not there; there is nothing"),
    ],
)
def test_what_a_template_names_must_be_there(name: str, text: str, message: str) -> None:
    assert refused(text, name, template="{body}").message == message


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{}", "the template's {} is not a name in braces"),
        ("{a!r}", "the template's {a!r} is not a name in braces"),
        ("{a:>3}", "the template's {a:>3} is not a name in braces"),
        ("{a!s:x}", "the template's {a!s:x} is not a name in braces"),
        ("{a:{b}}", "the template's {a:{b}} is not a name in braces"),
        ("{a", "the template cannot be read: "),
        ("a}", "the template cannot be read: "),
        ("{a}}", "the template cannot be read: "),
        ("", "the template names nothing"),
        ("Summarise", "the template names nothing"),
        ("{{a}}", "the template names nothing"),
    ],
)
@pytest.mark.parametrize("name", ["q.txt", "q.csv", "q.jsonl"])
def test_a_template_that_cannot_be_used_is_refused(template: str, message: str, name: str) -> None:
    error = refused({"q.txt": "a", "q.csv": "a\nb", "q.jsonl": '{"a": "b"}'}[name], name, template=template)
    assert error.message.startswith(message)
    with pytest.raises(UsageError) as same:
        given_prompts(["a"], template=template)
    assert same.value.message == error.message


@pytest.mark.parametrize("key", ["system", "max_tokens", "seed"])
def test_a_template_may_name_any_key_of_the_line(key: str) -> None:
    """They are there, so ``is not there`` would be a lie."""
    value = {"system": "s", "max_tokens": 3, "seed": 5}[key]
    (prompt,) = read_prompts(json.dumps({"prompt": "p", key: value}), name="q.jsonl", template=f"{{prompt}} {{{key}}}")
    assert prompt.text == f"p {value}"
