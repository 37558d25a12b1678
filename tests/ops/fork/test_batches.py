"""Order, interruption, and going on with what an earlier output holds."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from llamakv.engine.llamacpp.scheduler import LlamaScheduler
from llamakv.errors import (
    LlamakvError,
    MismatchError,
    UsageError,
)
from llamakv.ops.fork import Done, read_done
from llamakv.ops.prompts import Prompt
from llamakv.ops.requests import MemoryOptions, SamplingOptions
from tests.ops.driver import GREEDY, RANDOM, Driver, Heard, ResumeOptions, sha
from tests.ops.fork.forks import (
    KINDS,
    LONG,
    PROMPTS,
    begin,
    keys,
    of_lengths,
)

# ---------------------------------------------------------------- in and out of order


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


def test_what_is_finished_is_told_whatever_goes_wrong_after_it(
    dense: Driver, chat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, told = LlamaScheduler.step, []

    def step(self: LlamaScheduler, *arguments) -> list:
        over = real(self, *arguments)
        if self.counts.n_active == 1 and not over:
            raise MismatchError("something is wrong")
        return over

    monkeypatch.setattr(LlamaScheduler, "step", step)
    prompts = of_lengths(40, 2, 3)  # the first one holds the others up
    with pytest.raises(MismatchError):
        dense.fork(
            chat, *prompts, sampling=GREEDY, n_parallel=3, on_result=lambda result: told.append(result.branch.id)
        )
    assert told == [1, 2]
