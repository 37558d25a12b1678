"""Results of ``bench`` as JSON: kept in files, shown by ``--json``, and read again by ``--compare``.

A file is one object: ``format`` (``"llamakv bench"``), ``version`` and the fields of ``BenchResult``, which
``bench --json`` shows as its ``data``. Infinities, which JSON lacks, are texts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable
from pathlib import Path

from llamakv.errors import DamagedError, FormatError, NewerFormatError
from llamakv.ops.bench.results import BenchResult
from llamakv.ops.report_files import write_report_file
from llamakv.store.system_errors import reading

FORMAT = "llamakv bench"
VERSION = 1
MOST_BYTES = 16 << 20
"""A result is some kilobytes; anything as large as this is something else."""

_MOST = 2**63 - 1
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_FROM_JSON = ("schema_version", "command", "data")
"""Keys by which what ``--json`` printed is known."""

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]


class NotAResultError(FormatError):
    """The file is something else than a result of ``bench``."""

    code = "not_a_result"


# ---------------------------------------------------------------- writing


def result_json(result: BenchResult) -> dict[str, JsonValue]:
    """Return a result as JSON values: its version, then all fields."""
    values = _encode(result)
    assert isinstance(values, dict)
    return {"version": VERSION, **values}


def write_result(path: Path, result: BenchResult, *, overwrite: bool) -> None:
    """Write a result to a file of its own, at once.

    Raises:
        ExistsError, WriteError: what was there is as it was.
    """
    text = json.dumps({"format": FORMAT, **result_json(result)}, indent=1, allow_nan=False)
    write_report_file(path, (text + "\n").encode(), overwrite=overwrite)


def _encode(value: object) -> JsonValue:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    assert dataclasses.is_dataclass(value)
    return {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value)}


# ---------------------------------------------------------------- reading


def read_result(path: Path) -> BenchResult:
    """Read a result: a file of ``bench --output``, or what ``bench --json`` printed.

    Raises:
        NotFoundError, ReadError: it is not there, or cannot be read.
        NotAResultError: it is something else.
        NewerFormatError: it is of a version this one does not know.
        DamagedError: a key is missing (those that came later may be), unknown, or of the wrong kind, or a size or
            number of something is negative.
    """
    if path.is_dir():
        raise NotAResultError(f"'{path}' is not a bench result: it is a folder", path=str(path))
    with reading(path), path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise NotAResultError(f"'{path}' is not a bench result: over {MOST_BYTES} bytes", path=str(path))
    try:
        document = json.loads(data, parse_constant=_refuse, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise NotAResultError(f"'{path}' is not a bench result: it is not JSON ({error})", path=str(path)) from error
    return _result_of(document, path)


def _result_of(document: object, path: Path) -> BenchResult:
    values = document if isinstance(document, dict) else {}
    if all(key in values for key in _FROM_JSON):
        if values["command"] != "bench" or not isinstance(values["data"], dict):
            raise NotAResultError(
                f"'{path}' is not a bench result: it is of another command, or failed", path=str(path)
            )
        values = values["data"]
    elif values.get("format") != FORMAT:
        raise NotAResultError(f"'{path}' is not a bench result", hint="llamakv bench -o FILE makes one", path=str(path))
    version = values.get("version")
    if type(version) is not int or version != VERSION:
        raise NewerFormatError(
            f"'{path}' is a bench result of version {version!r}, this llamakv reads version {VERSION}", path=str(path)
        )
    fields = {key: value for key, value in values.items() if key not in ("format", "version")}
    try:
        result = _DECODE(fields, "")
    except _Wrong as wrong:
        raise DamagedError(f"'{path}' is a damaged bench result: {wrong}", path=str(path)) from wrong
    assert isinstance(result, BenchResult)
    return result


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice")
    return found


class _Wrong(Exception):
    """What is wrong, and where."""


_Decoder = Callable[[object, str], object]


def _decoder(kind: object) -> _Decoder:
    """What makes a value of a type out of JSON; the second argument is where that is."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass_decoder(kind)
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        items = [_decoder(argument) for argument in arguments if argument is not Ellipsis]
        return _tuple_decoder(items, is_any_length=Ellipsis in arguments)
    if isinstance(kind, types.UnionType):
        inner = _decoder(next(argument for argument in arguments if argument is not types.NoneType))
        return _optional(inner)
    if kind is float:
        return _float
    assert kind in (int, str, bool), kind

    def decode(value: object, where: str) -> object:
        if type(value) is not kind or (isinstance(value, int) and abs(value) > _MOST):
            raise _Wrong(f"{where} is {_short(value)}, expected {_WORDS[typing.cast(type, kind)]}")
        if isinstance(value, int) and value < 0:
            raise _Wrong(f"{where} is {_short(value)}, expected no negative number")
        return value

    return decode


def _optional(inner: _Decoder) -> _Decoder:
    return lambda value, where: None if value is None else inner(value, where)


_WORDS = {int: "a whole number", str: "a text", bool: "true or false"}


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:39] + "…"


def _float(value: object, where: str) -> object:
    if isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST:
        raise _Wrong(f"{where} is {_short(value)}, expected a number")
    return float(value)


def _size(value: object, where: str) -> object:
    found = _float(value, where)
    if not isinstance(found, float) or not math.isfinite(found) or found < 0:
        raise _Wrong(f"{where} is {_short(value)}, expected a size")
    return found


def _tuple_decoder(items: list[_Decoder], *, is_any_length: bool) -> _Decoder:
    def decode(value: object, where: str) -> object:
        if not isinstance(value, list) or (not is_any_length and len(value) != len(items)):
            raise _Wrong(f"{where} is {_short(value)}, expected a list")
        decoders = items * len(value) if is_any_length else items
        return tuple(
            each(item, f"{where}[{index}]") for index, (each, item) in enumerate(zip(decoders, value, strict=True))
        )

    return decode


def _dataclass_decoder(kind: type) -> _Decoder:
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    decoders = {field.name: _decoder(hints[field.name]) for field in fields}
    decoders |= {field.name: _optional(_size) for field in fields if hints[field.name] == float | None}
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}

    def decode(value: object, where: str) -> object:
        if not isinstance(value, dict):
            raise _Wrong(f"{where or 'it'} is {_short(value)}, expected an object")
        for key in needed - value.keys():
            raise _Wrong(f"{where}.{key}".removeprefix(".") + " is missing")
        for key in value.keys() - decoders.keys():
            raise _Wrong(f"{where}.{key}".removeprefix(".") + " is unknown")
        return kind(**{key: decoders[key](each, f"{where}.{key}".removeprefix(".")) for key, each in value.items()})

    return decode


_DECODE = _decoder(BenchResult)
