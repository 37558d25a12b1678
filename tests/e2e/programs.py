"""The program as a user starts it: in processes of its own, or its command line in this one."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from llamakv.cli import app

GREEDY = ("-t", "1", "--temperature", "0", "--max-tokens", "12", "-q")
TIMEOUT_S = 60.0

DIES_AT_A_STEP = """
import os, signal, sys
from llamakv.cli.app import main
n_left = int(sys.argv.pop(1))
def counted(name, real):
    def step(*arguments, **options):
        global n_left
        n_left -= 1
        if n_left == -1:
            if name == "pwritev":
                fd, parts, offset = arguments
                data = b"".join(map(bytes, parts))
                real(fd, [data[: len(data) // 2]], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return step
for name in ("pwritev", "fsync", "ftruncate", "link", "rename", "unlink"):
    setattr(os, name, counted(name, getattr(os, name)))
main()
"""
"""The program, killed at a given one of the calls that change files; of a write half is done."""


@dataclass(frozen=True, slots=True)
class Ran:
    status: int
    out: str
    err: str


class Program:
    """The program with a model, in a home of its own."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capfd = capfd

    def start(self, *arguments: str | Path, limit: int | None = None, step: int | None = None) -> subprocess.Popen[str]:
        """A process, with a limit on the length of files, or killed at the ``step``-th change of a file."""
        how = ["-m", "llamakv"] if step is None else ["-c", DIES_AT_A_STEP, str(step)]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, *how, *map(str, arguments)],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            preexec_fn=None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )

    def run(self, *arguments: str | Path, limit: int | None = None, step: int | None = None) -> Ran:
        return finish(self.start(*arguments, limit=limit, step=step))

    def here(self, *arguments: str | Path) -> Ran:
        """The command line inside this process: ten times as fast."""
        self._capfd.readouterr()
        status = app.run([str(argument) for argument in arguments])
        captured = self._capfd.readouterr()
        return Ran(status, captured.out, captured.err)

    def goes_on(self, path: Path) -> str:
        """What the session says next, the file left alone."""
        ran = self.here("load", *GREEDY, path, "-p", "and then?")
        assert (ran.status, ran.err) == (0, "")
        return ran.out

    def leftovers(self) -> list[str]:
        return sorted(name for name in os.listdir(self.folder) if name.startswith("."))


def finish(process: subprocess.Popen[str], text: str = "") -> Ran:
    try:
        out, err = process.communicate(text, timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert "Traceback" not in err, err
    assert "internal error" not in err, err
    return Ran(process.returncode, out, err)
