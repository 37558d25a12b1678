"""Real models, a process for each step: what was resumed goes on with the same token ids and the same bits of logits
as the process that never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.run import run
from tests.real.text import story

pytestmark = pytest.mark.real

GREEDY = {"temperature": 0.0}
RANDOM = {"temperature": 0.8, "repeat_penalty": 1.2, "seed": 11}
QUESTIONS = ["Hello, who are you?", "Name three colours.", "Which of them is the warmest?", story(12, seed=1),
             "What was that text about?", "Say it in one sentence.", "Thank you.", "Count to five.",
             "And backwards.", "Goodbye."]  # fmt: skip


@pytest.fixture(params=["smollm2", "gemma"])
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_path")


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "sampled"])
def test_two_thousand_tokens_go_on_bit_for_bit_in_a_new_process(model: Path, tmp_path: Path, sampling) -> None:
    job = {"model": model, "cache": tmp_path / "cache", "path": tmp_path / "s.bin", "sampling": sampling, "write": 64}
    lived = run("prefill", text=story(400), n=2000, **job)
    resumed = run("go_on", **job)
    assert (lived["n_tokens"], resumed["reused"], resumed["evaluated"]) == (2000, 1999, 0)
    assert resumed["ids"] == lived["ids"]
    assert resumed["logits"] == lived["logits"]


def test_ten_turns_of_a_chat_in_ten_processes_equal_one_process(smollm2_path: Path, tmp_path: Path) -> None:
    job = {"model": smollm2_path, "cache": tmp_path / "cache", "sampling": {**RANDOM, "max_tokens": 40}}
    lived = run("turns", path=tmp_path / "one.bin", texts=QUESTIONS, **job)["answers"]
    for number, question in enumerate(QUESTIONS):
        answer = run("turns", path=tmp_path / "ten.bin", texts=[question], **job)["answers"][0]
        assert answer == lived[number]


def test_ten_turns_of_text_in_ten_processes_equal_one_process(gemma_path: Path, tmp_path: Path) -> None:
    job = {"model": gemma_path, "cache": tmp_path / "cache", "sampling": RANDOM, "write": 40}
    texts = [story(30 if number == 4 else 4, seed=number) for number in range(10)]
    lived = run("raw_turns", path=tmp_path / "one.bin", texts=texts, **job)["answers"]
    for number, text in enumerate(texts):
        answer = run("raw_turns", path=tmp_path / "ten.bin", texts=[text], **job)["answers"][0]
        assert answer == lived[number]


def test_a_cache_of_q8_0_goes_on_bit_for_bit(model: Path, tmp_path: Path) -> None:
    memory = {"type_k": "q8_0", "type_v": "q8_0"}
    job = {"model": model, "cache": tmp_path / "cache", "path": tmp_path / "s.bin", "write": 32}
    lived = run("prefill", text=story(150), n=700, memory=memory, **job)
    resumed = run("go_on", **job)
    assert (resumed["ids"], resumed["logits"]) == (lived["ids"], lived["logits"])
