"""Sessions in other places: copies share what they can, exports are whole, imports leave nothing half done."""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llamakv.errors import (
    DamagedError,
    ExistsError,
    LlamakvError,
    NoRoomError,
    NotASessionError,
    NotFoundError,
    UsageError,
    WriteError,
)
from llamakv.ops.budget import Budget
from llamakv.ops.copying import (
    Within,
    copy_session,
    export_session,
    exported,
    import_bytes,
    import_session,
    move_session,
    possible_name,
)
from llamakv.ops.lineage import INCOMPLETE, change_tags, set_note, set_pinned
from llamakv.records import MemoryKind, SectionKind
from llamakv.store.session_file import (
    SessionInfo,
    SessionReader,
    change_lineage,
    create_session,
    extend_session,
    read_session,
    truncate_sections,
    verify_session,
)
from llamakv.store.store_folder import StoreBudget, make_store, write_budget
from tests.ops.driver import GREEDY, Driver, Heard, sha, state_of
from tests.ops.talks import N_EACH, talk
from tests.store import samples

KINDS = [MemoryKind.DENSE, MemoryKind.WINDOWED, MemoryKind.RECURRENT, MemoryKind.HYBRID]
WORDS = [f"{who} {number}." for number in range(1, 6) for who in ("Question", "Answer")]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    make_store(folder)
    return folder


def contents(path: Path) -> list[tuple[str, int, int, int, bytes]]:
    with SessionReader(path) as reader:
        return samples.contents(reader.read(reader.info.sections))


def objects(store: Path) -> set[str]:
    return {path.name for path in (store / ".objects").glob("??/*")}


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".llamakv-")]


def damage(info: SessionInfo, index: int) -> None:
    """Flip a bit inside a section of a session."""
    section = info.sections[index]
    folder = info.path.parent / ".objects"
    path = folder / section.digest[:2] / section.digest if section.in_store else info.path
    data = bytearray(path.read_bytes())
    data[-20 if section.in_store else section.offset + section.n_stored // 2] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("in_store", "to_store"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_copy_is_a_child_with_the_same_state(store: Path, tmp_path: Path, kind, in_store, to_store) -> None:
    parent = talk((store if in_store else tmp_path) / "a.bin", *WORDS, kind=kind, name="a", tags=("x",))
    set_pinned(parent.path, True)
    set_note(parent.path, "a note")
    before, kept, began_s = sha(parent.path), objects(store), time.time()
    target = (store if to_store else tmp_path) / "b.bin"
    copied = copy_session(parent.path, target, name="b" if to_store else None)
    assert contents(target) == contents(parent.path)
    record, lineage = copied.info.record, copied.info.record.lineage
    assert replace(record, lineage=parent.record.lineage) == parent.record
    assert (lineage.parent_id, lineage.parent_position) == ("a", len(record.tokens))
    assert len(lineage.session_id) == 32
    assert (lineage.name, lineage.tags, lineage.n_saves) == ("b" if to_store else None, ("x",), 1)
    assert (lineage.pinned, lineage.note, lineage.ttl_s) == (False, "", None)
    assert began_s <= lineage.created_s == lineage.updated_s <= time.time()
    assert (copied.n_to_read, sha(parent.path)) == (0, before)
    if in_store and to_store:
        assert objects(store) == kept
        assert copied.info.n_written < 10_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_up_to_a_turn_holds_what_can_be_brought_back(store: Path, kind: MemoryKind) -> None:
    parent = talk(store / "a.bin", *WORDS, system="Be brief.", kind=kind)
    for turn in range(6):
        n_tokens = (1 + 2 * turn) * N_EACH
        copied = copy_session(parent.path, store / f"{turn}.bin", at=f"turn{turn}")
        record = copied.info.record
        assert record.tokens == parent.record.tokens[:n_tokens]
        assert record.chat.messages == parent.record.chat.messages[: 1 + 2 * turn]
        assert record.lineage.parent_position == n_tokens
        can_cut = kind in (MemoryKind.DENSE, MemoryKind.WINDOWED) or turn >= 3
        assert copied.n_to_read == (0 if can_cut else n_tokens - 1)
        assert copied.info.n_cells_held == n_tokens - 1 - copied.n_to_read
        assert verify_session(copied.info.path).is_sound
        assert read_session(copied.info.path) == replace(copied.info, n_written=0)
    whole = copy_session(parent.path, store / "whole.bin", at=str(len(parent.record.tokens)))
    assert whole.info.record.chat == parent.record.chat


def test_a_window_in_one_piece_cannot_be_cut(store: Path) -> None:
    record = talk(store / "x.bin", *WORDS, kind=MemoryKind.WINDOWED).record
    parent = create_session(store / "a.bin", record, [samples.whole(len(record.tokens) - 1)])
    assert copy_session(parent.path, store / "b.bin").n_to_read == 0
    assert copy_session(parent.path, store / "c.bin", at="turn2").n_to_read == 4 * N_EACH - 1


def test_a_session_that_lost_sections_is_copied_as_it_is(store: Path, tmp_path: Path) -> None:
    parent = talk(store / "a.bin", *WORDS)
    keep = truncate_sections(parent.sections, 256)
    extend_session(parent, parent.record, keep=keep, new=(), is_partial=True)
    assert copy_session(parent.path, store / "b.bin").n_to_read == len(parent.record.tokens) - 1 - 256
    assert copy_session(parent.path, store / "c.bin", at="turn1").n_to_read == 0
    move_session(store / "b.bin", tmp_path / "b.bin", name=None)
    assert read_session(tmp_path / "b.bin").n_cells_held == 256
    export_session(parent.path, tmp_path / "own.bin")
    assert import_session(tmp_path / "own.bin", store, name="d").n_cells_held == 256


def test_places_inside_a_message_are_refused_with_those_nearby(store: Path) -> None:
    path = talk(store / "a.bin", *WORDS).path
    with pytest.raises(UsageError) as refused:
        copy_session(path, store / "b.bin", at="250")
    assert refused.value.message == "position 250 is inside a message, which cannot be cut without the model"
    assert refused.value.hint == "near it are 200 (turn1) and 300"
    assert copy_session(path, store / "b.bin", at="300").info.record.chat.messages[-1].role == "user"
    for at, error in (("turn9", NotFoundError), ("9999", NotFoundError), ("turn0", UsageError), ("x", UsageError)):
        with pytest.raises(error):
            copy_session(path, store / "c.bin", at=at)
    assert sorted(path.name for path in store.glob("*.bin")) == ["a.bin", "b.bin"]


def test_raw_text_is_copied_whole_only(store: Path) -> None:
    record = replace(samples.make_record(600), chat=None, text="Once upon a time.")
    path = create_session(store / "a.bin", record, samples.cells_up_to(599)).path
    assert copy_session(path, store / "b.bin", at="600").info.record.text == "Once upon a time."
    with pytest.raises(UsageError, match="inside raw text"):
        copy_session(path, store / "c.bin", at="256")
    with pytest.raises(UsageError, match="raw text has no turns"):
        copy_session(path, store / "c.bin", at="turn1")


def test_a_message_read_together_with_the_next_has_no_end(store: Path) -> None:
    info = talk(store / "a.bin", "Hi.", "Hello!", "Who are you?", "A model.")
    first, given, asked, reply = info.record.chat.messages
    chat = replace(
        info.record.chat, messages=(first, replace(given, p0=100, p1=100), replace(asked, p0=100, p1=300), reply)
    )
    path = extend_session(info, replace(info.record, chat=chat), keep=info.sections, new=()).path
    with pytest.raises(UsageError) as refused:
        copy_session(path, store / "b.bin", at="turn1")
    assert refused.value.message == "turn 1 was read together with what follows: where it ends is not known"
    assert refused.value.hint == "near it are 100 and 300"
    assert copy_session(path, store / "b.bin", at="100").info.record.chat.messages == (first,)
    assert copy_session(path, store / "c.bin", at="turn2").info.record.chat == chat


def test_an_incomplete_session_stays_so_as_a_whole(store: Path) -> None:
    path = talk(store / "a.bin", *WORDS).path
    change_lineage(path, lambda old: replace(old, note=f"{INCOMPLETE} 5 of 9 tokens\nmine"))
    assert copy_session(path, store / "b.bin").info.record.lineage.note == f"{INCOMPLETE} 5 of 9 tokens"
    assert copy_session(path, store / "c.bin", at="turn1").info.record.lineage.note == ""


def test_a_copy_never_replaces_unasked(store: Path) -> None:
    path = talk(store / "a.bin", *WORDS).path
    other = talk(store / "b.bin", "Other.", "Words.").path
    before = sha(other)
    with pytest.raises(ExistsError) as refused:
        copy_session(path, other, name="b")
    assert (refused.value.message, refused.value.hint) == (
        "session 'b' already exists",
        "add --force to replace it",
    )
    assert sha(other) == before
    for target in (path, store / ".." / "store" / "a.bin"):
        with pytest.raises(UsageError, match="copied to itself"):
            copy_session(path, target, overwrite=True)
    kept = objects(store)
    copy_session(path, other, name="b", overwrite=True)
    assert objects(store) < kept  # what only the replaced session referred to is gone
    assert verify_session(other).is_sound


@pytest.mark.parametrize("in_store", [True, False])
def test_a_damaged_session_is_not_copied_out(store: Path, tmp_path: Path, in_store: bool) -> None:
    info = talk((store if in_store else tmp_path) / "a.bin", *WORDS)
    damage(info, 1)
    for target in (tmp_path / "own.bin", *([] if in_store else [store / "b.bin"])):
        with pytest.raises(DamagedError, match=r"cells section \[256, 512\)"):
            copy_session(info.path, target)
        assert not target.exists()
        assert leftovers(target.parent) == []
    with pytest.raises(DamagedError, match=r"cells section \[256, 512\)"):
        export_session(info.path, tmp_path / "own.bin")
    with pytest.raises(DamagedError):
        exported(info.path).__enter__()


def test_objects_that_are_gone_are_damage(store: Path) -> None:
    info = talk(store / "a.bin", *WORDS)
    shutil.rmtree(store / ".objects" / info.sections[1].digest[:2])
    with pytest.raises(DamagedError, match="is missing from the store"):
        copy_session(info.path, store / "b.bin")
    assert not (store / "b.bin").exists()


@pytest.mark.parametrize("name", ["ME", "MS", "MR", "MH"])
def test_a_copy_goes_on_as_the_session_did(models, tmp_path: Path, store: Path, name: str) -> None:
    driver, path = Driver(models(name), tmp_path), store / "a.bin"
    with driver.chat(save=path) as live:
        for number in range(2):
            live.send(f"Turn {number}.", Heard().reporter)
    then = tmp_path / "then.bin"
    export_session(path, then)
    with driver.resume(path) as live:
        live.send("Turn 2.", Heard().reporter)
    with driver.resume(then) as live:
        live.send("On.", Heard().reporter)
        expected = state_of(live)
    copied = copy_session(path, store / "b.bin", at="turn2")
    assert copied.n_to_read == 0
    heard = Heard()
    with driver.resume(store / "b.bin", heard) as live:
        assert live.opened.evaluated == 0
        live.send("On.", heard.reporter)
        assert state_of(live) == expected
    early = copy_session(path, store / "c.bin", at="turn1", name="c")
    with driver.resume(store / "c.bin", heard) as live:
        assert live.opened.evaluated == early.n_to_read
        live.send("On.", heard.reporter)
    with driver.chat() as fresh:
        for text in ("Turn 0.", "On."):
            fresh.send(text, Heard().reporter)
        assert tuple(state_of(fresh)[0]) == read_session(store / "c.bin").record.tokens


def test_messages_given_with_a_prompt_end_where_their_tokens_do(models, tmp_path: Path, store: Path) -> None:
    """Behind a reply whose end token is written again."""
    from llamakv.engine.llamacpp import LlamaModel
    from llamakv.engine.text import join
    from llamakv.ops.fork import SaveTarget
    from llamakv.ops.prompts import Prompt

    driver, path = Driver(models("ME"), tmp_path), store / "a.bin"
    with LlamaModel(driver.model) as model:
        with driver.chat(save=path, sampling=replace(GREEDY, max_tokens=300)) as live:
            live.send("hello", Heard().reporter)
        assert model.is_end(read_session(path).record.tokens[-1])
        given = (("user", "Hi."), ("assistant", "Hello!"), ("user", "Who are you?"))
        prompt = Prompt(id=0, text=None, where="prompt 0", messages=given)
        driver.fork(path, prompt, save_as=lambda branch: SaveTarget(path=store / "b.bin", name=None))
        record = read_session(store / "b.bin").record
        asked = record.chat.messages[2]
        read = join(model.token_bytes(token, special=True) for token in record.tokens[asked.p0 - 1 : asked.p1])
        assert read == "<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n"
        cut = copy_session(store / "b.bin", store / "c.bin", at=str(asked.p1)).info.record
        assert cut.chat.messages == record.chat.messages[:3]


# ---------------------------------------------------------------- moves


def test_moving_out_of_a_store_leaves_no_section_behind(store: Path, tmp_path: Path) -> None:
    kept = talk(store / "kept.bin", *WORDS[:6])
    path = talk(store / "a.bin", *WORDS).path
    move_session(path, tmp_path / "a.bin", name=None)
    assert objects(store) == {section.digest for section in kept.sections}
    assert verify_session(kept.path).is_sound
    assert verify_session(tmp_path / "a.bin").is_sound


def test_moving_over_another_session_leaves_none_of_its_sections(store: Path) -> None:
    path = talk(store / "a.bin", *WORDS).path
    wanted = objects(store)
    talk(store / "b.bin", "Other.", "Words.")
    with pytest.raises(ExistsError, match="session 'b' already exists"):
        move_session(path, store / "b.bin", name="b")
    info = move_session(path, store / "b.bin", name="b", overwrite=True)
    assert (info.record.lineage.name, info.record.lineage.session_id) == ("b", "a")
    assert objects(store) == wanted


# ---------------------------------------------------------------- exports and imports


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_comes_back_as_it_was(store: Path, tmp_path: Path, kind: MemoryKind) -> None:
    info = talk(store / "a.bin", *WORDS, kind=kind, name="a", tags=("x",), note="mine", parent_id="p", ttl_s=5.0)
    set_pinned(info.path, True)
    record = read_session(info.path).record
    made = export_session(info.path, tmp_path / "own.bin")
    assert (made.record, made.in_store) == (record, False)
    assert [m.time_s for m in made.record.chat.messages] == [m.time_s for m in record.chat.messages]
    assert contents(tmp_path / "own.bin") == contents(info.path)
    with exported(info.path) as (_, pieces):
        assert b"".join(pieces) == (tmp_path / "own.bin").read_bytes()
    other = tmp_path / "other store"
    back = import_session(tmp_path / "own.bin", other)
    assert (back.path, back.record) == (other / "a.bin", record)
    assert contents(back.path) == contents(info.path)
    assert objects(other) == objects(store)
    again = import_session(tmp_path / "own.bin", other, name="b")
    assert replace(again.record, lineage=replace(again.record.lineage, name="a")) == record
    assert again.record.lineage.name == "b"
    assert objects(other) == objects(store)
    assert again.n_written < 10_000


def test_a_place_is_exported_as_a_child(store: Path, tmp_path: Path) -> None:
    info = talk(store / "a.bin", *WORDS, name="a")
    made = export_session(info.path, tmp_path / "own.bin", at="turn1").record
    assert (made.lineage.parent_id, made.lineage.parent_position, made.lineage.name) == ("a", 200, "a")
    with exported(info.path, at="turn1") as (piped, pieces):
        (tmp_path / "piped.bin").write_bytes(b"".join(pieces))
    assert replace(piped.record, lineage=made.lineage) == made
    assert contents(tmp_path / "piped.bin") == contents(tmp_path / "own.bin")


def test_exporting_into_a_store_or_over_a_file_is_refused(store: Path, tmp_path: Path) -> None:
    info = talk(store / "a.bin", *WORDS)
    with pytest.raises(UsageError, match="is a store"):
        export_session(info.path, store / "b.bin")
    own = tmp_path / "own.bin"
    own.write_text("important\n" * 100)
    for overwrite in (False, True):
        with pytest.raises(ExistsError):
            export_session(info.path, own, overwrite=overwrite)
    assert own.read_text() == "important\n" * 100
    file = export_session(info.path, tmp_path / "own2.bin").path
    with pytest.raises(UsageError, match="copied to itself"):
        export_session(file, file, overwrite=True)
    with pytest.raises(WriteError):
        export_session(info.path, tmp_path / "no folder" / "own.bin")


def test_an_import_from_another_store_takes_its_sections_along(store: Path, tmp_path: Path) -> None:
    info = talk(tmp_path / "other" / "a.bin", *WORDS, in_store=True, name="old")
    back = import_session(info.path, store, name="new")
    assert contents(back.path) == contents(info.path)
    assert verify_session(back.path).is_sound


def test_an_index_without_its_sections_is_refused(store: Path, tmp_path: Path) -> None:
    info = talk(tmp_path / "other" / "a.bin", *WORDS, in_store=True)
    shutil.copy(info.path, tmp_path / "index.bin")
    with pytest.raises(DamagedError) as refused:
        import_session(tmp_path / "index.bin", store)
    assert "is only the index of a session" in refused.value.message
    assert refused.value.hint == "in that store: llamakv export NAME FILE"
    with pytest.raises(DamagedError, match="standard input"):
        import_bytes([(tmp_path / "index.bin").read_bytes()], store)
    shutil.rmtree(tmp_path / "other" / ".objects" / info.sections[0].digest[:2])
    with pytest.raises(DamagedError, match="is missing from the store"):
        import_session(info.path, store)
    assert (objects(store), list(store.glob("*.bin")), leftovers(store)) == (set(), [], [])


@pytest.mark.parametrize("way", ["file", "bytes"])
def test_damage_is_named_and_nothing_stays_of_it(store: Path, tmp_path: Path, way: str) -> None:
    whole = talk(store / "whole.bin", *WORDS[:4])
    before = objects(store)
    info = talk(tmp_path / "a.bin", *WORDS)
    damage(info, 3)
    data = info.path.read_bytes()
    take = {"file": lambda: import_session(info.path, store), "bytes": lambda: import_bytes([data], store, name="a")}
    with pytest.raises(DamagedError, match=r"cells section \[768, 999\)") as refused:
        take[way]()
    assert ("standard input" in refused.value.message) is (way == "bytes")
    assert (objects(store), leftovers(store)) == (before, [])
    assert [path.name for path in store.glob("*.bin")] == ["whole.bin"]
    assert verify_session(whole.path).is_sound


def test_an_import_that_fails_at_any_section_leaves_nothing(store: Path, tmp_path: Path) -> None:
    for n_bytes in (0, 10, 600, 1549, 3000):
        data = talk(tmp_path / f"{n_bytes}.bin", *WORDS).path.read_bytes()[:n_bytes]
        with pytest.raises(NotASessionError if n_bytes < 16 else DamagedError):
            import_bytes([data[:7], data[7:]], store, name="a")

    def broken() -> Iterator[bytes]:
        yield data
        raise OSError("the other end went away")

    with pytest.raises(OSError, match="went away"):
        import_bytes(broken(), store)
    assert sorted(path.name for path in store.iterdir()) == [".store"]


def test_bytes_come_in_pieces_of_any_size(store: Path, tmp_path: Path) -> None:
    info = talk(tmp_path / "a.bin", *WORDS, name=None)
    stream = io.BytesIO(info.path.read_bytes())
    back = import_bytes(iter(lambda: stream.read(777), b""), store)
    assert back.record.lineage.name == "session-a"  # its id: standard input has no name
    assert contents(back.path) == contents(info.path)


def test_an_import_never_replaces_unasked(store: Path, tmp_path: Path) -> None:
    path = talk(tmp_path / "a.bin", *WORDS).path
    other = talk(store / "a.bin", "Other.", "Words.")
    before = sha(other.path)
    with pytest.raises(ExistsError) as refused:
        import_session(path, store)
    assert (refused.value.message, refused.value.hint) == ("session 'a' already exists", "add --force to replace it")
    assert (sha(other.path), objects(store)) == (before, {section.digest for section in other.sections})
    info = import_session(path, store, overwrite=True)
    assert objects(store) == {section.digest for section in info.sections}
    with pytest.raises(UsageError, match="copied to itself"):
        import_session(store / "a.bin", store, name="a", overwrite=True)


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "a@turn1", "x.bin", "a\nb", " a"])
def test_an_impossible_name_is_refused(store: Path, tmp_path: Path, name: str) -> None:
    path = talk(tmp_path / "a.bin", *WORDS).path
    for take in (lambda: import_session(path, store, name=name), lambda: import_bytes([b"x"], store, name=name)):
        with pytest.raises(UsageError):
            take()
    assert sorted(path.name for path in store.iterdir()) == [".store"]


@pytest.mark.parametrize(
    ("name", "file", "expected"),
    [
        ("plan", "x.bin", "plan"),
        ("é 数据 [x]", "x.bin", "é 数据 [x]"),
        ("../../etc/passwd", "x.bin", "etc-passwd"),
        ("a\nb\x1b[1m", "x.bin", "ab[1m"),
        ("--", "x.bin", "x"),
        (None, "my plan.bin", "my plan"),
        (None, "plan@turn2", "plan-turn2"),
        (None, "plan.bin.bin", "plan"),
        (None, ".bin", "session-id"),
        (None, "", "session-id"),
        ("a\udc80", "x.bin", "a"),
        ("x" * 300, "", "x" * 251),
        ("ü" * 200, "", "ü" * 125),
    ],
)
def test_a_name_is_made_possible(tmp_path: Path, name: str | None, file: str, expected: str) -> None:
    info = read_session(talk(tmp_path / "a.bin", "Hi.", name=name, session_id="id").path)
    assert possible_name(info, file) == expected


def test_a_store_of_a_later_version_takes_nothing_in(tmp_path: Path) -> None:
    path = talk(tmp_path / "a.bin", *WORDS).path
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / ".store").write_text('{"llamakv_store": 99}')
    for take in (import_session, lambda file, root: import_bytes([file.read_bytes()], root)):
        with pytest.raises(LlamakvError) as refused:
            take(path, tmp_path / "s")
        assert refused.value.code == "newer_format"
    assert os.listdir(tmp_path / "s") == [".store"]


def test_what_is_not_there_is_said_to_be(store: Path, tmp_path: Path) -> None:
    for attempt in (
        lambda: copy_session(store / "a.bin", store / "b.bin"),
        lambda: move_session(store / "a.bin", store / "b.bin", name="b"),
        lambda: export_session(store / "a.bin", tmp_path / "b.bin"),
        lambda: import_session(tmp_path / "a.bin", store),
    ):
        with pytest.raises(NotFoundError):
            attempt()
    assert sorted(path.name for path in store.iterdir()) == [".store"]


def test_a_tail_is_copied_with_its_place(store: Path, tmp_path: Path) -> None:
    info = talk(store / "a.bin", *WORDS, kind=MemoryKind.HYBRID)
    made = export_session(info.path, tmp_path / "b.bin")
    assert [s.p1 for s in made.sections if s.kind is SectionKind.TAIL] == [599, 799, 999]
    change_tags(tmp_path / "b.bin", add=["x"])
    assert verify_session(tmp_path / "b.bin").is_sound


# ---------------------------------------------------------------- the budget of a store


def test_what_comes_into_a_store_keeps_to_its_budget(store: Path, tmp_path: Path) -> None:
    old = talk(store / "old.bin", *(f"old {number}" for number in range(10)))
    own = talk(tmp_path / "own.bin", *WORDS).path
    os.utime(old.path, (1e9, 1e9))
    n_bytes = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    write_budget(store, StoreBudget(max_bytes=n_bytes + 5_000))
    said = Heard()
    import_session(own, store, name="new", within=Within(reporter=said.reporter))
    assert [path.stem for path in store.glob("*.bin")] == ["new"]
    assert any(notice.startswith("removed old: ") for notice in said.notices)
    copied = copy_session(store / "new.bin", store / "copy.bin", name="copy")
    assert verify_session(copied.info.path).is_sound
    assert verify_session(store / "new.bin").is_sound  # its sections are shared: both fit


@pytest.mark.parametrize("way", ["copy", "move", "import"])
def test_what_does_not_fit_removes_nothing(store: Path, tmp_path: Path, way: str) -> None:
    kept = talk(store / "kept.bin", *WORDS[:2]).path
    own = talk(tmp_path / "own.bin", *(f"own {number}" for number in range(30))).path
    write_budget(store, StoreBudget(max_bytes=10_000))
    before = sha(own)
    put = {
        "copy": lambda: copy_session(own, store / "new.bin", name="new"),
        "move": lambda: move_session(own, store / "new.bin", name="new"),
        "import": lambda: import_session(own, store, name="new"),
    }[way]
    with pytest.raises(NoRoomError):
        put()
    assert (sha(own), [path.stem for path in store.glob("*.bin")]) == (before, ["kept"])
    assert verify_session(kept).is_sound


@pytest.mark.parametrize("way", ["exists", "damaged"])
def test_what_is_refused_removes_nothing(store: Path, tmp_path: Path, way: str) -> None:
    talk(store / "old.bin", *WORDS)
    taken = talk(store / "taken.bin", "Other.", "Words.").path
    own = talk(tmp_path / "own.bin", *(f"own {number}" for number in range(10)))
    n_bytes = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    write_budget(store, StoreBudget(max_bytes=n_bytes + 1_000))
    if way == "damaged":
        damage(own, 1)
    with pytest.raises(DamagedError if way == "damaged" else ExistsError):
        import_session(own.path, store, name="new" if way == "damaged" else "taken")
    assert sorted(path.stem for path in store.glob("*.bin")) == ["old", "taken"]
    assert verify_session(taken).is_sound


def test_a_copy_may_expire(store: Path) -> None:
    path = talk(store / "a.bin", *WORDS, ttl_s=50.0).path
    assert copy_session(path, store / "b.bin").info.record.lineage.ttl_s is None
    within = Within(budget=Budget(ttl_s=60.0))
    assert copy_session(path, store / "c.bin", within=within).info.record.lineage.ttl_s == 60.0


def test_a_move_between_folders_that_was_killed_is_finished_by_the_same_again(store: Path, tmp_path: Path) -> None:
    path = talk(store / "a.bin", *WORDS, name="a").path
    data = path.read_bytes()
    move_session(path, tmp_path / "b.bin", name=None)
    talk(store / "a.bin", *WORDS, name="a")
    path.write_bytes(data)
    move_session(path, tmp_path / "b.bin", name=None)
    assert not path.exists()
    assert verify_session(tmp_path / "b.bin").is_sound
