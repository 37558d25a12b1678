"""What is asked of ``bench`` in tests: one tiny model, short texts, one thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llamakv.ops.bench.requests import BenchRequest, TypesRequest
from llamakv.ops.requests import MemoryOptions, ModelRequest, Reporter

Ask = Callable[..., BenchRequest]


def types_request(*pairs: tuple[str, str], **more) -> TypesRequest:
    values = {"n_tokens": 48, "n_decoded": 8, "n_branches": 4, "compares_output": True, "n_positions": 20, **more}
    return TypesRequest(pairs=pairs or (("f16", "f16"),), **values)


@pytest.fixture
def ask(model_path: Path, tmp_path: Path) -> Ask:
    """Makes requests for the tiny dense model."""

    def make(types: TypesRequest | None = None, *, model: Path = model_path, **more) -> BenchRequest:
        asked = more.pop("model_options", {})
        work_dir = tmp_path / "work"
        work_dir.mkdir(exist_ok=True)
        values = {
            "memory": MemoryOptions(),
            "n_repeats": 1,
            "strategies": None,
            "text": None,
            "work_dir": work_dir,
            "reporter": Reporter(),
            **more,
        }
        request = ModelRequest(path=model, cache_dir=tmp_path / "cache", **{"n_threads": 1, **asked})
        return BenchRequest(model=request, types=types, **values)

    return make
