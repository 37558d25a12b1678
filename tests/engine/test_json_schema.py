"""Grammars made from JSON schemas: what is written under them is JSON that fits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.json_schema import any_object_grammar, schema_grammar
from llamakv.engine.llamacpp import LlamaModel
from llamakv.errors import UsageError
from llamakv.records import Sampling


@pytest.fixture(scope="module")
def write(models) -> Callable[[str, int], str]:
    """Text a model of random weights writes under a grammar, to its end: any text the grammar allows may come."""
    with LlamaModel(models("M")) as model:
        sequence = model.open_sequence(MemoryRequest(), n_ctx_min=512, n_ctx_max=2048, n_threads=1)
        sequence.extend(model.tokenize("hello", add_special=True, parse_special=False))
        n_start = len(sequence.tokens)

        def write(grammar: str, seed: int) -> str:
            sampling = Sampling(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, grammar=grammar, seed=seed)
            written = [token for token in sequence.generate(sampling, n_max=1500) if not model.is_end(token)]
            sequence.rewind(n_start)
            return b"".join(map(model.token_bytes, written)).decode("utf-8", "replace")

        yield write
        sequence.close()


def fits(pattern: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value, re.DOTALL) is not None


VALUES = ['a"b', "a\\b", "\U0001f600", "\n", 3, None]
TREE = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree_node"}]}},
    "required": ["next"],
}
SHORT = {"type": "string", "maxLength": 2}
CASES: list[tuple[dict[str, object], Callable[[object], bool]]] = [
    ({"type": "boolean"}, lambda v: isinstance(v, bool)),
    ({"type": "integer"}, lambda v: type(v) is int),
    ({"type": "number"}, lambda v: isinstance(v, int | float)),
    ({"type": ["null", "integer"]}, lambda v: v is None or type(v) is int),
    ({"type": "string", "minLength": 2, "maxLength": 3}, fits(".{2,3}")),
    ({"type": "string", "format": "date"}, fits(r"\d{4}-\d\d-\d\d")),
    ({"type": "string", "format": "uuid"}, fits(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")),
    ({"enum": VALUES}, lambda v: v in VALUES),
    ({"const": {"a": [1, "\\"]}}, lambda v: v == {"a": [1, "\\"]}),
    ({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}, lambda v: len(v) in (2, 3)),
    ({"type": "array", "items": {"type": "null"}, "maxItems": 0}, lambda v: v == []),
    (
        {
            "type": "object",
            "properties": {"a": SHORT, "b_c": {"type": "integer"}, 'd"': {"type": "null"}},
            "required": ["b_c"],
            "additionalProperties": False,
        },
        lambda v: "b_c" in v and v.keys() <= {"a", "b_c", 'd"'},
    ),
    (
        {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}},
        lambda v: v in ({}, {"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
    ),
    ({"anyOf": [{"const": 1}, {"$ref": "#/$defs/x_y"}], "$defs": {"x_y": {"const": 2}}}, lambda v: v in (1, 2)),
    ({"$defs": {"tree_node": TREE}, "$ref": "#/$defs/tree_node"}, lambda v: v.keys() == {"next"}),
    (  # two definitions whose last names are equal
        {"type": "object", "properties": {"p": {"$ref": "#/$defs/a/x"}, "q": {"$ref": "#/$defs/b/x"}},
         "required": ["p", "q"], "$defs": {"a": {"x": {"const": 1}}, "b": {"x": {"const": 2}}}},
        lambda v: v == {"p": 1, "q": 2},
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)))
def test_what_is_written_fits_the_schema(write, case: int) -> None:
    schema, is_fitting = CASES[case]
    grammar = schema_grammar(schema)
    for seed in range(4):
        value = json.loads(write(grammar, seed))
        assert is_fitting(value), value


def test_any_object_is_an_object(write) -> None:
    assert isinstance(json.loads(write(any_object_grammar(), 3)), dict)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "integer", "minimum": 0}, "'minimum'"),
        ({"type": "string", "pattern": "^a$"}, "'pattern'"),
        ({"type": "string", "format": "email"}, "format"),
        ({"type": "string", "maxLength": 10**9}, "maxLength"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "maxItems below"),
        ({"type": "array", "maxItems": True}, "maxItems"),
        ({"type": "file"}, "no type"),
        ({"type": ["string", "integer"], "minimum": 0}, "'minimum'"),
        ({"$ref": "https://example.org/schema"}, "outside the schema"),
        ({"$ref": "#/$defs/missing"}, "not there"),
        ({"$ref": "#/type", "type": "string"}, "beside"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "more than one schema"),
        ({"type": "object", "required": ["a"]}, "requires 'a'"),
        ({"type": "object", "required": [[]], "properties": {}}, "requires"),
        ({"type": "object", "properties": {"a": False}}, "#/properties/a"),
        ({"enum": []}, "enum"),
        ({"enum": [1], "type": "string"}, "no value"),
        ({"enum": list(range(3000))}, "2000 values"),
        ({"anyOf": [{"type": "null"}] * 3000}, "2000 places"),
        ({"anyOf": "x"}, "list of schemas"),
    ],
)
def test_what_is_not_understood_is_refused_by_its_name(schema: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        schema_grammar(schema)
    assert said in refused.value.message


def test_a_schema_nested_deeply_is_refused() -> None:
    schema: dict[str, object] = {"type": "null"}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    with pytest.raises(UsageError, match="64 levels"):
        schema_grammar(schema)


def test_grammars_without_end_or_beyond_measure_are_refused_by_the_engine(models) -> None:
    inner = {"type": "array", "maxItems": 1000, "items": {"type": "null"}}
    schemas = [{"$ref": "#"}, {"anyOf": [{"$ref": "#"}, {"type": "null"}]}]
    with LlamaModel(models("M")) as model:
        model.check_sampling(Sampling(grammar=schema_grammar({"type": "array", "maxItems": 1000, "items": inner})))
        for schema in schemas:
            with pytest.raises(UsageError, match="grammar"):
                model.check_sampling(Sampling(grammar=schema_grammar(schema)))
