"""A writer that fails or is killed after any step leaves the old session or the new one, whole."""

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from llamakv.errors import ConflictError, DamagedError, LlamakvError, LockedError, ReadError, WriteError
from llamakv.store import files, session_writer
from llamakv.store.section_writers import FileWriter
from llamakv.store.session_file import (
    SessionReader,
    check_writable,
    compact_session,
    create_session,
    extend_session,
    read_session,
    verify_session,
)
from tests.store.samples import cells, contents, make_record

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s.bin"


def read_everything(path):
    with SessionReader(path) as reader:
        return reader.info.record, contents(reader.read(reader.info.sections))


def two_sections(path):
    return create_session(path, make_record(5), [cells(0, 2), cells(2, 4)])


def save_again(base):
    n = len(base.record.tokens) - 1
    new = [cells(n, n + 2, n_bytes=3000), cells(n + 2, n + 3)]
    return extend_session(base, make_record(n + 4, n_saves=2), keep=base.sections, new=new)


def overwrite(base):
    return create_session(base.path, make_record(3, n_saves=2), [cells(0, 2, n_bytes=3000)], overwrite=True)


def compact(base):
    return compact_session(base.path)


# ---------------------------------------------------------------- a writer that dies or fails after each step

STEPS = ("write_at", "sync", "cut", "publish", "sync_folder", "discard")


class Died(BaseException):
    """The process is gone: nothing runs after it, no clean-up either."""


class FailingFiles:
    """Lets ``n_steps`` steps of the files layer pass; the next one is done half or not at all and fails."""

    def __init__(self, monkeypatch, n_steps, *, dies, n_bytes=None):
        self.n_left, self.dies, self.n_bytes, self.has_failed = n_steps, dies, n_bytes, False
        for name in STEPS:
            monkeypatch.setattr(files, name, self._wrap(name, getattr(files, name)))
        self._unlink = os.unlink
        monkeypatch.setattr(os, "unlink", self.unlink)

    def unlink(self, *arguments, **options):
        if not (self.has_failed and self.dies):
            self._unlink(*arguments, **options)

    def _wrap(self, name, real):
        def step(*arguments, **options):
            if self.has_failed and self.dies:
                raise Died
            if self.n_left == 0 and not self.has_failed:
                self.has_failed = True
                if name == "write_at":
                    fd, parts, offset, path = arguments
                    data = b"".join(map(bytes, parts))
                    real(fd, [data[: len(data) // 2 if self.n_bytes is None else self.n_bytes]], offset, path)
                if self.dies:
                    raise Died
                raise WriteError("injected", path="x")
            self.n_left -= 1
            return real(*arguments, **options)

        return step


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "fails"])
@pytest.mark.parametrize("save", [save_again, overwrite, compact])
def test_each_step_may_be_the_last(path, tmp_path, save, dies):
    base = two_sections(path)
    base = extend_session(base, make_record(4, n_saves=2), keep=base.sections[:1], new=[cells(2, 3)])
    start = path.read_bytes()
    old = read_everything(path)
    save(base)
    new = read_everything(path)
    seen = set()
    for n_steps in range(100):
        path.unlink()
        path.write_bytes(start)
        with pytest.MonkeyPatch.context() as patch:
            failing = FailingFiles(patch, n_steps, dies=dies)
            with contextlib.suppress(Died, WriteError):
                save(read_session(path))
            if not failing.has_failed:
                break
        found = read_everything(path)
        is_new = read_session(path).generation != base.generation
        assert found == (new if is_new else old)
        seen.add(is_new)
        if not dies and not is_new:
            assert path.read_bytes() == start, "a failed writer cleans up"
        assert [name for name in os.listdir(tmp_path) if not name.startswith(".llamakv-")] == ["s.bin"]
        assert verify_session(save_again(read_session(path)).path).is_sound
    assert n_steps > 4
    assert seen >= ({False, True} if dies else {False})


def test_the_slot_may_be_torn_after_any_byte(path):
    base = two_sections(path)
    start, old = path.read_bytes(), read_everything(path)
    save_again(base)
    new = read_everything(path)
    n_steps = 3  # two sections and the index are written, synced; then the slot
    for n_bytes in range(0, 513, 3):
        path.write_bytes(start)
        with pytest.MonkeyPatch.context() as patch:
            FailingFiles(patch, n_steps + 1, dies=True, n_bytes=n_bytes)
            with pytest.raises(Died):
                save_again(base)
        assert read_everything(path) == (new if n_bytes >= 104 else old), n_bytes
        info = read_session(path)
        assert extend_session(info, info.record, keep=info.sections, new=()).record == info.record


class PowerCut:
    """Records writes and syncs, to replay what a disk may hold after the power went: synced writes surely, later
    ones each perhaps."""

    def __init__(self, monkeypatch):
        self.steps = []
        real_write, real_sync = files.write_at, files.sync

        def write_at(fd, parts, offset, path):
            self.steps.append((offset, b"".join(map(bytes, parts))))
            return real_write(fd, parts, offset, path)

        def sync(fd, path):
            self.steps.append(None)
            real_sync(fd, path)

        monkeypatch.setattr(files, "write_at", write_at)
        monkeypatch.setattr(files, "sync", sync)

    def disks(self, start, chance):
        for n_steps in range(len(self.steps) + 1):
            done = self.steps[:n_steps]
            n_sure = max((i for i, step in enumerate(done) if step is None), default=0)
            for _ in range(8):
                disk = bytearray(start)
                for i, step in enumerate(done):
                    if step is not None and (i < n_sure or chance.random() < 0.5):
                        offset, data = step
                        disk.extend(bytes(max(0, offset + len(data) - len(disk))))
                        disk[offset : offset + len(data)] = data
                yield disk


def test_unsynced_writes_may_be_lost_in_any_combination(path, monkeypatch):
    base = two_sections(path)
    start, old = path.read_bytes(), read_everything(path)
    cut = PowerCut(monkeypatch)
    save_again(base)
    new = read_everything(path)
    seen = set()
    for disk in cut.disks(start, random.Random(0)):
        path.write_bytes(disk)
        found = read_everything(path)
        assert found in (old, new)
        seen.add(found == new)
    assert seen == {False, True}
    path.write_bytes(disk)


def test_a_new_file_is_synced_before_it_is_renamed_and_its_folder_after(path, monkeypatch):
    calls = []
    for name in STEPS:
        real = getattr(files, name)
        monkeypatch.setattr(
            files, name, lambda *a, _name=name, _real=real, **o: (calls.append(_name), _real(*a, **o))[1]
        )
    two_sections(path)
    assert calls[-3:] == ["sync", "publish", "sync_folder"]
    assert set(calls[:-3]) == {"write_at"}


# ---------------------------------------------------------------- kill -9

_EXTENDING = """
import sys
from llamakv.store.session_file import read_session, extend_session
from tests.store.samples import cells, make_record
path = sys.argv[1]
print("ready", flush=True)
for _ in range(1000):
    base = read_session(path)
    n = len(base.record.tokens)
    extend_session(base, make_record(n + 1, n_saves=n), keep=base.sections, new=[cells(n - 1, n, n_bytes=20_000)])
"""

_OVERWRITING = """
import sys
from llamakv.store.session_file import create_session
from tests.store.samples import cells, make_record
print("ready", flush=True)
for n in range(1, 1000):
    create_session(sys.argv[1], make_record(n + 1), [cells(0, n, n_bytes=200_000)], overwrite=True)
"""


def start(script, *arguments, **options):
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, text=True, cwd=ROOT, **options
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("script", [_EXTENDING, _OVERWRITING], ids=["extending", "overwriting"])
def test_a_writer_killed_at_any_moment_leaves_a_sound_session_and_no_lock(path, script):
    create_session(path, make_record(2), [cells(0, 1, n_bytes=20_000)])
    chance = random.Random(1)
    n_before = 0
    for _ in range(4):
        process = start(script, path)
        time.sleep(chance.uniform(0.005, 0.15))
        process.kill()
        process.wait()
        process.stdout.close()
        assert verify_session(path).is_sound
        base = read_session(path)
        n = len(base.record.tokens)
        if script is _EXTENDING:
            assert n >= n_before  # a slow machine may not have come to its first save
        with files.locked(path, wait_s=0):  # a lock whose owner is dead does not block
            pass
        extend_session(base, make_record(n + 1), keep=base.sections, new=[cells(n - 1, n, n_bytes=20_000)])
        n_before = n + 1
    files.remove_stale_temporaries(path.parent)
    assert os.listdir(path.parent) == ["s.bin"]


def test_the_next_save_removes_temporaries_of_dead_writers_only(path):
    stale = path.parent / ".llamakv-0123456789abcdef.tmp"
    stale.write_bytes(b"x")
    with files.replacement(path.parent / "t.bin", overwrite=False):
        two_sections(path)
        assert not stale.exists()
        assert len(os.listdir(path.parent)) == 2, "the temporary of a writer at work stays"
    assert sorted(os.listdir(path.parent)) == ["s.bin", "t.bin"]


# ---------------------------------------------------------------- full disks and read-only folders

_LIMITED = """
import resource, sys
from llamakv.errors import WriteError
from tests.store import test_durability as durability
from llamakv.store.session_file import read_session
base = read_session(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    getattr(durability, sys.argv[2])(base)
except WriteError as error:
    print(error.exit_status, error)
else:
    print("saved")
"""


@pytest.mark.parametrize("save", ["save_again", "overwrite"])
def test_a_file_size_limit_leaves_the_old_file_byte_for_byte(path, save):
    two_sections(path)
    before, old = path.read_bytes(), read_everything(path)
    n_needed = 0
    for limit in range(1700, 9000, 2400):
        done = subprocess.run(
            [sys.executable, "-c", _LIMITED, path, save, str(limit)],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        if done.stdout == "saved\n":
            n_needed = limit
            break
        assert done.stdout == f"16 cannot write '{path}': File too large\n"
        assert path.read_bytes() == before
        assert os.listdir(path.parent) == ["s.bin"]
    assert n_needed > 2000
    assert read_everything(path) != old


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB that can be filled and made read-only; needs root, as in CI."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk here ({mounted.stderr.strip()}); the size limit is tested anyway")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_leaves_the_old_session_and_no_temporary(small_disk):
    path = small_disk / "s.bin"
    base = two_sections(path)
    before = path.read_bytes()
    for save in (
        lambda: extend_session(base, make_record(9), keep=base.sections, new=[cells(4, 8, n_bytes=400_000)]),
        lambda: create_session(path, make_record(9), [cells(0, 8, n_bytes=400_000)], overwrite=True),
        lambda: create_session(small_disk / "t.bin", make_record(9), [cells(0, 8, n_bytes=400_000)]),
    ):
        with pytest.raises(WriteError, match=r"No space left on device \(\d+ more bytes needed, \d+ free\)"):
            save()
        assert path.read_bytes() == before
        assert os.listdir(small_disk) == ["s.bin"]
    assert save_again(base) == read_session(path)


def test_a_session_that_cannot_be_compacted_for_want_of_space_is_saved_all_the_same(small_disk, monkeypatch):
    monkeypatch.setattr(session_writer, "_MIN_DEAD", 1000)
    path = small_disk / "s.bin"
    base = create_session(path, make_record(9), [cells(0, 8, n_bytes=230_000)])
    info = extend_session(base, make_record(9), keep=(), new=[cells(0, 8, n_bytes=40_000)])
    assert info.n_dead_bytes > info.n_live_bytes
    assert info == read_session(path)
    assert os.listdir(small_disk) == ["s.bin"]


def test_a_read_only_disk_is_refused_before_any_work(small_disk):
    path = small_disk / "s.bin"
    base = two_sections(path)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    before = path.read_bytes()

    def never():
        raise AssertionError("worked in vain")
        yield

    for save in (
        lambda: check_writable(path, overwrite=True),
        lambda: check_writable(small_disk / "t.bin", overwrite=False),
        lambda: create_session(small_disk / "t.bin", make_record(5), never()),
        lambda: extend_session(base, make_record(6), keep=base.sections, new=never()),
    ):
        with pytest.raises(WriteError, match="Read-only file system"):
            save()
    assert path.read_bytes() == before
    assert read_everything(path)[0] == base.record


def as_nobody(function):
    """Run ``function`` in a child without root's power to ignore permissions; return what it returns as text."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            os.write(write_end, function().encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        text = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return text


def error_of(call):
    try:
        call()
    except LlamakvError as error:
        return f"{error.code} {error}"
    return "no error"


def test_a_folder_or_file_without_permission_is_a_named_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # relative paths: another user cannot walk down to pytest's private folder
    path, other = Path("s.bin"), Path("t.bin")
    base = two_sections(path)
    if os.geteuid() != 0:
        path.chmod(0)
    tmp_path.chmod(0o555)
    for call, name in (
        (lambda: check_writable(other, overwrite=False), "."),
        (lambda: create_session(other, make_record(5), [cells(0, 4)]), "."),
        (lambda: extend_session(base, make_record(6), keep=base.sections, new=[cells(4, 5)]), "s.bin"),
    ):
        message = as_nobody(lambda call=call: error_of(call))
        assert message == f"write cannot write '{name}': Permission denied"
    message = as_nobody(lambda: error_of(lambda: read_session(path)))
    assert message == "read cannot read 's.bin': Permission denied"
    tmp_path.chmod(0o700)


# ---------------------------------------------------------------- several processes


def test_a_reader_meanwhile_sees_the_old_or_the_new_session_never_an_error(path):
    info = create_session(path, make_record(2), [cells(0, 1, n_bytes=50_000)])
    problems, counts, is_done = [], [], threading.Event()

    def read_on():
        while not is_done.is_set():
            try:
                record, sections = read_everything(path)
                assert sections == contents([cells(i, i + 1, n_bytes=50_000) for i in range(len(sections))])
                counts.append((len(record.tokens), len(sections)))
            except (LlamakvError, AssertionError) as error:
                problems.append(error)

    reader = threading.Thread(target=read_on)
    reader.start()
    try:
        for n in range(2, 52):
            if n % 10 == 0:
                sections = [cells(i, i + 1, n_bytes=50_000) for i in range(n)]
                info = create_session(path, make_record(n + 1), sections, overwrite=True)
            else:
                new = [cells(n - 1, n, n_bytes=50_000)]
                info = extend_session(info, make_record(n + 1), keep=info.sections, new=new)
            if n % 7 == 0:
                info = compact_session(path)
    finally:
        is_done.set()
        reader.join()
    assert problems == []
    assert len(counts) > 3
    assert all(n_tokens == n_sections + 1 for n_tokens, n_sections in counts)
    assert counts == sorted(counts)


_RACING = """
import sys
from llamakv.errors import ConflictError
from llamakv.store.session_file import read_session, extend_session
from tests.store.samples import cells, make_record
print("ready", flush=True)
n_saved = n_conflicts = 0
while n_saved < 25:
    base = read_session(sys.argv[1])
    n = len(base.record.tokens)
    try:
        extend_session(base, make_record(n + 1), keep=base.sections, new=[cells(n - 1, n)])
        n_saved += 1
    except ConflictError:
        n_conflicts += 1
print(n_saved, n_conflicts)
"""


def test_of_two_writers_none_loses_a_save(path):
    create_session(path, make_record(2), [cells(0, 1)])
    writers = [start(_RACING, path) for _ in range(2)]
    for writer in writers:
        assert writer.communicate(timeout=50)[0].startswith("25 ")
        assert writer.returncode == 0
    info = read_session(path)
    assert (info.generation, len(info.record.tokens)) == (51, 52)
    assert verify_session(path).is_sound


def test_two_chats_that_resumed_the_same_session_conflict(path):
    two_sections(path)
    one, other = read_session(path), read_session(path)
    save_again(one)
    with pytest.raises(ConflictError):
        save_again(other)


def test_a_writer_waits_for_another_one_that_finishes_soon(path):
    base = two_sections(path)
    is_locked = threading.Event()

    def hold():
        with files.locked(path):
            is_locked.set()
            time.sleep(0.1)

    holder = threading.Thread(target=hold)
    holder.start()
    is_locked.wait()
    save_again(base)
    holder.join()
    with files.locked(path), pytest.raises(LockedError), files.locked(path, wait_s=0.0):
        pass


def test_limits_and_signals_are_as_these_tests_assume():
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN, "else a size limit would kill us"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


# ---------------------------------------------------------------- compacting


@pytest.mark.parametrize("error", [DamagedError, ReadError, WriteError])
def test_a_save_counts_although_the_compacting_after_it_fails(path, monkeypatch, error):
    base = create_session(path, make_record(3), [cells(0, 2, n_bytes=3 << 20)])

    def fail(*_):
        raise error("injected")

    monkeypatch.setattr(SessionReader, "read_stored", fail)
    info = extend_session(base, make_record(2, n_saves=2), keep=[], new=[cells(0, 1)])
    assert info.n_dead_bytes > info.n_live_bytes
    assert (read_session(path).commit, verify_session(path).is_sound) == (info.commit, True)


def test_a_file_renamed_onto_the_session_while_it_is_compacted_stays(path, tmp_path, monkeypatch):
    base = two_sections(path)
    extend_session(base, make_record(4, n_saves=2), keep=base.sections[:1], new=[cells(2, 3)])
    create_session(tmp_path / "other.bin", make_record(9), [cells(0, 8)])
    other = (tmp_path / "other.bin").read_bytes()
    copied = FileWriter.copy

    def copy_then_replace(*arguments):
        row = copied(*arguments)
        if (tmp_path / "other.bin").exists():
            os.rename(tmp_path / "other.bin", path)
        return row

    monkeypatch.setattr(FileWriter, "copy", copy_then_replace)
    with pytest.raises(ConflictError, match="replaced while"):
        compact_session(path)
    assert path.read_bytes() == other
    assert os.listdir(tmp_path) == ["s.bin"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_compacting_as_root_leaves_the_file_with_its_owner(path):
    base = two_sections(path)
    extend_session(base, make_record(4, n_saves=2), keep=base.sections[:1], new=[cells(2, 3)])
    os.chown(path, 1234, 2345)
    compact_session(path)
    status = path.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (1234, 2345, 0o600)


def test_checking_a_folder_removes_what_killed_writers_left_there(path, tmp_path):
    (tmp_path / ".llamakv-dead.tmp").touch()
    check_writable(path, overwrite=True)
    assert os.listdir(tmp_path) == []
