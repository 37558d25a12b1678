"""Branches of a saved session: each says what ``load`` says by itself, on every memory kind, and only the prefix's file
is read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.errors import (
    ExistsError,
    LlamakvError,
    MismatchError,
    NoRoomError,
    NotFoundError,
    StoreError,
    UsageError,
    WriteError,
)
from llamakv.ops.branches import Branch
from llamakv.ops.fork import Done, SaveTarget, read_done
from llamakv.ops.keeping import n_common
from llamakv.ops.prompts import Prompt
from llamakv.ops.requests import MemoryOptions, SamplingOptions
from llamakv.records import Sampling
from llamakv.store.session_file import read_session, verify_session
from tests.engine.test_scheduler import NOISE, NOISE_Q8_0
from tests.models.vocabulary import N_TOKENS
from tests.ops.driver import GREEDY, RANDOM, Driver, Forked, Heard, ResumeOptions, sha, state_of

KINDS = ["M", "MS", "MR", "MH", "MH2"]
TOGETHER = ("M", "MS")
LONG = "The quick brown fox jumps over the lazy dog. " * 12
PROMPTS = ("Who jumps?", " And over whom, é 数据?", "Tell me more. " * 40)
KEPT = {"q8_0": ("M", MemoryOptions(type_k="q8_0", type_v="q8_0")), "window": ("MS", MemoryOptions(swa="window"))}


def driver_of(models, folder: Path, what: str) -> Driver:
    name, memory = KEPT.get(what, (what, None))
    return Driver(models(name), folder, memory=memory)


@pytest.fixture(params=["M", "MS", "MR", "MH", *KEPT, pytest.param("MH2", marks=pytest.mark.slow)])
def driver(request: pytest.FixtureRequest, models, tmp_path: Path) -> Driver:
    """All memory kinds and settings."""
    return driver_of(models, tmp_path, request.param)


@pytest.fixture(
    params=["M", "MR", *(pytest.param(what, marks=pytest.mark.slow) for what in ("MS", "MH", "MH2", *KEPT))]
)
def kind(request: pytest.FixtureRequest, models, tmp_path: Path) -> Driver:
    """The same, most of them in CI only."""
    return driver_of(models, tmp_path, request.param)


@pytest.fixture
def dense(models, tmp_path: Path) -> Driver:
    return Driver(models("M"), tmp_path)


def begin(driver: Driver, path: Path, what: str) -> Path:
    """A session: raw text, a conversation, or a document that waits for questions."""
    if what == "chat":
        with driver.chat(save=path, system="Be brief.") as live:
            live.send("Hello there.", Heard().reporter)
            live.send(LONG, Heard().reporter)
    else:
        driver.save(path, LONG, raw=what == "raw")
    return path


@pytest.fixture
def raw(dense: Driver, tmp_path: Path) -> Path:
    return begin(dense, tmp_path / "raw.bin", "raw")


@pytest.fixture
def chat(dense: Driver, tmp_path: Path) -> Path:
    return begin(dense, tmp_path / "chat.bin", "chat")


def into(folder: Path) -> Callable[[Branch], SaveTarget]:
    """Keep each branch in a file called after its id."""
    return lambda branch: SaveTarget(path=folder / f"{branch.id}.bin", name=None)


def check_is_what_a_cold_start_says(driver: Driver, tokens: Sequence[int], n_generated: int) -> None:
    """The last tokens are what a context says greedily that never restored or shared anything, up to a tie that fell
    the other way: it reads in other batches, which changes rounding."""
    memory = MemoryRequest(
        type_k=driver.memory.type_k or "f16",
        type_v=driver.memory.type_v or "f16",
        swa_full=driver.memory.swa is None,
    )
    noise = NOISE if driver.memory.type_k is None else NOISE_Q8_0
    assert n_generated > 0
    with LlamaModel(driver.model) as model:
        sequence = model.open_sequence(memory, n_ctx_min=1024, n_ctx_max=8192, n_threads=1)
        sequence.extend(tokens[: len(tokens) - n_generated])
        for token in tokens[len(tokens) - n_generated :]:
            (expected,) = sequence.generate(Sampling(), n_max=1)
            if token != expected:
                logits = np.frombuffer(sequence.logits(), dtype=np.float32)
                assert float(logits[expected] - logits[token]) <= noise * float(logits.std())
                return


def text_of(driver: Driver, tokens: Sequence[int]) -> str:
    with LlamaModel(driver.model) as model:
        return b"".join(model.token_bytes(token, special=True) for token in tokens).decode()


def check_says_what_load_says(driver: Driver, path: Path, forked: Forked, sampling: SamplingOptions, **more) -> None:
    for result in forked.results:
        alone = driver.load(path, result.branch.prompt.text, sampling=sampling, **more)
        assert result.error is None
        assert (result.text, result.finish_reason, result.generated) == (
            alone.text,
            alone.finish_reason,
            alone.generated,
        )
        assert (result.reused, result.evaluated, result.seed) == (alone.reused, alone.evaluated, alone.seed)


# ---------------------------------------------------------------- the same words


@pytest.mark.parametrize("what", ["raw", "chat", pytest.param("document", marks=pytest.mark.slow)])
def test_each_branch_says_what_load_says(driver: Driver, tmp_path: Path, what: str) -> None:
    path = begin(driver, tmp_path / "a.bin", what)
    n_cells = len(read_session(path).record.tokens) - 1
    forked = driver.fork(path, *PROMPTS[1:], sampling=RANDOM)
    assert forked.ids == [0, 1]
    check_says_what_load_says(driver, path, forked, RANDOM)
    summary = forked.summary
    assert (summary.reused, summary.evaluated) == (n_cells, 0)
    assert (summary.n_answers, summary.n_errors, summary.n_skipped, summary.interrupted) == (2, 0, 0, False)
    assert summary.branch_evaluated == sum(result.evaluated for result in forked.results)
    assert summary.generated == sum(result.generated for result in forked.results)
    assert len(set(forked.texts)) > 1


@pytest.mark.parametrize(
    "what", ["raw", *(pytest.param(what, marks=pytest.mark.slow) for what in ("chat", "document"))]
)
@pytest.mark.parametrize("name", KINDS)
def test_many_branches_at_once_say_what_load_says(models, tmp_path: Path, name: str, what: str) -> None:
    """Decoded together rounding differs, and may tip a tie; where they are not, every answer is the same."""
    driver, heard = Driver(models(name), tmp_path), Heard()
    path = begin(driver, tmp_path / "a.bin", what)
    prompts = [f"My code is {number * 1111}. " * (number % 4 + 1) for number in range(10)]
    alone = driver.fork(path, *prompts, sampling=GREEDY)
    forked = driver.fork(path, *prompts, sampling=GREEDY, n_parallel=16, heard=heard)
    n_same = sum(a == b for a, b in zip(alone.texts, forked.texts, strict=True))
    assert [result.generated for result in forked.results] == [result.generated for result in alone.results]
    assert forked.summary.decoded_together == (name in TOGETHER)
    if name in TOGETHER:
        assert n_same >= 9
        assert forked.summary.n_parallel == 10
        assert forked.summary.n_steps < alone.summary.n_steps / 2
        assert heard.notices == []
    else:
        assert n_same == 10
        assert forked.summary.n_parallel == 1
        kind = read_session(path).record.kind
        assert heard.notices == [f"this model's memory ({kind}) is not decoded together: one branch at a time"]


def test_window_only_memory_is_decoded_one_branch_at_a_time(models, tmp_path: Path) -> None:
    driver, heard = Driver(models("MS"), tmp_path, memory=MemoryOptions(swa="window")), Heard()
    path = begin(driver, tmp_path / "a.bin", "raw")
    forked = driver.fork(path, *PROMPTS, sampling=GREEDY, n_parallel=16, heard=heard)
    assert (forked.summary.decoded_together, forked.summary.n_parallel) == (False, 1)
    assert [notice for notice in heard.notices if "one branch at a time" in notice] == heard.notices[:1]
    check_says_what_load_says(driver, path, forked, GREEDY)


def test_a_document_is_answered_without_a_question(kind: Driver, tmp_path: Path) -> None:
    path = begin(kind, tmp_path / "a.bin", "document")
    check_says_what_load_says(kind, path, kind.fork(path, None, sampling=GREEDY), GREEDY)


def test_raw_text_goes_on_without_a_prompt(kind: Driver, tmp_path: Path) -> None:
    path = begin(kind, tmp_path / "a.bin", "raw")
    forked = kind.fork(path, None, sampling=GREEDY)
    check_says_what_load_says(kind, path, forked, GREEDY)
    assert forked[0].evaluated == 1


@pytest.mark.parametrize("name", ["bos_template", "strict_template", "think_template", "space_prefix", "ME"])
def test_every_template_and_tokenizer_gives_what_load_gives(models, tmp_path: Path, name: str) -> None:
    driver, path = Driver(models(name), tmp_path), tmp_path / "a.bin"
    with driver.chat(save=path, system="Be brief.") as live:
        live.send("Hello there.", Heard().reporter)
        live.send("Go on.", Heard().reporter)
    forked = driver.fork(path, *PROMPTS, sampling=SamplingOptions(temperature=0.0, max_tokens=60))
    check_says_what_load_says(driver, path, forked, SamplingOptions(temperature=0.0, max_tokens=60))


def test_thinking_that_the_template_leaves_out_is_read_again_without_it(models, tmp_path: Path) -> None:
    driver, path = Driver(models("think_template"), tmp_path), tmp_path / "a.bin"
    thinking = SamplingOptions(temperature=0.0, max_tokens=40, grammar='root ::= "hm</think>yes"')
    with driver.chat(save=path, sampling=thinking) as live:
        assert live.send("Hello there.", Heard().reporter).text == "hm</think>yes"
    options = SamplingOptions(temperature=0.0, max_tokens=12, grammar="root ::= [a-z]+")
    forked = driver.fork(path, *PROMPTS, sampling=options, save_as=into(tmp_path))
    for result in forked.results:
        alone = driver.load(path, result.branch.prompt.text, sampling=options)
        assert (result.text, result.reused + result.evaluated) == (alone.text, alone.reused + alone.evaluated)
        assert result.reused < len(read_session(path).record.tokens) - 1
        tokens = read_session(tmp_path / f"{result.branch.id}.bin").record.tokens
        assert "assistant\nyes<|im_end|>" in text_of(driver, tokens)


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
    again = [notice for notice in heard.notices if "36 tokens were read again" in notice]
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


# ---------------------------------------------------------------- what a prompt may say


def test_a_prompt_of_its_own_settings_says_what_load_says_with_them(dense: Driver, raw: Path) -> None:
    own = [
        SamplingOptions(max_tokens=3),
        SamplingOptions(temperature=0.0),
        SamplingOptions(seed=12345),
        SamplingOptions(stop=("e",)),
        SamplingOptions(logit_bias=tuple((token, float("-inf")) for token in range(600))),
        SamplingOptions(grammar='root ::= "yes" | "no"'),
        SamplingOptions(top_k=1),
        SamplingOptions(temperature=5.0, top_k=0, top_p=1.0, min_p=0.0, seed=3),
        SamplingOptions(repeat_penalty=50.0, penalty_last_n=10),
    ]
    prompts = [Prompt(id=number, text="So?", sampling=options) for number, options in enumerate(own)]
    forked = dense.fork(raw, *prompts, sampling=RANDOM)
    base = {name: getattr(RANDOM, name) for name in RANDOM.__dataclass_fields__}
    for result, options in zip(forked.results, own, strict=True):
        given = {name: value for name in base if (value := getattr(options, name)) is not None}
        alone = dense.load(raw, "So?", sampling=SamplingOptions(**{**base, **given}))
        assert (result.text, result.finish_reason, result.seed) == (alone.text, alone.finish_reason, alone.seed)
    assert forked[0].generated == 3
    assert (forked[3].finish_reason, "e" in forked[3].text) == ("stop", False)
    assert forked[5].text in ("yes", "no")


def test_settings_of_one_prompt_do_not_reach_another(dense: Driver, raw: Path) -> None:
    odd = Prompt(id="odd", text="So?", sampling=SamplingOptions(temperature=50.0, max_tokens=1, stop=("a",)))
    for n_parallel in (1, 3):
        forked = dense.fork(raw, "So?", odd, Prompt(id=2, text="So?"), sampling=GREEDY, n_parallel=n_parallel)
        assert (forked[0].text, forked[0].generated) == (forked[2].text, 12)
        assert forked[0].text == dense.load(raw, "So?", sampling=GREEDY).text


def test_a_system_prompt_takes_the_place_of_the_sessions(kind: Driver, tmp_path: Path) -> None:
    path = begin(kind, tmp_path / "a.bin", "chat")
    prompts = [Prompt(id=name, text="So?", system=name) for name in ("Be long.", "")]
    same = Prompt(id="same", text="So?", system="Be brief.")
    forked = kind.fork(path, *prompts, same, Prompt(id="none", text="So?"), sampling=GREEDY, save_as=into(tmp_path))
    for number, prompt in enumerate(prompts):
        with kind.resume(path, system=prompt.system, save=tmp_path / f"expected-{number}.bin") as again:
            expected = again.send("So?", Heard().reporter)
            assert forked[number].text == expected.text
            record = read_session(tmp_path / f"{prompt.id}.bin").record
            assert record.tokens == tuple(state_of(again)[0])
            assert [(m.role, m.content) for m in record.chat.messages] == [(m.role, m.content) for m in again.messages]
    assert forked[2].text == forked[3].text
    assert forked[2].reused == len(read_session(path).record.tokens) - 1


def test_messages_are_turns_through_the_template(dense: Driver, chat: Path, tmp_path: Path) -> None:
    asked = (("user", "One?"), ("assistant", "It is one."), ("user", "Two?"))
    with_system = (("system", "Be long."), ("user", "One?"))
    forked = dense.fork(
        chat,
        Prompt(id="turns", messages=asked),
        Prompt(id="system", messages=with_system),
        Prompt(id="same", messages=with_system[1:], system="Be long."),
        sampling=GREEDY,
        save_as=into(tmp_path),
    )
    parent, saved = read_session(chat).record, read_session(tmp_path / "turns.bin").record
    n_prompt = len(saved.tokens) - forked[0].generated
    assert text_of(dense, saved.tokens[:n_prompt]) == text_of(dense, parent.tokens) + (
        "<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nIt is one.<|im_end|>\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert saved.tokens[: len(parent.tokens)] == parent.tokens
    check_is_what_a_cold_start_says(dense, saved.tokens, forked[0].generated)
    assert [(m.role, m.content) for m in saved.chat.messages[-4:]] == [*asked, ("assistant", forked[0].text)]
    assert forked[1].text == forked[2].text
    system = read_session(tmp_path / "system.bin").record
    assert system.tokens == read_session(tmp_path / "same.bin").record.tokens
    assert [(m.role, m.content) for m in system.chat.messages[:1]] == [("system", "Be long.")]
    with dense.resume(tmp_path / "turns.bin", save=tmp_path / "other.bin") as again:
        assert again.opened.evaluated == 0
        again.undo(Heard().reporter)
        assert [m.content for m in again.messages][-2:] == ["One?", "It is one."]


def test_roles_that_the_template_refuses_are_that_branchs_error(models, tmp_path: Path) -> None:
    driver, path = Driver(models("strict_template"), tmp_path), tmp_path / "a.bin"
    with driver.chat(save=path) as live:
        live.send("Hello.", Heard().reporter)
    twice = Prompt(id=0, messages=(("user", "One?"), ("user", "Two?")))
    forked = driver.fork(path, twice, Prompt(id=1, text="So?"), sampling=GREEDY)
    assert isinstance(forked[0].error, UsageError)
    assert "roles must alternate" in forked[0].error.message
    assert forked[1].text == driver.load(path, "So?", sampling=GREEDY).text
    assert (forked.summary.n_answers, forked.summary.n_errors) == (1, 1)


def test_two_system_prompts_are_that_branchs_error(dense: Driver, chat: Path) -> None:
    both = Prompt(id=0, messages=(("system", "A"), ("user", "So?")), system="B")
    forked = dense.fork(chat, both, Prompt(id=1, text="So?"), sampling=GREEDY)
    assert isinstance(forked[0].error, UsageError)
    assert forked[1].error is None


def test_raw_text_has_no_messages_and_no_system_prompt(dense: Driver, raw: Path) -> None:
    prompts = [Prompt(id=0, messages=(("user", "So?"),)), Prompt(id=1, text="So?", system=""), Prompt(id=2, text="So?")]
    forked = dense.fork(raw, *prompts, sampling=GREEDY)
    assert [type(result.error) for result in forked.results] == [UsageError, UsageError, type(None)]
    assert "'messages' means nothing here" in forked[0].error.message
    assert "'system' means nothing here" in forked[1].error.message


@pytest.mark.parametrize("what", ["raw", "chat", "document"])
def test_an_empty_prompt_is_an_error_and_the_others_are_answered(dense: Driver, tmp_path: Path, what: str) -> None:
    path = begin(dense, tmp_path / "a.bin", what)
    forked = dense.fork(path, "", "So?", sampling=GREEDY)
    assert isinstance(forked[0].error, UsageError)
    assert "empty" in forked[0].error.message
    assert forked[1].text == dense.load(path, "So?", sampling=GREEDY).text


@pytest.mark.parametrize("what", ["chat", "document"])
def test_a_message_of_blanks_is_an_error(dense: Driver, tmp_path: Path, what: str) -> None:
    path = begin(dense, tmp_path / "a.bin", what)
    forked = dense.fork(path, " \n\t", "So?", sampling=GREEDY)
    assert [type(result.error) for result in forked.results] == [UsageError, type(None)]


def test_a_chat_that_ends_with_a_reply_needs_a_prompt(dense: Driver, chat: Path) -> None:
    forked = dense.fork(chat, None, "So?", sampling=GREEDY)
    assert "there is nothing to answer" in forked[0].error.message
    assert forked[1].error is None


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(grammar="nonsense"),
        SamplingOptions(logit_bias=((N_TOKENS, 1.0),)),
        SamplingOptions(logit_bias=((-1, 1.0),)),
        SamplingOptions(logit_bias=((10**20, 1.0),)),
    ],
    ids=["grammar", "token", "negative token", "huge token"],
)
def test_settings_the_engine_refuses_are_that_branchs_error(dense: Driver, raw: Path, options) -> None:
    forked = dense.fork(raw, Prompt(id=0, text="So?", sampling=options), Prompt(id=1, text="So?"), sampling=GREEDY)
    assert [type(result.error) for result in forked.results] == [UsageError, type(None)]
    told: list[object] = []
    with pytest.raises(UsageError):
        dense.fork(raw, "So?", sampling=options, on_result=told.append)
    assert told == []


@pytest.mark.parametrize("n_parallel", [1, 4])
def test_a_prompt_too_long_for_any_context_is_an_error_and_the_others_are_answered(
    dense: Driver, raw: Path, n_parallel: int
) -> None:
    """B69."""
    prompts = ["So?", "word " * 600, "And?", "word " * 9000]
    forked = dense.fork(raw, *prompts, sampling=GREEDY, model=dense.request(n_ctx=512), n_parallel=n_parallel)
    for index in (1, 3):
        error = forked[index].error
        assert isinstance(error, NoRoomError)
        assert (error.exit_status, error.fields["limit"]) == (15, 512)
        assert int(error.fields["needed"]) > 512
    for index in (0, 2):
        assert forked[index].text == dense.load(raw, prompts[index], sampling=GREEDY).text
    assert (forked.summary.n_answers, forked.summary.n_errors) == (2, 2)


def test_branches_that_do_not_fit_together_take_turns(dense: Driver, raw: Path) -> None:
    """B69: 16 branches of 100 cells and more in a context of 512, 170 of them taken by the prefix."""
    prompts = [f"{number} " * 50 for number in range(16)]
    forked = dense.fork(raw, *prompts, sampling=GREEDY, model=dense.request(n_ctx=512), n_parallel=16)
    alone = dense.fork(raw, *prompts, sampling=GREEDY)
    assert forked.ids == list(range(16))
    assert sum(a == b for a, b in zip(forked.texts, alone.texts, strict=True)) >= 15
    assert 1 <= forked.summary.n_parallel < 16
    assert forked.summary.n_cells_peak <= 512


def test_a_reply_that_fills_the_context_ends_there(dense: Driver, raw: Path) -> None:
    endless = SamplingOptions(temperature=0.0, max_tokens=-1)
    forked = dense.fork(raw, "So?", "And?", sampling=endless, model=dense.request(n_ctx=300), n_parallel=2)
    assert [result.finish_reason for result in forked.results] == ["context", "context"]
    alone = dense.load(raw, "So?", sampling=endless, model=dense.request(n_ctx=300))
    assert (forked[0].text, forked[0].generated) == (alone.text, alone.generated)


def test_an_answer_that_takes_too_long_is_cut_and_says_so(dense: Driver, raw: Path) -> None:
    endless = SamplingOptions(temperature=0.0, max_tokens=8000)
    never = Prompt(id="never", text="So?", timeout_s=0.0)
    slow = Prompt(id="slow", text="So?", timeout_s=0.3)
    forked = dense.fork(raw, never, slow, sampling=endless)
    assert (forked[0].finish_reason, forked[0].generated, forked[0].text) == ("timeout", 0, "")
    assert (forked[1].finish_reason, 0 < forked[1].generated < 8000) == ("timeout", True)
    all_slow = dense.fork(raw, "So?", Prompt(id=1, text="So?", timeout_s=600.0, sampling=GREEDY), timeout_s=0.0)
    assert [result.finish_reason for result in all_slow.results] == ["timeout", "length"]


# ---------------------------------------------------------------- samples


def test_samples_of_a_prompt_are_what_load_says_with_their_seeds(dense: Driver, raw: Path) -> None:
    forked = dense.fork(raw, "So?", "And?", sampling=RANDOM, n_samples=3)
    assert forked.ids == [0, 1, 2, 3, 4, 5]
    assert [(result.branch.index, result.branch.sample, result.seed) for result in forked.results] == [
        (0, 0, 7), (1, 1, 8), (2, 2, 9), (3, 0, 7), (4, 1, 8), (5, 2, 9),
    ]  # fmt: skip
    assert len(set(forked.texts)) == 6
    for result in forked.results:
        seeded = SamplingOptions(temperature=0.8, repeat_penalty=1.2, max_tokens=12, seed=result.seed)
        assert result.text == dense.load(raw, result.branch.prompt.text, sampling=seeded).text


def test_samples_have_ids_of_their_own(dense: Driver, raw: Path) -> None:
    prompts = [Prompt(id="a", text="So?"), Prompt(id=7, text="So?"), Prompt(id=2, text="So?")]
    forked = dense.fork(raw, *prompts, sampling=RANDOM, n_samples=2)
    assert forked.ids == ["a-0", "a-1", "7-0", "7-1", 4, 5]


def test_seeds_count_up_from_a_prompts_own_and_wrap(dense: Driver, raw: Path) -> None:
    prompts = [Prompt(id=0, text="So?", sampling=SamplingOptions(seed=2**32 - 1))]
    assert [result.seed for result in dense.fork(raw, *prompts, n_samples=3).results] == [2**32 - 1, 0, 1]


def test_a_new_seed_is_drawn_where_minus_1_is_asked_for(dense: Driver, raw: Path) -> None:
    random = SamplingOptions(seed=-1, temperature=0.8, max_tokens=1)
    one = dense.fork(raw, "So?", sampling=random, n_samples=3)
    other = dense.fork(raw, "So?", sampling=random)
    seeds = [result.seed for result in one.results]
    assert seeds == [seeds[0], (seeds[0] + 1) % 2**32, (seeds[0] + 2) % 2**32]
    assert other[0].seed not in seeds
    own = [Prompt(id=number, text="So?", sampling=random) for number in range(3)]
    assert len({result.seed for result in dense.fork(raw, *own).results}) == 3


def test_samples_at_temperature_0_are_the_same_and_that_is_said(dense: Driver, raw: Path) -> None:
    heard = Heard()
    forked = dense.fork(raw, "So?", sampling=GREEDY, n_samples=3, heard=heard)
    assert len(set(forked.texts)) == 1
    assert heard.notices == ["temperature is 0: all samples of a prompt will be the same"]


@pytest.mark.parametrize("name", KINDS)
def test_samples_on_every_memory_kind_are_their_own(models, tmp_path: Path, name: str) -> None:
    """B64."""
    driver = Driver(models(name), tmp_path)
    path = begin(driver, tmp_path / "a.bin", "document")
    forked = driver.fork(path, "So?", sampling=RANDOM, n_samples=4, n_parallel=1 if name in TOGETHER else 4)
    for result in forked.results:
        seeded = SamplingOptions(temperature=0.8, repeat_penalty=1.2, max_tokens=12, seed=result.seed)
        assert result.text == driver.load(path, "So?", sampling=seeded).text
    assert len(set(forked.texts)) > 1


# ---------------------------------------------------------------- in and out of order


def of_lengths(*lengths: int) -> list[Prompt]:
    return [
        Prompt(id=number, text="So?", sampling=SamplingOptions(max_tokens=length))
        for number, length in enumerate(lengths)
    ]


def test_results_are_told_in_the_order_of_the_prompts(dense: Driver, raw: Path) -> None:
    prompts = of_lengths(60, 2, 30, 2, 1, 9)
    assert dense.fork(raw, *prompts, n_parallel=4).ids == [0, 1, 2, 3, 4, 5]


def test_results_are_told_as_they_finish_where_that_is_asked_for(dense: Driver, raw: Path) -> None:
    prompts = of_lengths(60, 2, 30, 4)
    assert dense.fork(raw, *prompts, n_parallel=4, unordered=True).ids == [1, 3, 2, 0]
    assert dense.fork(raw, *prompts, n_parallel=1, unordered=True).ids == [0, 1, 2, 3]


def test_each_result_is_told_as_soon_as_its_turn_has_come(dense: Driver, raw: Path) -> None:
    told: list[int] = []
    progress: list[int] = []
    forked = dense.fork(
        raw, *of_lengths(2, 60, 60), n_parallel=3, on_result=lambda result: told.append(result.branch.index)
    )
    progress = [at.n_done for at in forked.progress]
    assert told == [0, 1, 2]
    assert progress == sorted(progress)
    assert progress.count(1) > 30


def test_progress_counts_every_prompt_once(dense: Driver, raw: Path) -> None:
    forked = dense.fork(raw, *of_lengths(5, 5, 5, 5), Prompt(id="bad", text="So?", system="x"), n_parallel=2)
    last = forked.progress[-1]
    assert (last.n_done, last.n_total, last.n_generated) == (5, 5, 20)
    assert {at.n_total for at in forked.progress} == {5}
    assert max(at.n_active for at in forked.progress) == forked.summary.n_parallel == 2
    generated = [at.n_generated for at in forked.progress]
    assert generated == sorted(generated)


# ---------------------------------------------------------------- going on after an interruption


def keys(results: Forked) -> dict[str, str]:
    return {str(result.branch.id): str(result.key) for result in results.results if result.error is None}


@pytest.mark.parametrize("name", KINDS)
def test_an_interrupted_batch_goes_on_with_the_same_answers(models, tmp_path: Path, name: str) -> None:
    driver = Driver(models(name), tmp_path)
    path = begin(driver, tmp_path / "a.bin", "chat")
    prompts = [f"{prompt} {number}" for number in range(3) for prompt in PROMPTS[:2]]
    whole = driver.fork(path, *prompts, sampling=RANDOM)
    first = driver.fork(path, *prompts, sampling=RANDOM, until=lambda results: len(results) >= 2)
    assert (first.summary.interrupted, first.ids, first.summary.n_answers) == (True, [0, 1], 2)
    assert first.texts == whole.texts[:2]
    second = driver.fork(path, *prompts, sampling=RANDOM, done=keys(first))
    assert second.ids == [2, 3, 4, 5]
    assert (second.summary.n_answers, second.summary.n_skipped, second.summary.interrupted) == (4, 2, False)
    assert [*first.texts, *second.texts] == whole.texts


def test_what_is_finished_is_told_on_an_interruption_even_behind_a_gap(dense: Driver, raw: Path) -> None:
    n_steps = 0

    def after_a_while(results: Sequence[object]) -> bool:
        nonlocal n_steps
        n_steps += 1
        return n_steps > 1000

    prompts = of_lengths(4000, 2, 3, 4)
    forked = dense.fork(raw, *prompts, n_parallel=4, until=after_a_while)
    assert (forked.summary.interrupted, forked.ids) == (True, [1, 2, 3])
    assert [result.finish_reason for result in forked.results] == ["length"] * 3


def test_interrupted_before_it_began_nothing_is_told(dense: Driver, raw: Path) -> None:
    before = sha(raw)
    n_asked = 0

    def once_loaded(results: Sequence[object]) -> bool:
        nonlocal n_asked
        n_asked += 1
        return n_asked > 400  # the model has been loaded by then, and some tokens were written

    forked = dense.fork(raw, *of_lengths(8000, 8000), until=once_loaded, n_parallel=2)
    assert (forked.summary.interrupted, forked.results, forked.summary.n_answers) == (True, [], 0)
    assert sha(raw) == before


@pytest.mark.parametrize("how", [{"at": "800"}, {"options": ResumeOptions(recompute=True)}], ids=["at", "recompute"])
def test_reading_the_prefix_again_can_be_interrupted(models, tmp_path: Path, how: dict[str, object]) -> None:
    driver, path, heard = Driver(models("MH"), tmp_path), tmp_path / "a.bin", Heard(abort_at=256)
    driver.save(path, LONG * 6, raw=True)
    before, told = sha(path), []
    with pytest.raises(LlamakvError) as stopped:
        driver.fork(path, "So?", heard=heard, on_result=told.append, **how)
    assert (stopped.value.exit_status, told, sha(path)) == (130, [], before)
    assert max(done for phase, done, _ in heard.phases if phase == "prefill") < 799


def test_nothing_is_done_where_all_is_done(dense: Driver, raw: Path) -> None:
    first = dense.fork(raw, *PROMPTS, sampling=RANDOM)
    again = dense.fork(raw, *PROMPTS, sampling=RANDOM, done=keys(first))
    assert again.results == []
    assert (again.summary.n_skipped, again.summary.generated, again.summary.n_steps) == (3, 0, 0)


def test_what_is_done_is_left_out_in_order_and_unordered(dense: Driver, raw: Path) -> None:
    prompts = of_lengths(9, 2, 30, 4, 5, 6)
    done = {id: key for id, key in keys(dense.fork(raw, *prompts)).items() if id in ("0", "3", "5")}
    assert dense.fork(raw, *prompts, done=done, n_parallel=4).ids == [1, 2, 4]
    assert dense.fork(raw, *prompts, done=done, n_parallel=4, unordered=True).ids == [1, 4, 2]


def test_keys_of_ids_that_nobody_asks_for_do_no_harm(dense: Driver, raw: Path) -> None:
    assert dense.fork(raw, "So?", sampling=GREEDY, done={"other": "x"}).ids == [0]


@pytest.mark.parametrize(
    "change",
    ["prompt", "seed", "max_tokens", "place", "session", "system", "memory", "model"],
)
def test_an_answer_to_something_else_is_refused_before_anything_is_run(
    models, dense: Driver, chat: Path, tmp_path: Path, change: str
) -> None:
    first = dense.fork(chat, *PROMPTS, sampling=RANDOM)
    done = {"1": keys(first)["1"]}
    prompts: list[str | Prompt] = list(PROMPTS)
    more: dict[str, object] = {"sampling": RANDOM, "done": done}
    if change == "prompt":
        prompts[1] = "Another one."
    elif change == "seed":
        more["sampling"] = SamplingOptions(temperature=0.8, repeat_penalty=1.2, max_tokens=12, seed=8)
    elif change == "max_tokens":
        prompts[1] = Prompt(id=1, text=PROMPTS[1], sampling=SamplingOptions(max_tokens=13))
    elif change == "place":
        more["at"] = "turn1"
    elif change == "session":
        chat = begin(dense, tmp_path / "other.bin", "document")
    elif change == "system":
        prompts[1] = Prompt(id=1, text=PROMPTS[1], system="Another.")
    elif change == "memory":
        more |= {"memory": MemoryOptions(type_k="q8_0"), "options": ResumeOptions(recompute=True)}
    else:
        more |= {"model": dense.request(models("M2")), "options": ResumeOptions(recompute=True)}
    told: list[object] = []
    with pytest.raises(UsageError) as refused:
        dense.fork(chat, *prompts, on_result=told.append, **more)
    assert told == []
    assert "id 1 was answered before for another prompt, session, model or options" in refused.value.message
    assert (refused.value.fields["expected"], refused.value.exit_status) == (done["1"], 2)


def test_a_random_seed_does_not_make_an_answer_another(dense: Driver, raw: Path) -> None:
    random = SamplingOptions(seed=-1, temperature=0.8, max_tokens=2)
    own = Prompt(id="own", text="So?", sampling=SamplingOptions(seed=-1))
    first = dense.fork(raw, "So?", own, sampling=random)
    assert dense.fork(raw, "So?", own, "And?", sampling=random, done=keys(first)).ids == [2]


def test_the_same_session_somewhere_else_gives_the_same_keys(dense: Driver, raw: Path, tmp_path: Path) -> None:
    copy, model = tmp_path / "elsewhere.bin", tmp_path / "renamed.gguf"
    shutil.copy(raw, copy)
    shutil.copy(dense.model, model)
    first = dense.fork(raw, *PROMPTS, sampling=RANDOM)
    assert keys(dense.fork(copy, *PROMPTS, sampling=RANDOM, model=dense.request(model), n_parallel=3)) == keys(first)
    assert len(set(keys(first).values())) == 3


# ---------------------------------------------------------------- earlier outputs


ONE = b'{"type": "answer", "id": 1, "key": "k"}\n'


def test_earlier_answers_are_known_by_id() -> None:
    two = '{"type": "answer", "id": "é", "key": "k2", "text": "数据"}\n'.encode()
    assert read_done(ONE + two, "out") == Done(keys={"1": "k", "é": "k2"}, n_whole_bytes=len(ONE + two))
    for nothing in (b"", b"\n \n"):
        assert read_done(nothing, "out") == Done(keys={}, n_whole_bytes=len(nothing))


def test_an_error_is_not_done_and_an_answer_after_it_is() -> None:
    error, done = b'{"type": "error", "id": 1, "code": "x"}\n', b'{"type": "done", "schema_version": 1}\n'
    assert read_done(error, "out").keys == {}
    assert read_done(error + done + ONE, "out").keys == {"1": "k"}
    assert read_done(ONE + error, "out").keys == {}


def test_a_last_line_that_was_not_finished_is_not_done() -> None:
    last = '{"type": "answer", "id": 2, "text": "é 数据", "key": "kk"}'.encode()
    for n in range(1, len(last)):
        assert read_done(ONE + last[:n], "out") == Done(keys={"1": "k"}, n_whole_bytes=len(ONE)), n
    whole = Done(keys={"1": "k", "2": "kk"}, n_whole_bytes=len(ONE), ends_openly=True)
    assert read_done(ONE + last, "out") == whole


FOREIGN = [
    b"# a heading",
    b"[1, 2]",
    b"3",
    b"null",
    b'"text"',
    b"{}",
    b'{"id": 1, "key": "k"}',
    b'{"type": "answer"}',
    b'{"type": "answer", "id": 1}',
    b'{"type": "error"}',
    b'{"type": "message", "text": "hi"}',
    b'{"type": ["answer"]}',
    b'{"prompt": "hi"}',
    b"[" * 100_000,
    b"\xff\xfe",
]


@pytest.mark.parametrize("line", FOREIGN, ids=lambda line: repr(line[:40]))
@pytest.mark.parametrize("ending", [b"\n", b""], ids=["whole", "at the end"])
def test_a_file_of_something_else_is_refused(line: bytes, ending: bytes) -> None:
    for before, number in ((ONE, 2), (b"", 1)):
        with pytest.raises(UsageError) as refused:
            read_done(before + line + ending, "out.jsonl")
        assert refused.value.message == f"out.jsonl line {number} is not a line of answers as fork writes them"


def test_half_a_line_with_more_behind_it_is_refused() -> None:
    for n in (1, 10, len(ONE) - 2):
        with pytest.raises(UsageError, match="out line 2 is not"):
            read_done(ONE + ONE[:n] + b"\n" + ONE, "out")


# ---------------------------------------------------------------- branches that are kept


@pytest.mark.parametrize("what", ["raw", "chat", pytest.param("document", marks=pytest.mark.slow)])
def test_a_kept_branch_is_the_session_that_load_would_have_saved(driver: Driver, tmp_path: Path, what: str) -> None:
    path, kept = begin(driver, tmp_path / "a.bin", what), tmp_path / "kept"
    kept.mkdir()
    parent = read_session(path).record
    forked = driver.fork(path, PROMPTS[2], sampling=RANDOM, save_as=into(kept))
    for result in forked.results:
        alone = tmp_path / f"alone-{result.branch.id}.bin"
        driver.load(path, result.branch.prompt.text, sampling=RANDOM, save=alone)
        assert result.saved == kept / f"{result.branch.id}.bin"
        one, other = read_session(result.saved).record, read_session(alone).record
        assert (one.tokens, one.chat, one.text, one.sampling) == (other.tokens, other.chat, other.text, other.sampling)
        assert (one.identity, one.kind, one.settings) == (other.identity, other.kind, other.settings)
        assert (one.lineage.parent_id, one.lineage.parent_position) == (
            parent.lineage.session_id,
            other.lineage.parent_position,
        )
        assert (one.lineage.n_saves, one.lineage.tags) == (1, other.lineage.tags)
        assert verify_session(result.saved).is_sound
        if what == "raw":
            goes_on = [driver.load(place, " On.", sampling=RANDOM).text for place in (result.saved, alone)]
            assert goes_on[0] == goes_on[1]
            continue
        with driver.resume(result.saved) as here, driver.resume(alone) as there:
            assert (here.opened.evaluated, here.messages) == (0, there.messages)
            assert here.send("On.", Heard().reporter).text == there.send("On.", Heard().reporter).text
            ids, logits = state_of(here)
            assert ids == state_of(there)[0]
            if driver.memory.swa is None:
                assert logits == state_of(there)[1]


def test_a_kept_branch_shares_its_parents_sections_and_can_be_forked_again(dense: Driver, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    dense.save(path, LONG * 6, raw=True)
    parent = read_session(path)
    forked = dense.fork(path, "So?", sampling=GREEDY, save_as=into(tmp_path))
    child = read_session(tmp_path / "0.bin")
    n = len(parent.sections)
    assert [s.digest for s in child.sections[:n]] == [s.digest for s in parent.sections]
    again = dense.fork(tmp_path / "0.bin", "So?", sampling=GREEDY, save_as=lambda _: SaveTarget(
        path=tmp_path / "grandchild.bin", name="grandchild"))  # fmt: skip
    lineage = read_session(tmp_path / "grandchild.bin").record.lineage
    assert (lineage.parent_id, lineage.name) == (child.record.lineage.session_id, "grandchild")
    assert lineage.parent_position == len(child.record.tokens)
    assert again[0].reused == len(child.record.tokens) - 1
    assert forked.summary.reused == len(parent.record.tokens) - 1


def test_a_kept_branch_of_a_place_inside_has_that_place_as_its_parents(driver: Driver, tmp_path: Path) -> None:
    path = begin(driver, tmp_path / "a.bin", "raw")
    driver.fork(path, " So?", at="37", sampling=GREEDY, save_as=into(tmp_path))
    record = read_session(tmp_path / "0.bin").record
    assert record.tokens[:37] == read_session(path).record.tokens[:37]
    assert record.lineage.parent_position == 37
    assert verify_session(tmp_path / "0.bin").is_sound
    answer = driver.load(tmp_path / "0.bin", " On.", sampling=GREEDY, save=tmp_path / "1.bin")
    check_is_what_a_cold_start_says(driver, read_session(tmp_path / "1.bin").record.tokens, answer.generated)


def test_branches_kept_while_others_are_under_way_are_whole(dense: Driver, chat: Path, tmp_path: Path) -> None:
    prompts = of_lengths(5, 9, 2, 14, 30, 3, 3, 8)
    forked = dense.fork(chat, *prompts, sampling=GREEDY, n_parallel=4, save_as=into(tmp_path))
    ids = {read_session(tmp_path / f"{number}.bin").record.lineage.session_id for number in range(8)}
    assert len(ids) == 8
    for result in forked.results:
        record = read_session(tmp_path / f"{result.branch.id}.bin").record
        assert record.chat.messages[-1].content == result.text
        assert (record.chat.messages[-1].finish, record.sampling.max_tokens) == ("length", result.generated)
        with dense.resume(tmp_path / f"{result.branch.id}.bin", save=tmp_path / "x.bin", overwrite=True) as again:
            assert again.opened.evaluated == 0
            answer = again.send("On.", Heard().reporter)
            check_is_what_a_cold_start_says(dense, state_of(again)[0], answer.generated)


def test_a_kept_branch_cut_by_time_can_be_gone_on_with(dense: Driver, chat: Path, tmp_path: Path) -> None:
    prompts = [Prompt(id="none", text="So?", timeout_s=0.0), Prompt(id="some", text="So?", timeout_s=0.05)]
    endless = SamplingOptions(temperature=0.0, max_tokens=4000)
    forked = dense.fork(chat, *prompts, sampling=endless, save_as=into(tmp_path))
    assert [result.finish_reason for result in forked.results] == ["timeout", "timeout"]
    for result in forked.results:
        if result.saved is None:  # nothing was read of it
            assert result.generated == 0
            continue
        with dense.resume(result.saved, sampling=GREEDY) as again:
            assert again.send("On.", Heard().reporter).generated == 12


def test_a_target_that_is_there_is_refused_before_anything_is_run(dense: Driver, raw: Path, tmp_path: Path) -> None:
    shutil.copy(raw, tmp_path / "1.bin")
    before = sha(tmp_path / "1.bin")
    told: list[object] = []
    with pytest.raises(ExistsError) as refused:
        dense.fork(
            raw, *PROMPTS, save_as=into(tmp_path), on_result=told.append, model=dense.request(tmp_path / "no.gguf")
        )
    assert (told, refused.value.exit_status) == ([], 11)
    assert sha(tmp_path / "1.bin") == before
    assert not (tmp_path / "0.bin").exists()
    forked = dense.fork(raw, *PROMPTS, save_as=into(tmp_path), overwrite=True, sampling=GREEDY)
    assert [result.saved for result in forked.results] == [tmp_path / f"{number}.bin" for number in range(3)]
    assert read_session(tmp_path / "1.bin").record.text.endswith(PROMPTS[1] + forked[1].text)


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_session_is_never_overwritten(dense: Driver, raw: Path, tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "0.bin").write_bytes(b"precious")
    told: list[object] = []
    with pytest.raises(ExistsError):
        dense.fork(raw, "So?", save_as=into(tmp_path), overwrite=overwrite, on_result=told.append)
    assert (told, (tmp_path / "0.bin").read_bytes()) == ([], b"precious")


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_branches_are_not_kept_in_one_file(dense: Driver, raw: Path, tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    places = {0: tmp_path / "same.bin", 1: tmp_path / "link" / "same.bin"}
    told: list[object] = []
    with pytest.raises(UsageError) as refused:
        dense.fork(
            raw,
            "So?",
            "And?",
            save_as=lambda branch: SaveTarget(path=places[branch.index], name=None),
            overwrite=overwrite,
            on_result=told.append,
        )
    assert "which is id 0" in refused.value.message
    assert (told, sorted(path.name for path in tmp_path.glob("*.bin"))) == ([], ["raw.bin"])


@pytest.mark.parametrize("how", ["path", "link", "hard link"])
def test_the_session_itself_is_never_a_target(dense: Driver, raw: Path, tmp_path: Path, how: str) -> None:
    target = {"path": raw, "link": tmp_path / "link.bin", "hard link": tmp_path / "hard.bin"}[how]
    if how == "link":
        target.symlink_to(raw)
    elif how == "hard link":
        os.link(raw, target)
    before = sha(raw)
    with pytest.raises(LlamakvError) as refused:
        dense.fork(raw, "So?", save_as=lambda _: SaveTarget(path=target, name=None), overwrite=how != "hard link")
    assert isinstance(refused.value, UsageError if how != "hard link" else ExistsError)
    assert sha(raw) == before


def test_a_target_in_no_folder_is_refused_before_anything_is_run(dense: Driver, raw: Path, tmp_path: Path) -> None:
    told: list[object] = []
    with pytest.raises((WriteError, NotFoundError)):
        dense.fork(raw, "So?", save_as=into(tmp_path / "nowhere"), on_result=told.append)
    assert told == []


def test_a_branch_that_cannot_be_kept_is_an_error_with_its_answer(dense: Driver, raw: Path, tmp_path: Path) -> None:
    """The file appears while the batch runs: it stays, and the other branches are kept."""

    def appear(result: object) -> None:
        (tmp_path / "1.bin").write_bytes(b"precious")

    forked = dense.fork(raw, *PROMPTS, sampling=GREEDY, save_as=into(tmp_path), on_result=appear)
    assert [type(result.error) for result in forked.results] == [type(None), ExistsError, type(None)]
    assert forked[1].text == dense.load(raw, PROMPTS[1], sampling=GREEDY).text
    assert (forked[1].saved, (tmp_path / "1.bin").read_bytes()) == (None, b"precious")
    assert (forked.summary.n_answers, forked.summary.n_errors) == (2, 1)
    assert verify_session(tmp_path / "2.bin").is_sound


@pytest.mark.parametrize("what", ["saved again", "spoilt", *(pytest.param(what, marks=pytest.mark.slow) for what in (
    "replaced", "removed"))])  # fmt: skip
def test_what_becomes_of_the_session_meanwhile_does_not_reach_kept_branches(
    dense: Driver, chat: Path, tmp_path: Path, what: str
) -> None:
    expected = dense.fork(chat, *PROMPTS, sampling=GREEDY, save_as=into(tmp_path)).texts
    tokens = [read_session(tmp_path / f"{number}.bin").record.tokens for number in range(3)]
    n_told = 0

    def change(result: object) -> None:
        nonlocal n_told
        n_told += 1
        if n_told > 1:
            return
        if what == "saved again":
            with dense.resume(chat) as other:
                other.undo(Heard().reporter)
                other.send("Something else altogether.", Heard().reporter)
        elif what == "replaced":
            chat.unlink()
            begin(dense, chat, "document")
        elif what == "removed":
            chat.unlink()
        else:
            chat.write_bytes(b"\0" * 4096)

    forked = dense.fork(chat, *PROMPTS, sampling=GREEDY, save_as=into(tmp_path), overwrite=True, on_result=change)
    assert forked.texts == expected
    for number in range(3):
        assert verify_session(tmp_path / f"{number}.bin").is_sound
        assert read_session(tmp_path / f"{number}.bin").record.tokens == tokens[number]
        with dense.resume(tmp_path / f"{number}.bin") as again:
            answer = again.send("On.", Heard().reporter)
            check_is_what_a_cold_start_says(dense, state_of(again)[0], answer.generated)


def test_branches_that_are_done_are_not_kept_again(dense: Driver, raw: Path, tmp_path: Path) -> None:
    first = dense.fork(raw, *PROMPTS, sampling=GREEDY, save_as=into(tmp_path), until=lambda results: len(results) == 1)
    before = sha(tmp_path / "0.bin")
    second = dense.fork(raw, *PROMPTS, sampling=GREEDY, save_as=into(tmp_path), done=keys(first))
    assert (second.ids, sha(tmp_path / "0.bin")) == ([1, 2], before)
    assert sorted(path.name for path in tmp_path.glob("[0-9]*.bin")) == ["0.bin", "1.bin", "2.bin"]


# ---------------------------------------------------------------- the session's file


def facts(folder: Path) -> list[tuple[object, ...]]:
    """All there is in a folder: names, content, times and modes."""
    return [
        (path.name, sha(path), path.stat().st_mtime_ns, path.stat().st_mode, path.stat().st_ino)
        for path in sorted(folder.iterdir())
    ]


@pytest.mark.parametrize("how", ["plain", "at", "recompute", "kept"])
@pytest.mark.parametrize("name", ["M", "MH"])
def test_a_session_that_may_not_be_written_is_forked_and_stays_as_it_is(
    models, tmp_path: Path, name: str, how: str
) -> None:
    """B67; for root, to whom no mode matters, nothing in the folder changes either."""
    driver, folder = Driver(models(name), tmp_path), tmp_path / "read-only"
    folder.mkdir()
    path = begin(driver, folder / "a.bin", "chat")
    path.chmod(0o444)
    folder.chmod(0o555)
    try:
        before = (facts(folder), folder.stat().st_mtime_ns)
        more = {
            "plain": {},
            "at": {"at": "turn1"},
            "recompute": {"options": ResumeOptions(recompute=True)},
            "kept": {"save_as": into(tmp_path)},
        }[how]
        forked = driver.fork(path, *PROMPTS, sampling=GREEDY, n_parallel=3, **more)
        assert forked.summary.n_answers == 3
        assert (facts(folder), folder.stat().st_mtime_ns) == before
    finally:
        folder.chmod(0o755)


def test_read_again_the_prefix_counts_as_evaluated_and_the_answers_are_the_same(driver: Driver, tmp_path: Path) -> None:
    path, heard = begin(driver, tmp_path / "a.bin", "chat"), Heard()
    n_cells = len(read_session(path).record.tokens) - 1
    again = ResumeOptions(recompute=True)
    forked = driver.fork(path, PROMPTS[1], sampling=GREEDY, options=again, heard=heard, save_as=into(tmp_path))
    assert (forked.summary.reused, forked.summary.evaluated) == (0, n_cells)
    assert any(f"reading {n_cells:,} tokens again: asked for with --recompute" in notice for notice in heard.notices)
    for result in forked.results:
        alone = driver.load(path, result.branch.prompt.text, sampling=GREEDY, options=again)
        assert (result.text, result.reused) == (alone.text, n_cells)
        with driver.resume(tmp_path / f"{result.branch.id}.bin") as kept:
            assert kept.opened.evaluated == 0
            answer = kept.send("On.", Heard().reporter)
            check_is_what_a_cold_start_says(driver, state_of(kept)[0], answer.generated)


def test_read_again_under_other_settings_branches_are_kept_with_those(dense: Driver, raw: Path, tmp_path: Path) -> None:
    other = MemoryOptions(type_k="q8_0", type_v="q8_0")
    with pytest.raises(MismatchError, match="--type-k f16, q8_0"):
        dense.fork(raw, "So?", memory=other)
    again = ResumeOptions(recompute=True)
    dense.fork(raw, "So?", memory=other, options=again, sampling=GREEDY, save_as=into(tmp_path))
    assert read_session(tmp_path / "0.bin").record.settings.type_k == "q8_0"
    assert read_session(raw).record.settings.type_k == "f16"
    answer = dense.load(tmp_path / "0.bin", " On.", sampling=GREEDY)
    assert answer.reused == len(read_session(tmp_path / "0.bin").record.tokens) - 1


def test_another_model_is_refused(models, dense: Driver, raw: Path) -> None:
    with pytest.raises(MismatchError) as refused:
        dense.fork(raw, "So?", model=dense.request(models("M2")))
    assert refused.value.exit_status == 14


def test_a_session_too_large_for_the_context_is_refused(dense: Driver, raw: Path) -> None:
    with pytest.raises(NoRoomError) as refused:
        dense.fork(raw, "So?", model=dense.request(n_ctx=64))
    assert refused.value.exit_status == 15


def test_what_is_damaged_is_refused_and_read_again_if_asked(dense: Driver, raw: Path) -> None:
    expected = dense.fork(raw, *PROMPTS, sampling=GREEDY).texts
    section = read_session(raw).sections[0]
    data = bytearray(raw.read_bytes())
    data[section.offset + section.n_stored // 2] ^= 1
    raw.write_bytes(data)
    with pytest.raises(StoreError) as refused:
        dense.fork(raw, "So?")
    assert refused.value.exit_status == 13
    assert dense.fork(raw, *PROMPTS, sampling=GREEDY, options=ResumeOptions(recompute=True)).texts == expected


def test_a_kept_branch_that_was_gone_on_with_is_not_replaced(dense: Driver, chat: Path, tmp_path: Path) -> None:
    more = {"save_as": into(tmp_path), "sampling": GREEDY}
    kept = dense.fork(chat, "What?", **more).results[0].saved
    assert kept is not None
    assert dense.fork(chat, "What?", **more).results[0].error is None  # as it was kept, it may be made again
    with dense.resume(kept) as live:
        live.send("And more.", Heard().reporter)
    before = kept.read_bytes()
    with pytest.raises(ExistsError):
        dense.fork(chat, "What?", **more)
    assert kept.read_bytes() == before


@pytest.mark.parametrize("word", ["user", "assistant", "  two words"])
def test_a_message_is_found_though_the_template_has_its_words(dense: Driver, tmp_path: Path, word: str) -> None:
    path = tmp_path / "words.bin"
    with dense.chat(save=path) as live:
        live.send(word, Heard().reporter)
        message = live.messages[0]
    found = {}
    for at in range(message.p0 + 1, message.p1):
        (tmp_path / f"at{at}").mkdir()
        try:
            result = dense.fork(path, "Next?", at=str(at), sampling=GREEDY, save_as=into(tmp_path / f"at{at}"))
        except UsageError:
            continue
        saved = result.results[0].saved
        assert saved is not None
        record = read_session(saved).record
        assert record.chat is not None
        found[at] = record.chat.messages[0].content
        text = text_of(dense, record.tokens)
        assert text.startswith(f"<|im_start|>user\n{found[at]}\n\nNext?<|im_end|>")
    assert all(word.startswith(content) and len(content) < len(word) for content in found.values())
    assert found


def test_undoing_the_answer_to_a_document_takes_the_document_too(driver: Driver, tmp_path: Path) -> None:
    path, answered = begin(driver, tmp_path / "doc.bin", "document"), tmp_path / "answered.bin"
    driver.load(path, None, save=answered, sampling=GREEDY)
    document = read_session(answered).record.chat.messages[-2]
    assert (document.role, document.p0) == ("user", read_session(path).record.chat.messages[-1].p0)
    with driver.resume(answered) as live, driver.chat() as cold:
        live.undo(Heard().reporter)
        live.send("Hello.", Heard().reporter)
        if any(message.role == "system" for message in live.messages):
            cold.set_system(live.messages[0].content, Heard().reporter)
        cold.send("Hello.", Heard().reporter)
        assert list(live._model.sequence.tokens[:20]) == list(cold._model.sequence.tokens[:20])
