"""Which sessions refer to the same objects, and the survey of a store: from the cache, and as the files say."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from llamakv.errors import NewerFormatError
from llamakv.records import MemoryKind, SessionRecord
from llamakv.store import cache as cache_module
from llamakv.store import sharing
from llamakv.store.session_file import create_session, extend_session, read_session
from llamakv.store.session_store import SessionStore
from llamakv.store.sharing import Sharer, find_sharers
from llamakv.store.store_folder import make_store
from llamakv.store.survey import SurveyedSession, take_survey
from tests.store import samples, stores
from tests.store.indexes import rows_of, write_index


def add(root: Path, name: str, n_tokens: int, kind: MemoryKind = MemoryKind.DENSE) -> Path:
    """A session with sections of 256 positions; those of the same positions are the same objects."""
    path = root / f"{name}.bin"
    record = samples.make_record(n_tokens, kind=kind, session_id=f"id-{name}")
    write_index(path, record, rows_of(kind, n_tokens - 1))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four sessions: ``short`` is the beginning of ``long`` and ``longer``; ``other`` has nothing in common with
    them."""
    root = tmp_path / "store"
    make_store(root)
    add(root, "short", 513)
    add(root, "long", 1025)
    add(root, "longer", 1101)
    add(root, "other", 100, MemoryKind.RECURRENT)
    return root


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks so fine that no two changes ever have the same time."""
    monkeypatch.setattr(cache_module, "_SETTLED_NS", -1)


def names(sharers: tuple[Sharer, ...] | None) -> list[tuple[str, int]]:
    assert sharers is not None
    return [(sharer.name, len(sharer.digests)) for sharer in sharers]


# ---------------------------------------------------------------- who shares


@pytest.mark.parametrize("n_verified", [0, 1, 10])
def test_sharers_are_those_with_objects_in_common_the_most_first(root: Path, n_verified: int) -> None:
    for _ in range(2):  # without the cache, and with it
        assert names(find_sharers(read_session(root / "long.bin"), n_verified=n_verified)) == [
            ("longer", 4),
            ("short", 2),
        ]
        assert names(find_sharers(read_session(root / "short.bin"), n_verified=n_verified)) == [
            ("long", 2),
            ("longer", 2),
        ]
        assert names(find_sharers(read_session(root / "other.bin"), n_verified=n_verified)) == []


def test_what_is_in_common_are_digests_of_the_sessions_sections(root: Path) -> None:
    info = read_session(root / "long.bin")
    longer, short = find_sharers(info) or ()
    assert longer.digests == {section.digest for section in info.sections}
    assert short.digests == {section.digest for section in info.sections[:2]}


def test_only_sections_that_are_asked_about_count(root: Path) -> None:
    info = read_session(root / "long.bin")
    assert names(find_sharers(replace(info, sections=info.sections[3:]))) == [("longer", 1)]


def test_the_first_of_all_and_of_each_section_are_read_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = read_session(root / "long.bin")
    find_sharers(info)
    read: list[str] = []

    def digests_of(path: Path) -> Collection[str]:
        read.append(path.stem)
        return frozenset(section.digest for section in read_session(path).sections)

    monkeypatch.setattr(sharing, "digests_of", digests_of)
    for n_verified, wanted in ((0, []), (1, ["longer"]), (2, ["longer", "short"])):
        read.clear()
        sharers = find_sharers(info, n_verified=n_verified) or ()
        assert read == wanted
        assert [sharer.name for sharer in sharers if sharer.is_verified] == wanted


def test_a_hint_that_is_not_true_is_left_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = read_session(root / "long.bin")
    find_sharers(info)
    monkeypatch.setattr(sharing, "digests_of", lambda path: frozenset())
    assert names(find_sharers(info, n_verified=1)) == [("short", 2)]
    monkeypatch.undo()
    (root / "longer.bin").unlink()
    monkeypatch.setattr(cache_module.StoreCache, "_refresh_if_changed", lambda *_: True)
    assert names(find_sharers(info, n_verified=1)) == [("short", 2)]


@pytest.mark.usefixtures("settled")
def test_changes_show_at_once(root: Path) -> None:
    info = read_session(root / "long.bin")
    assert names(find_sharers(info)) == [("longer", 4), ("short", 2)]
    add(root, "short", 300)
    add(root, "new", 1025)
    (root / "longer.bin").unlink()
    assert names(find_sharers(info)) == [("new", 4), ("short", 1)]


def test_where_much_would_have_to_be_read_nothing_is(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = read_session(root / "long.bin")
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "read_session", pytest.fail)
        assert find_sharers(info, n_read_at_most=3) is None
    assert names(find_sharers(info, n_read_at_most=4)) == [("longer", 4), ("short", 2)]


def test_a_session_is_not_its_own_sharer_by_another_name(root: Path) -> None:
    (root / "link.bin").symlink_to(root / "long.bin")
    assert names(find_sharers(read_session(root / "link.bin"), n_verified=9)) == [("longer", 4), ("short", 2)]
    assert names(find_sharers(read_session(root / "long.bin"), n_verified=9)) == [("longer", 4), ("short", 2)]


def test_outside_a_store_nothing_is_shared_and_nothing_left(tmp_path: Path, root: Path) -> None:
    alone = tmp_path / "alone.bin"
    create_session(alone, samples.make_record(300), samples.cells_up_to(299))
    assert find_sharers(read_session(alone)) == ()
    moved = Path(shutil.copy(root / "long.bin", tmp_path))
    assert find_sharers(read_session(moved)) == ()
    assert not (tmp_path / ".cache").exists()


def test_a_later_llamakvs_store_is_refused(root: Path) -> None:
    info = read_session(root / "long.bin")
    (root / ".store").write_text('{"llamakv_store": 99}')
    with pytest.raises(NewerFormatError):
        find_sharers(info)


# ---------------------------------------------------------------- the survey


def as_files_say(root: Path) -> list[SurveyedSession]:
    """What a survey must say of the sessions, from their files alone."""
    found = []
    for entry in SessionStore(root).list():
        if entry.info is None:
            continue
        record, objects = entry.info.record, [s for s in entry.info.sections if s.in_store]
        own = [s for s in entry.info.sections if not s.in_store]
        digests = frozenset(s.digest for s in objects)
        lengths = [path.stat().st_size for d in digests if (path := root / ".objects" / d[:2] / d).exists()]
        found.append(
            SurveyedSession(
                name=entry.name,
                path=entry.path,
                used_s=entry.path.stat().st_mtime_ns / 1e9,
                lineage=record.lineage,
                identity=record.identity,
                n_tokens=len(record.tokens),
                n_cells_held=entry.info.n_cells_held,
                n_file_bytes=entry.info.n_file_bytes,
                n_raw_own=sum(s.n_raw for s in own),
                n_stored_own=sum(s.n_stored for s in own),
                n_object_bytes=sum(lengths),
                digests=digests,
            )
        )
    return sorted(found, key=lambda session: session.name)


def odd_sessions(root: Path) -> None:
    """Real objects, a session with sections of its own, one with an odd lineage, and one that cannot be read."""
    stores.add_session(root, "real", 600)
    stores.add_session(root, "branch", 900)
    create_session(root.parent / "own.bin", samples.make_record(300), samples.cells_up_to(299))
    shutil.move(root.parent / "own.bin", root / "own.bin")
    odd: SessionRecord = samples.make_record(20)
    lineage = replace(odd.lineage, name=None, note="é\n\ud83d", ttl_s=1e-300, llamakv_version="9 \ud83d", pinned=True)
    write_index(root / "odd.bin", replace(odd, lineage=lineage), rows_of(MemoryKind.DENSE, 19))
    (root / "broken.bin").write_bytes(b"GGUF" * 500)


@pytest.mark.usefixtures("settled")
def test_a_survey_is_what_the_files_say(root: Path) -> None:
    odd_sessions(root)
    for _ in range(2):  # without the cache, and with it
        survey = take_survey(root)
        assert list(survey.sessions) == as_files_say(root)
        assert [(session.name, session.error.code) for session in survey.unreadable] == [("broken", "not_a_session")]
        raw = {s.digest: s.n_raw for e in SessionStore(root).list() if e.info for s in e.info.sections if s.in_store}
        assert survey.object_raw == raw
        assert survey.object_bytes == {p.name: p.stat().st_size for p in (root / ".objects").glob("??/*")}


@pytest.mark.usefixtures("settled")
def test_a_survey_reads_only_indexes_that_changed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_survey(root)
    read: list[Path] = []
    monkeypatch.setattr(cache_module, "read_session", lambda path: (read.append(path), read_session(path))[1])
    steps: list[tuple[int, int]] = []
    take_survey(root, on_progress=lambda n_done, n: steps.append((n_done, n)))
    assert (read, steps) == ([], [])
    add(root, "other", 50, MemoryKind.RECURRENT)
    survey = take_survey(root, on_progress=lambda n_done, n: steps.append((n_done, n)))
    assert (read, steps) == ([root / "other.bin"], [(1, 1)])
    assert list(survey.sessions) == as_files_say(root)


@pytest.mark.usefixtures("settled")
def test_a_survey_after_a_real_save_has_the_new_sections(root: Path) -> None:
    info = stores.add_session(root, "real", 600)
    before = {session.name: session for session in take_survey(root).sessions}["real"]
    record = samples.make_record(900, session_id=info.record.lineage.session_id, n_saves=2)
    extend_session(info, record, keep=info.sections[:2], new=samples.cells_up_to(899, p0=512))
    survey = take_survey(root)
    after = {session.name: session for session in survey.sessions}["real"]
    assert len(after.digests) == len(read_session(info.path).sections) > len(before.digests)
    assert list(survey.sessions) == as_files_say(root)


def test_a_store_without_a_usable_cache_is_surveyed_all_the_same(root: Path) -> None:
    take_survey(root)
    database = root / ".cache" / "sessions.sqlite"
    data = bytearray(database.read_bytes())
    for offset in range(0, len(data), 997):
        flipped = bytearray(data)
        flipped[offset] ^= 0x11
        shutil.rmtree(root / ".cache")
        (root / ".cache").mkdir()
        database.write_bytes(flipped)
        assert list(take_survey(root).sessions) == as_files_say(root), offset
    shutil.rmtree(root / ".cache")
    (root / ".cache").write_text("in the way")
    assert list(take_survey(root).sessions) == as_files_say(root)
    assert names(find_sharers(read_session(root / "long.bin"))) == [("longer", 4), ("short", 2)]
