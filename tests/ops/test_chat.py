"""Turns: templates, going back, interruptions and failures that leave a conversation as it was."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.errors import (
    AbortedError,
    DamagedError,
    ExistsError,
    LlamakvError,
    MismatchError,
    NoRoomError,
    NotASessionError,
    NotFoundError,
    UsageError,
)
from llamakv.ops.requests import SamplingOptions
from llamakv.records import MemoryKind
from llamakv.store.session_file import read_session
from tests.ops.driver import GREEDY, RANDOM, Driver, Heard, sha, state_of

KINDS = ["M", "MS", "MR", "MH", *(pytest.param(name, marks=pytest.mark.slow) for name in ("MH2", "ML"))]
LONG = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture(params=KINDS)
def driver(request: pytest.FixtureRequest, models, tmp_path: Path) -> Driver:
    return Driver(models(request.param), tmp_path)


@pytest.fixture
def dense(models, tmp_path: Path) -> Driver:
    return Driver(models("M"), tmp_path)


def say(conversation, *texts: str):
    return [conversation.send(text, Heard().reporter) for text in texts]


# ---------------------------------------------------------------- history and templates


def test_history_comes_back_whole(dense: Driver, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with dense.chat(save=path, system="Be kind.") as live:
        say(live, "One.", "Two.")
        messages = live.messages
    with dense.resume(path) as again:
        assert again.messages == messages
    assert [(m.role, m.content) for m in messages][:2] == [("system", "Be kind."), ("user", "One.")]
    ends = [m.p1 for m in messages]
    assert [m.p0 for m in messages] == [0, *ends[:-1]]


def test_tokens_once_read_are_never_made_again(dense: Driver, tmp_path: Path) -> None:
    with dense.chat(sampling=SamplingOptions(temperature=1.5, max_tokens=80, seed=3)) as live:
        say(live, "Hello.")
        model, sequence = live._model.model, live._model.sequence
        before = list(sequence.tokens)
        text = b"".join(model.token_bytes(t, special=True) for t in before).decode()
        assert model.tokenize(text, add_special=False, parse_special=True) != before  # not the canonical ones
        answer = say(live, "More.")[0]
        assert list(sequence.tokens)[: len(before)] == before
        assert answer.reused == len(before) - 1


def test_a_start_token_stands_at_the_start_and_nowhere_else(models, tmp_path: Path) -> None:
    for name, n_expected in (("bos_template", 1), ("M", 0)):
        driver, path = Driver(models(name), tmp_path), tmp_path / f"{name}.bin"
        with driver.chat(save=path) as live:
            say(live, "One.")
        for _ in range(3):
            with driver.resume(path) as again:
                say(again, "Another.")
        tokens = read_session(path).record.tokens
        assert [i for i, token in enumerate(tokens) if token == 1] == list(range(n_expected))


def test_a_template_that_wants_roles_to_alternate_and_trims_is_followed(models, tmp_path: Path) -> None:
    driver, path = Driver(models("strict_template"), tmp_path), tmp_path / "a.bin"
    driver.save(path, LONG, system="From the text.")
    with driver.resume(path) as again:
        n = len(state_of_tokens(again))
        answers = say(again, "Who?", "Where?", "  Spaces around?  ")
        assert answers[0].reused == n - 1
        assert all(answer.evaluated < 60 for answer in answers)


def state_of_tokens(conversation) -> list[int]:
    return list(conversation._model.sequence.tokens)


def test_a_template_that_drops_thinking_reads_that_reply_again_and_says_so(models, tmp_path: Path) -> None:
    driver, path = Driver(models("think_template"), tmp_path), tmp_path / "a.bin"
    grammar = 'root ::= "<think>abc</think>yes"'
    options = SamplingOptions(temperature=0, max_tokens=40, grammar=grammar, seed=1)
    heard, heard_again = Heard(), Heard()
    with driver.chat(save=path, sampling=options) as live:
        say(live, "One.")
        assert live.messages[-1].content == "<think>abc</think>yes"
        p0 = live.messages[-1].p0
        with driver.resume(path, save=tmp_path / "b.bin") as again:
            answer = live.send("Two.", heard.reporter)
            same = again.send("Two.", heard_again.reporter)
            assert state_of(again) == state_of(live)
    assert heard.notices == heard_again.notices
    assert "tokens are read again" in heard.notices[0]
    assert answer.reused == same.reused == p0 - 1
    text = b"".join(
        live_bytes for live_bytes in (_piece(driver, token) for token in read_session(path).record.tokens)
    ).decode()
    assert text.count("<think>") == 1


def _piece(driver: Driver, token: int, cache={}) -> bytes:  # noqa: B006
    model = cache.get(driver.model) or cache.setdefault(driver.model, driver.chat()._model.model)
    return model.token_bytes(token, special=True)


def test_a_model_without_a_template_cannot_chat_but_continues_text(models, tmp_path: Path) -> None:
    driver, path = Driver(models("no_template"), tmp_path), tmp_path / "a.bin"
    for attempt in (lambda: driver.chat(), lambda: driver.save(path, "text")):
        with pytest.raises(UsageError) as refused:
            attempt()
        assert "no chat template" in refused.value.message
        assert "--raw" in (refused.value.hint or "")
    driver.save(path, "Once upon a time", raw=True)
    assert driver.load(path).generated == 12
    with pytest.raises(UsageError, match="raw text"):
        driver.resume(path)


def test_a_new_system_prompt_is_read_before_all_that_was_said_and_kept(driver: Driver, tmp_path: Path) -> None:
    path, heard = tmp_path / "a.bin", Heard()
    with driver.chat(system="Old.", save=path) as live:
        say(live, "One.", "Two.")
        contents = [m.content for m in live.messages][1:]
        live.set_system("New.", heard.reporter)
        assert heard.notices[-1].startswith("there is a new system prompt: ")
        assert [m.content for m in live.messages] == ["New.", *contents]
        assert [m.p0 for m in live.messages] == [0, *[m.p1 for m in live.messages[:-1]]]
        head = live._model.model.tokenize("<|im_start|>system\nNew.", add_special=True, parse_special=True)
        assert state_of_tokens(live)[: len(head)] == head
        answer = live.send("Three.", heard.reporter)
        assert answer.evaluated < 40
        expected = state_of(live)[0], live.messages
        live.set_system("New.", heard.reporter)  # nothing new: nothing is read
        assert (state_of_tokens(live), live.messages) == expected
    with driver.resume(path) as again:
        assert (state_of_tokens(again), again.messages) == expected
        again.set_system("", Heard().reporter)
        assert again.messages[0].role == "user"
    with driver.resume(path, heard, system="Third.") as again:
        assert again.messages[0].content == "Third."
        say(again, "Four.")
    assert read_session(path).record.chat.messages[0].content == "Third."


def test_a_new_system_prompt_that_is_stopped_or_does_not_fit_changes_nothing(dense: Driver, tmp_path: Path) -> None:
    with dense.chat(system="Old.", model=dense.request(n_ctx=1024)) as live:
        say(live, LONG, "Two.")
        before = state_of_tokens(live), live.messages
        with pytest.raises(AbortedError):
            live.set_system(LONG, Heard(abort_at=256).reporter)
        assert (state_of_tokens(live), live.messages) == before
        with pytest.raises(NoRoomError):
            live.set_system(LONG * 6, Heard().reporter)
        assert (state_of_tokens(live), live.messages) == before


def test_a_system_prompt_set_before_anything_was_said_is_read_with_the_first_message(dense: Driver) -> None:
    with dense.chat() as live, dense.chat(system="Be kind.") as cold:
        live.set_system("Be kind.", Heard().reporter)
        assert [m.content for m in live.messages] == ["Be kind."]
        say(live, "Hello.")
        say(cold, "Hello.")
        assert state_of(live) == state_of(cold)


# ---------------------------------------------------------------- going back


def test_undo_takes_the_last_exchange_back(driver: Driver, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with driver.chat(save=path) as live:
        say(live, "One.", LONG)
        expected = state_of(live)[0], live.messages
        say(live, "Three.")
        size = path.stat().st_size
        assert live.undo(Heard().reporter) == 2
        assert (state_of(live)[0], live.messages) == expected
        info = read_session(path)
        assert len(info.record.tokens) == len(expected[0])
        assert info.n_live_bytes <= size
        after = say(live, "Four.")[0]
        kept = state_of(live)
    with driver.chat() as cold:
        say(cold, "One.", LONG)
        assert say(cold, "Four.")[0].text == after.text
        assert state_of(cold) == kept
    with driver.resume(path) as again:
        assert state_of_tokens(again) == kept[0]


def test_undo_after_a_resume_goes_back_to_the_stored_turn_exactly(driver: Driver, tmp_path: Path) -> None:
    path, heard = tmp_path / "a.bin", Heard()
    with driver.chat(save=path) as live:
        say(live, LONG, "Two.", "Three.")
    with driver.resume(path) as again:
        assert again.undo(heard.reporter) == 2
        assert heard.notices == []  # nothing had to be read again
        say(again, "Other.")
        ids = state_of(again)
    with driver.chat() as cold:
        say(cold, LONG, "Two.", "Other.")
        assert state_of(cold) == ids
    with driver.resume(path) as once_more:
        say(once_more, "And?")


def test_undo_deep_into_the_past_is_exact_or_says_what_it_read(driver: Driver, tmp_path: Path) -> None:
    path, heard = tmp_path / "a.bin", Heard()
    with driver.chat(save=path) as live:
        say(live, LONG, *(f"Number {i}." for i in range(6)))
    with driver.resume(path) as again:
        for _ in range(6):
            again.undo(heard.reporter)
        say(again, "Other.")
        ids, _ = state_of(again)
        recurrent = again.model_info.kind in (MemoryKind.RECURRENT, MemoryKind.HYBRID)
    assert bool(heard.notices) == recurrent
    assert all("read again" in notice for notice in heard.notices)
    with driver.chat() as cold:
        say(cold, LONG, "Other.")
        assert state_of(cold)[0] == ids


def test_undo_of_everything_leaves_an_empty_conversation(driver: Driver, tmp_path: Path) -> None:
    with driver.chat() as live:
        say(live, "One.")
        live.undo(Heard().reporter)
        assert live.messages == ()
        with pytest.raises(UsageError, match="nothing to take back"):
            live.undo(Heard().reporter)
        say(live, LONG)
        with driver.chat() as cold:
            say(cold, LONG)
            assert state_of(cold) == state_of(live)


def test_retry_is_another_reply_to_the_same_words(driver: Driver, tmp_path: Path) -> None:
    path, heard = tmp_path / "a.bin", Heard()
    with driver.chat(save=path, sampling=RANDOM) as live:
        first = say(live, LONG)[0]
        second = live.retry(heard.reporter)
        assert second.text != first.text
        assert second.seed == first.seed + 1
        assert [m.content for m in live.messages][1:] == [second.text]
        expected = state_of(live)
    with driver.chat(sampling=SamplingOptions(temperature=0.8, repeat_penalty=1.2, max_tokens=12, seed=8)) as cold:
        say(cold, LONG)
        assert state_of(cold)[0] == expected[0]
    with driver.resume(path) as again:
        assert state_of_tokens(again) == expected[0]


# ---------------------------------------------------------------- interruptions and failures


def test_a_stopped_reply_is_kept_and_the_next_turn_goes_on(driver: Driver, tmp_path: Path) -> None:
    path, calls = tmp_path / "a.bin", itertools.count()
    heard = Heard()
    with driver.chat(save=path) as live:
        reporter = heard.reporter
        stopping = type(reporter)(text=reporter.text, should_abort=lambda: len(heard.texts) >= 5 and next(calls) >= 0)
        answer = live.send("Hello.", stopping)
        assert (answer.finish_reason, answer.generated) == ("interrupted", 5)
        assert live.messages[-1].finish == "interrupted"
        assert len(state_of_tokens(live)) == live._model.sequence.n_cells + 1
        expected = say(live, "Go on.")[0]
        kept = state_of(live)
    with driver.resume(path) as again:
        assert state_of_tokens(again) == kept[0]
        assert again.messages[1].content == answer.text
    assert expected.generated == 12


def test_a_message_stopped_while_it_is_read_was_never_said(driver: Driver, tmp_path: Path) -> None:
    with driver.chat() as live, driver.chat() as cold:
        for conversation in (live, cold):
            say(conversation, "Hello.")
        before = state_of_tokens(live), live.messages
        with pytest.raises(AbortedError):
            live.send(LONG * 3, Heard(abort_at=256).reporter)
        assert (state_of_tokens(live), live.messages) == before
        say(live, "Go on.")
        say(cold, "Go on.")
        assert state_of(live) == state_of(cold)


def test_a_turn_that_fails_in_the_reply_was_never_said(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    with driver.chat() as live, driver.chat() as cold:
        for conversation in (live, cold):
            say(conversation, "Hello.")
        before, messages = state_of_tokens(live), live.messages
        original = LlamaRun.add_token

        calls = itertools.count()

        def fail(self, *details):
            if next(calls) % 4 == 3:
                raise NoRoomError("out of memory")
            return original(self, *details)

        for attempt in (lambda: live.send("Again, please.", Heard().reporter), lambda: live.retry(Heard().reporter)):
            with monkeypatch.context() as patched:
                patched.setattr(LlamaRun, "add_token", fail)
                with pytest.raises(NoRoomError):
                    attempt()
            assert (state_of_tokens(live), live.messages) == (before, messages)
        say(live, "Go on.")
        say(cold, "Go on.")
        assert state_of(live)[0] == state_of(cold)[0]


def test_undoing_all_that_was_saved_says_what_the_file_holds(dense: Driver, tmp_path: Path) -> None:
    path, heard = tmp_path / "a.bin", Heard()
    with dense.chat(save=path) as live:
        say(live, "Hello.")
        before = sha(path)
        live.undo(heard.reporter)
        assert str(path) in heard.notices[-1]
        assert sha(path) == before
        say(live, "Other.")
    assert read_session(path).record.chat.messages[0].content == "Other."


def test_undo_down_to_the_system_prompt_keeps_it(driver: Driver, tmp_path: Path) -> None:
    path, heard = tmp_path / "a.bin", Heard()
    with driver.chat(save=path, system="Be kind.") as live:
        say(live, "Hello.")
        live.undo(heard.reporter)
        assert [m.role for m in live.messages] == ["system"]
    with driver.resume(path, heard) as again, driver.chat(system="Be kind.") as cold:
        say(again, "Other.")
        say(cold, "Other.")
        assert state_of_tokens(again) == state_of_tokens(cold)
        assert again.messages == cold.messages
    assert not any("differently" in notice for notice in heard.notices)


def test_a_message_that_does_not_fit_changes_nothing(dense: Driver, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    model = dense.request(n_ctx=512)
    with dense.chat(save=path, model=model) as live:
        say(live, "Hello.")
        before, file = state_of(live), sha(path)
        with pytest.raises(NoRoomError) as refused:
            live.send(LONG * 5, Heard().reporter)
        fields = refused.value.fields
        assert (fields["limit"], fields["used"]) == (512, len(before[0]) - 1)
        assert int(fields["needed"]) > 512
        assert state_of(live) == before
        assert sha(path) == file
        say(live, "Short.")


def test_a_reply_that_meets_the_limit_ends_there_and_is_kept(dense: Driver, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    sampling = SamplingOptions(temperature=0, max_tokens=-1, seed=0)
    with dense.chat(save=path, model=dense.request(n_ctx=512), sampling=sampling) as live:
        answer = say(live, LONG)[0]
        assert answer.finish_reason == "context"
        assert len(state_of_tokens(live)) == 512
    assert len(read_session(path).record.tokens) == 512


@pytest.mark.parametrize("what", ["missing", "empty", "text", "damaged", "other model", "folder"])
def test_a_load_that_fails_leaves_the_conversation_intact(driver: Driver, models, tmp_path: Path, what: str) -> None:
    bad = tmp_path / "bad.bin"
    other = Driver(models("M2"), tmp_path)
    if what == "empty":
        bad.write_bytes(b"")
    elif what == "text":
        bad.write_text("hello " * 100)
    elif what == "folder":
        bad.mkdir()
    elif what == "other model":
        with other.chat(save=bad) as foreign:
            say(foreign, "Hi.")
    elif what == "damaged":
        with driver.chat(save=bad) as foreign:
            say(foreign, LONG)
        section = read_session(bad).sections[-1]
        data = bytearray(bad.read_bytes())
        data[section.offset + section.n_stored // 2] ^= 255
        bad.write_bytes(data)
    expected: type[LlamakvError] = {
        "missing": NotFoundError,
        "damaged": DamagedError,
        "other model": MismatchError,
    }.get(what, NotASessionError)
    with driver.chat() as live, driver.chat() as cold:
        for conversation in (live, cold):
            say(conversation, "One.", "Two.")
        with pytest.raises(expected):
            live.load(bad, Heard().reporter)
        say(live, "Three.")
        say(cold, "Three.")
        assert state_of(live) == state_of(cold)


def test_load_goes_over_to_another_session(driver: Driver, tmp_path: Path) -> None:
    one, two = tmp_path / "one.bin", tmp_path / "two.bin"
    with driver.chat(save=one) as live:
        say(live, LONG)
    with driver.chat(save=two) as live:
        say(live, "Other.")
        live.load(one, Heard().reporter)
        assert live.path == one
        say(live, "Go on.")
        expected = state_of(live)
    with driver.chat() as cold:
        say(cold, LONG, "Go on.")
        assert state_of(cold) == expected
    assert len(read_session(two).record.chat.messages) == 2
    assert len(read_session(one).record.chat.messages) == 4


def test_a_branch_leaves_its_parent_alone(driver: Driver, tmp_path: Path) -> None:
    one, two = tmp_path / "one.bin", tmp_path / "two.bin"
    with driver.chat(save=one) as live:
        say(live, "Hello.")
        n = len(state_of_tokens(live))
    before = sha(one)
    with driver.resume(one, save=two) as branch:
        say(branch, "Elsewhere.")
    assert sha(one) == before
    parent, child = read_session(one).record.lineage, read_session(two).record.lineage
    assert (child.parent_id, child.parent_position) == (parent.session_id, n)
    with pytest.raises(ExistsError):
        driver.chat(save=two)
    with driver.chat(save=two, overwrite=True) as fresh:
        say(fresh, "Again.")
    assert read_session(two).record.lineage.parent_id is None


def test_seeds_decide_the_words(dense: Driver) -> None:
    def reply(seed: int) -> str:
        options = SamplingOptions(temperature=1.0, max_tokens=12, seed=seed)
        with dense.chat(sampling=options) as live:
            return say(live, "Hello.")[0].text

    assert reply(1) == reply(1)
    assert len({reply(seed) for seed in (1, 2, -1, -1)}) == 4


def test_stop_strings_end_a_reply_and_stay_out_of_its_text(dense: Driver, tmp_path: Path) -> None:
    with dense.chat(sampling=GREEDY) as live:
        whole = say(live, "Hello.")[0].text
    stop = whole[5:8]
    heard = Heard()
    with dense.chat(sampling=SamplingOptions(temperature=0, max_tokens=12, seed=0, stop=(stop,))) as live:
        answer = live.send("Hello.", heard.reporter)
        assert answer.text == "".join(heard.texts) == whole[: whole.index(stop)]
        assert answer.finish_reason == "stop"
        say(live, "Go on.")


@pytest.mark.parametrize("text", ["", "   ", "\n\n"])
def test_an_empty_message_is_refused(dense: Driver, text: str) -> None:
    with dense.chat() as live, pytest.raises(UsageError, match="empty"):
        live.send(text, Heard().reporter)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (SamplingOptions(grammar="root ::= ("), "grammar"),
        (SamplingOptions(logit_bias=((10**6, 1.0),)), "1000000"),
        (SamplingOptions(temperature=float("nan")), "temperature"),
        (SamplingOptions(seed=2**32), str(2**32)),
    ],
)
def test_sampling_that_cannot_work_is_refused_at_once(dense: Driver, tmp_path: Path, options, named: str) -> None:
    path = tmp_path / "a.bin"
    dense.save(path, "Once upon a time", raw=True)
    before = sha(path)
    for attempt in (
        lambda: dense.chat(sampling=options),
        lambda: dense.load(path, "x", sampling=options, save=path),
        lambda: dense.save(tmp_path / "b.bin", "text", sampling=options),
    ):
        with pytest.raises(UsageError, match=named):
            attempt()
    assert sha(path) == before
    assert not (tmp_path / "b.bin").exists()
