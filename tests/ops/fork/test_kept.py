"""Branches that are kept as sessions, and the file they come from, which is only read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

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
from llamakv.ops.fork import SaveTarget
from llamakv.ops.prompts import Prompt
from llamakv.ops.requests import MemoryOptions, SamplingOptions
from llamakv.store.session_file import read_session, verify_session
from tests.ops.driver import GREEDY, RANDOM, Driver, Heard, ResumeOptions, sha, state_of
from tests.ops.fork.forks import (
    LONG,
    PROMPTS,
    begin,
    check_is_what_a_cold_start_says,
    into,
    keys,
    of_lengths,
    text_of,
)

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
