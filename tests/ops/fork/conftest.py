"""Models to fork sessions of, and sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.driver import Driver
from tests.ops.fork.forks import (
    KEPT,
    begin,
    driver_of,
)


@pytest.fixture(params=["M", "MS", "MR", "MH", *KEPT, pytest.param("MH2", marks=pytest.mark.slow)])
def driver(request: pytest.FixtureRequest, models, tmp_path: Path) -> Driver:
    """All memory kinds and settings."""
    return driver_of(models, tmp_path, request.param)


@pytest.fixture(
    params=["M", "MR", *(pytest.param(what, marks=pytest.mark.slow) for what in ("MS", "MH", "MH2", *KEPT))]
)
def kind(request: pytest.FixtureRequest, models, tmp_path: Path) -> Driver:
    """The same, most of them in CI only."""
    return driver_of(models, tmp_path, request.param)


@pytest.fixture
def dense(models, tmp_path: Path) -> Driver:
    return Driver(models("M"), tmp_path)


@pytest.fixture
def raw(dense: Driver, tmp_path: Path) -> Path:
    return begin(dense, tmp_path / "raw.bin", "raw")


@pytest.fixture
def chat(dense: Driver, tmp_path: Path) -> Path:
    return begin(dense, tmp_path / "chat.bin", "chat")
