"""Forks inside a session."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.prefix import n_common
from llamakv.errors import (
    NotFoundError,
    UsageError,
)
from llamakv.store.session_file import read_session
from tests.ops.driver import GREEDY, Driver, Heard, state_of
from tests.ops.fork.forks import (
    LONG,
    PROMPTS,
    TOGETHER,
    begin,
    check_is_what_a_cold_start_says,
    check_says_what_load_says,
    into,
    text_of,
)

# ---------------------------------------------------------------- a place inside


def test_a_fork_at_a_position_is_a_cold_start_of_those_tokens(driver: Driver, tmp_path: Path) -> None:
    """B61."""
    path, heard = begin(driver, tmp_path / "a.bin", "raw"), Heard()
    tokens = read_session(path).record.tokens
    forked = driver.fork(path, *PROMPTS, at="37", sampling=GREEDY, heard=heard, n_parallel=4, save_as=into(tmp_path))
    with LlamaModel(driver.model) as model:
        suffixes = [model.tokenize(prompt, add_special=False, parse_special=True) for prompt in PROMPTS]
    for result, suffix in zip(forked.results, suffixes, strict=True):
        read = read_session(tmp_path / f"{result.branch.id}.bin").record.tokens
        assert read[: 37 + len(suffix)] == (*tokens[:37], *suffix)
        assert (len(read) - 37 - len(suffix), result.finish_reason) == (result.generated, "length")
        check_is_what_a_cold_start_says(driver, read, result.generated)
    shares = driver.model.stem in TOGETHER and driver.memory.swa is None
    assert (forked.summary.reused, forked.summary.evaluated) == ((36, 0) if shares else (0, 36))
    assert [result.reused for result in forked.results] == [36, 36, 36]
    assert [result.evaluated for result in forked.results] == [1 + len(suffix) for suffix in suffixes]
    again = [notice for notice in heard.notices if "36 of 36 tokens is not stored: they are read again" in notice]
    assert len(again) == (0 if shares else 1)


def test_a_fork_after_a_turn_is_the_session_as_it_was_then(driver: Driver, tmp_path: Path) -> None:
    path, then, heard = tmp_path / "a.bin", tmp_path / "then.bin", Heard()
    with driver.chat(save=path, system="Be brief.") as live:
        for number in range(3):
            live.send(f"Turn {number}. {LONG}", Heard().reporter)
            if number == 0:
                shutil.copy(path, then)
    n_then = len(read_session(then).record.tokens)
    forked = driver.fork(path, *PROMPTS, at="turn1", sampling=GREEDY, heard=heard, n_parallel=4, save_as=into(tmp_path))
    assert forked.summary.reused + forked.summary.evaluated == n_then - 1
    if driver.memory.swa is None:  # the recurrent state after each of the last turns is in the file
        assert (forked.summary.reused, [n for n in heard.notices if "read again" in n]) == (n_then - 1, [])
    for result in forked.results:
        alone = driver.load(then, result.branch.prompt.text, sampling=GREEDY, save=tmp_path / "alone.bin")
        assert (result.text, result.finish_reason, result.reused) == (alone.text, alone.finish_reason, alone.reused)
        record, expected = (read_session(tmp_path / f"{name}.bin").record for name in (result.branch.id, "alone"))
        assert (record.tokens, record.chat) == (expected.tokens, expected.chat)
        assert record.lineage.parent_position == n_common(record.tokens, read_session(path).record.tokens) >= n_then
        (tmp_path / "alone.bin").unlink()


def test_turn_0_is_the_system_prompt_alone(driver: Driver, tmp_path: Path) -> None:
    path = begin(driver, tmp_path / "a.bin", "chat")
    forked = driver.fork(path, *PROMPTS[:2], at="turn0", sampling=GREEDY, save_as=into(tmp_path))
    for number, prompt in enumerate(PROMPTS[:2]):
        with driver.chat(system="Be brief.") as fresh:
            assert forked[number].text == fresh.send(prompt, Heard().reporter).text
            assert read_session(tmp_path / f"{number}.bin").record.tokens == tuple(fresh._model.sequence.tokens)
            assert read_session(tmp_path / f"{number}.bin").record.chat.messages == fresh.messages


def test_the_last_turn_is_the_whole_session(kind: Driver, tmp_path: Path) -> None:
    path = begin(kind, tmp_path / "a.bin", "chat")
    forked = kind.fork(path, PROMPTS[1], at="turn2", sampling=GREEDY)
    check_says_what_load_says(kind, path, forked, GREEDY)
    n_tokens = len(read_session(path).record.tokens)
    assert kind.fork(path, PROMPTS[1], at=str(n_tokens), sampling=GREEDY).texts == forked.texts


def test_a_fork_inside_a_message_goes_on_from_the_words_there(dense: Driver, chat: Path, tmp_path: Path) -> None:
    record = read_session(chat).record
    reply, question = record.chat.messages[-1], record.chat.messages[-2]
    for place, role in ((reply.p0 + 3, "assistant"), (question.p0 + 40, "user")):
        forked = dense.fork(chat, "So?", at=str(place), sampling=GREEDY, save_as=into(tmp_path), overwrite=True)
        saved = read_session(tmp_path / "0.bin").record
        assert saved.tokens[:place] == record.tokens[:place]
        assert forked[0].reused == place - 1
        joint = {"assistant": "<|im_end|>\n<|im_start|>user\nSo?", "user": "\n\nSo?"}[role]
        asked = text_of(dense, record.tokens[:place]) + joint + "<|im_end|>\n<|im_start|>assistant\n"
        n_prompt = len(saved.tokens) - forked[0].generated
        assert text_of(dense, saved.tokens[:n_prompt]) == asked
        check_is_what_a_cold_start_says(dense, saved.tokens, forked[0].generated)
        with dense.resume(tmp_path / "0.bin") as again:
            assert again.opened.evaluated == 0
            again.send("On.", Heard().reporter)
            assert tuple(state_of(again)[0][: len(saved.tokens)]) == saved.tokens


@pytest.mark.parametrize(
    ("what", "at", "error", "status", "said"),
    [
        ("raw", "9999", NotFoundError, 10, "position 9,999 is not in the session: it has "),
        ("raw", "0", NotFoundError, 10, "position 0 is not in the session"),
        ("raw", "turn1", UsageError, 2, "raw text has no turns"),
        ("raw", "-1", UsageError, 2, "'-1' is not a place in a session"),
        ("raw", "1.5", UsageError, 2, "'1.5' is not a place in a session"),
        ("raw", "", UsageError, 2, "'' is not a place in a session"),
        ("raw", " 5", UsageError, 2, "' 5' is not a place in a session"),
        ("raw", "turn", UsageError, 2, "'turn' is not a place in a session"),
        ("raw", "²", UsageError, 2, "'²' is not a place in a session"),
        ("chat", "turn3", NotFoundError, 10, "there is no turn 3 in the session: it has 2"),
        ("chat", "1", UsageError, 2, "position 1 lies within the chat template's own text, not in a message"),
        ("document", "turn1", NotFoundError, 10, "there is no turn 1 in the session: it has 0"),
        ("document", "turn0", UsageError, 2, "there is nothing before turn 1: the session has no system prompt"),
    ],
)
def test_a_place_that_is_not_there_is_refused(dense: Driver, tmp_path: Path, what, at, error, status, said) -> None:
    path = begin(dense, tmp_path / "a.bin", what)
    with pytest.raises(error) as refused:
        dense.fork(path, "So?", at=at, save_as=into(tmp_path))
    assert refused.value.message.startswith(said)
    assert refused.value.exit_status == status
    assert not (tmp_path / "0.bin").exists()


@pytest.mark.parametrize("at", ["9" * 5000, "turn" + "9" * 5000])
def test_a_place_of_thousands_of_digits_is_not_there(dense: Driver, chat: Path, at: str) -> None:
    with pytest.raises((UsageError, NotFoundError)):
        dense.fork(chat, "So?", at=at)
