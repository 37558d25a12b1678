"""Models with templates of their own, and the program's fixtures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import home, model, process, run
from tests.models import writer
from tests.ops.driver import Driver

__all__ = ["home", "model", "process", "run"]


@pytest.fixture
def dense(models, tmp_path: Path) -> Driver:
    return Driver(models("M"), tmp_path)


@pytest.fixture(scope="session")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a tiny model like the one called `base`, with some of its properties changed."""
    folder = tmp_path_factory.mktemp("variants")

    def write(base: str, name: str, **changes: object) -> Path:
        path = folder / f"{base}-{name}.gguf"
        if not path.exists():
            writer.write_spec(replace(writer.SPECS[base], **changes), path)  # type: ignore[arg-type]
        return path

    return write


def tokens_of(n: int) -> list[int]:
    """So many tokens that every tiny model has."""
    return [300 + i % 300 for i in range(n)]
