"""What is counted, and what happens when something fails in the middle (known-faults A, D and E)."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp import LlamaModel, native
from llamakv.engine.llamacpp.context import NativeContext
from llamakv.errors import LlamakvError, MismatchError, NoRoomError, UsageError
from llamakv.ops import opening
from llamakv.ops.requests import ResumeOptions
from llamakv.records import SectionKind
from llamakv.store.session_file import SessionReader, create_session, read_session
from tests.faults.test_program import names_used
from tests.ops.driver import RANDOM, Driver, Heard, state_of

LONG = "The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture
def decoded(monkeypatch):
    counts = []
    real = NativeContext.decode

    def decode(self, rows, **more):
        counts.append(sum(len(part.tokens) for part in rows))
        return real(self, rows, **more)

    monkeypatch.setattr(NativeContext, "decode", decode)
    return counts


@pytest.mark.parametrize("name", ["M", "MS", "MR", "MH", "MH2"])
def test_a_text_that_has_grown_counts_what_was_really_evaluated(models, tmp_path, name, decoded):
    # B01, B02
    driver, path, heard = Driver(models(name), tmp_path), tmp_path / "a.bin", Heard()
    driver.save(path, LONG + "and the qui")  # another last token once the word is whole
    decoded.clear()
    grown = driver.save(path, LONG + "and the quick.", heard)
    assert grown.evaluated == sum(decoded)


@pytest.mark.parametrize("name", ["M", "MS", "MR", "MH", "MH2"])
def test_a_retry_counts_what_was_really_evaluated(models, tmp_path, name, decoded):
    # B02, B58
    driver, heard = Driver(models(name), tmp_path), Heard()
    with driver.chat(sampling=RANDOM) as live:
        live.send(LONG, Heard().reporter)
        decoded.clear()
        answer = live.retry(heard.reporter)
    assert answer.evaluated == sum(decoded) - (answer.generated - 1)


@pytest.mark.parametrize("name", ["M", "MR"])
def test_an_answer_after_a_recompute_reuses_nothing(models, tmp_path, name, decoded):
    driver, path = Driver(models(name), tmp_path), tmp_path / "a.bin"
    driver.save(path, LONG)
    decoded.clear()
    answer = driver.load(path, "Q", options=ResumeOptions(recompute=True))
    assert answer.evaluated == sum(decoded) - (answer.generated - 1)
    assert answer.reused == 0


def other_build(path: Path, old: Path, **changes) -> None:
    info = read_session(path)
    with SessionReader(path) as reader:
        record = replace(info.record, **changes)
        create_session(old, record, list(reader.read(info.sections)))


def test_load_in_a_chat_does_not_take_the_state_of_another_build(models, tmp_path):
    # B22
    driver, path, old = Driver(models("M"), tmp_path), tmp_path / "a.bin", tmp_path / "old.bin"
    with driver.chat(save=path) as live:
        live.send(LONG, Heard().reporter)
    other_build(path, old, versions=replace(read_session(path).record.versions, commit="0000000"))
    with driver.chat() as live:
        live.send("Here.", Heard().reporter)
        with pytest.raises(MismatchError):
            live.load(old, Heard().reporter)
        assert [m.content for m in live.messages if m.role == "user"] == ["Here."]


def test_load_in_a_chat_of_an_unreadable_template_changes_nothing(models, tmp_path):
    # B32, B34
    driver, path, old = Driver(models("M"), tmp_path), tmp_path / "a.bin", tmp_path / "old.bin"
    with driver.chat(save=path) as live:
        live.send(LONG, Heard().reporter)
    chat = read_session(path).record.chat
    other_build(path, old, chat=replace(chat, template="{% for"))
    with driver.chat(save=tmp_path / "live.bin") as live, driver.chat() as cold:
        for c in (live, cold):
            c.send("Here.", Heard().reporter)
        with pytest.raises(UsageError):
            live.load(old, Heard().reporter)
        for c in (live, cold):
            c.send("There.", Heard().reporter)
        assert state_of(live) == state_of(cold)
        assert live.path == tmp_path / "live.bin"


def test_a_branch_knows_how_much_it_shares_with_its_parent(models, tmp_path):
    driver, path, branch = Driver(models("M"), tmp_path), tmp_path / "a.bin", tmp_path / "b.bin"
    with driver.chat(save=path, sampling=RANDOM) as live:
        live.send("One.", Heard().reporter)
        live.send("Two.", Heard().reporter)
    with driver.resume(path, save=branch) as again:
        again.retry(Heard().reporter)
    one, two = read_session(path).record, read_session(branch).record
    same = next(i for i, (a, b) in enumerate(zip(one.tokens, two.tokens, strict=False)) if a != b)
    assert two.lineage.parent_position == same


def test_a_restore_without_room_changes_nothing(models):
    with LlamaModel(models("M")) as model:
        sequence = model.open_sequence(MemoryRequest(), n_ctx_min=10, n_ctx_max=512, n_threads=1)
        sequence.extend(list(range(300, 400)))
        with pytest.raises(NoRoomError):
            sequence.restore(list(range(600)), [])
        assert (len(sequence.tokens), sequence.n_cells) == (100, 99)


def test_a_session_whose_file_was_removed_is_saved_again(models, tmp_path):
    driver, path = Driver(models("M"), tmp_path), tmp_path / "a.bin"
    with driver.chat(save=path) as live:
        live.send("One.", Heard().reporter)
        path.unlink()
        live.send("Two.", Heard().reporter)
    assert len(read_session(path).record.chat.messages) == 4


@pytest.mark.parametrize("what", ["removed", "damaged", "replaced"])
@pytest.mark.parametrize("name", ["MR", "MH"])
def test_taking_back_needs_no_file(models, tmp_path: Path, name: str, what: str) -> None:
    # B58
    driver, path, other = Driver(models(name), tmp_path), tmp_path / "a.bin", tmp_path / "other.bin"
    with driver.chat(save=path) as live, driver.chat(save=other) as second:
        for conversation, text in ((live, "One."), (live, "Two."), (second, "Other."), (second, "Words.")):
            conversation.send(text, Heard().reporter)
        expected = live.messages[:2]
        info = read_session(path)
        if what == "removed":
            path.unlink()
        elif what == "replaced":
            assert read_session(other).generation == info.generation
            shutil.copy(other, path)
        else:
            tail = next(section for section in info.sections if section.kind is SectionKind.TAIL)
            data = bytearray(path.read_bytes())
            data[tail.offset + tail.n_stored // 2] ^= 1
            path.write_bytes(data)
        assert live.undo(Heard().reporter) == 2
        assert live.messages == expected
        saved = live.path
    assert read_session(saved).record.chat.messages == expected
    assert saved == (path.with_name("a-2.bin") if what == "replaced" else path)


def test_a_new_system_prompt_is_not_lost_by_leaving(models, tmp_path):
    driver, path = Driver(models("M"), tmp_path), tmp_path / "a.bin"
    with driver.chat(save=path, system="Old.") as live:
        live.send("One.", Heard().reporter)
        live.set_system("New.", Heard().reporter)
        live.save(None, Heard().reporter)
        shown = [m.content for m in live.messages]
    with driver.resume(path) as again:
        assert [m.content for m in again.messages] == shown


def test_the_same_system_prompt_keeps_its_place(models, tmp_path):
    driver, path = Driver(models("M"), tmp_path), tmp_path / "a.bin"
    with driver.chat(save=path, system="Be brief.") as live:
        live.send("One.", Heard().reporter)
        place = live.messages[0]
    with driver.resume(path, system="Be brief.") as again:
        again.send("Two.", Heard().reporter)
        assert again.messages[0] == place


@pytest.mark.parametrize("name", ["MR", "MH", "MH2"])
def test_stopping_the_reading_after_a_resume_reads_nothing_again(models, tmp_path, name, decoded):
    driver, path = Driver(models(name), tmp_path), tmp_path / "a.bin"
    with driver.chat(save=path) as live:
        live.send(LONG, Heard().reporter)
    with driver.resume(path) as again:
        decoded.clear()
        with pytest.raises(LlamakvError):
            again.send(LONG * 3, Heard(abort_at=256).reporter)
        assert sum(decoded) < 256 * 2 + 10


def test_a_retry_that_fails_keeps_its_seed(models, tmp_path, monkeypatch):
    driver = Driver(models("M"), tmp_path)
    with driver.chat(sampling=RANDOM) as live:
        live.send("One.", Heard().reporter)
        before = live.sampling, live.messages

        def fail(*_: object, **__: object) -> None:
            raise NoRoomError("no")

        monkeypatch.setattr("llamakv.ops.conversation.write_reply", fail)
        with pytest.raises(NoRoomError):
            live.retry(Heard().reporter)
        assert (live.sampling, live.messages) == before


def test_all_that_is_taken_from_the_binding_is_looked_for_first() -> None:
    # B31; takes the place of test_the_installed_binding_has_all_that_is_used
    assert names_used() == set(native.NEEDED)


def test_a_session_that_another_model_took_over_while_it_was_opened_is_refused(
    models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # B19: --recompute keeps the session's id and changes its model
    driver, other, path = Driver(models("M"), tmp_path), Driver(models("M2"), tmp_path), tmp_path / "a.bin"
    with driver.chat(save=path) as live:
        live.send("One.", Heard().reporter)
    real = opening.find_model

    def meanwhile(*given: object) -> object:
        monkeypatch.setattr(opening, "find_model", real)
        with other.resume(path, options=ResumeOptions(recompute=True)) as taken:
            taken.send("Two.", Heard().reporter)
        return real(*given)

    monkeypatch.setattr(opening, "find_model", meanwhile)
    with pytest.raises(MismatchError, match="while it was opened"):
        driver.resume(path)
