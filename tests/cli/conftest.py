"""Ways to run the program: inside the test for speed, and as a process where streams and signals matter."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llamakv.cli import app
from llamakv.store.session_file import create_session
from tests.store import samples


@dataclass(frozen=True, slots=True)
class Ran:
    """What a run of the program left behind."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout, parsed strictly."""
        return json.loads(self.out, parse_constant=_refuse)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The JSON lines on stdout."""
        return [json.loads(line, parse_constant=_refuse) for line in self.out.splitlines()]


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home: store, caches and history of this test only; also the working folder."""
    for name in [name for name in os.environ if name.startswith(("LLAMAKV", "_LLAMAKV"))]:
        monkeypatch.delenv(name)
    for name, folder in (("XDG_DATA_HOME", "data"), ("XDG_CACHE_HOME", "cache"), ("HOME", "home")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setenv("LLAMAKV_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(home: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ran]]:
    """Run the program inside the test process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def run_here(*arguments: str | Path) -> Ran:
        capfd.readouterr()
        status = app.run([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Ran(status, captured.out, captured.err)

    yield run_here
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def process(home: Path) -> Callable[..., Ran]:
    """Run the program as a process of its own."""

    def run_process(*arguments: str | Path, stdin: str | bytes = b"", env: dict[str, str] | None = None) -> Ran:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        done = subprocess.run(
            command(*arguments), input=data, capture_output=True, timeout=60, env={**os.environ, **(env or {})}
        )
        return Ran(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))

    return run_process


def command(*arguments: str | Path) -> list[str]:
    """The program as a command line."""
    return [sys.executable, "-m", "llamakv", *map(str, arguments)]


def processor_s(arguments: list[str]) -> float:
    """Seconds a process computes until it ends with 0, which waiting for its turn does not lengthen."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(arguments, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


@pytest.fixture
def session(home: Path) -> Path:
    """A session file with two messages and 600 tokens, made without an engine."""
    return make_session(home / "session.bin")


def make_session(path: Path, n_tokens: int = 600, **changes: object) -> Path:
    """Write a session file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = samples.make_record(n_tokens, **changes)  # type: ignore[arg-type]
    create_session(path, record, samples.cells_up_to(n_tokens - 1))
    return path


@pytest.fixture
def model(model_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> Path:
    """The tiny model, as the one the environment names."""
    monkeypatch.setenv("LLAMAKV_MODEL", str(model_path))
    return model_path
