"""JSON schemas as GBNF grammars: whatever fits the grammar fits the schema.

Our own, because llama-cpp-python's converter leaves out what it does not know (``minimum``), writes backslashes in
``enum`` wrong, mixes up definitions whose last names are equal and builds text without bound. Here a schema is
translated as it is, or refused with the place and the word that cannot be. Objects are written with their properties in
the schema's order and, where properties are named, without further ones, which is always allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from llamakv.errors import UsageError

_N_PLACES_MAX = 2000
_N_DEEP_MAX = 64
_N_VALUES_MAX = 2000
_N_TIMES_MAX = 1000
"""The engine unrolls repetitions: it refuses more than 2,000 of one thing."""

_ANNOTATIONS = {
    "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "example",
    "deprecated", "readOnly", "writeOnly", "discriminator",
}  # fmt: skip

_CHAR = r'[^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" ([0-9a-ce-fA-CE-F] [0-9a-fA-F]{3} | [dD] [0-7] [0-9a-fA-F]{2}))'
_INTEGER = '"-"? ("0" | [1-9] [0-9]{0,15})'
_PRIMITIVES = {
    "space": '" "?',
    "char": _CHAR,
    "string": r'"\"" char* "\""',
    "integer": _INTEGER,
    "number": _INTEGER + ' ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "value": "object | array | string | number | boolean | null",
    "pair": 'string space ":" space value',
    "object": '"{" space (pair (space "," space pair)* space)? "}"',
    "array": '"[" space (value (space "," space value)* space)? "]"',
}
_DAYS_28 = '"0" [1-9] | "1" [0-9] | "2" [0-8]'
_DATE = (  # no 29 February: not every year has one
    f'[0-9]{{4}} "-" (("0" [13578] | "1" [02]) "-" ({_DAYS_28} | "29" | "3" [01]) | '
    f'("0" [469] | "11") "-" ({_DAYS_28} | "29" | "30") | "02-" ({_DAYS_28}))'
)
_TIME = '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{1,6})? ("Z" | [-+] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])'  # noqa: E501
_HEX = "[0-9a-f]"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f'{_DATE} "T" {_TIME}',
    "uuid": f'{_HEX}{{8}} "-" {_HEX}{{4}} "-" {_HEX}{{4}} "-" {_HEX}{{4}} "-" {_HEX}{{12}}',
}
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


def any_object_grammar() -> str:
    """GBNF of every JSON object."""
    return _written({**_PRIMITIVES, "root": "object"})


def schema_grammar(schema: Mapping[str, object]) -> str:
    """GBNF of the JSON values that fit a schema.

    Understood: ``type``, ``properties``, ``required``, ``additionalProperties``, ``items``, ``minItems``, ``maxItems``,
    ``enum``, ``const``, ``anyOf`` and ``oneOf`` (one of them fits; others may too), ``allOf`` of one, ``$ref`` into the
    schema itself, ``minLength``, ``maxLength`` and ``format`` of date, time, date-time and uuid.

    Raises:
        UsageError: the schema is not one, is too large, or has another word that limits what fits.
    """
    return _Grammar(schema).text


class _Grammar:
    def __init__(self, schema: Mapping[str, object]) -> None:
        self._schema = schema
        self._rules = dict(_PRIMITIVES)
        self._references: dict[str, str] = {"#": "root"}
        self._n_places = 0
        self._n_values = 0
        self._rules["root"] = self._value(schema, "#", 0)

    @property
    def text(self) -> str:
        return _written(self._rules)

    def _rule(self, body: str, name: str | None = None) -> str:
        name = name or f"r{len(self._rules)}"
        self._rules[name] = body
        return name

    def _value(self, schema: object, at: str, depth: int) -> str:
        """The body of a rule for a value at a place of the schema."""
        self._n_places += 1
        if self._n_places > _N_PLACES_MAX or depth > _N_DEEP_MAX:
            raise UsageError(f"the JSON schema is larger than {_N_PLACES_MAX} places or {_N_DEEP_MAX} levels")
        if schema is True:
            return "value"
        if not isinstance(schema, dict):
            raise _refused(at, "is not a schema that something fits")
        words = {word: value for word, value in schema.items() if word not in _ANNOTATIONS}
        if not words:
            return "value"
        if "$ref" in words:
            return self._reference(_only(words, "$ref", at), at, depth)
        for word in ("anyOf", "oneOf", "allOf"):
            if word in words:
                return self._alternatives(_only(words, word, at), f"{at}/{word}", depth)
        if "enum" in words or "const" in words:
            return self._constants(words, at)
        kind = words.pop("type", None) or _told_by(words)
        if isinstance(kind, list) and kind:
            known = {word for word in words if any(word in _WORDS.get(str(one), ()) for one in kind)}
            if len(known) < len(words):
                raise _refused(at, f"has '{min(words.keys() - known)}', which is not supported")
            parts = [{w: v for w, v in words.items() if w in _WORDS.get(str(one), ())} for one in kind]
            bodies = [self._typed(one, part, at, depth) for one, part in zip(kind, parts, strict=True)]
            return " | ".join(self._rule(body) for body in bodies)
        return self._typed(kind, words, at, depth)

    def _typed(self, kind: object, words: Mapping[str, object], at: str, depth: int) -> str:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise _refused(at, f"has no type of {', '.join(_TYPES)}")
        for word in words:
            if word not in _WORDS[kind]:
                raise _refused(at, f"has '{word}', which is not supported with type {kind}")
        if kind == "object" and words:
            return self._object(words, at, depth)
        if kind == "array" and words:
            return self._array(words, at, depth)
        if kind == "string" and words:
            return _string(words, at)
        return kind

    def _reference(self, target: object, at: str, depth: int) -> str:
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            raise _refused(at, "refers to something outside the schema")
        if target not in self._references:
            found: object = self._schema
            for part in target.split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                if not isinstance(found, dict) or part not in found:
                    raise _refused(at, f"refers to '{target[:100]}', which is not there")
                found = found[part]
            name = self._references[target] = self._rule("")  # before it is read: it may refer to itself
            self._rules[name] = self._value(found, target, depth + 1)
        return self._references[target]

    def _alternatives(self, options: object, at: str, depth: int) -> str:
        if not isinstance(options, list) or not options:
            raise _refused(at, "must be a list of schemas")
        if at.endswith("allOf") and len(options) > 1:
            raise _refused(at, "of more than one schema is not supported")
        return " | ".join(self._rule(self._value(one, f"{at}/{i}", depth + 1)) for i, one in enumerate(options))

    def _constants(self, words: Mapping[str, object], at: str) -> str:
        values = words.get("enum", [words.get("const")])
        extra = words.keys() - {"enum", "const", "type"}
        if not isinstance(values, list) or not values or extra or ("enum" in words and "const" in words):
            raise _refused(at, "must have 'enum' (a list of values) or 'const', and no further limits")
        kind = words.get("type")
        fitting = [value for value in values if kind is None or _is_of(value, kind)]
        self._n_values += len(fitting)
        if not fitting or self._n_values > _N_VALUES_MAX:
            raise _refused(at, f"has no value of its type, or the schema more than {_N_VALUES_MAX} values")
        return " | ".join(_literal(value, at) for value in fitting)

    def _object(self, words: Mapping[str, object], at: str, depth: int) -> str:
        properties, required = words.get("properties", {}), words.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise _refused(at, "must have properties (an object) and required (a list)")
        if missing := [name for name in required if not isinstance(name, str) or name not in properties]:
            raise _refused(at, f"requires '{str(missing[0])[:100]}', which is not one of its properties")
        if not properties:
            further = words.get("additionalProperties", True)
            if further is False:
                return '"{" space "}"'
            value = self._rule(self._value(further, f"{at}/additionalProperties", depth + 1))
            pair = self._rule(f'string space ":" space {value}')
            return f'"{{" space ({pair} (space "," space {pair})* space)? "}}"'
        return f'"{{" space {self._pairs(properties, set(required), at, depth)} space "}}"'

    def _pairs(self, properties: Mapping[str, object], required: set[object], at: str, depth: int) -> str:
        """The rule for the pairs of an object, each in its place; optional ones may be left out."""
        first, later = '""', ""  # from the property at hand on: as long as none was written; behind another
        for name, schema in reversed(list(properties.items())):
            value = self._rule(self._value(schema, f"{at}/properties/{name}", depth + 1))
            pair = self._rule(f'{_literal(name, at)} space ":" space {value}')
            if name in required:
                first = self._rule(f"{pair} {later}")
                later = self._rule(f'space "," space {pair} {later}')
            else:
                first = self._rule(f"{pair} {later} | {first}")
                later = self._rule(f'(space "," space {pair})? {later}')
        return first

    def _array(self, words: Mapping[str, object], at: str, depth: int) -> str:
        item = self._rule(self._value(words.get("items", True), f"{at}/items", depth + 1))
        lowest, highest = _range(words, "minItems", "maxItems", at)
        if highest == 0:
            return '"[" space "]"'
        more = _times(max(0, lowest - 1), None if highest is None else highest - 1)
        filled = f'{item} (space "," space {item}){more} space'
        return f'"[" space {filled} "]"' if lowest else f'"[" space ({filled})? "]"'


_WORDS: Mapping[str, Sequence[str]] = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "format"),
    "number": (),
    "integer": (),
    "boolean": (),
    "null": (),
}


def _written(rules: Mapping[str, str]) -> str:
    return "".join(f"{name} ::= {body}\n" for name, body in rules.items())


def _refused(at: str, why: str) -> UsageError:
    return UsageError(f"the JSON schema at '{at[:200]}' {why}")


def _only(words: Mapping[str, object], word: str, at: str) -> object:
    extra = words.keys() - {word}
    if extra:
        raise _refused(at, f"has '{min(extra)}' beside '{word}', which is not supported")
    return words[word]


def _told_by(words: Mapping[str, object]) -> str | None:
    """The type that a schema without one means: the one its words are about."""
    return next((kind for kind, known in _WORDS.items() if any(word in known for word in words)), None)


def _is_of(value: object, kind: object) -> bool:
    kinds = kind if isinstance(kind, list) else [kind]
    names = {dict: "object", list: "array", str: "string", float: "number", bool: "boolean", type(None): "null"}
    if type(value) is int:
        return "integer" in kinds or "number" in kinds
    return names.get(type(value)) in kinds


def _literal(value: object, at: str) -> str:
    """A JSON value as the text it is written as, quoted for GBNF."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise _refused(at, "has a value that JSON cannot say") from error
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


def _string(words: Mapping[str, object], at: str) -> str:
    if "format" in words:
        form = words["format"]
        if len(words) > 1 or not isinstance(form, str) or form not in _FORMATS:
            raise _refused(at, f"has a format other than {', '.join(_FORMATS)}, or a length beside it")
        return rf'"\"" {_FORMATS[form]} "\""'
    return rf'"\"" char{_times(*_range(words, "minLength", "maxLength", at))} "\""'


def _range(words: Mapping[str, object], lowest: str, highest: str, at: str) -> tuple[int, int | None]:
    first, last = words.get(lowest, 0), words.get(highest)
    for word, value in ((lowest, first), (highest, last)):
        if value is not None and (type(value) is not int or not 0 <= value <= _N_TIMES_MAX):
            raise _refused(at, f"has a {word} that is not 0 to {_N_TIMES_MAX}")
    assert isinstance(first, int)
    assert last is None or isinstance(last, int)
    if last is not None and last < first:
        raise _refused(at, f"has a {highest} below its {lowest}")
    return first, last


def _times(lowest: int, highest: int | None) -> str:
    if highest is None:
        return "*" if lowest == 0 else f"{{{lowest},}}"
    return f"{{{lowest},{highest}}}"
