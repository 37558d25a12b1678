"""The cache of a store: what it says is what the files say, whatever happens to it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llamakv.errors import DamagedError, NotASessionError, WriteError
from llamakv.records import MemoryKind, ModelIdentity, SectionKind, SessionRecord
from llamakv.store import cache as cache_module
from llamakv.store import cache_database, summary
from llamakv.store.cache import StoreCache
from llamakv.store.objects import Objects
from llamakv.store.session_file import change_lineage, create_session, read_session
from llamakv.store.session_store import SessionStore
from llamakv.store.store_folder import make_store
from llamakv.store.summary import SessionSummary, UnreadableSession, decode_summaries, encode_summary, summarise
from tests.store import samples
from tests.store.indexes import rows_of, write_index

DATABASE = Path(".cache") / "sessions.sqlite"


def record(n_tokens: int = 20, *, first: int = 0, **lineage: object) -> SessionRecord:
    found = samples.make_record(n_tokens)
    tokens = tuple((first + i) % 1000 for i in range(n_tokens))
    return replace(found, tokens=tokens, lineage=replace(found.lineage, **{"session_id": f"id-{first}", **lineage}))


def add(root: Path, name: str, n_tokens: int = 20, **values: object) -> Path:
    path = root / f"{name}.bin"
    found = record(n_tokens, **values)
    write_index(path, found, rows_of(found.kind, n_tokens - 1))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store of three sessions and a damaged one."""
    root = tmp_path / "store"
    make_store(root)
    for index, name in enumerate(("a", "b", "c")):
        add(root, name, 20 + index, first=index, updated_s=100.0 + index, tags=(name,))
    (root / "broken.bin").write_bytes((root / "a.bin").read_bytes()[:-5])
    return root


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks so fine that no two changes ever have the same time."""
    monkeypatch.setattr(cache_module, "_SETTLED_NS", -1)


def summaries(root: Path) -> tuple[SessionSummary | UnreadableSession, ...]:
    with StoreCache(root) as cache:
        return cache.summaries()


def expected(root: Path) -> list[SessionSummary | tuple[str, str]]:
    """What a listing must say, from the files alone."""
    found: list[SessionSummary | tuple[str, str]] = []
    for entry in SessionStore(root).list():
        if entry.info is None:
            assert entry.error is not None
            found.append((entry.name, entry.error.message))
        else:
            found.append(summarise(entry.info, entry.name, entry.path.stat().st_mtime_ns / 1e9))
    return found


def listed(root: Path) -> list[SessionSummary | tuple[str, str]]:
    return [
        (session.name, session.error.message) if isinstance(session, UnreadableSession) else session
        for session in summaries(root)
    ]


def n_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that the names of files read from now on are added to."""
    read: list[str] = []

    def reading(path: Path) -> object:
        read.append(path.stem)
        return read_session(path)

    monkeypatch.setattr(cache_module, "read_session", reading)
    return read


def connect(root: Path) -> contextlib.closing[sqlite3.Connection]:
    return contextlib.closing(sqlite3.connect(root / DATABASE, isolation_level=None))


# ---------------------------------------------------------------- the list


def test_a_listing_is_what_the_files_say(root: Path) -> None:
    assert listed(root) == expected(root)
    assert listed(root) == expected(root)
    assert [session.name for session in summaries(root)] == ["c", "b", "a", "broken"]
    assert isinstance(summaries(root)[-1], UnreadableSession)


def test_a_summary_has_all_that_a_list_shows(root: Path) -> None:
    found = replace(record(11), kind=MemoryKind.HYBRID)
    lineage = replace(
        found.lineage, note="é\n\ud83d", tags=("x", "y"), pinned=True, ttl_s=3.5, parent_id="p", parent_position=4
    )
    write_index(root / "full.bin", replace(found, lineage=lineage), rows_of(MemoryKind.HYBRID, 10, [4]))
    os.utime(root / "full.bin", (5.0, 5.0))
    for _ in range(2):
        (full,) = (session for session in summaries(root) if session.name == "full")
        assert isinstance(full, SessionSummary)
        assert (full.path, full.used_s, full.file_bytes) == (root / "full.bin", 5.0, full.path.stat().st_size)
        assert (full.n_tokens, full.n_cells, full.n_turns, full.turn_ends) == (11, 10, 1, (11,))
        assert (full.raw_bytes, full.stored_bytes, full.object_bytes, full.n_sections) == (300, 270, 270, 3)
        assert (full.note, full.tags, full.pinned, full.ttl_s) == ("é\n\ud83d", ("x", "y"), True, 3.5)
        assert (full.parent_id, full.parent_position, full.is_raw) == ("p", 4, False)
        assert (full.identity, full.settings, full.kind) == (found.identity, found.settings, MemoryKind.HYBRID)


def test_a_summary_survives_being_kept(root: Path) -> None:
    info = read_session(root / "a.bin")
    found = summarise(info, "a", 7.25)
    odd = replace(found, created_s=float("inf"), ttl_s=1e-300, note="\0\udc80", is_raw=True, parent_position=None)
    for one in (found, odd):
        assert list(decode_summaries(root, [("a", 7.25, *encode_summary(one))])) == [one]


def test_what_is_kept_of_a_session_belongs_to_a_version() -> None:
    """Another list of facts is another version of the database."""
    facts = (
        "session_id", "parent_id", "parent_position", "kind", "n_tokens", "n_cells", "turn_ends", "is_raw", "raw_bytes",
        "stored_bytes", "object_bytes", "n_sections", "file_bytes", "created_s", "updated_s", "n_saves", "note", "tags",
        "pinned", "ttl_s",
    )  # fmt: skip
    identity = ("digest", "n_bytes", "architecture", "name", "quantisation", "tokenizer_digest", "adapters")
    assert cache_database._VERSION == 2
    assert facts == summary._FACTS
    assert tuple(field.name for field in dataclasses.fields(ModelIdentity)) == identity


def test_a_store_that_is_not_there_is_empty_and_stays_so(tmp_path: Path) -> None:
    assert summaries(tmp_path / "none") == ()
    with StoreCache(tmp_path / "none") as cache:
        assert cache.longest_prefix("x", [1, 2, 3]) is None
    assert not (tmp_path / "none").exists()


def test_nothing_is_left_in_a_folder_that_is_no_store(tmp_path: Path) -> None:
    add(tmp_path, "a")
    assert [session.name for session in summaries(tmp_path)] == ["a"]
    assert os.listdir(tmp_path) == ["a.bin"]


def test_the_database_is_private(root: Path) -> None:
    umask = os.umask(0o022)
    try:
        with StoreCache(root) as cache:
            cache.refresh()
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (root / ".cache").iterdir()}
    finally:
        os.umask(umask)
    assert modes == dict.fromkeys(("sessions.sqlite", "sessions.sqlite-wal", "sessions.sqlite-shm", ".lock"), 0o600)
    assert stat.S_IMODE((root / ".cache").stat().st_mode) == 0o700


def test_names_that_are_no_unicode_are_listed(root: Path) -> None:
    shutil.copy(root / "a.bin", os.fsencode(root) + b"/x\xff.bin")
    for _ in range(2):
        assert "x\udcff" in [session.name for session in summaries(root)]
    assert listed(root) == expected(root)


# ---------------------------------------------------------------- keeping up


@pytest.mark.usefixtures("settled")
def test_only_what_changed_is_read_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summaries(root)
    read = n_read(monkeypatch)
    summaries(root)
    assert read == ["broken"]
    read.clear()
    add(root, "b", 30)
    add(root, "d")
    (root / "c.bin").unlink()
    os.utime(root / "a.bin")
    assert listed(root) == expected(root)
    assert sorted(set(read)) == ["a", "b", "broken", "d"]


def test_a_file_that_was_just_written_is_read_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_SETTLED_NS", 3600 * 10**9)
    summaries(root)
    read = n_read(monkeypatch)
    summaries(root)
    assert sorted(read) == ["a", "b", "broken", "c"]


@pytest.mark.usefixtures("settled")
def test_labels_damage_and_repair_show_at_once(root: Path) -> None:
    create_session(root / "a.bin", record(600), samples.cells_up_to(599), overwrite=True)
    for change in (
        lambda: change_lineage(root / "a.bin", lambda lineage: replace(lineage, tags=("new",), pinned=True)),
        lambda: os.truncate(root / "b.bin", 1700),
        lambda: add(root, "b"),
        lambda: add(root, "broken"),
        lambda: (root / "a.bin").unlink(),
        lambda: (root / "new.bin").symlink_to(root / "b.bin"),
    ):
        summaries(root)
        change()
        assert listed(root) == expected(root)


@pytest.mark.usefixtures("settled")
def test_the_look_up_looks_at_no_file_where_the_folder_is_as_it_was(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = record(20)
    space = cache_module.space_of(found.identity, found.settings, found.versions)
    with StoreCache(root) as cache:
        hint = cache.longest_prefix(space, [*found.tokens, 5])
        assert hint is not None
        assert (hint.name, hint.path, hint.n_cells) == ("a", root / "a.bin", 19)
        with monkeypatch.context() as patch:
            patch.setattr(cache_module, "session_stamps", pytest.fail)
            assert cache.longest_prefix(space, [*found.tokens, 5]) == hint
        add(root, "longer", 40)
        hint = cache.longest_prefix(space, [*range(40), 5])
        assert hint is not None
        assert (hint.name, hint.n_cells) == ("longer", 39)
        (root / "longer.bin").unlink()
        hint = cache.longest_prefix(space, [*range(40), 5])
        assert hint is not None
        assert (hint.name, hint.n_cells) == ("a", 19)


def test_no_object_is_opened(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Objects, "open", pytest.fail)
    monkeypatch.setattr(Objects, "has", pytest.fail)
    summaries(root)
    with StoreCache(root) as cache:
        cache.longest_prefix("space", [1, 2, 3])


# ---------------------------------------------------------------- damage


def _garbage(root: Path) -> None:
    (root / DATABASE).write_bytes(b"not a database " * 1000)


def _nothing(root: Path) -> None:
    (root / DATABASE).write_bytes(b"")


def _half(root: Path) -> None:
    os.truncate(root / DATABASE, (root / DATABASE).stat().st_size // 2)


def _zeros(root: Path) -> None:
    with open(root / DATABASE, "r+b") as file:
        file.seek(4096)
        file.write(bytes(8192))


def _other_version(root: Path) -> None:
    with connect(root) as database:
        database.execute("PRAGMA user_version = 3")


def _other_schema(root: Path) -> None:
    with connect(root) as database:
        database.execute("DROP INDEX prefixes_by_tokens")


def _trap(root: Path) -> None:
    with connect(root) as database:
        database.execute("CREATE TRIGGER trap AFTER INSERT ON folder BEGIN DELETE FROM sessions; END")


def _wrong_rows(root: Path) -> None:
    with connect(root) as database:
        database.execute("UPDATE sessions SET facts = replace(facts, '2', '3')")


def _wrong_types(root: Path) -> None:
    with connect(root) as database:
        database.execute("UPDATE sessions SET facts = 1, model = 'x'")
        database.execute("UPDATE prefixes SET tokens = 'text', name = 7")


def _folder_instead(root: Path) -> None:
    (root / DATABASE).unlink()
    (root / DATABASE).mkdir()


def _file_instead(root: Path) -> None:
    shutil.rmtree(root / ".cache")
    (root / ".cache").touch()


DAMAGES = [
    _garbage, _nothing, _half, _zeros, _other_version, _other_schema, _trap, _wrong_rows, _wrong_types,
    _folder_instead, _file_instead,
]  # fmt: skip


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__[1:])
def test_damage_changes_nothing_and_is_gone_afterwards(
    root: Path, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    summaries(root)
    damage(root)
    found = record(20)
    space = cache_module.space_of(found.identity, found.settings, found.versions)
    with StoreCache(root) as cache:
        hint = cache.longest_prefix(space, [*found.tokens, 5])
    assert hint is not None
    assert (hint.name, hint.n_cells) == ("a", 19)
    assert listed(root) == expected(root)
    if damage not in (_folder_instead, _file_instead):
        assert listed(root) == expected(root)
        read = n_read(monkeypatch)
        assert listed(root) == expected(root)
        assert read == ["broken"]


@pytest.mark.usefixtures("settled")
@pytest.mark.slow
def test_a_flip_of_any_byte_changes_nothing(root: Path) -> None:
    summaries(root)
    data = (root / DATABASE).read_bytes()
    right = expected(root)
    for offset in [*range(120), *range(120, len(data), 397)]:
        flipped = bytearray(data)
        flipped[offset] ^= 0x11
        shutil.rmtree(root / ".cache")
        (root / ".cache").mkdir()
        (root / DATABASE).write_bytes(flipped)
        assert listed(root) == right, offset


@contextlib.contextmanager
def _writing(root: Path) -> Iterator[None]:
    with connect(root) as database:
        database.execute("BEGIN IMMEDIATE")
        yield


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    with connect(root) as database:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("BEGIN EXCLUSIVE")
        yield


@contextlib.contextmanager
def _opening(root: Path) -> Iterator[None]:
    from llamakv.store import files

    with files.lock_of(root / ".cache" / ".lock", shared=False, wait_s=0.0):
        yield


@pytest.mark.parametrize("holding", [_writing, _alone, _opening], ids=lambda holding: holding.__name__[1:])
def test_a_database_that_others_keep_locked_is_left_alone(
    root: Path, holding: Callable[[Path], contextlib.AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_database, "_WAIT_S", 0.05)
    summaries(root)
    add(root, "d")
    with holding(root):
        assert listed(root) == expected(root)
        assert (root / DATABASE).exists()
    assert listed(root) == expected(root)


def test_a_folder_that_cannot_be_written_is_listed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise WriteError(f"cannot write {folder}")

    monkeypatch.setattr(cache_database.files, "make_private_folder", refuse)
    assert listed(root) == expected(root)
    assert not (root / ".cache").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_listed(root: Path) -> None:
    root.chmod(0o500)
    try:
        assert listed(root) == expected(root)
    finally:
        root.chmod(0o700)


def test_a_full_disk_changes_nothing(root: Path) -> None:
    with StoreCache(root) as cache:
        cache.refresh()
        cache._database._connection.execute("PRAGMA max_page_count = 1")
        for index in range(40):
            add(root, f"more-{index}", 800, first=index)
        assert {session.name for session in cache.summaries()} == set(SessionStore(root).names())
        assert cache._database.in_memory
    assert (root / DATABASE).exists()
    assert listed(root) == expected(root)


def test_deleting_it_while_it_is_open_changes_nothing(root: Path) -> None:
    found = record(20)
    space = cache_module.space_of(found.identity, found.settings, found.versions)
    with StoreCache(root) as cache:
        cache.refresh()
        shutil.rmtree(root / ".cache")
        add(root, "d", 50)
        summaries(root)  # another process makes a new one
        assert {session.name for session in cache.summaries()} == set(SessionStore(root).names())
        hint = cache.longest_prefix(space, [*range(50), 3])
        assert hint is not None
        assert (hint.name, hint.n_cells) == ("d", 49)
    assert listed(root) == expected(root)
    with connect(root) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_closed_cache_still_answers(root: Path) -> None:
    cache = StoreCache(root)
    cache.close()
    cache.close()
    assert {session.name for session in cache.summaries()} == set(SessionStore(root).names())
    cache.close()
    assert (root / DATABASE).exists()


def test_errors_keep_their_kind(root: Path) -> None:
    (root / "other.bin").write_bytes(b"GGUF" * 1000)
    kinds = {s.name: type(s.error) for s in summaries(root) if isinstance(s, UnreadableSession)}
    assert kinds == {"broken": DamagedError, "other": NotASessionError}


# ---------------------------------------------------------------- processes

LIST = """
import sys
from pathlib import Path
from llamakv.store import cache
cache._N_BATCH_BYTES = 4000
with cache.StoreCache(Path(sys.argv[1])) as found:
    print(" ".join(sorted(s.name for s in found.summaries())))
"""


def run_list(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", LIST, str(root)], stdout=subprocess.PIPE, text=True)


def test_many_processes_share_it(root: Path) -> None:
    for index in range(200):
        add(root, f"more-{index:03}", 60, first=index)
    names = " ".join(SessionStore(root).names())
    running = [run_list(root) for _ in range(4)]
    assert [process.communicate(timeout=60)[0].strip() for process in running] == [names] * 4
    assert listed(root) == expected(root)
    with connect(root) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        (n_rows,) = database.execute("SELECT count(*) FROM prefixes").fetchone()
    assert n_rows == 203


@pytest.mark.slow
def test_processes_that_are_killed_leave_it_sound(root: Path) -> None:
    for index in range(300):
        add(root, f"more-{index:03}", 60, first=index)
    for attempt in range(4):
        shutil.rmtree(root / ".cache", ignore_errors=True)
        process = run_list(root)
        deadline_s = time.monotonic() + 20
        while not (root / f"{DATABASE}-wal").exists() and time.monotonic() < deadline_s:
            time.sleep(0.001)
        time.sleep(0.01 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with connect(root) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert listed(root) == expected(root)


def test_a_section_that_is_not_cells_counts_as_stored(root: Path) -> None:
    found = replace(record(10), kind=MemoryKind.RECURRENT)
    write_index(root / "r.bin", found, rows_of(MemoryKind.RECURRENT, 9, [3]))
    assert {section.kind for section in read_session(root / "r.bin").sections} == {SectionKind.TAIL}
    assert listed(root) == expected(root)
