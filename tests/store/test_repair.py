"""Damage in a store is found, told, and left out: what is sound of a session stays usable."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamakv.errors import NewerFormatError, ReadError
from llamakv.ops.checking import verify_sessions, verify_store
from llamakv.ops.repair import Outcome, repair_sessions, repair_store
from llamakv.ops.requests import Reporter
from llamakv.records import MemoryKind
from llamakv.store import files, objects
from llamakv.store.checking import Trouble
from llamakv.store.claims import claiming
from llamakv.store.collector import collect
from llamakv.store.digests import digest_bytes
from llamakv.store.objects import Objects
from llamakv.store.session_file import SessionReader, create_session, extend_session, read_session
from llamakv.store.store_folder import StoreBudget, make_store, read_budget, write_budget
from llamakv.store.survey import take_survey
from tests.store import samples, stores
from tests.store.stores import add_session, flip, object_of

ROOT = Path(__file__).parents[2]
QUIET = Reporter()


@pytest.fixture
def root(tmp_path):
    make_store(tmp_path / "store")
    return tmp_path / "store"


def outcomes(report):
    return {session.name: session.outcome for session in report.sessions}


def make_newer(path):
    data = bytearray(path.read_bytes())
    data[16] = 9  # the version, in session files and objects alike
    if path.suffix != ".bin":
        data[80:112] = digest_bytes(bytes(data[:80]))  # an object's header is whole
    path.write_bytes(data)


# ---------------------------------------------------------------- verifying


def test_a_whole_store_is_read_once_and_found_sound(root):
    add_session(root, "one", 600, text=1)
    add_session(root, "two", 513, text=1)
    told = []
    check = verify_store(root, Reporter(progress=lambda *arguments: told.append(arguments)))
    assert (check.n_wrong, check.n_orphans, check.n_objects) == (0, 0, 3 + 0)
    assert check.n_bytes == take_survey(root).n_object_bytes
    assert told[-1] == ("verify", check.n_bytes, check.n_bytes)
    assert verify_store(root, QUIET, fast=True).n_bytes == 0


def test_a_folder_that_is_not_there_is_an_empty_store(tmp_path):
    check = verify_store(tmp_path / "none", QUIET)
    assert (check.n_wrong, check.sessions, check.n_objects) == (0, (), 0)
    assert repair_store(tmp_path / "none", QUIET).is_sound
    assert not (tmp_path / "none").exists()


def test_each_kind_of_trouble_is_told_with_the_sessions_it_hits(root):
    for name in ("one", "two"):
        add_session(root, name, 513, text=1)
    add_session(root, "gone", 257, text=2)
    add_session(root, "newer", 257, text=3)
    add_session(root, "sound", 257, text=4)
    add_session(root, "orphan", 257, text=5)
    flip(object_of(root, "one", 1))
    object_of(root, "gone", 0).unlink()
    make_newer(object_of(root, "newer", 0))
    files.remove(root / "orphan.bin")
    (root / "bad.bin").write_bytes(b"x" * 3000)
    check = verify_store(root, QUIET)
    by_name = {session.name: session for session in check.sessions}
    assert {name: [bad.trouble for bad in session.bad] for name, session in by_name.items()} == {
        "one": [Trouble.DAMAGED],
        "two": [Trouble.DAMAGED],
        "gone": [Trouble.MISSING],
        "newer": [Trouble.NEWER],
        "sound": [],
        "bad": [],
    }
    assert by_name["bad"].error.code == "not_a_session"
    assert (by_name["one"].rest.n_cells, by_name["gone"].rest.n_cells) == (256, 0)
    assert sorted(check.users.values()) == [("gone",), ("newer",), ("one", "two")]
    assert check.n_wrong == 4
    assert check.n_orphans == 0  # with an index that cannot be read nobody knows
    (root / "bad.bin").unlink()
    assert verify_store(root, QUIET).n_orphans == 1
    fast = verify_store(root, QUIET, fast=True)
    assert {session.name for session in fast.sessions if session.bad} == {"gone", "newer"}


def test_a_session_saved_while_it_is_verified_is_looked_at_again(root, monkeypatch):
    info = add_session(root, "one", 513, text=1)
    lost = Objects(root).path_of(info.sections[1].digest)
    real = objects.Objects.open

    def replaced_meanwhile(self, digest):
        if lost.exists() and digest == info.sections[1].digest:
            add_session(root, "one", 513, text=2)
            lost.unlink()
        return real(self, digest)

    monkeypatch.setattr(objects.Objects, "open", replaced_meanwhile)
    assert verify_store(root, QUIET).n_wrong == 0


@pytest.mark.parametrize(("number", "trouble"), [(errno.EIO, Trouble.DAMAGED), (errno.EACCES, Trouble.UNREADABLE)])
def test_what_the_system_forbids_is_not_taken_for_lost(root, monkeypatch, number, trouble):
    add_session(root, "one", 513)
    refused = object_of(root, "one", 1)
    real = files.open_for_reading

    def refuse(path):
        if path == refused:
            raise ReadError(f"cannot read '{path}'", path=str(path), errno=number)
        return real(path)

    monkeypatch.setattr(files, "open_for_reading", refuse)
    assert [bad.trouble for bad in verify_sessions([root / "one.bin"], QUIET)[0].bad] == [trouble]
    before = stores.files_of(root)
    assert outcomes(repair_store(root, QUIET))["one"] is (
        Outcome.REPAIRED if number == errno.EIO else Outcome.UNREADABLE
    )
    assert (stores.files_of(root) == before) is (number == errno.EACCES)


# ---------------------------------------------------------------- what of a session is kept


@pytest.mark.parametrize("lose", [flip, Path.unlink], ids=["damaged", "missing"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_state_before_the_first_lost_section_is_kept(root, index, lose):
    before = add_session(root, "one", 600, idle_s=5000)
    used_ns = (root / "one.bin").stat().st_mtime_ns
    lose(object_of(root, "one", index))
    dry = repair_store(root, QUIET, is_dry_run=True)
    assert read_session(root / "one.bin").commit == before.commit
    report = repair_store(root, QUIET)
    assert report.sessions == dry.sessions
    assert (report.is_sound, dry.is_sound) == (True, False)
    (session,) = report.sessions
    assert (session.outcome, session.n_tokens, session.n_cells, session.n_to_read) == (
        Outcome.REPAIRED,
        600,
        256 * index,
        599 - 256 * index,
    )
    info = read_session(root / "one.bin")
    assert info.record == before.record
    assert info.sections == before.sections[:index]
    assert info.n_cells_held == 256 * index
    assert (root / "one.bin").stat().st_mtime_ns == used_ns
    with SessionReader(root / "one.bin") as reader:
        assert len(list(reader.read(info.sections))) == index
    assert verify_store(root, QUIET).n_wrong == 0
    assert outcomes(repair_store(root, QUIET)) == {"one": Outcome.SOUND}


RECURRENT = [samples.tail(50), samples.tail(90), samples.tail(99)]
HYBRID = [samples.cells(0, 64), samples.cells(64, 99), samples.tail(50), samples.tail(80), samples.tail(99)]


@pytest.mark.parametrize(
    ("kind", "sections", "lost", "n_cells", "n_kept"),
    [
        (MemoryKind.RECURRENT, RECURRENT, {2}, 90, 2),
        (MemoryKind.RECURRENT, RECURRENT, {0}, 99, 2),
        (MemoryKind.RECURRENT, RECURRENT, {0, 1, 2}, 0, 0),
        (MemoryKind.HYBRID, HYBRID, {4}, 80, 4),
        (MemoryKind.HYBRID, HYBRID, {1}, 50, 2),
        (MemoryKind.HYBRID, HYBRID, {0}, 0, 0),
        (MemoryKind.HYBRID, HYBRID, {3}, 99, 4),
        (MemoryKind.WINDOWED, [samples.whole(99)], {0}, 0, 0),
    ],
)
def test_other_kinds_of_memory_go_back_to_where_all_parts_are_there(root, kind, sections, lost, n_cells, n_kept):
    add_session(root, "one", 100, kind=kind, sections=sections)
    paths = [object_of(root, "one", index) for index in lost]
    for path in paths:
        flip(path)
    (session,) = repair_sessions([root / "one.bin"], QUIET).sessions
    assert (session.outcome, session.n_cells) == (Outcome.REPAIRED, n_cells)
    info = read_session(root / "one.bin")
    assert (info.n_cells_held, len(info.sections), len(info.record.tokens)) == (n_cells, n_kept, 100)
    assert not any(path.exists() for path in paths)
    assert verify_store(root, QUIET).n_wrong == 0


@pytest.mark.parametrize("in_store", [False, True])
def test_a_session_with_sections_of_its_own_is_repaired_too(root, tmp_path, in_store):
    path = tmp_path / "session.bin"
    before = create_session(path, samples.make_record(600), samples.cells_up_to(599))
    section = before.sections[1]
    flip(path, lambda n: section.offset + section.n_stored // 2)
    if in_store:
        path = Path(shutil.move(path, root / "session.bin"))
    (session,) = repair_sessions([path], QUIET).sessions
    assert (session.outcome, session.n_cells) == (Outcome.REPAIRED, 256)
    info = read_session(path)
    assert (info.record, info.n_cells_held, info.in_store) == (before.record, 256, in_store)
    assert outcomes(repair_sessions([path], QUIET)) == {"session": Outcome.SOUND}
    with SessionReader(path) as reader:
        assert len(list(reader.read(info.sections))) == 1


# ---------------------------------------------------------------- sessions that share


def test_all_that_share_a_damaged_section_are_repaired_and_others_not_touched(root):
    for name, text in (("one", 1), ("two", 1), ("other", 2)):
        add_session(root, name, 600, text=text)
    bad = object_of(root, "one", 1)
    flip(bad)
    other = (root / "other.bin").read_bytes()
    report = repair_store(root, QUIET)
    assert outcomes(report) == {"one": Outcome.REPAIRED, "two": Outcome.REPAIRED, "other": Outcome.SOUND}
    assert (report.n_objects, report.n_objects_left, bad.exists()) == (1, 0, False)
    assert (root / "other.bin").read_bytes() == other


def test_repairing_one_session_leaves_the_objects_of_the_others(root):
    for name in ("one", "two"):
        add_session(root, name, 600, text=1)
    bad = object_of(root, "one", 1)
    flip(bad)
    report = repair_sessions([root / "one.bin"], QUIET)
    assert (report.n_objects, report.n_objects_left, bad.exists()) == (0, 1, True)
    assert read_session(root / "two.bin").n_cells_held == 599
    assert repair_store(root, QUIET).n_objects == 1


def test_a_damaged_object_that_a_writer_claims_is_left_to_it(root):
    add_session(root, "one", 600)
    bad = object_of(root, "one", 2)
    flip(bad)
    with claiming(Objects(root)) as claim:
        claim.add([bad.name])
        report = repair_store(root, QUIET)
        assert (report.n_objects, report.n_objects_left, bad.exists()) == (0, 1, True)
    add_session(root, "two", 600)  # writes the same content again, over the damaged one
    assert verify_store(root, QUIET).n_wrong == 0


def test_a_damaged_object_of_no_session_goes(root):
    add_session(root, "one", 257, text=1)
    orphan = object_of(root, "one", 0)
    files.remove(root / "one.bin")
    flip(orphan)
    assert verify_store(root, QUIET).n_wrong == 1
    assert repair_store(root, QUIET).n_objects == 1
    assert not orphan.exists()


# ---------------------------------------------------------------- what cannot be repaired


def test_an_index_that_cannot_be_read_is_moved_aside_and_kept(root):
    add_session(root, "one", 257, text=1)
    add_session(root, "two", 257, text=2)
    for number in (1, 2, 3):
        data = bytes([number]) * 2000
        (root / "bad.bin").write_bytes(data)
        (bad, one, _) = repair_store(root, QUIET).sessions
        assert (bad.outcome, one.outcome) == (Outcome.MOVED, Outcome.SOUND)
        assert bad.moved_to.name == ("bad.bin.damaged" if number == 1 else f"bad.bin.damaged-{number}")
        assert bad.moved_to.read_bytes() == data
    assert sorted(session.name for session in take_survey(root).sessions) == ["one", "two"]
    collect(root)
    assert len(list(root.glob("bad.bin.damaged*"))) == 3


def test_a_long_name_is_moved_aside_too(root):
    path = root / f"{'ü' * 125}.bin"
    path.write_bytes(b"x" * 2000)
    (session,) = repair_store(root, QUIET).sessions
    assert len(os.fsencode(session.moved_to.name)) <= 255
    assert session.moved_to.read_bytes() == b"x" * 2000


def test_what_a_later_llamakv_wrote_is_left_alone(root):
    add_session(root, "index", 257, text=1)
    add_session(root, "object", 513, text=2)
    make_newer(root / "index.bin")
    make_newer(object_of(root, "object", 1))
    before = stores.files_of(root)
    report = repair_store(root, QUIET)
    assert outcomes(report) == {"index": Outcome.NEWER, "object": Outcome.NEWER}
    assert not report.is_sound
    assert stores.files_of(root) == before
    (root / ".store").write_text('{"llamakv_store": 9}')
    with pytest.raises(NewerFormatError):
        repair_store(root, QUIET)


def test_a_file_outside_of_stores_that_cannot_be_read_stays(tmp_path):
    path = tmp_path / "session.bin"
    path.write_bytes(b"x" * 2000)
    report = repair_sessions([path], QUIET)
    assert outcomes(report) == {"session": Outcome.LOST}
    assert not report.is_sound
    assert path.read_bytes() == b"x" * 2000


@pytest.mark.parametrize("in_store", [False, True])
@pytest.mark.parametrize("how", ["index", "cut", "both"])
def test_a_file_whose_last_save_cannot_be_read_goes_back_to_the_one_before(root, tmp_path, how, in_store):
    path = (root if in_store else tmp_path) / "session.bin"
    elsewhere = tmp_path / "made.bin"
    before = create_session(elsewhere, samples.make_record(400), samples.cells_up_to(399))
    record = samples.make_record(600, n_saves=2)
    after = extend_session(before, record, keep=before.sections, new=[samples.cells(399, 599)])
    shutil.move(elsewhere, path)
    if how == "cut":
        os.truncate(path, after.n_file_bytes - 1)
    else:
        flip(path, lambda n: n - 20)
    if how == "both":
        flip(path, lambda n: before.sections[1].offset + 40)
    data = path.read_bytes()
    (dry,) = repair_sessions([path], QUIET, is_dry_run=True).sessions
    assert path.read_bytes() == data
    report = repair_sessions([path], QUIET)
    (session,) = report.sessions
    n_cells = 256 if how == "both" else 399
    assert (session.outcome, session.n_tokens, session.n_cells) == (Outcome.WENT_BACK, 400, n_cells)
    assert (dry.outcome, dry.n_tokens, report.is_sound) == (Outcome.WENT_BACK, 400, True)
    info = read_session(path)
    assert (info.record, info.n_cells_held) == (before.record, n_cells)
    assert outcomes(repair_sessions([path], QUIET)) == {"session": Outcome.SOUND}
    extend_session(info, record, keep=info.sections, new=[samples.cells(n_cells, 599)])
    assert verify_sessions([path], QUIET)[0].is_sound


def test_a_session_being_written_is_left_alone(root, monkeypatch):
    monkeypatch.setattr("llamakv.store.locks.locked.__wrapped__.__kwdefaults__", {"wait_s": 0.0})
    add_session(root, "one", 600)
    (root / "bad.bin").write_bytes(b"x" * 2000)
    bad = object_of(root, "one", 1)
    flip(bad)
    with files.locked(root / "one.bin"), files.locked(root / "bad.bin"):
        before = stores.files_of(root)
        report = repair_store(root, QUIET)
        assert outcomes(report) == {"one": Outcome.LOCKED, "bad": Outcome.LOCKED}
        assert (report.is_sound, report.n_objects_left) == (False, 1)
        assert stores.files_of(root) == before
    assert outcomes(repair_store(root, QUIET)) == {"one": Outcome.REPAIRED, "bad": Outcome.MOVED}


# ---------------------------------------------------------------- the store itself


def test_a_damaged_store_file_is_written_again(root):
    add_session(root, "one", 257)
    write_budget(root, StoreBudget(max_bytes=10**9))
    (root / ".store").write_text("{")
    assert verify_store(root, QUIET).n_wrong == 1
    assert repair_store(root, QUIET, is_dry_run=True).is_store_written
    assert (root / ".store").read_text() == "{"
    assert repair_store(root, QUIET).is_store_written
    assert read_budget(root) == StoreBudget()
    assert not repair_store(root, QUIET).is_store_written


def test_the_cache_and_what_killed_writers_left_go(root):
    add_session(root, "one", 257)
    (root / ".cache").mkdir(exist_ok=True)
    (root / ".cache" / "sessions.sqlite").write_bytes(b"x")
    (root / ".cache.old").mkdir()
    stale = [folder / ".llamakv-0011223344556677.tmp" for folder in (root, root / ".objects" / ".claims")]
    for path in stale:
        path.touch()
    assert repair_store(root, QUIET, is_dry_run=True).n_temporaries == 0
    assert all(path.exists() for path in stale)
    assert repair_store(root, QUIET).n_temporaries == 2
    assert sorted(path.name for path in root.iterdir()) == [".objects", ".store", "one.bin"]
    assert not stale[1].exists()


# ---------------------------------------------------------------- killed

STEPS = ("write_at", "sync", "publish", "sync_folder", "discard", "remove_stale_temporaries", "set_time")


class Died(BaseException):
    """The process is gone: nothing runs after it."""


def die_after(patch, n_steps):
    """Let so many steps of the files layer pass; none after that is done."""
    left = [n_steps]

    def wrap(real):
        def step(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                raise Died
            return real(*arguments, **options)

        return step

    for name in STEPS:
        patch.setattr(files, name, wrap(getattr(files, name)))
    return left


def damaged_store(root):
    shutil.rmtree(root)
    add_session(root, "one", 600, text=1)
    add_session(root, "two", 513, text=1)
    add_session(root, "own", 257, text=3)
    (root / "bad.bin").write_bytes(b"x" * 2000)
    flip(object_of(root, "one", 1))
    object_of(root, "own", 0).unlink()
    (root / ".store").write_text("{")


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_repair_that_is_killed_is_finished_by_the_next(root, every):
    records = {}
    for n_steps in range(0, 200, every):
        damaged_store(root)
        records = {name: read_session(root / f"{name}.bin").record for name in ("one", "two", "own")}
        with pytest.MonkeyPatch.context() as patch:
            left = die_after(patch, n_steps)
            with contextlib.suppress(Died):
                repair_store(root, QUIET)
        assert {name: read_session(root / f"{name}.bin").record for name in records} == records
        report = repair_store(root, QUIET)
        assert report.is_sound
        assert verify_store(root, QUIET).n_wrong == 0
        assert {name: read_session(root / f"{name}.bin").n_cells_held for name in records} == {
            "one": 256,
            "two": 256,
            "own": 0,
        }
        assert [path.read_bytes() for path in root.glob("bad*")] == [b"x" * 2000]
        if left[0] >= 0:
            break
    assert 20 < n_steps < 199


SCRIPT = """
import os, signal, sys, threading, time
from pathlib import Path
from llamakv.ops.repair import repair_store
from llamakv.ops.requests import Reporter
delay_s = float(sys.argv[2])
threading.Thread(target=lambda: (time.sleep(delay_s), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()
repair_store(Path(sys.argv[1]), Reporter())
time.sleep(1)
"""


@pytest.mark.parametrize("delay_s", [0.002, 0.01, 0.03])
def test_kill_9_at_any_moment_leaves_a_store_that_can_be_repaired(root, delay_s):
    damaged_store(root)
    done = subprocess.run([sys.executable, "-c", SCRIPT, root, str(delay_s)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert repair_store(root, QUIET).is_sound
    assert verify_store(root, QUIET).n_wrong == 0
    assert read_session(root / "one.bin").n_cells_held == 256


# ---------------------------------------------------------------- any damage


@settings(max_examples=15)
@given(st.data())
@pytest.mark.slow
def test_whatever_byte_is_hit_repair_ends_in_a_sound_store(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("store")
    make_store(root)
    add_session(root, "one", 400, text=1, bytes_per_cell=4)
    add_session(root, "two", 513, text=1, bytes_per_cell=4)
    add_session(root, "tails", 100, kind=MemoryKind.HYBRID, sections=HYBRID)
    paths = sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size)
    for path in data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=3, unique=True)):
        flip(path, lambda n: data.draw(st.integers(0, n - 1)))
    indexes = {path.stem: path.read_bytes() for path in root.glob("*.bin")}
    names = [name for name, info in ((name, _try_to_read(root / f"{name}.bin")) for name in indexes) if info]
    records = {name: read_session(root / f"{name}.bin").record for name in names}
    try:
        report = repair_store(root, QUIET)
    except NewerFormatError:
        return  # the bit made it a later version's
    if Outcome.NEWER in outcomes(report).values():
        return
    assert report.is_sound
    assert verify_store(root, QUIET).n_wrong == 0
    assert {name: read_session(root / f"{name}.bin").record for name in names} == records
    for name in set(indexes) - set(names):
        assert (root / f"{name}.bin.damaged").read_bytes() == indexes[name]
    before = stores.files_of(root)
    assert repair_store(root, QUIET).is_sound
    assert stores.files_of(root) == before


def _try_to_read(path):
    try:
        return read_session(path)
    except Exception:
        return None
