"""References, names, and the list of sessions."""

import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from llamakv.errors import DamagedError, LockedError, NotASessionError, NotFoundError, UsageError, WriteError
from llamakv.store import files
from llamakv.store.collector import Collected
from llamakv.store.objects import Objects
from llamakv.store.session_file import create_session
from llamakv.store.session_store import SessionStore, check_name
from tests.store.samples import cells, make_record


@pytest.fixture
def store(tmp_path):
    return SessionStore(tmp_path / "data" / "store")


def save(path, *, n_saves=1, updated_s=100.0):
    record = make_record(5, n_saves=n_saves)
    record = replace(record, lineage=replace(record.lineage, updated_s=updated_s))
    return create_session(path, record, [cells(0, 4)])


def save_named(store, name, **options):
    return save(store.resolve_for_writing(name), **options)


# ---------------------------------------------------------------- references


def test_a_reference_is_a_name_or_a_path(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("here").touch()
    Path("folder").mkdir()
    assert store.resolve("notes") == store.root / "notes.bin"
    assert store.resolve("folder") == store.root / "folder.bin"
    assert store.resolve("é 数据 [x]") == store.root / "é 数据 [x].bin"
    for ref in ("./notes", "a/b", "/a/b", "notes.bin", "../x.bin", "here"):
        assert store.resolve(ref) == Path(ref)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        ".",
        ".hidden",
        "-",
        "-x",
        "a\0b",
        "a\nb",
        "a\x1b[1m",
        "\x7f",
        " a",
        "a ",
        "x" * 252,
        "ü" * 126,
        "a\\b",
        "notes@12",
        "notes@turn3",
        "a\udc80",
        "a\u2028b",
    ],
)
def test_impossible_names_are_usage_errors(store, name):
    with pytest.raises(UsageError) as caught:
        store.resolve(name)
    assert caught.value.exit_status == 2
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["a/b", "/etc/passwd", "../x"])
def test_a_path_is_not_a_name(name):
    with pytest.raises(UsageError):
        check_name(name)


@pytest.mark.parametrize("name", ["a", "x" * 251, "ü" * 125, "me@work", "a.b", "a..b", "1200", "[INST]"])
def test_possible_names_can_be_saved_and_listed(store, name):
    save_named(store, name)
    assert store.names() == (name,)
    assert store.list()[0].name == name


def test_the_folder_appears_with_the_first_write_and_is_private(store):
    store.resolve("notes")
    assert (store.names(), store.list()) == ((), ())
    collected = store.collect()
    assert collected is not None
    assert (collected.n_objects, collected.n_temporaries) == (0, 0)
    with pytest.raises(NotFoundError):
        store.latest()
    assert not store.root.parent.exists()
    umask = os.umask(0o022)
    try:
        save_named(store, "notes")
    finally:
        os.umask(umask)
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    assert stat.S_IMODE(store.root.parent.stat().st_mode) == 0o700


def test_a_path_reference_makes_no_store(store, tmp_path):
    store.resolve_for_writing(str(tmp_path / "x.bin"))
    assert not store.root.exists()
    store.root.mkdir(parents=True)
    info = save(store.resolve_for_writing(str(store.root / "x.bin")))
    assert not info.in_store
    assert os.listdir(store.root) == ["x.bin"]
    info = save(store.resolve_for_writing("y"))
    assert info.in_store
    info = save(store.resolve_for_writing(str(store.root / "z.bin")))
    assert info.in_store, "in the folder of a store"
    assert store.names() == ("x", "y", "z")


def test_a_store_that_is_a_file_is_a_write_error(store):
    store.root.parent.mkdir()
    store.root.touch()
    assert store.list() == ()
    with pytest.raises(WriteError):
        store.resolve_for_writing("notes")


# ---------------------------------------------------------------- lists


def test_the_newest_save_comes_first_by_counter_where_the_clock_is_equal(store):
    save_named(store, "b", n_saves=2)
    save_named(store, "c", n_saves=3)
    save_named(store, "a", n_saves=1)
    save_named(store, "z", n_saves=9, updated_s=99.0)
    assert [entry.name for entry in store.list()] == ["c", "b", "a", "z"]
    assert store.latest().path.name == "c.bin"
    assert store.names() == ("a", "b", "c", "z")


def test_one_bad_file_is_a_row_and_nothing_else_is_listed(store):
    info = save_named(store, "good")
    shutil.copy(info.path, store.root / "cut.bin")
    os.truncate(store.root / "cut.bin", 1700)
    (store.root / "empty.bin").touch()
    (store.root / "dangling.bin").symlink_to("nowhere")
    (store.root / "folder.bin").mkdir()
    (store.root / "notes.txt").touch()
    (store.root / ".llamakv-0011223344556677.tmp").touch()
    (store.root / ".hidden.bin").touch()
    os.mkfifo(store.root / "pipe.bin")
    entries = store.list()
    assert [(entry.name, entry.error and entry.error.code) for entry in entries] == [
        ("good", None),
        ("cut", "damaged"),
        ("empty", "not_a_session"),
    ]
    assert entries[0].info == info
    assert store.names() == ("cut", "empty", "good")


def test_a_copied_folder_is_the_same_store(store, tmp_path):
    save_named(store, "one")
    save_named(store, "two")
    shutil.copytree(store.root, tmp_path / "copy")
    assert SessionStore(tmp_path / "copy").names() == ("one", "two")


# ---------------------------------------------------------------- removing


def test_removing_checks_all_before_the_first(store):
    info = save_named(store, "one")
    with pytest.raises(NotFoundError):
        store.remove("one", "missing")
    assert store.names() == ("one",)
    assert store.remove("one", "one") == (info.path,)
    assert store.names() == ()


def test_damaged_sessions_can_be_removed_and_other_files_not(store, tmp_path):
    info = save_named(store, "one")
    os.truncate(info.path, 1700)
    store.remove("one")
    other = tmp_path / "model.gguf"
    other.write_bytes(b"GGUF" * 1000)
    for ref in (str(other), str(tmp_path)):
        with pytest.raises(NotASessionError):
            store.remove(ref)
    assert other.exists()


def test_removing_a_link_leaves_what_it_points_to(store):
    info = save_named(store, "one")
    (store.root / "link.bin").symlink_to(info.path)
    store.remove("link")
    assert store.names() == ("one",)


def test_a_session_being_written_is_not_removed(store):
    info = save_named(store, "one")
    save_named(store, "another")
    with files.locked(info.path), pytest.raises(LockedError):
        store.remove("another", "one")
    assert store.names() == ("another", "one")


def test_sessions_removed_before_one_that_could_not_be_take_their_sections_along(store, monkeypatch):
    info = save_named(store, "one")
    record = make_record(5, session_id="other")
    create_session(store.resolve("another"), record, [cells(0, 4, seed=1)])
    monkeypatch.setattr(files, "is_locked", lambda path: False)  # it is only just about to be
    with files.locked(info.path), pytest.raises(LockedError):
        store.remove("another", "one")
    assert store.names() == ("one",)
    assert [digest for digest, _ in Objects(store.root).all()] == [info.sections[0].digest]


def test_stale_temporaries_are_collected(store):
    store.resolve_for_writing("one")
    for n_objects in (0, 1):
        stale = store.root / ".llamakv-0011223344556677.tmp"
        stale.touch()
        assert store.collect() == Collected(n_objects=0, n_bytes=0, n_temporaries=1)
        assert not stale.exists()
        assert len(list(Objects(store.root).all())) == n_objects
        if not n_objects:
            save_named(store, "one")


def test_a_store_whose_marker_is_damaged_lists_its_sessions_and_refuses_the_rest(store):
    info = save_named(store, "one")
    for content in (b"", b"[]", b"null", b'{"llamakv_store": true}', b'{"llamakv_store": 0}', b"[" * 9999, b"\xff"):
        (store.root / ".store").write_bytes(content)
        assert [entry.info for entry in store.list()] == [info]
        for change in (
            lambda: store.resolve("one"),
            lambda: store.resolve_for_writing("two"),
            lambda: store.remove("one"),
            lambda: store.remove(str(info.path)),
            store.collect,
            lambda: save(store.root / "two.bin"),
        ):
            with pytest.raises(DamagedError, match="damaged store") as caught:
                change()
            assert "llamakv repair" in (caught.value.hint or "")
        assert (store.root / ".store").read_bytes() == content
    assert store.names() == ("one",)
