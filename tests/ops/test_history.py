"""What was said in a session, and where two of them part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llamakv.errors import DamagedError, NotFoundError, UsageError
from llamakv.ops.comparing import N_AROUND, Comparison, Difference, Relation, compare_sessions
from llamakv.ops.copying import copy_session, export_session
from llamakv.ops.history import EntryKind, LogEntry, Parent, log_session
from llamakv.records import MemoryKind
from llamakv.store.session_file import create_session, extend_session, truncate_sections
from llamakv.store.store_folder import make_store
from tests.ops.talks import N_EACH, START_S, talk
from tests.store import samples

WORDS = ["One?", "One.", "Two?", "Two.", "Three?", "Three."]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    make_store(folder)
    return folder


def entries(path: Path, root: Path, at: str | None = None) -> list[LogEntry]:
    return list(log_session(path, root, at=at).entries)


# ---------------------------------------------------------------- log


def test_a_log_has_the_system_prompt_then_the_turns(store: Path) -> None:
    path = talk(store / "a.bin", *WORDS, "Four?", system="Be brief.").path
    found = entries(path, store)
    assert [(e.kind, e.turn) for e in found] == [
        (EntryKind.SYSTEM, None),
        (EntryKind.TURN, 1),
        (EntryKind.TURN, 2),
        (EntryKind.TURN, 3),
        (EntryKind.OPEN, None),
    ]
    assert [(e.p0, e.p1) for e in found] == [(0, 100), (100, 300), (300, 500), (500, 700), (700, 800)]
    assert [e.time_s for e in found] == [START_S + n for n in (0, 2, 4, 6, 7)]
    assert [[m.content for m in e.messages] for e in found][:2] == [["Be brief."], ["One?", "One."]]


@pytest.mark.parametrize("kind", list(MemoryKind))
def test_the_bytes_of_all_turns_are_those_of_the_session(store: Path, kind: MemoryKind) -> None:
    info = talk(store / "a.bin", *WORDS, system="Be brief.", kind=kind)
    found = entries(info.path, store)
    assert sum(e.n_bytes for e in found) == info.n_stored_bytes
    assert sum(e.p1 - e.p0 for e in found) == len(info.record.tokens)
    assert [e.p0 for e in found[1:]] == [e.p1 for e in found[:-1]]
    if kind in (MemoryKind.DENSE, MemoryKind.WINDOWED):
        per_token = [e.n_bytes / (e.p1 - e.p0) for e in found[:2]]
        assert per_token[0] == pytest.approx(per_token[1], rel=0.02)  # they lie in the same section


def test_a_section_of_which_a_part_is_used_counts_as_a_whole(store: Path) -> None:
    parent = talk(store / "a.bin", *WORDS)
    info = copy_session(parent.path, store / "b.bin", at="turn1").info
    (only,) = entries(info.path, store)
    assert only.n_bytes == info.n_stored_bytes == parent.sections[0].n_stored


def test_a_log_ends_at_a_place(store: Path) -> None:
    path = talk(store / "a.bin", *WORDS).path
    assert [e.turn for e in entries(path, store, at="turn2")] == [1, 2]
    assert [e.kind for e in entries(path, store, at="300")] == [EntryKind.TURN, EntryKind.OPEN]
    with pytest.raises(UsageError):
        log_session(path, store, at="301")
    with pytest.raises(NotFoundError):
        log_session(path, store, at="turn4")


def test_raw_text_is_told_section_by_section(store: Path) -> None:
    record = replace(samples.make_record(600), chat=None, text="Once upon a time.")
    info = create_session(store / "a.bin", record, samples.cells_up_to(599))
    found = entries(info.path, store)
    assert [(e.kind, e.p0, e.p1, e.messages) for e in found] == [
        (EntryKind.SECTION, 0, 256, ()),
        (EntryKind.SECTION, 256, 512, ()),
        (EntryKind.SECTION, 512, 599, ()),
    ]
    assert tuple(e.section for e in found) == info.sections


def test_messages_read_with_later_ones_are_told_with_theirs(store: Path) -> None:
    info = talk(store / "a.bin", "Hi.", "Hello!", "Who are you?", "A model.")
    first, given, asked, reply = info.record.chat.messages
    chat = replace(
        info.record.chat, messages=(first, replace(given, p0=100, p1=100), replace(asked, p0=100, p1=300), reply)
    )
    path = extend_session(info, replace(info.record, chat=chat), keep=info.sections, new=()).path
    assert [(e.turn, e.p0, e.p1) for e in entries(path, store)] == [(1, 0, 100), (2, 100, 400)]


def test_a_session_without_messages_has_no_entries(store: Path) -> None:
    info = talk(store / "a.bin", "Hi.")
    record = replace(info.record, chat=replace(info.record.chat, messages=()))
    extend_session(info, record, keep=info.sections, new=())
    assert entries(info.path, store) == []


def test_a_parent_is_named_where_it_is_in_the_store(store: Path, tmp_path: Path) -> None:
    path = talk(store / "a.bin", *WORDS).path
    assert log_session(path, store).parent is None
    copy_session(path, tmp_path / "b.bin", at="turn2")
    copy_session(path, tmp_path / "c.bin", at="300")
    (store / "broken.bin").write_bytes(b"x" * 5000)
    assert log_session(tmp_path / "b.bin", store).parent == Parent(
        session_id="a", position=400, name="a", place="turn2"
    )
    assert log_session(tmp_path / "c.bin", store).parent == Parent(session_id="a", position=300, name="a", place=None)
    for root in (tmp_path / "nowhere", tmp_path):
        told = log_session(tmp_path / "b.bin", root).parent
        assert told == Parent(session_id="a", position=400, name=None, place=None)


def test_damage_and_absence_are_said(store: Path) -> None:
    with pytest.raises(NotFoundError):
        log_session(store / "a.bin", store)
    path = talk(store / "a.bin", *WORDS).path
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DamagedError):
        log_session(path, store)
    with pytest.raises(DamagedError):
        compare_sessions(path, path)


# ---------------------------------------------------------------- diff


def compare(a: Path, b: Path, **places: str) -> Comparison:
    """Compare, and check that the other way round it is the same."""
    found = compare_sessions(a, b, **places)
    back = compare_sessions(b, a, at_a=places.get("at_b"), at_b=places.get("at_a"))
    assert (back.a, back.b, back.n_common) == (found.b, found.a, found.n_common)
    assert {s.digest for s in back.shared_sections} == {s.digest for s in found.shared_sections}
    assert back.differences == tuple(Difference(field=d.field, a=d.b, b=d.a) for d in found.differences)
    return found


def test_sessions_part_where_their_words_do(store: Path) -> None:
    a = talk(store / "a.bin", *WORDS[:2], "And of Italy?", "Rome.", system="Be brief.")
    b = talk(store / "b.bin", *WORDS[:2], "And of Spain, please?", "Madrid.", "Thanks.", "Oh.", system="Be brief.")
    found = compare(a.path, b.path)
    assert (found.n_common, found.relation) == (3 * N_EACH, Relation.PARTED)
    for side, text in ((found.a, "Italy?"), (found.b, "Spain, please?")):
        assert (side.turn, side.role) == (2, "user")
        assert (side.text_before, side.text_after) == ("And of ", text)
    assert (found.a.n_own_tokens, found.b.n_own_tokens) == (200, 400)
    assert [len(side.own_sections) for side in (found.a, found.b)] == [1, 2]
    assert found.shared_sections == a.sections[:1]
    assert (found.n_shared_bytes, found.stored_once) == (a.sections[0].n_stored, True)
    assert found.a.n_own_bytes == a.sections[1].n_stored
    assert (found.agrees_on("identity", "kind"), found.agrees_on("settings"), found.differences) == (True, True, ())


def test_a_beginning_ends_where_the_other_goes_on(store: Path) -> None:
    path = talk(store / "a.bin", *WORDS).path
    found = compare(path, path, at_a="turn1")
    assert (found.n_common, found.relation) == (200, Relation.BEGINNING)
    assert (found.a.turn, found.a.role, found.a.text_before, found.a.text_after) == (None, None, "One.", "")
    assert (found.b.turn, found.b.role, found.b.text_before, found.b.text_after) == (2, "user", "", "Two?")
    assert (found.a.n_own_tokens, found.a.own_sections) == (0, ())
    assert compare_sessions(path, path, at_b="turn1").relation is Relation.CONTINUATION


def test_a_session_and_its_export_are_the_same(store: Path, tmp_path: Path) -> None:
    info = talk(store / "a.bin", *WORDS)
    own = export_session(info.path, tmp_path / "own.bin").path
    found = compare(info.path, own)
    assert (found.n_common, found.relation, found.stored_once) == (600, Relation.SAME, False)
    assert len(found.shared_sections) == len(info.sections)
    assert (found.a.own_sections, found.b.own_sections, found.differences) == ((), (), ())


def test_the_same_words_as_other_tokens_part_in_a_message(store: Path) -> None:
    a = talk(store / "a.bin", *WORDS)
    tokens = list(a.record.tokens)
    tokens[250] += 1
    keep = truncate_sections(a.sections, 200)
    record = replace(a.record, tokens=tuple(tokens), lineage=replace(a.record.lineage, session_id="b"))
    b = create_session(store / "b.bin", record, [*samples.cells_up_to(599)])
    assert keep
    found = compare(a.path, b.path)
    assert found.n_common == 250
    assert (
        (found.a.turn, found.a.role, found.a.text_after)
        == (2, "user", "Two?")
        == (
            found.b.turn,
            found.b.role,
            found.b.text_after,
        )
    )


def test_another_system_prompt_parts_there(store: Path) -> None:
    a = talk(store / "a.bin", *WORDS, system="Be brief.")
    b = talk(store / "b.bin", *WORDS)
    found = compare(a.path, b.path)
    assert found.n_common == 0
    assert (found.a.role, found.a.text_after) == ("system", "Be brief.")
    assert (found.b.role, found.b.turn, found.b.text_after) == ("user", 1, "One?")


def test_raw_texts_part_in_their_text_and_long_ones_are_cut(store: Path) -> None:
    texts = ["x" * 500 + end * 300 for end in "yz"]
    for name, text in zip("ab", texts, strict=True):
        record = replace(samples.make_record(600), chat=None, text=text)
        create_session(store / f"{name}.bin", record, samples.cells_up_to(599))
    found = compare(store / "a.bin", store / "b.bin")
    assert (found.a.text_before, found.a.text_after) == ("x" * N_AROUND, "y" * N_AROUND)
    assert (found.b.turn, found.b.role) == (None, None)
    chat = talk(store / "c.bin", *WORDS).path
    assert compare(store / "a.bin", chat).differences[-1] == Difference(field="form", a="raw text", b="a conversation")


def test_every_difference_in_model_and_settings_is_named(store: Path) -> None:
    a = talk(store / "a.bin", *WORDS)
    record = replace(
        a.record,
        identity=replace(a.record.identity, digest="12" * 32, adapters=()),
        settings=replace(a.record.settings, type_k="q8_0"),
        versions=replace(a.record.versions, commit="abc"),
        sampling=replace(a.record.sampling, seed=5),
        chat=replace(a.record.chat, template_digest="34" * 32),
    )
    b = create_session(store / "b.bin", record, samples.cells_up_to(599))
    found = compare(a.path, b.path)
    assert [d.field for d in found.differences] == [
        "identity.digest",
        "identity.adapters",
        "settings.type_k",
        "versions.commit",
        "sampling.seed",
        "chat.template_digest",
    ]
    assert found.differences[2] == Difference(field="settings.type_k", a="f16", b="q8_0")
    assert (found.agrees_on("identity"), found.agrees_on("settings"), found.agrees_on("kind")) == (False, False, True)
    other = talk(store / "c.bin", *WORDS, kind=MemoryKind.RECURRENT)
    assert compare(a.path, other.path).differences == (Difference(field="kind", a="dense", b="recurrent"),)
