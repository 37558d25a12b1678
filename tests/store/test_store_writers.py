"""A writer of a store that fails or dies after any step leaves sound sessions, and nothing that stays for ever."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from llamakv.errors import ConflictError, NewerFormatError, NotFoundError, WriteError
from llamakv.store import files, format, session_store
from llamakv.store.collector import collect
from llamakv.store.objects import CLAIMS, Objects
from llamakv.store.section_writers import ObjectWriter
from llamakv.store.session_file import (
    SessionReader,
    change_lineage,
    compact_session,
    create_session,
    extend_session,
    read_session,
    truncate_sections,
    verify_session,
)
from llamakv.store.session_store import SessionStore
from llamakv.store.store_folder import make_store, read_budget
from tests.store.at_rest import check, left_over, read_all, referenced, save, there
from tests.store.samples import cells, make_record
from tests.store.test_durability import Died, FailingFiles, as_nobody, error_of


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # what is on the disk when is for other tests


@pytest.fixture
def root(tmp_path):
    make_store(tmp_path / "store")
    return tmp_path / "store"


# ---------------------------------------------------------------- saving


def test_changing_what_a_session_says_of_itself_leaves_all_else(root):
    info = save(root, "a", n=3)
    os.utime(info.path, ns=(10**18, 10**18))
    changed = change_lineage(info.path, lambda lineage: lineage.__class__(session_id="a", pinned=True, ttl_s=60.0))
    assert (changed.sections, changed.generation) == (info.sections, 2)
    assert (changed.record.lineage.pinned, changed.record.lineage.ttl_s) == (True, 60.0)
    assert info.path.stat().st_mtime_ns == 10**18
    assert changed == read_session(info.path)
    check(root)


def test_compacting_in_a_store_makes_a_small_index_and_nothing_else(root, tmp_path):
    info = save(root, "a", n=3)
    with open(info.path, "ab") as file:
        file.write(bytes(5000))
    compacted = compact_session(info.path)
    assert (compacted.n_dead_bytes, compacted.sections, compacted.record) == (0, info.sections, info.record)
    assert all(section.in_store for section in compacted.sections)
    assert compact_session(info.path) == compacted
    check(root)


def test_a_store_of_a_later_version_is_refused_and_left_as_it_is(root):
    info = save(root, "a")
    (root / ".store").write_text('{"llamakv_store": 2, "something": "new"}')
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    store = SessionStore(root)
    for change in (
        lambda: store.resolve("a"),
        lambda: store.resolve_for_writing("b"),
        lambda: store.list(),
        lambda: store.latest(),
        lambda: store.remove("a"),
        lambda: store.remove(str(info.path)),
        lambda: store.collect(),
        lambda: make_store(root),
        lambda: save(root, "b"),
        lambda: save(root, "a", seed=1, overwrite=True),
        lambda: extend_session(info, make_record(4), keep=info.sections, new=[cells(2, 3)]),
        lambda: change_lineage(info.path, lambda lineage: lineage.__class__(session_id="other")),
    ):
        with pytest.raises(NewerFormatError, match=r"format version 2, this llamakv knows up to 1") as caught:
            change()
        assert (caught.value.exit_status, caught.value.hint) == (13, "pip install --upgrade llamakv")
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()} == before


def test_a_store_made_twice_at_the_same_time_keeps_the_budget_of_whoever_set_one(tmp_path, monkeypatch):
    from llamakv.store import store_folder

    root = tmp_path / "store"
    real = store_folder.is_store

    def late(folder):
        found = real(folder)
        if not found:
            monkeypatch.setattr(store_folder, "is_store", real)
            make_store(root)
            store_folder.write_budget(root, store_folder.StoreBudget(max_bytes=1000))
        return found

    monkeypatch.setattr(store_folder, "is_store", late)
    make_store(root)
    assert read_budget(root).max_bytes == 1000
    assert os.listdir(root) == [".store"]


def test_a_session_removed_just_before_it_is_replaced_is_no_error(root, monkeypatch):
    save(root, "a")
    real = files.locked

    def locked(path, **options):
        path.unlink(missing_ok=True)
        return real(path, **options)

    monkeypatch.setattr(files, "locked", locked)
    save(root, "a", seed=1, overwrite=True)
    collect(root)
    check(root)


def test_a_session_removed_just_before_it_is_changed_is_not_found(root):
    info = save(root, "a")

    def change(lineage):
        info.path.unlink(missing_ok=True)
        return replace(lineage, pinned=True)

    with pytest.raises(NotFoundError):
        change_lineage(info.path, change)


def test_a_session_replaced_and_collected_under_a_writers_hands_is_a_conflict_and_no_damage(root, monkeypatch):
    """Who overwrites a place that was empty when it looked does not know of who locked what came there since."""
    base = save(root, "a")
    real = ObjectWriter.keep

    def late(self, path, sections, locked_fd):
        create_session(root / "other.bin", make_record(4), [cells(0, 3)])
        os.replace(root / "other.bin", path)
        collect(root)
        real(self, path, sections, locked_fd)

    monkeypatch.setattr(ObjectWriter, "keep", late)
    with pytest.raises(ConflictError, match="replaced or removed while it was saved"):
        extend_session(base, make_record(4), keep=base.sections, new=[cells(2, 3)])
    check(root)


def test_a_session_saved_just_before_it_is_removed_leaves_no_objects(root, monkeypatch):
    base = save(root, "a")
    real = session_store.SessionStore._check_removable

    def late(self, path):
        real(self, path)
        extend_session(base, make_record(4), keep=base.sections, new=[cells(2, 3)])

    monkeypatch.setattr(session_store.SessionStore, "_check_removable", late)
    SessionStore(root).remove("a")
    check(root)
    assert there(root) == set()


def test_removing_by_path_collects_in_the_store_the_session_was_in(root, tmp_path):
    info = save(root, "a")
    save(root, "b", n=1)
    SessionStore(tmp_path / "another").remove(str(info.path))
    check(root)
    assert len(there(root)) == 1


def test_a_store_nobody_may_write_to_is_read_and_forked_from_and_refuses_the_rest(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # relative paths: another user cannot walk down to pytest's private folder
    tmp_path.chmod(0o755)
    out = tmp_path / "out"
    make_store(out)
    read_all(save(root, "a", n=3).path)  # what another user may not import is imported now
    for path in (root, *root.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    for path in (out, *out.rglob("*")):
        path.chmod(0o777)
    store, here = SessionStore("store"), Path("store")

    def read():
        with SessionReader(store.resolve("a")) as reader:
            n = len(list(reader.read(reader.info.sections)))
            create_session("out/b.bin", make_record(4), [], source=reader, keep=reader.info.sections)
        assert verify_session("out/b.bin").is_sound
        return f"{n} {[entry.name for entry in store.list()]} {store.collect(()) and 'nothing to collect'}"

    assert as_nobody(read) == "3 ['a'] nothing to collect"
    for call in (
        lambda: save(here, "b"),
        lambda: save(here, "a", overwrite=True),
        lambda: extend_session(base := read_session(here / "a.bin"), base.record, keep=base.sections, new=[]),
        lambda: change_lineage(here / "a.bin", lambda lineage: lineage.__class__(session_id="b")),
        lambda: store.remove("a"),
    ):
        message = as_nobody(lambda call=call: error_of(call))
        assert message.startswith("write cannot write 'store"), message
    monkeypatch.undo()
    for path in (root, *root.rglob("*"), out):
        path.chmod(0o700)
    check(root)


# ---------------------------------------------------------------- a writer that dies or fails at each step


def make_new(root):
    return save(root, "new", seed=9, n=3)


def fork(root):
    with SessionReader(root / "a.bin") as reader:
        keep = truncate_sections(reader.info.sections, 2)
        return create_session(root / "new.bin", make_record(4), [cells(2, 3, seed=99)], source=reader, keep=keep)


def replace_all(root):
    return save(root, "a", seed=9, overwrite=True)


def go_on(root):
    base = read_session(root / "a.bin")
    n = len(base.record.tokens)
    new = [cells(n - 1, n, seed=99), cells(n, n + 1, seed=98)]
    return extend_session(base, make_record(n + 2, n_saves=2), keep=base.sections, new=new)


def pin(root):
    return change_lineage(root / "a.bin", lambda lineage: lineage.__class__(session_id="a", pinned=True))


def take_over(root):
    with SessionReader(root.parent / "other" / "a.bin") as reader:
        return create_session(root / "new.bin", make_record(3), [], source=reader, keep=reader.info.sections)


def snapshot(root):
    return {path.name: (read_session(path).record, read_all(path)) for path in root.glob("*.bin")}


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "fails"])
@pytest.mark.parametrize("change", [make_new, fork, replace_all, go_on, pin, take_over])
def test_each_step_may_be_the_last_and_what_it_leaves_is_collected(tmp_path, change, dies):
    start = tmp_path / "start"
    make_store(start)
    save(start, "a", seed=1, n=4)
    save(start, "b", seed=1, n=3)
    make_store(tmp_path / "other")
    save(tmp_path / "other", "a", seed=2)
    shutil.copytree(start, tmp_path / "store")
    old = snapshot(start)
    change(tmp_path / "store")
    new = snapshot(tmp_path / "store")
    assert new != old
    seen = set()
    for n_steps in range(200):
        root = tmp_path / f"store-{n_steps}"
        shutil.copytree(start, root)
        with pytest.MonkeyPatch.context() as patch:
            failing = FailingFiles(patch, n_steps, dies=dies)
            try:
                change(root)
            except (Died, WriteError):
                assert failing.has_failed
            if not failing.has_failed:
                break
        found = snapshot(root)
        assert found in (old, new), n_steps
        seen.add(found == new)
        if not dies:
            assert left_over(root) == []
        collect(root)
        check(root)
        assert snapshot(root) == found
        assert len(os.listdir(Objects(root).folder / CLAIMS)) == 0
    assert n_steps > 4
    assert seen == {False, True}


def test_a_collector_that_dies_or_fails_at_any_removal_loses_nothing(root, monkeypatch):
    save(root, "a", seed=1)
    save(root, "gone", seed=2, n=5)
    (root / "gone.bin").unlink()
    for error in (Died, WriteError):
        real = Objects.remove

        def remove(self, digest, error=error, real=real):
            if digest == min(there(root) - referenced(root)):
                raise error("injected")
            return real(self, digest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Objects, "remove", remove)
            with pytest.raises(error):
                collect(root)
        assert verify_session(root / "a.bin").is_sound
    collect(root)
    check(root)


def test_a_store_without_a_claims_folder_or_lock_gets_them_again(root):
    save(root, "a")
    shutil.rmtree(Objects(root).folder / CLAIMS)
    (Objects(root).folder / ".lock").unlink()
    save(root, "b", seed=1)
    assert collect(root).n_objects == 0
    check(root)
    assert format.VERSION == 2
