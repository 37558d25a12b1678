"""Saved and resumed through files: the same words as the run that never stopped, on every memory kind."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
from pathlib import Path

import pytest

from llamakv.engine.llamacpp import LlamaModel
from llamakv.errors import (
    DamagedError,
    ExistsError,
    InterruptedByUser,
    MismatchError,
    NoRoomError,
    NotFoundError,
    UsageError,
)
from llamakv.ops import opening, save
from llamakv.ops.chat import open_chat
from llamakv.ops.requests import ChatRequest, MemoryOptions, ModelRequest, SamplingOptions, SaveRequest
from llamakv.records import SectionKind
from llamakv.store import locks
from llamakv.store.session_file import SessionReader, create_session, read_session
from tests.engine.scheduler.conftest import unguarded  # noqa: F401 a fixture
from tests.engine.scheduler.test_adopt import with_gap
from tests.ops.driver import GREEDY, RANDOM, Driver, Heard, ResumeOptions, sha, state_of

KINDS = ["M", "MS", "MR", "MH", *(pytest.param(name, marks=pytest.mark.slow) for name in ("MH2", "ML"))]
LONG = "The quick brown fox jumps over the lazy dog. " * 12
TURNS = ["Hello there.", LONG, "One more?", "And a last one, please: " + "x y z " * 40]


@pytest.fixture(params=KINDS)
def driver(request: pytest.FixtureRequest, models, tmp_path: Path) -> Driver:
    return Driver(models(request.param), tmp_path)


@pytest.fixture
def dense(models, tmp_path: Path) -> Driver:
    return Driver(models("M"), tmp_path)


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "sampled"])
def test_one_process_per_turn_says_what_one_process_says(driver: Driver, tmp_path: Path, sampling) -> None:
    path, n_tokens = tmp_path / "turns.bin", 0
    with driver.chat(sampling=sampling, system="Be brief.") as live:
        for number, text in enumerate(TURNS):
            expected = live.send(text, Heard().reporter)
            opening = {"save": path, "sampling": sampling, "system": "Be brief."}
            with driver.chat(**opening) if number == 0 else driver.resume(path) as again:
                if number:
                    assert (again.opened.reused, again.opened.evaluated) == (n_tokens - 1, 0)
                answer = again.send(text, Heard().reporter)
                assert state_of(again) == state_of(live)
                assert again.messages == live.messages
                n_tokens = len(state_of(again)[0])
            assert (answer.text, answer.reused, answer.evaluated) == (
                expected.text,
                expected.reused,
                expected.evaluated,
            )
    assert read_session(path).record.lineage.n_saves == len(TURNS)


@pytest.mark.parametrize(
    "memory",
    [
        MemoryOptions(flash_attn="off"),
        MemoryOptions(type_k="q8_0", type_v="q8_0"),
        MemoryOptions(type_k="q4_0", type_v="q4_0"),
        MemoryOptions(swa="window"),
    ],
    ids=["no-flash-attention", "q8_0", "q4_0", "window-only"],
)
def test_stored_memory_settings_are_applied_and_resume_is_exact(models, tmp_path: Path, memory) -> None:
    for name in ("M", "MS", "MH"):
        driver = Driver(models(name), tmp_path / name, memory=memory)
        path = tmp_path / f"{name}.bin"
        with driver.chat(save=path) as live:
            live.send(TURNS[1], Heard().reporter)
            with driver.resume(path) as again:
                assert again._model.model.settings == live._model.model.settings
                live.send(TURNS[2], Heard().reporter)
                again.send(TURNS[2], Heard().reporter)
                ids, logits = state_of(again)
                assert ids == state_of(live)[0]
                if memory.swa != "window":  # the same words, not always the same bits: design, engine-facts a2
                    assert logits == state_of(live)[1]


def test_resuming_with_nothing_new_evaluates_nothing_but_the_pending_token(driver: Driver, tmp_path: Path) -> None:
    path = tmp_path / "raw.bin"
    driver.save(path, LONG, raw=True)
    first = driver.load(path)
    assert first.evaluated == 1
    assert first.reused == len(read_session(path).record.tokens) - 1
    assert [driver.load(path).text for _ in range(4)] == [first.text] * 4


def test_raw_text_is_continued_as_if_it_had_been_read_at_once(driver: Driver, tmp_path: Path) -> None:
    path = tmp_path / "raw.bin"
    driver.save(path, LONG, raw=True)
    model = driver.chat()._model.model
    answer = driver.load(path, " And then?")
    record = read_session(path).record
    wanted = model.tokenize(LONG, add_special=True, parse_special=True)
    question = model.tokenize(" And then?", add_special=False, parse_special=True)
    assert list(record.tokens) == wanted
    assert answer.evaluated == len(question) + 1
    with driver.chat() as cold:
        sequence = cold._model.open_sequence()
        sequence.extend(wanted)
        sequence.extend(question)
        ids = list(sequence.generate(dataclasses.replace(record.sampling, temperature=0), n_max=12))
        assert answer.text == b"".join(model.token_bytes(token) for token in ids).decode("utf-8", "replace")


@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize("at", [120, 140, 160, 250])
def test_where_windows_were_lost_before_saving_tokens_are_read_again(models, tmp_path: Path, at: int) -> None:
    driver, path = Driver(models("MS"), tmp_path), tmp_path / "lost.bin"
    driver.save(tmp_path / "raw.bin", "Hello", raw=True)
    record = read_session(tmp_path / "raw.bin").record
    with LlamaModel(models("MS")) as model:
        _, text, sections = with_gap(model)
    create_session(path, dataclasses.replace(record, tokens=tuple(text)), sections)
    answer, whole = driver.load(path, at=str(at)), driver.load(path)
    is_there = at > 148 + 32
    assert (answer.reused, answer.evaluated) == ((at - 1, 1) if is_there else (0, at))
    assert (whole.reused, whole.evaluated) == (299, 1)
    assert answer.text == driver.load(path, at=str(at), options=ResumeOptions(recompute=True)).text


def test_a_document_and_its_questions_are_one_user_message(driver: Driver, tmp_path: Path) -> None:
    path = tmp_path / "document.bin"
    result = driver.save(path, LONG, system="Answer from the text.")
    before = sha(path)
    answers = [driver.load(path, question) for question in ("Who jumps?", "Over whom?", "Who jumps?")]
    assert answers[0].text == answers[2].text
    assert [answer.reused for answer in answers] == [result.saved.info.record.tokens.__len__() - 1] * 3
    assert sha(path) == before
    with driver.chat(system="Answer from the text.") as cold:
        cold.send(f"{LONG.rstrip()}\n\nWho jumps?", Heard().reporter)
        cold_ids, _ = state_of(cold)
    with driver.resume(path, save=tmp_path / "other.bin") as again:
        again.send("Who jumps?", Heard().reporter)
        ids, _ = state_of(again)
    assert ids == cold_ids
    assert sha(path) == before


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "document"])
def test_a_text_that_has_grown_is_read_on(driver: Driver, tmp_path: Path, raw: bool) -> None:
    path, whole = tmp_path / "a.bin", tmp_path / "whole.bin"
    text = LONG.rstrip() + "\n"
    for addition in ("And more.\n", "\nA paragraph.", " ", "\n\n", "x"):
        before = len(read_session(path).record.tokens) if path.exists() else 0
        result = driver.save(path, text, raw=raw)
        assert result.reused >= max(before - 4, 0)
        text += addition
    driver.save(path, text, raw=raw)
    driver.save(whole, text, raw=raw)
    assert read_session(path).record.tokens == read_session(whole).record.tokens
    with pytest.raises(ExistsError):
        driver.save(path, "Another text.", raw=raw)


def test_a_text_that_was_not_read_to_its_end_says_so_when_it_is_used(dense: Driver, tmp_path: Path) -> None:
    path, heard = tmp_path / "a.bin", Heard()
    dense.save(path, LONG * 8, Heard(abort_at=512))
    dense.load(path, "So?", heard)
    assert any(notice.startswith(f"{path} is incomplete: 513 of ") for notice in heard.notices)
    dense.save(path, LONG * 8)
    heard = Heard()
    dense.load(path, "So?", heard)
    assert not any("incomplete" in notice for notice in heard.notices)


# ---------------------------------------------------------------- what fits


def test_a_model_is_a_regular_file(dense: Driver, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for name, named in (("pipe.gguf", "not a regular file"), (".", "a directory")):
        with pytest.raises(UsageError, match=named):
            dense.chat(model=dense.request(tmp_path / name))
    with pytest.raises(NotFoundError):
        dense.chat(model=dense.request(tmp_path / "none.gguf"))


def test_a_context_beyond_what_the_model_was_trained_with_is_remarked_on(models, tmp_path: Path) -> None:
    driver, heard = Driver(models("short_ctx"), tmp_path), Heard()
    driver.chat(heard, model=driver.request(n_ctx=1024)).close()
    assert "trained with contexts of 256 tokens" in heard.notices[0]
    with pytest.raises(NoRoomError) as refused:
        driver.save(tmp_path / "a.bin", LONG * 3)
    assert "trained with contexts of 256 tokens" in (refused.value.hint or "")
    assert not (tmp_path / "a.bin").exists()


def test_a_renamed_model_resumes_and_a_twin_does_not(models, dense: Driver, tmp_path: Path) -> None:
    path, copy = tmp_path / "a.bin", tmp_path / "elsewhere" / "renamed.gguf"
    with dense.chat(save=path) as live:
        live.send("Hello", Heard().reporter)
    before = sha(path)
    copy.parent.mkdir()
    shutil.copy(dense.model, copy)
    with dense.resume(path, model=dense.request(copy)) as again:
        assert again.opened.evaluated == 0
    stat = copy.stat()
    content = models("M2").read_bytes()
    assert len(content) == stat.st_size
    with copy.open("r+b") as file:
        file.write(content)
    os.utime(copy, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(MismatchError) as refused:
        dense.resume(path, model=dense.request(copy))
    fields = refused.value.fields
    assert fields["expected"] != fields["actual"]
    assert str(fields["expected"])[:16] in refused.value.message
    assert str(fields["actual"])[:16] in refused.value.message
    assert refused.value.exit_status == 14
    assert sha(path) == before


def test_the_model_is_found_again_by_its_content(models, dense: Driver, tmp_path: Path) -> None:
    path, moved = tmp_path / "a.bin", tmp_path / "folder"
    model = tmp_path / "m.gguf"
    shutil.copy(dense.model, model)
    with dense.chat(save=path, model=dense.request(model)) as live:
        live.send("Hello", Heard().reporter)
    nothing = ModelRequest(cache_dir=tmp_path / "cache", n_threads=1)
    with dense.resume(path, model=nothing) as again:
        assert again.opened.evaluated == 0
    moved.mkdir()
    model.rename(moved / "other name.gguf")
    with pytest.raises(NotFoundError) as missing:
        dense.resume(path, model=nothing)
    assert missing.value.hint is not None
    with dense.resume(path, model=dataclasses.replace(nothing, folders=(moved,))) as again:
        assert again.opened.evaluated == 0
    (moved / "other name.gguf").unlink()
    demo = dataclasses.replace(nothing, default=models("M2"), demo=dense.model)
    with dense.resume(path, model=demo) as again:
        assert again.opened.evaluated == 0


def test_adapters_belong_to_the_session(models, dense: Driver, tmp_path: Path) -> None:
    one, other, path = models.lora(1), models.lora(2), tmp_path / "a.bin"
    with dense.chat(save=path, model=dense.request(adapters=((one, 1.0),))) as live:
        live.send(LONG, Heard().reporter)
        for adapters in ((), ((other, 1.0),), ((one, 0.5),), ((one, 1.0), (other, 1.0))):
            with pytest.raises(MismatchError, match="LoRA"):
                dense.resume(path, model=dense.request(adapters=adapters))
        copy = tmp_path / "copy.gguf"
        shutil.copy(one, copy)
        live.send("On.", Heard().reporter)
        with dense.resume(path, model=dense.request(adapters=((copy, 1.0),)), save=tmp_path / "b.bin") as again:
            assert again.opened.evaluated == 0
        with dense.resume(path) as again:  # the session's own adapter is found and applied
            live.send("More.", Heard().reporter)
            again.send("More.", Heard().reporter)
            assert state_of(again) == state_of(live)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (MemoryOptions(type_k="q8_0"), "--type-k f16, q8_0"),
        (MemoryOptions(type_v="f32"), "--type-v f16, f32"),
        (MemoryOptions(flash_attn="off"), "--flash-attn on, off"),
        (MemoryOptions(rope_freq_base=5000.0), "--rope-freq-base 0, 5000"),
    ],
)
def test_other_memory_settings_are_refused_or_read_again(dense: Driver, tmp_path: Path, options, named) -> None:
    path = tmp_path / "a.bin"
    with dense.chat(save=path) as live:
        live.send(LONG, Heard().reporter)
        n_tokens = len(state_of(live)[0])
    before = sha(path)
    with pytest.raises(MismatchError) as refused:
        dense.resume(path, memory=options)
    assert named in refused.value.message
    assert sha(path) == before
    heard = Heard()
    with dense.resume(path, heard, memory=options, options=ResumeOptions(recompute=True)) as again:
        assert (again.opened.reused, again.opened.evaluated) == (0, n_tokens - 1)
        assert any(f"{n_tokens - 1:,} tokens again" in notice for notice in heard.notices)
        again.send("Go on.", Heard().reporter)
        expected, _ = state_of(again)
    with dense.resume(path) as once_more:  # the new settings are the stored ones now
        assert once_more.opened.evaluated == 0
        assert list(once_more._model.sequence.tokens) == expected


def test_another_model_can_read_the_tokens_again_if_it_has_the_same_tokenizer(models, dense: Driver, tmp_path) -> None:
    path = tmp_path / "a.bin"
    dense.save(path, LONG, raw=True)
    before = sha(path)
    again = ResumeOptions(recompute=True)
    with pytest.raises(MismatchError, match="tokenizer"):
        dense.load(path, model=dense.request(models("bos_template")), options=again, save=path)
    assert sha(path) == before
    twin = Driver(models("M2"), tmp_path)
    twin.save(tmp_path / "cold.bin", LONG, raw=True)
    answer = twin.load(path, options=again, save=path)
    assert answer.text == twin.load(tmp_path / "cold.bin").text
    assert read_session(path).record.identity == read_session(tmp_path / "cold.bin").record.identity
    twin.load(path)


def test_a_model_file_that_changes_while_it_is_opened_is_refused(models, tmp_path: Path, monkeypatch) -> None:
    model = tmp_path / "m.gguf"
    shutil.copy(models("M"), model)
    driver, original = Driver(model, tmp_path), opening.LlamaModel

    def replace_and_load(path, **options):
        path.write_bytes(models("M2").read_bytes())
        return original(path, **options)

    monkeypatch.setattr(opening, "LlamaModel", replace_and_load)
    with pytest.raises(MismatchError, match="was changed while it was opened"):
        driver.chat(save=tmp_path / "a.bin")
    assert not (tmp_path / "a.bin").exists()


def test_a_context_too_small_for_the_session_is_refused(dense: Driver, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    dense.save(path, "word " * 900, raw=True)
    n = len(read_session(path).record.tokens)
    with pytest.raises(NoRoomError) as refused:
        dense.load(path, model=dense.request(n_ctx=512))
    assert (refused.value.fields["needed"], refused.value.fields["limit"]) == (n, 512)
    assert refused.value.exit_status == 15
    expected = dense.load(path)
    assert dense.load(path, model=dense.request(n_ctx=8192)).text == expected.text


def test_another_build_of_the_engine_reads_the_tokens_again(dense: Driver, tmp_path: Path) -> None:
    path, old = tmp_path / "a.bin", tmp_path / "old.bin"
    dense.save(path, LONG, raw=True)
    info = read_session(path)
    versions = dataclasses.replace(info.record.versions, commit="0000000", binding="0.3.1", backend="cuda")
    with SessionReader(path) as reader:
        record = dataclasses.replace(info.record, versions=versions)
        create_session(old, record, list(reader.read(info.sections)))
    expected = dense.load(path)
    heard = Heard()
    answer = dense.load(old, heard=heard)
    assert (answer.text, answer.reused) == (expected.text, 0)
    assert any("saved by llama.cpp commit 0000000" in notice for notice in heard.notices)
    trusted = dense.load(old, options=ResumeOptions(trust_state=True))
    assert (trusted.text, trusted.reused) == (expected.text, len(info.record.tokens) - 1)


def test_a_damaged_section_is_refused_and_can_be_read_again(driver: Driver, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    driver.save(path, LONG * 2, raw=True)
    expected = driver.load(path)
    info = read_session(path)
    data = bytearray(path.read_bytes())
    data[info.sections[0].offset + info.sections[0].n_stored // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError) as refused:
        driver.load(path)
    assert "--recompute" in (refused.value.hint or "")
    again = driver.load(path, options=ResumeOptions(recompute=True))
    assert (again.text, again.reused) == (expected.text, 0)


# ---------------------------------------------------------------- saving


def test_a_turn_appends_its_own_cells_and_an_index(dense: Driver, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    dense.save(path, LONG * 16)
    first = read_session(path)
    with dense.resume(path) as again:
        answer = again.send("A question of some length, to be answered.", Heard().reporter)
    after = read_session(path)
    n_new = sum(s.n_stored for s in after.sections if s.p0 >= first.sections[-1].p1)
    index = 4 * len(after.record.tokens) + 16 * 1024
    assert answer.saved is not None
    assert after.n_file_bytes - first.n_file_bytes <= 1.05 * n_new + index
    assert after.sections[: len(first.sections)] == first.sections


def test_saving_again_without_a_change_keeps_every_section(driver: Driver, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with driver.chat(save=path) as live:
        live.send(LONG, Heard().reporter)
        first = read_session(path)
        live.save(None, Heard().reporter)
        second = read_session(path)
    assert [s.digest for s in first.sections] == [s.digest for s in second.sections]
    assert dataclasses.replace(
        second.record, lineage=dataclasses.replace(second.record.lineage, n_saves=1, updated_s=0.0)
    ) == dataclasses.replace(first.record, lineage=dataclasses.replace(first.record.lineage, updated_s=0.0))


def test_recurrent_tails_are_kept_for_the_last_turns_only(models, tmp_path: Path) -> None:
    driver, path = Driver(models("MH"), tmp_path), tmp_path / "a.bin"
    with driver.chat(save=path) as live:
        for _ in range(5):
            live.send("Again.", Heard().reporter)
    kinds = [s.kind for s in read_session(path).sections]
    assert kinds.count(SectionKind.TAIL) == 3


def test_two_chats_that_save_the_same_session_both_keep_their_words(dense: Driver, tmp_path: Path) -> None:
    path, heard = tmp_path / "a.bin", Heard()
    with dense.chat(save=path) as live:
        live.send("Hello", Heard().reporter)
    with dense.resume(path) as one, dense.resume(path) as two:
        one.send("I am the first.", Heard().reporter)
        answer = two.send("I am the second.", heard.reporter)
        again = two.send("Still the second.", Heard().reporter)
    sibling = tmp_path / "a-2.bin"
    assert answer.saved.info.path == again.saved.info.path == sibling
    assert str(sibling) in heard.notices[-1]
    assert "first" in read_session(path).record.chat.messages[-2].content
    assert [m.content for m in read_session(sibling).record.chat.messages][2::2] == [
        "I am the second.",
        "Still the second.",
    ]
    assert read_session(sibling).record.lineage.parent_id == read_session(path).record.lineage.session_id


@pytest.mark.parametrize(
    "what", ["removed", "spoilt", "cut", pytest.param("locked", marks=pytest.mark.slow), "replaced by another"]
)
def test_a_turn_is_kept_whatever_became_of_the_file(
    dense: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path, heard = tmp_path / "a.bin", Heard()
    with dense.chat(save=path) as live:
        live.send("One.", Heard().reporter)
        if what == "removed":
            path.unlink()
        elif what == "spoilt":
            path.write_text("not a session " * 200)
        elif what == "cut":
            os.truncate(path, path.stat().st_size // 2)
        elif what == "replaced by another":
            path.unlink()
            dense.save(path, LONG, raw=True)
        monkeypatch.setattr(locks, "LOCK_WAIT_S", 0.1)
        with path.open("rb") if what == "locked" else contextlib.nullcontext() as held:
            if held is not None:
                fcntl.flock(held, fcntl.LOCK_EX)
            answer = live.send("Two.", heard.reporter)
        place = answer.saved.info.path
        assert place == (path if what == "removed" else tmp_path / "a-2.bin")
        said = "was moved or removed meanwhile" if what == "removed" else f"saved to {place} instead"
        assert said in heard.notices[-1]
        live.send("Three.", Heard().reporter)
    with dense.resume(place) as again:
        assert [m.content for m in again.messages][::2] == ["One.", "Two.", "Three."]
        assert list(again._model.sequence.tokens) == state_of_tokens(live)
    assert read_session(place).record.lineage.n_saves == 2


def state_of_tokens(conversation) -> list[int]:
    return list(conversation._model.sequence.tokens)


def test_a_name_as_long_as_can_be_still_has_room_beside_it(dense: Driver, tmp_path: Path) -> None:
    path = tmp_path / ("é" * 125 + ".bin")
    with dense.chat(save=path) as one:
        one.send("One.", Heard().reporter)
        with dense.resume(path) as two:
            two.send("Two.", Heard().reporter)
        answer = one.send("Three.", Heard().reporter)
    assert answer.saved.info.path.name == "é" * 124 + "-2.bin"


def test_of_two_saves_to_one_new_name_none_is_lost(dense: Driver, tmp_path: Path, monkeypatch) -> None:
    path, heard = tmp_path / "a.bin", Heard()
    original = save._read

    def read_slowly(*arguments):
        monkeypatch.setattr(save, "_read", original)
        dense.save(path, "Another text.", raw=True)
        return original(*arguments)

    monkeypatch.setattr(save, "_read", read_slowly)
    result = dense.save(path, LONG, heard, raw=True)
    assert result.saved.info.path == tmp_path / "a-2.bin"
    assert read_session(path).record.text == "Another text."
    assert read_session(tmp_path / "a-2.bin").record.text == LONG


def test_a_session_replaced_while_it_is_opened_is_refused(dense: Driver, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.bin"
    with dense.chat(save=path) as live:
        live.send("One.", Heard().reporter)
    original = opening.LlamaModel

    def replace_and_load(*arguments, **options):
        path.unlink(missing_ok=True)
        monkeypatch.setattr(opening, "LlamaModel", original)
        dense.save(path, LONG, raw=True)
        return original(*arguments, **options)

    monkeypatch.setattr(opening, "LlamaModel", replace_and_load)
    with pytest.raises(MismatchError, match="replaced by another session"):
        dense.resume(path)


def test_an_interrupted_save_keeps_what_was_read_and_goes_on_from_there(driver: Driver, tmp_path: Path) -> None:
    whole, path, text = tmp_path / "whole.bin", tmp_path / "a.bin", LONG * 8
    for raw in (True, False):
        for old in (whole, path):
            old.unlink(missing_ok=True)
        driver.save(whole, text, raw=raw)
        heard = Heard(abort_at=512)
        first = driver.save(path, text, heard, raw=raw)
        n_read = len(first.saved.info.record.tokens)
        assert not first.complete
        assert 1 < n_read < first.n_tokens_wanted
        second = driver.save(path, text, raw=raw)
        assert second.complete
        assert second.reused == n_read - 1
        assert second.evaluated == first.n_tokens_wanted - n_read
        assert read_session(path).record.tokens == read_session(whole).record.tokens
        prompt = None if raw else "So?"
        assert driver.load(path, prompt).text == driver.load(whole, prompt).text
        third = driver.save(path, text, raw=raw)
        assert (third.evaluated, third.complete) == (0, True)


TEXTS = {"raw": {"raw": True}, "document": {}, "system": {"system": LONG * 9}}
KILLED = [(name, text) for name in ("M", "MS", "MR", "MH", "MH2", "ML") for text in TEXTS]
FIRST = [("M", "document"), ("MS", "raw"), ("MR", "system"), ("MH", "document")]


@pytest.mark.parametrize(
    ("driver", "options"),
    [
        pytest.param(name, TEXTS[text], id=f"{name}-{text}", marks=() if (name, text) in FIRST else pytest.mark.slow)
        for name, text in KILLED
    ],
    indirect=["driver"],
)
def test_a_killed_save_goes_on_from_what_was_kept_on_the_way(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options
) -> None:
    whole, path, text = tmp_path / "whole.bin", tmp_path / "a.bin", "é " + LONG * 10
    driver.save(whole, text, **options)
    monkeypatch.setattr(save, "_KEEP_EVERY_S", 0.0)
    heard = Heard()

    class Killed(BaseException):
        pass

    def die() -> bool:
        if max((done for phase, done, _ in heard.phases if phase == "prefill"), default=0) > 1024:
            raise_later.append(1)
        return bool(raise_later)

    raise_later: list[int] = []
    request = SaveRequest(model=driver.request(), path=path, text=text, sampling=GREEDY, **options)
    original = save._as_read

    def killed(*arguments, complete):
        if raise_later:
            raise Killed
        return original(*arguments, complete=complete)

    monkeypatch.setattr(save, "_as_read", killed)
    with pytest.raises(Killed):
        save.save_prefix(request, dataclasses.replace(heard.reporter, should_abort=die))
    monkeypatch.setattr(save, "_as_read", original)
    kept = read_session(path).record
    assert len(kept.tokens) == 1025
    assert kept.lineage.note.startswith("incomplete: 1025 of ")
    other = {**options, "system": "Another one."} if "system" in options else options
    with pytest.raises(ExistsError):
        driver.save(path, "Something else. " * 300, **other)
    result = driver.save(path, text, **options)
    assert (result.complete, result.reused) == (True, 1024)
    record = read_session(path).record
    assert (record.tokens, record.chat, record.text, record.lineage.note) == (
        (expected := read_session(whole).record).tokens,
        expected.chat,
        expected.text,
        "",
    )
    prompt = None if options.get("raw") else "So?"
    assert driver.load(path, prompt).text == driver.load(whole, prompt).text


def test_reading_again_can_be_interrupted_and_changes_nothing(dense: Driver, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    dense.save(path, LONG * 8, raw=True)
    before = sha(path)
    with pytest.raises(InterruptedByUser):
        dense.load(path, heard=Heard(abort_at=256), options=ResumeOptions(recompute=True))
    assert sha(path) == before


def test_loading_the_model_can_be_interrupted(dense: Driver, tmp_path: Path) -> None:
    reporter = dataclasses.replace(Heard().reporter, should_abort=lambda: True)
    with pytest.raises(InterruptedByUser, match="while the model was loaded"):
        open_chat(ChatRequest(model=dense.request(), save=tmp_path / "a.bin"), reporter)


def test_sampling_is_stored_and_can_be_changed(dense: Driver, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    bias = ((400, float("-inf")), (401, 2.5))
    options = SamplingOptions(temperature=0.3, seed=5, max_tokens=4, logit_bias=bias, stop=("END",))
    with dense.chat(save=path, sampling=options, system="S.") as live:
        live.send("Hello", Heard().reporter)
    stored = read_session(path).record.sampling
    assert (stored.temperature, stored.seed, stored.logit_bias, stored.stop) == (0.3, 5, bias, ("END",))
    with dense.resume(path, sampling=SamplingOptions(seed=6)) as again:
        again.send("Hello", Heard().reporter)
    changed = read_session(path).record
    assert changed.sampling == dataclasses.replace(stored, seed=6)
    assert [m.role for m in changed.chat.messages] == ["system", "user", "assistant", "user", "assistant"]
