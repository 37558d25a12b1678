"""Models for the scheduler's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.window_guard import WindowGuard
from tests.engine.scheduler.cases import (
    MOST_KINDS,
    Case,
    make_case,
)


@pytest.fixture(scope="module")
def dense(models) -> Iterator[LlamaModel]:
    with LlamaModel(models("M")) as model:
        yield model


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windowed layers lose what is out of a sequence's window to others, as they did when older sessions were saved."""
    monkeypatch.setattr(WindowGuard, "protect", lambda self: None)


@pytest.fixture(scope="module", params=MOST_KINDS)
def model(request: pytest.FixtureRequest, models) -> Iterator[LlamaModel]:
    with LlamaModel(models(request.param)) as model:
        yield model


@pytest.fixture(scope="module")
def branches(model: LlamaModel) -> Case:
    """Six branches that write 12 tokens each; the suffixes have 5 to 55 tokens."""
    return make_case(model, [(5 + 10 * i, 12) for i in range(6)])
