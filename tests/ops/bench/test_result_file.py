"""Files of results: what is written is read again; anything else is refused with its reason."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamakv.errors import DamagedError, ExistsError, FormatError, NewerFormatError, NotFoundError, WriteError
from llamakv.ops.bench.result_file import VERSION, NotAResultError, read_result, result_json, write_result
from llamakv.ops.bench.results import (
    BenchedModel,
    BenchResult,
    BreakEven,
    LengthTimes,
    Machine,
    OutputChange,
    Spread,
    StrategiesResult,
    StrategyResult,
    TypeResult,
)
from tests.cli import bench_samples

texts = st.text(max_size=8)
counts = st.integers(0, 2**63 - 1)
numbers = st.floats(allow_nan=False, width=64, min_value=-1e18, max_value=1e18) | st.just(math.inf)


def of(kind: type, **fields: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """Any value of a dataclass: texts, counts and numbers where ``fields`` says nothing else."""
    kinds: dict[str, st.SearchStrategy[object]] = {
        "str": texts, "int": counts, "float": numbers, "bool": st.booleans(), "Spread": spreads,
        "Spread | None": st.none() | spreads, "int | None": st.none() | counts, "str | None": st.none() | texts,
        "float | None": st.none() | numbers, "bool | None": st.none() | st.booleans(),
    }  # fmt: skip
    found = {
        field.name: fields[field.name] if field.name in fields else kinds[str(field.type)]
        for field in dataclasses.fields(kind)
    }
    return st.builds(kind, **found)


spreads = st.builds(Spread, n_runs=counts, least=numbers, median=numbers, most=numbers)
break_even = st.none() | st.builds(BreakEven, n_tokens=st.none() | counts, at_most=st.booleans())
lists: Callable[[st.SearchStrategy[object]], st.SearchStrategy[object]] = lambda items: st.lists(  # noqa: E731
    items, max_size=2
).map(tuple)
type_results = of(
    TypeResult, lengths=lists(of(LengthTimes)), break_even_warm=break_even, break_even_cold=break_even,
    output=st.none() | of(OutputChange), state_bytes_per_token=st.none() | st.floats(min_value=0, max_value=1e18),
)  # fmt: skip
results = of(
    BenchResult, machine=of(Machine), model=of(BenchedModel), types=lists(type_results),
    strategies=st.none() | of(
        StrategiesResult, rows=lists(of(StrategyResult)), failed=lists(st.tuples(texts, texts))
    ),
)  # fmt: skip


@settings(max_examples=40)
@given(result=results)
def test_any_result_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, result: BenchResult) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    write_result(path, result, overwrite=True)
    assert read_result(path) == result


def test_what_json_output_shows_is_read_too(tmp_path: Path) -> None:
    result = bench_samples.result()
    path = tmp_path / "printed.json"
    document = {
        "schema_version": 1, "command": "bench", "status": "partial", "data": result_json(result), "errors": [],
    }  # fmt: skip
    path.write_text(json.dumps(document))
    assert read_result(path) == result


def test_a_file_says_what_it_is(tmp_path: Path) -> None:
    write_result(tmp_path / "a.json", bench_samples.result(), overwrite=False)
    values = json.loads((tmp_path / "a.json").read_text())
    assert (values["format"], values["version"]) == ("llamakv bench", VERSION)
    assert values["types"][1]["type_k"] == "q8_0"


def test_a_file_is_replaced_only_when_asked_to_and_is_as_open_as_the_umask_says(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("mine")
    with pytest.raises(ExistsError):
        write_result(path, bench_samples.result(), overwrite=False)
    assert path.read_text() == "mine"
    before = os.umask(0o027)
    try:
        write_result(path, bench_samples.result(), overwrite=True)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_a_missing_folder_is_a_write_error(tmp_path: Path) -> None:
    with pytest.raises(WriteError):
        write_result(tmp_path / "no" / "a.json", bench_samples.result(), overwrite=False)


def changed(*path: str | int, value: object) -> bytes:
    """A good file with one value changed; ``...`` removes it."""
    values = {"format": "llamakv bench", **result_json(bench_samples.result())}
    inner: object = values
    for key in path[:-1]:
        inner = inner[key]  # type: ignore[index]
    if value is ...:
        del inner[path[-1]]  # type: ignore[union-attr, operator]
    else:
        inner[path[-1]] = value  # type: ignore[index, call-overload]
    return json.dumps(values).encode()


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (b"", NotAResultError, "it is not JSON"),
        (b"\x93NUMPY\xff", NotAResultError, "it is not JSON"),
        (b"[" * 100_000, NotAResultError, "it is not JSON"),
        (b"[1]", NotAResultError, "is not a bench result"),
        (b"{}", NotAResultError, "is not a bench result"),
        (b'{"format": "llamakv bench", "format": "llamakv bench"}', NotAResultError, "a key twice"),
        (b'{"schema_version": 1, "command": "ls", "data": {}}', NotAResultError, "of another command, or failed"),
        (b'{"schema_version": 1, "command": "bench", "data": null}', NotAResultError, "of another command, or failed"),
        (changed("version", value=2), NewerFormatError, "of version 2, this llamakv reads version 1"),
        (changed("version", value=True), NewerFormatError, "of version True"),
        (changed("version", value=...), NewerFormatError, "of version None"),
        (changed("model", value=...), DamagedError, "model is missing"),
        (changed("colour", value="red"), DamagedError, "colour is unknown"),
        (changed("machine", "n_cores", value="2"), DamagedError, 'machine.n_cores is "2", expected a whole number'),
        (changed("machine", "n_cores", value=True), DamagedError, "machine.n_cores is true, expected a whole number"),
        (changed("machine", "n_cores", value=10**30), DamagedError, "expected a whole number"),
        (changed("elapsed_s", value=10**400), DamagedError, "elapsed_s is 1000000000"),
        (changed("elapsed_s", value=None), DamagedError, "elapsed_s is null, expected a number"),
        (changed("types", 0, "peak_rss_bytes", value=-5), DamagedError, "peak_rss_bytes is -5, expected no negative"),
        (changed("types", 0, "lengths", 0, "file_bytes", value=-1), DamagedError, "file_bytes is -1, expected no"),
        (changed("types", 0, "lengths", 0, "file_bytes", value="inf"), DamagedError, 'is "inf", expected a whole'),
        (changed("types", 0, "state_bytes_per_token", value="inf"), DamagedError, 'token is "inf", expected a size'),
        (changed("types", 0, "state_bytes_per_token", value="nan"), DamagedError, 'token is "nan", expected a size'),
        (changed("types", 0, "state_bytes_per_token", value=-0.5), DamagedError, "token is -0.5, expected a size"),
        (changed("types", value={}), DamagedError, "types is {}, expected a list"),
        (changed("types", 1, "lengths", 0, "save_s", value=3), DamagedError, "types[1].lengths[0].save_s is 3"),
        (changed("strategies", "failed", value=[["a"]]), DamagedError, "strategies.failed[0] is"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_its_reason(
    tmp_path: Path, data: bytes, kind: type[FormatError], message: str
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(kind) as caught:
        read_result(path)
    assert message in caught.value.message
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.exit_status == 13


def test_what_is_not_there_is_not_found_and_a_folder_no_result(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_result(tmp_path / "no.json")
    with pytest.raises(NotAResultError, match="it is a folder"):
        read_result(tmp_path)


def test_a_huge_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_result(path, bench_samples.result(), overwrite=False)
    monkeypatch.setattr("llamakv.ops.bench.result_file.MOST_BYTES", path.stat().st_size - 1)
    with pytest.raises(NotAResultError, match=r"over [0-9]+ bytes"):
        read_result(path)


def test_a_result_from_before_there_were_some_fields_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    values = {"format": "llamakv bench", **result_json(bench_samples.result(strategies=None))}
    del values["work_dir"]
    for row in values["types"]:
        del row["failed"]
    path.write_text(json.dumps(values))
    assert read_result(path) == bench_samples.result(strategies=None, work_dir=None)
