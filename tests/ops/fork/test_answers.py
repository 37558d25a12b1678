"""Each branch says what ``load`` says by itself, on every memory kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamakv.errors import (
    NoRoomError,
    UsageError,
)
from llamakv.ops.prompts import Prompt
from llamakv.ops.requests import MemoryOptions, SamplingOptions
from llamakv.store.session_file import read_session
from tests.models.vocabulary import N_TOKENS
from tests.ops.driver import GREEDY, RANDOM, Driver, Heard, state_of
from tests.ops.fork.forks import (
    KINDS,
    PROMPTS,
    TOGETHER,
    begin,
    check_is_what_a_cold_start_says,
    check_says_what_load_says,
    into,
    text_of,
)

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
        assert heard.notices == [f"{kind} memory is not decoded together: one branch at a time"]


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
    for timeout_s in (0.3, 3.0, 30.0):  # a busy machine may not come to the first token
        forked = dense.fork(raw, never, Prompt(id="slow", text="So?", timeout_s=timeout_s), sampling=endless)
        assert (forked[0].finish_reason, forked[0].generated, forked[0].text) == ("timeout", 0, "")
        if forked[1].generated:
            break
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


def test_a_stored_window_only_session_is_said_to_be_that(models, tmp_path: Path) -> None:
    driver, heard = Driver(models("MS"), tmp_path, memory=MemoryOptions(swa="window")), Heard()
    path = begin(driver, tmp_path / "raw.bin", "raw")
    assert driver.fork(path, "One?", "Two?", heard=heard, sampling=GREEDY).summary.decoded_together is False
    assert "window-only memory is not decoded together: one branch at a time" in heard.notices
