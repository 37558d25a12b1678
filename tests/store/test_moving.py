"""A session that is moved is always somewhere, whole."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from llamakv.errors import ConflictError, DamagedError, ExistsError, LockedError, NotFoundError, UsageError, WriteError
from llamakv.store import files, moving
from llamakv.store.moving import move_session, session_bytes
from llamakv.store.session_file import SessionReader, create_session, read_session, verify_session
from llamakv.store.store_folder import make_store
from tests.store.samples import cells, cells_up_to, contents, make_record
from tests.store.test_durability import Died, FailingFiles


@pytest.fixture(params=["files", "store", "out of a store", "into a store"])
def places(request, tmp_path):
    """Where a session is, and where it is to be."""
    a, b = tmp_path / "a", tmp_path / "b"
    if request.param == "files":
        return plain(a) / "one.bin", plain(b) / "two.bin"
    if request.param == "store":
        return stored(a) / "one.bin", a / "two.bin"
    if request.param == "out of a store":
        return stored(a) / "one.bin", plain(b) / "two.bin"
    return plain(a) / "one.bin", stored(b) / "two.bin"


def plain(folder):
    folder.mkdir()
    return folder


def stored(folder):
    make_store(folder)
    return folder


def save(path, n_tokens=600, **changes):
    return create_session(path, make_record(n_tokens, **changes), cells_up_to(n_tokens - 1))


def read_everything(path):
    with SessionReader(path) as reader:
        return reader.info.record, contents(reader.read(reader.info.sections))


def renamed(record, name):
    return replace(record, lineage=replace(record.lineage, name=name))


def test_it_is_the_same_session_under_another_name(places):
    old, new = places
    save(old)
    os.utime(old, ns=(5 * 10**18 // 3, 5 * 10**18 // 3))
    record, sections = read_everything(old)
    info = move_session(old, new, name="two")
    assert read_everything(new) == (renamed(record, "two"), sections)
    assert (info.path, info.record.lineage.name) == (new, "two")
    assert not old.exists()
    assert new.stat().st_mtime_ns == 5 * 10**18 // 3
    assert new.stat().st_mode & 0o777 == 0o600


def test_without_a_name_the_record_is_the_same(places):
    old, new = places
    save(old)
    before = read_everything(old)
    move_session(old, new, name=None)
    assert read_everything(new) == before


@pytest.mark.parametrize("name", ["two", pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("overwrite", [False, True])
def test_whoever_dies_at_any_step_loses_nothing_and_the_same_again_finishes(places, tmp_path, name, overwrite):
    old, new = places
    save(old)
    if overwrite:
        save(new, 300, session_id="other")
    for folder in ("a", "b"):
        if (tmp_path / folder).exists():
            shutil.copytree(tmp_path / folder, tmp_path / f"{folder}-before")
    record, sections = read_everything(old)
    moved = (record if name is None else renamed(record, name)), sections
    seen = set()
    for n_steps in range(100):
        for folder in ("a", "b"):
            if (tmp_path / f"{folder}-before").exists():
                shutil.rmtree(tmp_path / folder)
                shutil.copytree(tmp_path / f"{folder}-before", tmp_path / folder)
        with pytest.MonkeyPatch.context() as patch:
            failing = FailingFiles(patch, n_steps, dies=True)
            discard = files.discard
            patch.setattr(files, "discard", failing._wrap("discard", discard))
            with contextlib.suppress(Died):
                move_session(old, new, name=name, overwrite=overwrite)
            if not failing.has_failed:
                break
        there = [path.exists() for path in places]
        is_new = new.exists() and read_session(new).record == moved[0]
        seen.add((there[0], is_new))
        assert any((there[0], is_new))
        assert not there[0] or read_everything(old) == (record, sections)
        if there[0]:
            move_session(old, new, name=name, overwrite=overwrite)
        assert read_everything(new) == moved
        assert not old.exists()
    assert n_steps > 0
    assert (True, False) in seen


SCRIPT = """
import os, sys
from llamakv.store import files
from llamakv.store.moving import move_session
real = getattr(files, sys.argv[3])
def wait(*arguments, **options):
    print("here", flush=True)
    sys.stdin.read()
setattr(files, sys.argv[3], wait)
move_session(sys.argv[1], sys.argv[2], name="two")
"""


@pytest.mark.parametrize("step", ["publish", "discard"])
def test_a_process_killed_between_the_steps_loses_nothing(tmp_path, step):
    old, new = stored(tmp_path / "s") / "one.bin", tmp_path / "s" / "two.bin"
    save(old)
    record, sections = read_everything(old)
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, old, new, step],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout.readline() == b"here\n"
    seconds = itertools.count(0, 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: next(seconds))
        with pytest.raises(LockedError):
            move_session(old, new, name="two")
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdin.close()
    child.stdout.close()
    assert new.exists() is (step == "discard")
    assert read_everything(old) == (record, sections)
    move_session(old, new, name="two")
    assert read_everything(new) == (renamed(record, "two"), sections)
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [".objects", ".store", "two.bin"]


def test_a_name_that_is_taken_is_refused(places):
    old, new = places
    save(old)
    save(new, 300, session_id="other")
    before, other = read_everything(old), read_everything(new)
    with pytest.raises(ExistsError):
        move_session(old, new, name="two")
    assert (read_everything(old), read_everything(new)) == (before, other)
    move_session(old, new, name="two", overwrite=True)
    assert read_everything(new) == (renamed(before[0], "two"), before[1])


def test_a_file_that_is_no_session_is_never_replaced(places):
    old, new = places
    save(old)
    new.write_text("important\n" * 100)
    for overwrite in (False, True):
        with pytest.raises(ExistsError):
            move_session(old, new, name="two", overwrite=overwrite)
    assert new.read_text() == "important\n" * 100
    assert old.exists()


def test_a_session_is_not_moved_to_itself(tmp_path):
    path = save(tmp_path / "one.bin").path
    (tmp_path / "link").symlink_to(tmp_path)
    for target in (path, tmp_path / "link" / "one.bin"):
        with pytest.raises(UsageError):
            move_session(path, target, name=None, overwrite=True)
    link = tmp_path / "two.bin"
    link.symlink_to(path)
    with pytest.raises((UsageError, WriteError)):
        move_session(path, link, name=None, overwrite=True)
    assert verify_session(path).is_sound


def test_two_links_to_a_file_are_a_move_half_done(tmp_path):
    old, new = save(tmp_path / "one.bin").path, tmp_path / "two.bin"
    before = read_everything(old)
    for overwrite in (False, True):
        os.link(old, new)
        move_session(old, new, name=None, overwrite=overwrite)
        assert (read_everything(new), old.exists()) == (before, False)
        new.rename(old)


def test_a_damaged_session_stays_where_it_is(tmp_path):
    old = stored(tmp_path / "s") / "one.bin"
    info = save(old)
    place = tmp_path / "s" / ".objects" / info.sections[1].digest[:2] / info.sections[1].digest
    data = bytearray(place.read_bytes())
    data[-20] ^= 1
    place.write_bytes(data)
    with pytest.raises(DamagedError, match=r"cells section \[256, 512\)"):
        move_session(old, tmp_path / "two.bin", name=None)
    place.unlink()
    with pytest.raises(DamagedError, match="is missing from the store"):
        move_session(old, tmp_path / "s" / "two.bin", name="two")
    assert old.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]


def test_moving_over_file_systems_copies(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "move", lambda *_arguments, **_options: False)
    old, new = save(tmp_path / "one.bin").path, tmp_path / "two.bin"
    before = read_everything(old)
    move_session(old, new, name=None)
    assert (read_everything(new), old.exists()) == (before, False)


def test_a_file_put_in_its_place_meanwhile_is_not_removed(tmp_path, monkeypatch):
    old, new = save(stored(tmp_path / "s") / "one.bin").path, tmp_path / "s" / "two.bin"
    real = moving.take

    def take(*arguments, **options):
        made = real(*arguments, **options)
        save(tmp_path / "s" / "three.bin", 300)
        os.replace(tmp_path / "s" / "three.bin", old)
        return made

    monkeypatch.setattr(moving, "take", take)
    with pytest.raises(ConflictError):
        move_session(old, new, name="two")
    assert len(read_session(old).record.tokens) == 300
    assert verify_session(new).is_sound


def test_what_is_not_there_is_not_moved(tmp_path):
    with pytest.raises(NotFoundError):
        move_session(tmp_path / "one.bin", tmp_path / "two.bin", name=None)


def test_the_bytes_of_a_session_are_those_of_its_file(tmp_path):
    old = save(stored(tmp_path / "s") / "one.bin").path
    with SessionReader(old) as source:
        data = b"".join(session_bytes(source, source.info))
        moving.take(source, source.info, tmp_path / "own.bin", overwrite=False)
    assert data == (tmp_path / "own.bin").read_bytes()
    assert read_everything(tmp_path / "own.bin") == read_everything(old)
    again = create_session(tmp_path / "small.bin", make_record(1), [])
    with SessionReader(again.path) as source:
        assert b"".join(session_bytes(source, source.info)) == again.path.read_bytes()
    big = create_session(tmp_path / "big.bin", make_record(5), [cells(0, 4, n_bytes=3 << 20)])
    with SessionReader(big.path) as source:
        assert b"".join(session_bytes(source, source.info)) == big.path.read_bytes()
