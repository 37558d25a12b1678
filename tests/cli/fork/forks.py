"""Running ``fork`` as a shell script does."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.cli.conftest import Ran, command

Run = Callable[..., Ran]

FEW = ("--max-tokens", "3", "-t", "1")
MANY = ("--max-tokens", "60", "--temperature", "0", "-t", "1")
N_MANY = 30
ANSWER = {
    "type", "id", "index", "text", "finish_reason", "reused", "evaluated", "generated", "seed", "elapsed_s",
    "first_token_s", "key",
}  # fmt: skip
ERROR = {"type", "id", "index", "code", "message", "hint", "fields", "exit_status"}
TIMEOUT_S = 60.0


def lines_of(data: bytes | str) -> list[dict[str, Any]]:
    """Whole JSON lines, all of it."""
    text = data.decode() if isinstance(data, bytes) else data
    assert text == "" or text.endswith("\n")
    return Ran(0, text, "").lines


def texts_of(lines: Sequence[dict[str, Any]]) -> dict[object, str]:
    """What was answered, by id; each id once."""
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["id"]: line["text"] for line in lines}


def appending(file: Path, *arguments: str | Path, **env: str) -> Ran:
    """The program with ``>> FILE``."""
    with file.open("ab") as out:
        done = subprocess.run(
            command(*arguments), stdout=out, stderr=subprocess.PIPE, timeout=TIMEOUT_S, env={**os.environ, **env},
        )  # fmt: skip
    return Ran(done.returncode, "", done.stderr.decode())


def started(out: Path, n_lines: int, *arguments: str | Path) -> subprocess.Popen[str]:
    """A process that has written so many lines to a file."""
    with out.open("ab") as file:
        child = subprocess.Popen(command(*arguments), stdout=file, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + TIMEOUT_S
    while out.read_bytes().count(b"\n") < n_lines:
        assert child.poll() is None, child.stderr and child.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.005)
    return child
