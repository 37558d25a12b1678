"""Shell completion: the files are what the program says, and a real shell completes with them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import make_session
from tests.cli.regenerate import SHELLS, file_of, script


@pytest.mark.parametrize("shell", SHELLS)
def test_the_completion_file_is_what_the_program_prints(shell: str) -> None:
    assert file_of(shell).read_text(encoding="utf-8") == script(shell)


def _complete_in_bash(line: str, home: Path) -> list[str]:
    """What bash offers for the last word of a line."""
    words = line.split(" ")
    program = home / "bin" / "llamakv"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m llamakv "$@"\n')
    program.chmod(0o700)
    quoted = " ".join(f"'{word}'" for word in words)
    commands = f"""
        source '{file_of("bash")}'
        COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}
        _llamakv_completion llamakv
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", commands],
        env={**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
class TestBash:
    def test_completes_commands(self, home: Path) -> None:
        assert _complete_in_bash("llamakv in", home) == ["inspect"]

    def test_completes_options(self, home: Path) -> None:
        assert _complete_in_bash("llamakv chat --res", home) == ["--resume"]

    def test_completes_values_of_options(self, home: Path) -> None:
        assert _complete_in_bash("llamakv save --flash-attn a", home) == ["auto"]

    def test_completes_names_of_sessions(self, home: Path) -> None:
        make_session(home / "store" / "notes.bin")
        make_session(home / "store" / "other.bin")
        assert _complete_in_bash("llamakv load no", home) == ["notes"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_shell_reads_its_file_without_a_complaint(shell: str) -> None:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed")
    before = "autoload -Uz compinit; compinit -u -D; " if shell == "zsh" else ""
    done = subprocess.run([found, "-c", f"{before}source {file_of(shell)}"], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
