"""Objects that nobody refers to go, all others stay, whoever else saves, fails or dies meanwhile."""

import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from llamakv.errors import FormatError, LockedError, NewerFormatError, ReadError
from llamakv.store import claims, codec, collector, files
from llamakv.store.claims import claimed, claiming, store_lock
from llamakv.store.codec import AUTO
from llamakv.store.collector import Marks, collect
from llamakv.store.objects import CLAIMS, Objects
from llamakv.store.session_file import (
    change_lineage,
    compact_session,
    create_session,
    extend_session,
    truncate_sections,
)
from llamakv.store.session_store import SessionStore
from llamakv.store.store_folder import make_store
from tests.store.at_rest import check, left_over, read_all, referenced, save, there
from tests.store.samples import cells, f16_bytes, make_record
from tests.store.test_durability import as_nobody, error_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path):
    make_store(tmp_path / "store")
    return tmp_path / "store"


# ---------------------------------------------------------------- what goes and what stays


def test_what_no_session_refers_to_goes_and_all_else_stays(root):
    save(root, "a", seed=1, n=3)
    save(root, "b", seed=2)
    save(root, "gone", seed=3)
    (root / "gone.bin").unlink()
    n_bytes = sum(entry.stat().st_size for digest, entry in Objects(root).all() if digest not in referenced(root))
    would = collect(root, dry_run=True)
    assert len(there(root)) == 7
    assert (would.n_objects, would.n_bytes) == (2, n_bytes)
    assert collect(root) == would
    check(root)
    assert collect(root).n_objects == 0


def test_a_dry_run_counts_as_if_sessions_were_gone(root):
    save(root, "a", n=3)
    save(root, "b", n=2)  # the first two of a
    assert collect(root, dry_run=True).n_objects == 0
    assert collect(root, dry_run=True, without={"b"}).n_objects == 0
    assert collect(root, dry_run=True, without={"a"}).n_objects == 1
    assert collect(root, dry_run=True, without={"a", "b"}).n_objects == 3
    check(root)


def test_of_candidates_only_those_nobody_refers_to_go(root):
    one, other = save(root, "a", seed=1), save(root, "b", seed=2)
    orphan = save(root, "gone", seed=3)
    (root / "gone.bin").unlink()
    (root / "b.bin").unlink()
    candidates = {section.digest for info in (one, other) for section in info.sections}
    assert collect(root, candidates).n_objects == 2
    assert there(root) == {section.digest for info in (one, orphan) for section in info.sections}


def test_sections_behind_a_cut_go_and_those_before_it_stay(root):
    info = save(root, "a", n=6)
    extend_session(info, make_record(4, n_saves=2), keep=truncate_sections(info.sections, 3), new=[])
    assert collect(root).n_objects == 3
    assert len(read_all(root / "a.bin")) == 3
    check(root)


def test_more_objects_than_the_lock_is_held_for_go(root, monkeypatch):
    monkeypatch.setattr(collector, "_N_BATCH", 2)
    save(root, "a", n=2)
    save(root, "gone", seed=1, n=7)
    (root / "gone.bin").unlink()
    progress = []
    assert collect(root, on_progress=lambda n_done, n: progress.append((n_done, n))).n_objects == 7
    assert progress == [(2, 7), (4, 7), (6, 7), (7, 7)]
    check(root)


def test_a_folder_that_is_no_store_has_nothing_to_collect(tmp_path):
    assert collect(tmp_path).n_objects == 0
    assert collect(tmp_path / "missing").n_objects == 0
    assert os.listdir(tmp_path) == []


def test_a_session_with_its_sections_in_its_own_file_needs_no_objects(root, tmp_path):
    save(tmp_path, "alone", n=3)
    shutil.move(tmp_path / "alone.bin", root)
    save(root, "a")
    assert collect(root).n_objects == 0
    assert len(read_all(root / "alone.bin")) == 3


@pytest.mark.parametrize("name", ["notes", "notes.session", ".hidden.bin", "notes.BIN"])
def test_what_has_no_name_of_a_session_in_a_store_keeps_its_sections_itself(root, name):
    sections = [cells(i, i + 1, n_bytes=300) for i in range(3)]
    info = create_session(root / name, make_record(4), sections)
    assert not info.in_store
    info = extend_session(info, make_record(6), keep=info.sections[:2], new=[cells(2, 5, n_bytes=900)])
    info = change_lineage(info.path, lambda lineage: replace(lineage, pinned=True))
    compacted = compact_session(info.path)
    assert compacted.n_file_bytes < info.n_file_bytes
    save(root, "a", n=3)
    create_session(root / name, make_record(4), sections, overwrite=True)
    SessionStore(root).remove("a")
    collect(root)
    assert there(root) == set(), "nobody would know that they are needed"
    assert len(read_all(root / name)) == 3


@pytest.mark.parametrize("content", [b"", b"GGUF" + bytes(4000), None], ids=["empty", "something else", "cut"])
def test_an_index_that_cannot_be_read_keeps_everything(root, content):
    save(root, "a")
    info = save(root, "b", seed=1)
    data = (root / "b.bin").read_bytes()
    (root / "b.bin").write_bytes(data[:-1] if content is None else content)
    save(root, "gone", seed=2)
    (root / "gone.bin").unlink()
    before = there(root)
    with pytest.raises(FormatError) as caught:
        collect(root)
    assert "llamakv rm b" in (caught.value.hint or "")
    assert SessionStore(root).collect() is None
    SessionStore(root).remove("a")  # goes; what it referred to waits
    assert there(root) == before
    (root / "b.bin").write_bytes(data)
    assert collect(root).n_objects == 4
    assert there(root) == {section.digest for section in info.sections}


def test_a_session_file_that_may_not_be_looked_at_keeps_everything(root, monkeypatch):
    save(root, "a")
    real = files.open_for_reading

    def refuse(path):
        if path.suffix == ".bin":
            raise ReadError("injected", path=str(path))
        return real(path)

    monkeypatch.setattr(files, "open_for_reading", refuse)
    with pytest.raises(ReadError):
        collect(root)
    assert SessionStore(root).collect() is None
    monkeypatch.undo()
    check(root)


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_sessions_that_cannot_even_be_asked_about_keep_everything(root, monkeypatch):
    save(root, "a")
    save(root, "gone", seed=1)
    (root / "gone.bin").unlink()
    for path in (root, *root.rglob("*")):
        os.chown(path, 65534, 65534)
    monkeypatch.chdir(root.parent)
    root.chmod(0o600)  # the names in it can be listed, and nothing else
    message = as_nobody(lambda: error_of(lambda: list(collector.session_files(Path("store")))))
    assert message == "read cannot read 'store': Permission denied"
    root.chmod(0o700)


def test_a_store_of_a_later_version_is_not_collected(root):
    save(root, "gone")
    (root / "gone.bin").unlink()
    (root / ".store").write_text('{"llamakv_store": 2}')
    before = sorted(root.rglob("*"))
    with pytest.raises(NewerFormatError):
        collect(root)
    assert sorted(root.rglob("*")) == before


# ---------------------------------------------------------------- claims


def orphan(root, seed=7):
    """An object that no session refers to."""
    encoded = codec.encode(f16_bytes(500, seed), AUTO)
    Objects(root).put(encoded)
    return encoded.digest.hex()


def test_an_object_that_is_claimed_stays_until_the_claim_ends(root):
    one, other = orphan(root, 1), orphan(root, 2)
    with claiming(Objects(root)) as claim:
        assert claim.add([one, "ab" * 32, one]) == ("ab" * 32,)
        assert collect(root).n_objects == 1
        assert there(root) == {one}
        assert claim.add([other]) == (other,)
        with store_lock(Objects(root), shared=False):
            assert claimed(Objects(root)) == {one, other, "ab" * 32}
    assert collect(root).n_objects == 1
    assert left_over(root) == []


def test_what_is_claimed_before_it_is_there_stays_too(root):
    with claiming(Objects(root)) as claim:
        digest = codec.encode(f16_bytes(500, 7), AUTO).digest.hex()
        assert claim.add([digest]) == (digest,)
        assert orphan(root) == digest
        assert collect(root).n_objects == 0
        assert claim.add([digest]) == ()
    assert collect(root).n_objects == 1


_CLAIMING = """
import sys, time
from pathlib import Path
from llamakv.store.claims import claiming
from llamakv.store.objects import Objects
with claiming(Objects(Path(sys.argv[1]))) as claim:
    claim.add(sys.argv[2:])
    print("ready", flush=True)
    time.sleep(60)
"""


def test_the_claim_of_a_process_counts_while_it_lives_and_no_longer(root):
    digest = orphan(root)
    command = [sys.executable, "-c", _CLAIMING, root, digest]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout.readline() == "ready\n"
        assert collect(root).n_objects == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert len(os.listdir(Objects(root).folder / CLAIMS)) == 1
    collected = collect(root)
    assert (collected.n_objects, collected.n_temporaries) == (1, 1)
    assert left_over(root) == []


def in_thread(work):
    """Start ``work``; what is returned waits for it and gives its result."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()

    def result():
        thread.join(30)
        return found[0]

    return result


def test_a_claim_added_while_the_collector_waits_for_its_turn_counts(root, monkeypatch):
    digest, other = orphan(root, 1), orphan(root, 2)
    is_waiting = threading.Event()
    real = collector.store_lock

    def store_lock_told(*arguments, **options):
        is_waiting.set()
        return real(*arguments, **options)

    monkeypatch.setattr(collector, "store_lock", store_lock_told)
    with claiming(Objects(root)) as claim:
        with store_lock(Objects(root), shared=True):
            result = in_thread(lambda: collect(root))
            assert is_waiting.wait(30)
            assert claim.add([digest]) == ()
        assert result().n_objects == 1
        assert there(root) == {digest}
    assert other not in there(root)


def test_a_session_saved_while_the_collector_waits_for_its_turn_counts(root, monkeypatch):
    base = save(root, "a")
    left = save(root, "gone", seed=1, n=3)
    (root / "gone.bin").unlink()
    real = collector.store_lock

    def store_lock_late(*arguments, **options):
        monkeypatch.setattr(collector, "store_lock", real)
        save(root, "b", seed=1)  # with sections that were garbage when the collector looked
        extend_session(base, make_record(4, n_saves=2), keep=base.sections, new=[cells(2, 3, n_bytes=300, seed=1002)])
        return real(*arguments, **options)

    monkeypatch.setattr(collector, "store_lock", store_lock_late)
    assert collect(root).n_objects == 0
    assert {section.digest for section in left.sections} <= there(root)
    check(root)


def test_a_writer_waits_for_the_collector_and_finds_what_it_took_away_missing(root):
    digest = orphan(root)
    with claiming(Objects(root)) as claim:
        with store_lock(Objects(root), shared=False):
            result = in_thread(lambda: claim.add([digest]))
            Objects(root).remove(digest)
        assert result() == (digest,)


def test_a_collector_that_does_not_get_its_turn_removes_nothing(root, monkeypatch):
    orphan(root)
    monkeypatch.setattr(claims, "WAIT_S", 0.02)
    with store_lock(Objects(root), shared=True), pytest.raises(LockedError) as caught:
        collect(root)
    assert caught.value.exit_status == 12
    assert len(there(root)) == 1


def test_removing_a_session_succeeds_though_its_sections_cannot_be_collected_now(root, monkeypatch):
    save(root, "a")
    monkeypatch.setattr(claims, "WAIT_S", 0.02)
    with store_lock(Objects(root), shared=True):
        assert SessionStore(root).remove("a") == (root / "a.bin",)
    assert len(there(root)) == 2
    assert collect(root).n_objects == 2


def test_an_index_replaced_by_one_that_looks_the_same_is_read_again(root, monkeypatch):
    """File systems give the same inode, and times of the same tick of the clock, to files written one after another."""
    save(root, "a", seed=1)
    marks = Marks(root)
    monkeypatch.setattr(collector, "session_files", lambda root: [("a", root / "a.bin", (*stamp[:2], *stamp[2:]))])
    status = (root / "a.bin").stat()
    stamp = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    assert marks.update() == referenced(root)
    save(root, "a", seed=2, overwrite=True)
    assert marks.update() == referenced(root)


def test_an_old_index_is_read_once(root, monkeypatch):
    save(root, "a")
    stamp = (1, 2, 10**18, 10**18)
    monkeypatch.setattr(collector, "session_files", lambda root: [("a", root / "a.bin", stamp)])
    marks = Marks(root)
    first = marks.update()
    monkeypatch.setattr(collector, "digests_of", lambda path: pytest.fail("read again"))
    assert marks.update() == first == referenced(root)


def test_what_removed_the_last_reference_is_on_the_disk_before_the_object_goes(root, monkeypatch):
    save(root, "a", seed=1)
    calls = []
    real_sync, real_remove = files.sync_folder, Objects.remove
    monkeypatch.setattr(files, "sync_folder", lambda folder: (calls.append(folder), real_sync(folder))[1])
    monkeypatch.setattr(Objects, "remove", lambda self, digest: (calls.append("remove"), real_remove(self, digest))[1])
    (root / "a.bin").unlink()
    assert collect(root).n_objects == 2
    assert calls == [root, "remove", "remove"]
