"""Saving and reading back: what was given comes back, and the file is what FORMAT.md says."""

import contextlib
import dataclasses
import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamakv.errors import (
    ConflictError,
    ExistsError,
    LockedError,
    NotASessionError,
    NotFoundError,
    UsageError,
    WriteError,
)
from llamakv.records import MemoryKind, SectionKind, StateSection
from llamakv.store import files, locks
from llamakv.store.session_file import (
    AUTO,
    NONE,
    Encoding,
    SessionReader,
    check_writable,
    compact_session,
    create_session,
    extend_session,
    read_session,
    truncate_sections,
    verify_session,
)
from tests.store.samples import cells, cells_up_to, contents, f16_bytes, make_record, tail, whole

KINDS = {
    MemoryKind.DENSE: lambda n: [*cells_up_to(n)],
    MemoryKind.WINDOWED: lambda n: [*cells_up_to(n)],
    MemoryKind.RECURRENT: lambda n: [tail(1), tail(n)],
    MemoryKind.HYBRID: lambda n: [tail(3), *cells_up_to(n), tail(n)],
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s.bin"


def read_all(path):
    with SessionReader(path) as reader:
        return contents(reader.read(reader.info.sections))


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_comes_back_equal(path, kind):
    record, sections = make_record(601, kind=kind), KINDS[kind](600)
    created = create_session(path, record, sections)
    info = read_session(path)
    assert info == created
    assert info.record == record
    assert (info.generation, info.n_dead_bytes) == (1, 0)
    assert info.n_file_bytes == info.n_live_bytes == path.stat().st_size
    assert info.n_raw_bytes == sum(section.data.nbytes for section in sections)
    assert read_all(path) == contents(sections)


@pytest.mark.parametrize("kind", [MemoryKind.WINDOWED, MemoryKind.HYBRID])
def test_one_whole_section_comes_back_equal(path, kind):
    create_session(path, make_record(41, kind=kind), [whole(40)])
    assert read_all(path) == contents([whole(40)])


@pytest.mark.parametrize("kind", MemoryKind)
def test_a_single_pending_token_has_no_sections(path, kind):
    record = make_record(1, kind=kind)
    create_session(path, record, [])
    assert read_session(path).record == record
    assert read_all(path) == []


@pytest.mark.slow
def test_a_text_that_compresses_a_thousandfold_comes_back_and_one_over_the_limit_is_refused(path):
    record = dataclasses.replace(make_record(1), text="ab" * 3_000_000)
    create_session(path, record, [])
    assert read_session(path).record == record
    assert zstd("-t", str(path)).returncode == 0
    before = path.read_bytes()
    record = dataclasses.replace(record, text="ab" * 34_000_000)
    with pytest.raises(WriteError, match="session too large"):
        create_session(path, record, [], overwrite=True)
    assert path.read_bytes() == before


def test_no_tokens_are_refused(path):
    with pytest.raises(UsageError):
        create_session(path, make_record(0), [])
    assert not path.exists()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 70_000), min_size=1, max_size=7),
    fill=st.sampled_from(["f16", "zeros", "text", "random"]),
    compress=st.sampled_from([AUTO, NONE, 0, 1, 3]),
)
def test_any_bytes_come_back_equal(tmp_path, sizes, fill, compress):
    path = tmp_path / "any.bin"

    def data(seed, n_bytes):
        if fill == "f16":
            return f16_bytes(n_bytes, seed)
        if fill == "random":
            return memoryview(os.urandom(n_bytes))
        return memoryview((b"\0" if fill == "zeros" else b"a word or two; ") * n_bytes)[:n_bytes]

    sections = [
        StateSection(kind=SectionKind.CELLS, p0=i, p1=i + 1, p_used=i + 1, data=data(i, n_bytes))
        for i, n_bytes in enumerate(sizes)
    ]
    record = make_record(len(sizes) + 1)
    info = create_session(path, record, sections, compress=compress, overwrite=True)
    assert read_all(path) == contents(sections)
    assert info.n_stored_bytes <= 1.01 * info.n_raw_bytes + 64 * len(sections)


def test_sections_come_in_the_order_asked_and_on_section_sees_each(path):
    seen = []
    sections = [cells(i, i + 1, n_bytes=200_000) for i in range(12)]
    info = create_session(path, make_record(13), sections, on_section=seen.append)
    assert tuple(seen) == info.sections
    order = [info.sections[i] for i in (5, 0, 11, 5, 3)]
    with SessionReader(path) as reader:
        assert [item.p0 for item in reader.read(order)] == [5, 0, 11, 5, 3]


def test_a_reader_left_early_closes_at_once(path):
    info = create_session(path, make_record(13), [cells(i, i + 1, n_bytes=200_000) for i in range(12)])
    with SessionReader(path) as reader:
        assert next(reader.read(info.sections)).p0 == 0
    reader.close()


def test_a_section_of_another_file_is_the_callers_bug(path, tmp_path):
    info = create_session(path, make_record(5), [cells(0, 4)])
    create_session(tmp_path / "t.bin", make_record(5), [cells(0, 4, seed=99)])
    with SessionReader(tmp_path / "t.bin") as reader, pytest.raises(ValueError, match="not one of"):
        reader.read(info.sections)


@pytest.mark.parametrize(
    ("kind", "n_tokens", "sections"),
    [
        (MemoryKind.DENSE, 5, [cells(0, 3)]),
        (MemoryKind.DENSE, 5, [cells(0, 5)]),
        (MemoryKind.DENSE, 5, [cells(1, 4)]),
        (MemoryKind.DENSE, 5, [cells(0, 2), cells(3, 4)]),
        (MemoryKind.DENSE, 5, [cells(0, 3), cells(2, 4)]),
        (MemoryKind.DENSE, 5, [cells(0, 4), tail(4)]),
        (MemoryKind.DENSE, 5, [whole(4)]),
        (MemoryKind.DENSE, 5, []),
        (MemoryKind.DENSE, 1, [cells(0, 1)]),
        (MemoryKind.WINDOWED, 5, [whole(3)]),
        (MemoryKind.WINDOWED, 5, [whole(4), whole(4)]),
        (MemoryKind.WINDOWED, 5, [cells(0, 4), whole(4)]),
        (MemoryKind.RECURRENT, 5, [tail(3)]),
        (MemoryKind.RECURRENT, 5, [tail(4), tail(4)]),
        (MemoryKind.RECURRENT, 5, [tail(4), tail(5)]),
        (MemoryKind.RECURRENT, 5, [cells(0, 4), tail(4)]),
        (MemoryKind.HYBRID, 5, [cells(0, 4)]),
        (MemoryKind.HYBRID, 5, [cells(0, 4), tail(2)]),
        (MemoryKind.HYBRID, 5, [cells(0, 3), tail(4)]),
    ],
)
def test_sections_that_do_not_fit_the_tokens_are_not_saved(path, kind, n_tokens, sections):
    with pytest.raises(ValueError, match="sections do not fit"):
        create_session(path, make_record(n_tokens, kind=kind), sections)
    assert os.listdir(path.parent) == []


def test_a_failing_source_of_sections_leaves_nothing(path):
    def broken():
        yield cells(0, 2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create_session(path, make_record(5), broken())
    assert os.listdir(path.parent) == []


# ---------------------------------------------------------------- the next generation


def test_a_save_after_a_turn_appends_only_what_is_new(path):
    old = create_session(path, make_record(601), cells_up_to(600, bytes_per_cell=1000))
    before = path.read_bytes()
    new = cells(600, 700, n_bytes=100_000)
    info = extend_session(old, make_record(701, n_saves=2), keep=old.sections, new=[new])
    assert info == read_session(path)
    assert info.generation == 2
    assert info.sections[:-1] == old.sections
    assert path.read_bytes()[1549 : len(before)] == before[1549:]
    assert info.n_file_bytes - len(before) == info.sections[-1].n_stored + info.n_index_bytes
    assert info.n_index_bytes <= 4 * 701 + 16 * 1024
    assert info.n_dead_bytes == old.n_index_bytes
    assert read_all(path)[-1] == contents([new])[0]


def test_many_saves_alternate_the_slots(path):
    info = create_session(path, make_record(2), [cells(0, 1)])
    for n in range(2, 12):
        info = extend_session(info, make_record(n + 1), keep=info.sections, new=[cells(n - 1, n)])
        assert read_session(path) == info
    assert info.generation == 11
    assert len(read_all(path)) == 11


def test_going_back_lowers_what_is_used_and_leaves_the_bytes(path):
    old = create_session(path, make_record(601), cells_up_to(600))
    keep = truncate_sections(old.sections, 300)
    assert [(item.p0, item.p1, item.p_used) for item in keep] == [(0, 256, 256), (256, 512, 300)]
    info = extend_session(old, make_record(321), keep=keep, new=[cells(300, 320)])
    assert [item.p_used for item in info.sections] == [256, 300, 320]
    assert len(read_all(path)[1][4]) == 256 * 8


def test_truncating_keeps_tails_up_to_the_position(path):
    info = create_session(path, make_record(601, kind=MemoryKind.HYBRID), [tail(300), *cells_up_to(600), tail(600)])
    keep = truncate_sections(info.sections, 300)
    assert [(item.kind, item.p_used) for item in keep] == [("tail", 300), ("cells", 256), ("cells", 300)]


def test_extending_something_changed_meanwhile_is_a_conflict_and_writes_nothing(path):
    base = create_session(path, make_record(5), [cells(0, 4)])
    extend_session(base, make_record(6), keep=base.sections, new=[cells(4, 5)])
    before = path.read_bytes()

    def never():
        raise AssertionError("prefilled in vain")
        yield

    with pytest.raises(ConflictError) as caught:
        extend_session(base, make_record(7), keep=base.sections, new=never())
    assert caught.value.exit_status == 12
    assert path.read_bytes() == before


def test_extending_another_session_under_the_same_name_is_a_conflict(path):
    base = create_session(path, make_record(5), [cells(0, 4)])
    create_session(path, make_record(5, session_id="other"), [cells(0, 4)], overwrite=True)
    with pytest.raises(ConflictError):
        extend_session(base, make_record(6), keep=base.sections, new=[cells(4, 5)])


def test_extending_a_removed_session_is_not_found(path):
    base = create_session(path, make_record(5), [cells(0, 4)])
    path.unlink()
    with pytest.raises(NotFoundError):
        extend_session(base, make_record(6), keep=base.sections, new=[cells(4, 5)])


def test_bytes_behind_the_committed_end_are_ignored_and_cut_off_by_the_next_save(path):
    base = create_session(path, make_record(5), [cells(0, 4)])
    with open(path, "ab") as file:
        file.write(b"x" * 5000)
    assert read_session(path).n_dead_bytes == 5000
    base = read_session(path)
    info = extend_session(base, make_record(6), keep=base.sections, new=[cells(4, 5)])
    assert b"x" * 5000 not in path.read_bytes()
    assert info.n_dead_bytes == base.n_index_bytes


def test_a_file_over_half_dead_is_compacted_by_the_save(path):
    base = create_session(path, make_record(5), [cells(0, 4, n_bytes=3_000_000)])
    info = extend_session(base, make_record(5, n_saves=2), keep=(), new=[cells(0, 4, n_bytes=50)])
    assert (info.n_dead_bytes, info.generation) == (0, 3)
    assert path.stat().st_size < 10_000
    assert read_all(path) == contents([cells(0, 4, n_bytes=50)])


def test_compacting_removes_dead_bytes_and_nothing_else(path):
    base = create_session(path, make_record(601), cells_up_to(600, bytes_per_cell=200))
    info = extend_session(base, make_record(301), keep=truncate_sections(base.sections, 300), new=())
    before = read_all(path)
    with SessionReader(path) as reader:
        compacted = compact_session(path)
        assert contents(reader.read(reader.info.sections)) == before, "an open reader is not hurt"
    assert compacted.n_dead_bytes == 0 < info.n_dead_bytes
    assert compacted.record == info.record
    assert read_all(path) == before
    inode = path.stat().st_ino
    assert compact_session(path) == compacted
    assert path.stat().st_ino == inode, "nothing to do: not rewritten"


def test_a_new_file_can_take_over_sections_as_they_are_stored(path, tmp_path):
    parent = create_session(path, make_record(601), cells_up_to(600))
    with SessionReader(path) as reader:
        child = create_session(
            tmp_path / "child.bin",
            make_record(321, session_id="child"),
            [cells(300, 320)],
            source=reader,
            keep=truncate_sections(reader.info.sections, 300),
        )
    assert [item.digest for item in child.sections[:2]] == [item.digest for item in parent.sections[:2]]
    assert verify_session(tmp_path / "child.bin").is_sound


def test_reading_a_session_takes_two_small_reads(path, monkeypatch):
    info = create_session(path, make_record(601), cells_up_to(600, bytes_per_cell=1000))
    reads = []
    real = files.read_at
    monkeypatch.setattr(files, "read_at", lambda fd, n, at, path: (reads.append((at, n)), real(fd, n, at, path))[1])
    assert read_session(path) == info
    assert reads == [(0, 1549), (info.commit.index_offset, info.n_index_bytes)]


def test_reading_changes_nothing(path):
    create_session(path, make_record(5), [cells(0, 4)])
    os.chmod(path, 0o444)
    before = (path.read_bytes(), path.stat().st_mtime_ns)
    for _ in range(3):
        read_all(path)
    assert verify_session(path).is_sound
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


_SAVING = """
import sys
from llamakv.store.session_file import create_session
from llamakv.records import SectionKind, StateSection
from tests.store.samples import cells, f16_bytes, make_record
n_bytes = 6 << 20
data = bytes(f16_bytes(n_bytes))
create_session(sys.argv[1], make_record(2), [cells(0, 1, n_bytes=300_000)])  # imports and threads
def peak(name):
    return int(open("/proc/self/status").read().split(name + ":")[1].split()[0]) * 1024
open("/proc/self/clear_refs", "w").write("5")
n_before = peak("VmRSS")
sections = (
    StateSection(kind=SectionKind.CELLS, p0=i, p1=i + 1, p_used=i + 1, data=memoryview(bytearray(data)))
    for i in range(40)
)
create_session(sys.argv[1], make_record(41), sections, overwrite=True)
print((peak("VmHWM") - n_before) / n_bytes)
"""


@pytest.mark.slow
def test_saving_takes_the_memory_of_less_than_eight_sections(path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", _SAVING, path]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert float(done.stdout) < 8


# ---------------------------------------------------------------- where a session may be written


def test_an_existing_session_is_only_replaced_when_asked(path):
    first = create_session(path, make_record(5), [cells(0, 4)])
    with pytest.raises(ExistsError) as caught:
        create_session(path, make_record(6), [cells(0, 5)])
    assert caught.value.exit_status == 11
    assert read_session(path) == first
    assert create_session(path, make_record(6), [cells(0, 5)], overwrite=True) == read_session(path)


def test_a_file_that_appears_meanwhile_is_not_replaced(path):
    def sections():
        path.write_bytes(b"mine")
        yield cells(0, 4)

    with pytest.raises(ExistsError):
        create_session(path, make_record(5), sections())
    assert path.read_bytes() == b"mine"
    assert os.listdir(path.parent) == ["s.bin"]


def test_something_that_is_no_session_is_never_replaced(path):
    path.write_bytes(b"GGUF" + b"\0" * 5000)
    with pytest.raises(ExistsError, match="not a session file"):
        create_session(path, make_record(5), [cells(0, 4)], overwrite=True)
    with pytest.raises(ExistsError):
        check_writable(path, overwrite=True)


def test_an_empty_or_a_damaged_file_may_be_replaced(path):
    path.touch()
    create_session(path, make_record(5), [cells(0, 4)], overwrite=True)
    with open(path, "r+b") as file:
        file.truncate(1000)
    check_writable(path, overwrite=True)
    create_session(path, make_record(5), [cells(0, 4)], overwrite=True)
    assert verify_session(path).is_sound


def test_a_link_is_not_written_through(path, tmp_path):
    target = tmp_path / "target.bin"
    base = create_session(target, make_record(5), [cells(0, 4)])
    before = target.read_bytes()
    path.symlink_to(target)
    linked = read_session(path)
    assert linked.record == base.record
    for write in (
        lambda: check_writable(path, overwrite=True),
        lambda: create_session(path, make_record(6), [cells(0, 5)], overwrite=True),
        lambda: create_session(path, make_record(6), [cells(0, 5)]),
        lambda: extend_session(linked, make_record(6), keep=linked.sections, new=[cells(4, 5)]),
        lambda: compact_session(path),
    ):
        with pytest.raises(WriteError, match="symbolic link"):
            write()
    assert target.read_bytes() == before


@pytest.mark.parametrize("overwrite", [True, False])
def test_impossible_targets_are_refused_before_any_work(tmp_path, overwrite):
    (tmp_path / "folder.bin").mkdir()
    os.mkfifo(tmp_path / "pipe.bin")
    (tmp_path / "file").touch()
    for name in ("folder.bin", "pipe.bin", "missing/s.bin", "file/s.bin", "x" * 300 + ".bin"):
        for write in (
            lambda path: check_writable(path, overwrite=overwrite),
            lambda path: create_session(path, make_record(5), iter([cells(0, 4)]), overwrite=overwrite),
        ):
            with pytest.raises(WriteError) as caught:
                write(tmp_path / name)
            assert caught.value.exit_status == 16
            assert "\n" not in caught.value.message
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.bin", "pipe.bin"]


def test_a_read_only_file_is_neither_extended_nor_replaced(path):
    base = create_session(path, make_record(5), [cells(0, 4)])
    os.chmod(path, 0o444)
    before = path.read_bytes()
    for write in (
        lambda: check_writable(path, overwrite=True),
        lambda: create_session(path, make_record(5), [cells(0, 4)], overwrite=True),
        lambda: extend_session(base, make_record(6), keep=base.sections, new=[cells(4, 5)]),
    ):
        with pytest.raises(WriteError, match="read-only"):
            write()
    assert path.read_bytes() == before


def test_checking_leaves_nothing_behind(path):
    check_writable(path, overwrite=False)
    assert os.listdir(path.parent) == []


def test_files_are_private_from_the_first_moment(path):
    modes = []

    def sections():
        modes.extend(stat.S_IMODE(os.stat(path.parent / name).st_mode) for name in os.listdir(path.parent))
        yield cells(0, 4)

    umask = os.umask(0o022)
    try:
        info = create_session(path, make_record(5), sections())
        extend_session(info, make_record(6), keep=info.sections, new=[cells(4, 5)])
        compact_session(path)
    finally:
        os.umask(umask)
    assert modes == [0o600]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.stat(path).st_nlink == 1


def test_odd_paths_work(tmp_path):
    folder = tmp_path / "é 数据 [x]"
    folder.mkdir()
    path = folder / ("a b" + "ü" * 100 + ".bin")
    create_session(path, make_record(5), [cells(0, 4)])
    assert verify_session(str(path)).is_sound


# ---------------------------------------------------------------- locks


def test_a_busy_file_is_reported_as_locked(path, monkeypatch):
    base = create_session(path, make_record(5), [cells(0, 4)])
    monkeypatch.setattr(locks, "_LOCK_POLL_S", 0.01)
    real = locks.acquire
    monkeypatch.setattr(locks, "acquire", lambda fd, at, *, wait_s: real(fd, at, wait_s=min(wait_s, 0.05)))
    before = path.read_bytes()
    with files.locked(path):
        for write in (
            lambda: extend_session(base, make_record(6), keep=base.sections, new=[cells(4, 5)]),
            lambda: create_session(path, make_record(5), [cells(0, 4)], overwrite=True),
        ):
            with pytest.raises(LockedError) as caught:
                write()
            assert caught.value.exit_status == 12
        assert read_all(path) == contents([cells(0, 4)]), "readers take no lock"
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["s.bin"]


# ---------------------------------------------------------------- other files


@pytest.mark.parametrize(
    "content",
    [b"", b"\x5c", b"Hello, this is text.\n" * 300, b"GGUF\x03\0\0\0" + b"\0" * 4000, b"\x80\x04\x95" * 900],
    ids=["empty", "one byte", "text", "gguf", "pickle"],
)
def test_other_files_are_not_sessions(path, content):
    path.write_bytes(content)
    for read in (read_session, verify_session, SessionReader):
        with pytest.raises(NotASessionError) as caught:
            read(path)
        assert (caught.value.exit_status, "\n" in str(caught.value)) == (13, False)


def test_folders_pipes_and_missing_files_are_named_errors(tmp_path):
    os.mkfifo(tmp_path / "pipe.bin")
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(tmp_path):  # its address has a length limit
        server.bind("socket.bin")
    for name in ("", "pipe.bin", "socket.bin"):
        with pytest.raises(NotASessionError):
            read_session(tmp_path / name)
    for name in ("missing.bin", "pipe.bin/x.bin"):
        with pytest.raises(NotFoundError) as caught:
            read_session(tmp_path / name)
        assert caught.value.exit_status == 10


# ---------------------------------------------------------------- zstd


def zstd(*arguments):
    program = shutil.which("zstd")
    assert program, "the zstd command is needed: apt-get install zstd"
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("compress", [AUTO, NONE, 3])
@pytest.mark.parametrize("n_cells", [0, 600])
def test_the_zstd_command_accepts_the_file(path, compress, n_cells):
    sections = [*cells_up_to(n_cells, bytes_per_cell=300)]
    if n_cells:
        sections[1] = dataclasses.replace(sections[1], data=memoryview(bytes(2_000_001)))  # padded
    info = create_session(path, make_record(n_cells + 1), sections, compress=compress)
    info = extend_session(info, make_record(n_cells + 2), keep=info.sections, new=[cells(n_cells, n_cells + 1)])
    tested = zstd("-t", str(path))
    assert tested.returncode == 0, tested.stderr
    listed = zstd("-lv", str(path))
    assert listed.returncode == 0
    n_frames = sum(len(section.frames) for section in info.sections) + 1
    n_padded = sum(section.n_stored != sum(section.frames) for section in info.sections)
    assert f"Zstandard Frames: {n_frames}\n" in listed.stdout
    assert f"Skippable Frames: {3 + n_padded}\n" in listed.stdout
    assert n_padded == (1 if n_cells and compress is not NONE else 0)


def test_the_file_command_recognises_the_file(path):
    create_session(path, make_record(1), [])
    program = shutil.which("file")
    assert program, "the file command is needed: apt-get install file"
    assert "Zstandard" in subprocess.run([program, path], capture_output=True, text=True, check=True).stdout


def test_keys_and_values_in_f16_shrink_by_planes_and_random_bytes_do_not_grow(path):
    info = create_session(path, make_record(5), [cells(0, 4, n_bytes=1 << 20)])
    assert info.sections[0].encoding is Encoding.PLANES
    assert info.n_file_bytes <= 0.875 * (1 << 20)
    random = StateSection(kind=SectionKind.CELLS, p0=0, p1=4, p_used=4, data=memoryview(os.urandom(1 << 20)))
    info = create_session(path, make_record(5), [random], overwrite=True)
    assert info.sections[0].encoding is Encoding.RAW
    assert info.n_stored_bytes <= 1.001 * (1 << 20)


def test_no_path_and_no_class_name_is_in_the_file(path):
    create_session(path, make_record(5), [cells(0, 4)])
    data = Path(path).read_bytes()
    assert str(path.parent).encode() not in data
    assert b"SessionRecord" not in data
