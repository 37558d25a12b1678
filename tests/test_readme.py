"""The README and the examples say what the program does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llamakv import errors

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROGRAM = Path(sys.executable).with_name("llamakv")


def run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HOME": str(folder), "PATH": f"{PROGRAM.parent}:{os.environ['PATH']}", **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_there_are_two_set_up_commands() -> None:
    assert re.findall(r"^pip install .*$", README, re.MULTILINE) == [
        'pip install ".[demo]" && llamakv chat --save session.bin',
        'pip install ".[demo,test]" && pytest',
    ]


def test_every_command_and_option_the_readme_names_exists(tmp_path: Path) -> None:
    helps = {name: run([str(PROGRAM), name, "--help"], tmp_path, COLUMNS="200").stdout for name in commands()}
    for name, rest in re.findall(r"llamakv ([a-z]+)([^#\n`]*)", README):
        if name not in helps:
            assert f"llamakv {name}" not in README or name in ("is", "keeps", "needs", "says", "gives"), name
            continue
        for option in re.findall(r"(?<![\w-])(--[a-z-]+|-[a-z]\b)", rest):
            assert option in helps[name], f"{option} of {name}"


def commands() -> list[str]:
    return ["chat", "save", "load", "inspect", "ls", "rm", "verify", "compact"]


def test_the_exit_statuses_are_those_of_the_errors() -> None:
    table = {int(status) for status in re.findall(r"\| (\d+) \|", README)}
    classes = [
        item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, errors.LlamakvError)
    ]
    assert {item.exit_status for item in classes} <= table


def test_a_document_is_read_once_and_asked_twice(models, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 30)
    script, model = str(ROOT / "examples" / "ask_a_document.sh"), str(models("ME"))
    first = run(["bash", script, "text.txt", "Who?", "What?"], tmp_path, LLAMAKV_MODEL=model)
    assert (first.returncode, first.stderr) == (0, "")
    assert re.findall(r"^> .*", first.stdout, re.MULTILINE) == ["> Who?", "> What?"]
    before = (tmp_path / "document.bin").read_bytes()
    again = run(["bash", script, "text.txt", "Who?", "What?"], tmp_path, LLAMAKV_MODEL=model)
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert len((tmp_path / "document.bin").read_bytes()) < len(before) * 1.5


def test_the_diary_goes_on_from_run_to_run(models, tmp_path: Path) -> None:
    script, model = str(ROOT / "examples" / "diary.sh"), str(models("ME"))
    for text in ("I planted a tree.", "What did I plant?"):
        done = run(["bash", script, text], tmp_path, LLAMAKV_MODEL=model)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.strip()
    history = run([str(PROGRAM), "inspect", "diary.bin", "--history"], tmp_path).stdout
    assert "I planted a tree." in history
    assert "What did I plant?" in history


@pytest.mark.real
def test_the_examples_work_with_the_demo_model(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Clara Holm painted the lighthouse red in May. " * 5)
    script = str(ROOT / "examples" / "ask_a_document.sh")
    done = run(["bash", script, "text.txt", "Who painted the lighthouse?"], tmp_path)
    assert done.returncode == 0
    assert "Clara" in done.stdout
