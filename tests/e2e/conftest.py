"""A program with a model, in a home of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.programs import Program


@pytest.fixture
def program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], model_path: Path
) -> Iterator[Program]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for name in [name for name in os.environ if name.startswith(("LLAMAKV", "_LLAMAKV"))]:
        monkeypatch.delenv(name)
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("LLAMAKV_STORE", str(tmp_path / "work"))
    monkeypatch.setenv("LLAMAKV_MODEL", str(model_path))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield Program(tmp_path / "work", capfd)
    for number, handler in handlers.items():
        signal.signal(number, handler)
