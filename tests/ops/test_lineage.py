"""Tags, notes and pins, also while a chat goes on; and when things were said."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llamakv.errors import ConflictError, NotFoundError, UsageError
from llamakv.ops import keeping, lineage
from llamakv.ops.lineage import INCOMPLETE, change_tags, set_note, set_pinned
from llamakv.records import Lineage, MemoryKind, Message, SessionRecord
from llamakv.store.session_file import (
    change_lineage,
    compact_session,
    extend_session,
    read_session,
    truncate_sections,
    verify_session,
)
from llamakv.store.store_folder import make_store
from tests.ops.driver import GREEDY, Driver, Heard, sha
from tests.ops.talks import in_words, talk
from tests.store import samples


@pytest.fixture(params=["file", "store"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A session in a file of its own, and one in a store."""
    return talk(tmp_path / "a.bin", "Hi.", "Hello.", in_store=request.param == "store").path


# ---------------------------------------------------------------- what can be said


def test_tags_are_sorted_and_unique_and_nothing_else_changes(path: Path) -> None:
    before = read_session(path).record
    change_tags(path, add=["b", "a", "b"])
    record = change_tags(path, add=["a", "Ä:1"]).record
    assert record.lineage.tags == ("a", "b", "Ä:1")
    assert replace(record, lineage=before.lineage) == before
    assert change_tags(path, remove=["b"]).record.lineage.tags == ("a", "Ä:1")
    assert verify_session(path).is_sound


def test_a_tag_that_is_not_there_is_not_removed_and_nothing_changes(path: Path) -> None:
    change_tags(path, add=["a"])
    before = sha(path)
    with pytest.raises(NotFoundError, match=r"has no tag 'b', 'c'"):
        change_tags(path, remove=["c", "a", "b"])
    assert sha(path) == before


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        ("", "it is empty"),
        ("a b", "it has white space"),
        ("a\u00a0b", "it has white space"),
        ("a\tb", "it has white space"),
        ("a,b", "it has a comma"),
        ("a\x1b", "it has control characters"),
        ("a\udc80", "it has control characters"),
        ("a" * 65, "it is longer than 64 characters"),
    ],
)
def test_an_impossible_tag_is_refused(path: Path, tag: str, reason: str) -> None:
    before = sha(path)
    with pytest.raises(UsageError) as refused:
        change_tags(path, add=["fine", tag])
    assert refused.value.message.endswith(reason)
    assert refused.value.message.isprintable()
    assert sha(path) == before


def test_64_characters_are_a_tag(path: Path) -> None:
    assert change_tags(path, add=["é" * 64]).record.lineage.tags == ("é" * 64,)


def test_a_note_is_written_and_removed(path: Path) -> None:
    assert set_note(path, "  the one\nwith the train \n").record.lineage.note == "the one\nwith the train"
    assert set_note(path, "").record.lineage.note == ""


def test_the_notes_of_the_program_are_its_own(path: Path) -> None:
    with pytest.raises(UsageError):
        set_note(path, f" {INCOMPLETE} not true")
    change_lineage(path, lambda old: replace(old, note=f"{INCOMPLETE} 5 of 9 tokens"))
    assert set_note(path, "mine").record.lineage.note == f"{INCOMPLETE} 5 of 9 tokens\nmine"
    assert set_note(path, "other").record.lineage.note == f"{INCOMPLETE} 5 of 9 tokens\nother"
    assert set_note(path, "").record.lineage.note == f"{INCOMPLETE} 5 of 9 tokens"


def test_pinning_twice_writes_once(path: Path) -> None:
    assert set_pinned(path, True).record.lineage.pinned
    before = sha(path)
    assert set_pinned(path, True).record.lineage.pinned
    assert sha(path) == before
    assert not set_pinned(path, False).record.lineage.pinned


def test_a_save_in_the_same_moment_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def losing(n_times: int) -> Callable[..., object]:
        left = [n_times]

        def change(*arguments: object) -> object:
            left[0] -= 1
            if left[0] >= 0:
                raise ConflictError("saved by somebody else")
            return change_lineage(*arguments)  # type: ignore[arg-type]

        return change

    monkeypatch.setattr(lineage, "change_lineage", losing(2))
    assert set_pinned(path, True).record.lineage.pinned
    monkeypatch.setattr(lineage, "change_lineage", losing(3))
    with pytest.raises(ConflictError) as refused:
        set_pinned(path, False)
    assert refused.value.hint == "the same command again"


# ---------------------------------------------------------------- while a chat goes on


@pytest.fixture
def driver(models, tmp_path: Path) -> Driver:
    return Driver(models("ME"), tmp_path)


@pytest.fixture(params=["file", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "sessions"
    folder.mkdir()
    if request.param == "store":
        make_store(folder)
    return folder / "chat.bin"


def label(path: Path) -> Lineage:
    def change(old: Lineage) -> Lineage:
        return replace(old, note="mine", tags=("a", "b"), pinned=True, ttl_s=60.0)

    return change_lineage(path, change).record.lineage


def test_what_is_said_of_a_session_meanwhile_stays_and_the_chat_saves_on(driver: Driver, place: Path) -> None:
    heard = Heard()
    with driver.chat(save=place, name="chat") as live:
        live.send("Hello.", heard.reporter)
        said = label(place)
        live.send("And?", heard.reporter)
        set_note(place, "another")
        live.send("More.", heard.reporter)
        messages, tokens = live.messages, tuple(live._model.sequence.tokens)
    record = read_session(place).record
    assert heard.notices == []
    assert [other.name for other in place.parent.glob("*.bin")] == ["chat.bin"]
    assert in_words(record.lineage) == in_words(replace(said, note="another"))
    assert (record.lineage.session_id, record.lineage.n_saves) == (said.session_id, 3)
    assert (record.chat.messages, record.tokens) == (messages, tokens)
    assert verify_session(place).is_sound


def test_a_session_that_was_only_rewritten_meanwhile_is_saved_on(driver: Driver, place: Path) -> None:
    """A compacted file, and one that was taken apart into a store, hold the same session elsewhere."""
    heard = Heard()
    with driver.chat(save=place) as live:
        live.send("Hello.", heard.reporter)
        set_pinned(place, True)
        compact_session(place)
        make_store(place.parent)
        set_pinned(place, False)
        live.send("And?", heard.reporter)
    assert (heard.notices, read_session(place).record.lineage.n_saves) == ([], 2)
    assert verify_session(place).is_sound


def test_a_session_that_was_saved_meanwhile_is_left_alone(driver: Driver, place: Path) -> None:
    heard = Heard()
    with driver.chat(save=place) as live:
        live.send("Hello.", heard.reporter)
        with driver.resume(place) as other:
            other.send("I was quicker.", Heard().reporter)
        label(place)
        theirs = read_session(place).record
        live.send("And?", heard.reporter)
    assert read_session(place).record == theirs
    assert any("saved to" in notice and "chat-2.bin" in notice for notice in heard.notices)
    assert read_session(place.with_name("chat-2.bin")).record.chat.messages[-2].content == "And?"


def test_fewer_sections_are_another_session(path: Path) -> None:
    base = read_session(path)
    shorter = replace(base.record, tokens=base.record.tokens[:150])
    extend_session(base, shorter, keep=truncate_sections(base.sections, 149), new=())
    assert lineage.relabelled(base) is None
    now = read_session(path)
    extend_session(now, base.record, keep=now.sections, new=(), is_partial=True)
    assert lineage.relabelled(base) is None


def test_only_one_more_try_is_made(driver: Driver, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def conflict(*_arguments: object, **_options: object) -> None:
        calls.append(1)
        raise ConflictError("again")

    heard = Heard()
    with driver.chat(save=place) as live:
        live.send("Hello.", heard.reporter)
        monkeypatch.setattr(keeping, "extend_session", conflict)
        live.send("And?", heard.reporter)
    assert len(calls) == 2
    assert any("chat-2.bin" in notice for notice in heard.notices)


def test_a_note_survives_reading_on(driver: Driver, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    driver.save(path, "A report.", sampling=GREEDY)
    set_note(path, "mine")
    driver.save(path, "A report. It has grown.", sampling=GREEDY)
    assert read_session(path).record.lineage.note == "mine"


def test_a_note_survives_that_a_text_was_not_read_to_its_end(driver: Driver, tmp_path: Path) -> None:
    path, text = tmp_path / "a.bin", "A very long report. " * 200
    assert not driver.save(path, text, Heard(abort_at=200), sampling=GREEDY).complete
    mark = read_session(path).record.lineage.note
    assert set_note(path, "mine").record.lineage.note == f"{mark}\nmine"
    heard = Heard()
    assert driver.save(path, text, heard, sampling=GREEDY).complete
    assert read_session(path).record.lineage.note == "mine"
    assert any(notice.endswith("again, reads the rest") for notice in heard.notices)
    assert not any("mine" in notice for notice in heard.notices)


# ---------------------------------------------------------------- when it was said


def times_of(record: SessionRecord) -> list[float]:
    assert record.chat is not None
    return [message.time_s for message in record.chat.messages]


def test_messages_know_when_they_were_said_and_keep_it(driver: Driver, tmp_path: Path) -> None:
    path, began_s = tmp_path / "a.bin", time.time()
    with driver.chat(save=path, system="Be brief.") as live:
        live.send("Hello.", Heard().reporter)
    first = times_of(read_session(path).record)
    assert len(first) == 3
    assert began_s <= min(first) <= max(first) <= time.time()
    assert first == sorted(first)
    with driver.resume(path) as live:
        live.send("And?", Heard().reporter)
        live.set_system("Be long.", Heard().reporter)
        live.undo(Heard().reporter)
        live.send("Or?", Heard().reporter)
    then = times_of(read_session(path).record)
    assert then[1:3] == first[1:]
    assert first[0] < then[0] < then[3] < then[4]  # the new system prompt was read before the question


def test_messages_whose_time_was_not_recorded_do_not_get_one_later(driver: Driver, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with driver.chat(save=path) as live:
        live.send("Hello.", Heard().reporter)
    base = read_session(path)
    old = tuple(replace(message, time_s=None) for message in base.record.chat.messages)
    record = replace(base.record, chat=replace(base.record.chat, messages=old))
    extend_session(base, record, keep=base.sections, new=())
    with driver.resume(path) as live:
        live.send("And?", Heard().reporter)
        live.set_system("Be brief.", Heard().reporter)
    times = times_of(read_session(path).record)
    assert times[1:3] == [None, None]
    assert None not in (times[0], *times[3:])


def test_a_text_that_grew_keeps_the_time_of_its_system_prompt(driver: Driver, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    driver.save(path, "A report.", system="Be brief.")
    first = times_of(read_session(path).record)
    before = sha(path)
    driver.save(path, "A report.", system="Be brief.")
    assert sha(path) == before
    driver.save(path, "A report. It has grown.", system="Be brief.")
    then = times_of(read_session(path).record)
    assert (then[0], then[1] > first[1]) == (first[0], True)


def test_branches_know_when_they_were_answered(driver: Driver, tmp_path: Path) -> None:
    from llamakv.ops.fork import SaveTarget

    path = tmp_path / "a.bin"
    with driver.chat(save=path) as live:
        live.send("Hello.", Heard().reporter)
    began_s = time.time()
    driver.fork(path, "So?", save_as=lambda branch: SaveTarget(path=tmp_path / "b.bin", name=None))
    times = times_of(read_session(tmp_path / "b.bin").record)
    assert times[:2] == times_of(read_session(path).record)
    assert began_s <= times[2] <= times[3] <= time.time()


def test_messages_are_equal_whenever_they_were_said() -> None:
    one = Message(role="user", content="Hi.", p0=0, p1=3, time_s=1.0)
    assert one == replace(one, time_s=2.0)
    assert one != replace(one, p1=4)


def test_times_are_stored_exactly(tmp_path: Path) -> None:
    record = talk(tmp_path / "a.bin", "Hi.", "Hello.", kind=MemoryKind.HYBRID).record
    assert times_of(read_session(tmp_path / "a.bin").record) == times_of(record) != [None, None]
    assert times_of(samples.make_record(5)) == [None, None]
