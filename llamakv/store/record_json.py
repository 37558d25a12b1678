"""A session's record as strict JSON: every key there, none unknown, no non-finite number literals.

The keys are the fields of the dataclasses in ``llamakv.records``, so a change there is a new format version; a test
compares them with FORMAT.md. Keys that came later are absent from earlier versions and have their defaults there.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
import types
import typing
from collections.abc import Callable

from llamakv.records import SessionRecord

TOKENS_KEY = "tokens"  # stored beside the JSON, packed
_SINCE_2 = {"Message": {"time_s"}, "Lineage": {"ttl_s"}}
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_MAX_INT = 2**63 - 1
MAX_MARKS = 1 << 21  # 100,000 messages; keeps what parsing allocates below 100 MB, a hundred times the text otherwise
_MARK = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[,\[{]', re.DOTALL)
"""A string, or what precedes any other value; there is no value without one of these."""

_Decoder = Callable[[object], object]


class RecordError(Exception):
    """JSON that is not a record; callers turn it into a DamagedError."""


# ---------------------------------------------------------------- encoding


def encode_record(record: SessionRecord) -> bytes:
    """Return all of ``record`` but its tokens as UTF-8 JSON."""
    values = {
        item.name: _encode(getattr(record, item.name)) for item in dataclasses.fields(record) if item.name != TOKENS_KEY
    }
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")  # half a surrogate pair becomes its JSON escape


def _encode(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _encode(getattr(value, item.name)) for item in dataclasses.fields(value)}
    return value


# ---------------------------------------------------------------- decoding


def decode_record(data: bytes, tokens: tuple[int, ...], *, version: int) -> SessionRecord:
    """Return the record made of JSON of a format version (1 or 2) and ``tokens``. Raises: RecordError."""
    if any(n > MAX_MARKS for n, _ in enumerate(_MARK.finditer(data), 1)):
        raise RecordError(f"record has over {MAX_MARKS} strings and separators")
    try:
        values = json.loads(
            data.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates
        )
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise RecordError(f"record is not JSON: {error}") from error
    if not isinstance(values, dict) or TOKENS_KEY in values:
        raise RecordError("record is not an object without tokens")
    record = _DECODE_RECORD[version](values | {TOKENS_KEY: []})
    assert isinstance(record, SessionRecord)
    return dataclasses.replace(record, tokens=tokens)


def _refuse_constant(name: str) -> object:
    raise RecordError(f"record has the literal {name}")


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise RecordError("record has a key twice")
    return values


def _decode_str(value: object) -> object:
    if not isinstance(value, str):
        raise RecordError(f"{value!r:.40} is not a string")
    return value


def _decode_bool(value: object) -> object:
    if not isinstance(value, bool):
        raise RecordError(f"{value!r:.40} is not true or false")
    return value


def _decode_int(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _MAX_INT:
        raise RecordError(f"{value!r:.40} is not a 64-bit integer")
    return value


def _decode_float(value: object) -> object:
    if isinstance(value, dict):
        name = value.get("float")
        if len(value) == 1 and isinstance(name, str) and name in _NON_FINITE:
            return _NON_FINITE[name]
    elif isinstance(value, float) and math.isfinite(value):
        return value
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_INT:
        return float(value)
    raise RecordError(f"{value!r:.40} is not a number")


_SIMPLE: dict[object, _Decoder] = {
    str: _decode_str,
    bool: _decode_bool,
    int: _decode_int,
    float: _decode_float,
}


def _decoder(kind: object, version: int) -> _Decoder:
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    arguments = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        decode = _decoder(inner, version)
        return lambda value: None if value is None else decode(value)
    if typing.get_origin(kind) is tuple:
        return _tuple_decoder(arguments, version)
    assert isinstance(kind, type)
    if issubclass(kind, enum.Enum):
        return _enum_decoder(kind)
    return _dataclass_decoder(kind, version)


def _tuple_decoder(arguments: tuple[object, ...], version: int) -> _Decoder:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        decode = _decoder(arguments[0], version)

        def decode_many(value: object) -> object:
            if not isinstance(value, list):
                raise RecordError(f"{value!r:.40} is not an array")
            return tuple(decode(item) for item in value)

        return decode_many
    decoders = [_decoder(argument, version) for argument in arguments]

    def decode_fixed(value: object) -> object:
        if not isinstance(value, list) or len(value) != len(decoders):
            raise RecordError(f"{value!r:.40} is not an array of {len(decoders)}")
        return tuple(decode(item) for decode, item in zip(decoders, value, strict=True))

    return decode_fixed


def _enum_decoder(kind: type[enum.Enum]) -> _Decoder:
    values = {member.value: member for member in kind}

    def decode(value: object) -> object:
        if not isinstance(value, str) or value not in values:
            raise RecordError(f"{value!r:.40} is not one of {', '.join(values)}")
        return values[value]

    return decode


def _dataclass_decoder(kind: type, version: int) -> _Decoder:
    later = _SINCE_2.get(kind.__name__, set()) if version < 2 else set()
    hints = typing.get_type_hints(kind)
    decoders = {name: _decoder(hint, version) for name, hint in hints.items() if name not in later}

    def decode(value: object) -> object:
        if not isinstance(value, dict):
            raise RecordError(f"{value!r:.40} is not an object")
        if value.keys() != decoders.keys():
            unknown = sorted(value.keys() - decoders.keys())
            missing = sorted(decoders.keys() - value.keys())
            raise RecordError(f"{kind.__name__} has unknown keys {unknown} and lacks {missing}"[:300])
        decoded = {}
        for name, decode_item in decoders.items():
            try:
                decoded[name] = decode_item(value[name])
            except RecordError as error:
                raise RecordError(f"{name}: {error}") from None
        return kind(**decoded)

    return decode


_DECODE_RECORD = {version: _decoder(SessionRecord, version) for version in (1, 2)}
