"""Sessions and prompts for ``fork``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llamakv.ops.requests import SamplingOptions
from tests.cli.fork.forks import (
    N_MANY,
)
from tests.ops.driver import Driver, Heard


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Path:
    """A folder with a conversation, raw text and a document."""
    folder = tmp_path_factory.mktemp("saved")
    driver = Driver(model_path, folder)
    sampling = SamplingOptions(temperature=0.5, seed=7, max_tokens=5)
    with driver.chat(save=folder / "chat.bin", sampling=sampling, system="Be brief.") as live:
        live.send("Hello there.", Heard().reporter)
        live.send("Go on.", Heard().reporter)
    for name in ("raw", "document"):
        driver.save(folder / f"{name}.bin", "The river is long. " * 20, raw=name == "raw", sampling=sampling)
    return folder


@pytest.fixture
def sessions(saved: Path, home: Path, model: Path) -> Path:
    """The home, with these sessions in it."""
    for path in saved.glob("*.bin"):
        shutil.copy(path, home)
    return home


@pytest.fixture
def questions(sessions: Path) -> Path:
    """Prompts as JSON lines, with ids beyond ASCII."""
    path = sessions / "questions.jsonl"
    lines = [{"id": f"é-{number}", "prompt": f"question {number}"} for number in range(N_MANY)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def uninterrupted(saved: Path, model_path: Path) -> dict[object, str]:
    """What all questions are answered with, one branch at a time."""
    prompts = [f"question {number}" for number in range(N_MANY)]
    greedy = SamplingOptions(max_tokens=60, temperature=0.0)
    forked = Driver(model_path, saved).fork(saved / "chat.bin", *prompts, sampling=greedy)
    return {f"é-{number}": text for number, text in enumerate(forked.texts)}
