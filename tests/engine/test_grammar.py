"""Grammars are looked at before the engine gets them."""

from __future__ import annotations

import pytest

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.grammar import check_grammar
from llamakv.engine.json_schema import any_object_grammar, schema_grammar
from llamakv.engine.llamacpp import LlamaModel
from llamakv.errors import EngineError, UsageError
from llamakv.records import Sampling

CHAIN = "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(30)), 'r30 ::= "a"?'])
REFERENCES = {
    f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}", "title": "x"}]} for i in range(26)
}


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a" | "b"',
        'root ::= [a-z]+ " " num # words\nnum ::= [0-9]{1,3}\n',
        'root ::= ("x" | (y z)?)* "."\ny ::= "\\"" [^"\\\\]\nz ::= y* |\n  "c"',
        'root ::= "[" (root ("," root)*)? "]"',
        any_object_grammar(),
        schema_grammar({"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 1000}),
    ],
)
def test_what_the_engine_can_follow_is_let_through(text: str) -> None:
    check_grammar(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("A LINE FOR YOUR LOG", "should begin at 'A'"),
        ("x ::= 'a'", "cannot be read at line 1"),
        ('x ::= "a"', "a rule named root"),
        ('root ::= "a" other', "uses 'other', which is not there"),
        ('root ::= ("a"', "a bracket is not closed"),
        ("root ::= *", "stands behind nothing"),
        ('root ::= "a"{5,2}', r"repetition \{5,2\} cannot be"),
        ('root ::= "a"{3000}', r"repetition \{3000\} cannot be"),
        ('root ::= ((("a"?){100}){100}){100}', "more than 200,000 parts"),
        (CHAIN, "more than 10,000 ways"),
        ("root ::= " + "(" * 300 + '"a"' + ")" * 300, "nested too deeply"),
        ("\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(500)), 'r500 ::= "a"']), "nested too deeply"),
        ('root ::= "a"\0', "zero byte"),
    ],
)
def test_what_it_cannot_is_refused_at_once(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        check_grammar(text)


def test_a_schema_with_too_many_ways_is_refused() -> None:
    schema = {"$defs": {**REFERENCES, "d26": {"type": "string"}}, "$ref": "#/$defs/d0"}
    with pytest.raises(UsageError, match="more than 10,000 ways"):
        check_grammar(schema_grammar(schema))


@pytest.mark.slow
def test_a_grammar_that_doubles_with_each_token_ends_its_run(models) -> None:
    with LlamaModel(models("M")) as model:
        (token,) = model.tokenize("a", add_special=False, parse_special=False)[-1:]
        sequence = model.open_sequence(MemoryRequest(), n_ctx_min=256, n_ctx_max=1024, n_threads=1)
        sequence.extend([5, 6, 7])
        grammar = 'root ::= "a" root "b" | "a" root "c" | "a"'
        with pytest.raises(EngineError, match="too ambiguous"):
            list(sequence.generate(Sampling(grammar=grammar, logit_bias=((token, 100.0),)), n_max=200))
