"""Strategies with a real model: what processes take is what was built up in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamakv.ops.bench.requests import BenchRequest, StrategiesRequest
from llamakv.ops.bench.results import StrategyResult
from llamakv.ops.bench.strategies import measure_strategies
from llamakv.ops.requests import MemoryOptions, ModelRequest, Reporter

pytestmark = pytest.mark.real

FEW, MANY, P, Q, A = 2, 8, 300, 8, 4
CELL = 30 * 3 * 64 * 2 * 2
"""Bytes of a cell of SmolLM2: keys and values of 30 layers with 3 heads of 64, at 2 bytes each."""


NAMES = ("none", "in-process", "hybrid")


def measure(model: Path, folder: Path, n_users: int, limit_bytes: int | None = None) -> dict[str, StrategyResult]:
    request = BenchRequest(
        model=ModelRequest(path=model, cache_dir=folder / "cache"),
        memory=MemoryOptions(),
        n_repeats=1,
        types=None,
        strategies=StrategiesRequest(
            n_users=n_users,
            n_prefix=P,
            n_question=Q,
            n_answer=A,
            shares_prefix=True,
            names=NAMES,
            memory_limit_bytes=limit_bytes,
        ),
        text=None,
        work_dir=folder,
        reporter=Reporter(),
    )
    result = measure_strategies(request, on_row=lambda _: None)
    assert result.failed == ()
    return {row.name: row for row in result.rows}


@pytest.fixture(scope="module")
def both(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, StrategyResult], ...]:
    """Rows by name, with few users and with many. What the many took without sharing is the limit for the few."""
    folder = tmp_path_factory.mktemp("strategies")
    many = measure(smollm2_path, folder, MANY)
    return measure(smollm2_path, folder, FEW, many["none"].peak_bytes), many


def test_cells_take_what_the_model_says(both: tuple[dict[str, StrategyResult], ...]) -> None:
    for rows, n_users in zip(both, (FEW, MANY), strict=True):
        assert rows["none"].cell_bytes == n_users * (P + Q + A - 1) * CELL
        assert rows["in-process"].cell_bytes == (P + n_users * (Q + A - 1)) * CELL
        assert rows["hybrid"].cell_bytes == rows["in-process"].cell_bytes


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_weights_and_contexts_and_a_constant(both: tuple[dict[str, StrategyResult], ...], name: str) -> None:
    few, many = (rows[name] for rows in both)
    rest = [row.peak_bytes - row.weights_bytes - row.context_bytes for row in (few, many)]
    grown = many.context_bytes - few.context_bytes
    assert 0 < min(rest) < 150e6  # the interpreter, libraries and what they allocate
    assert abs(rest[1] - rest[0]) < 8e6 + 0.1 * grown


def test_sharing_a_prefix_saves_its_cells(both: tuple[dict[str, StrategyResult], ...]) -> None:
    rows = both[1]
    saved = rows["none"].context_bytes - rows["in-process"].context_bytes
    assert saved > 0.8 * (MANY - 1) * P * CELL
    assert rows["none"].peak_bytes - rows["in-process"].peak_bytes > 0.8 * saved


def test_as_many_users_fit_as_were_seen_to(both: tuple[dict[str, StrategyResult], ...]) -> None:
    few, _ = both  # its limit is what the many took
    assert few["none"].limited_by == "memory"
    assert abs(few["none"].n_users_that_fit - MANY) <= 2
    assert few["in-process"].n_users_that_fit > 5 * MANY
