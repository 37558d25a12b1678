"""Readers of a store read to the end what they began to, or are told it is gone; sessions can be taken elsewhere."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llamakv.errors import (
    ConflictError,
    DamagedError,
    NotFoundError,
)
from llamakv.store.collector import collect
from llamakv.store.objects import CLAIMS, Objects
from llamakv.store.session_file import (
    SessionReader,
    create_session,
    extend_session,
    read_session,
    verify_session,
)
from llamakv.store.session_store import SessionStore
from llamakv.store.store_folder import make_store
from tests.store.at_rest import check, read_all, save, there
from tests.store.samples import cells, contents, make_record


@pytest.fixture
def root(tmp_path):
    make_store(tmp_path / "store")
    return tmp_path / "store"


# ---------------------------------------------------------------- readers


def test_a_reader_that_has_begun_keeps_reading_though_the_session_is_removed_and_collected(root):
    info = save(root, "a", n=12)
    expected = read_all(info.path)
    with SessionReader(info.path) as reader:
        sections = reader.read(reader.info.sections)
        first = next(sections)
        SessionStore(root).remove("a")
        assert there(root) == set()
        assert contents(iter([first, *sections])) == expected
        assert contents(reader.read(reader.info.sections[3:5])) == expected[3:5]


def test_a_reader_that_holds_keeps_what_it_holds(root):
    info = save(root, "a", n=4)
    with SessionReader(info.path) as reader:
        reader.hold(reader.info.sections[:2])
        SessionStore(root).remove("a")
        assert len(list(reader.read(reader.info.sections[:2]))) == 2
        with pytest.raises(ConflictError):
            reader.read(reader.info.sections)


def losing(path, change):
    """A reader that has read the index when ``change`` happens and its objects are collected."""
    reader = SessionReader(path)
    change()
    collect(path.parent)
    return reader


def test_a_reader_that_loses_the_race_is_told_so_and_reading_again_works(root):
    save(root, "a", seed=1)

    def read(reader):
        return list(reader.read(reader.info.sections))

    for change, use in (
        (lambda: save(root, "a", seed=2, overwrite=True), read),
        (lambda: save(root, "a", seed=3, overwrite=True), lambda reader: reader.hold(reader.info.sections)),
        (lambda: save(root, "a", seed=4, overwrite=True), lambda reader: list(reader.find_damage())),
        (
            lambda: save(root, "a", seed=5, overwrite=True),
            lambda reader: create_session(root / "b.bin", make_record(3), [], source=reader, keep=reader.info.sections),
        ),
        (
            lambda: save(root, "a", seed=6, overwrite=True),
            lambda reader: create_session(
                root.parent / "out.bin", make_record(3), [], source=reader, keep=reader.info.sections
            ),
        ),
    ):
        with losing(root / "a.bin", change) as reader, pytest.raises(ConflictError) as caught:
            use(reader)
        assert (caught.value.exit_status, caught.value.hint is not None) == (12, True)
        assert len(read_all(root / "a.bin")) == 2
        check(root)
    with losing(root / "a.bin", (root / "a.bin").unlink) as reader, pytest.raises(ConflictError):
        read(reader)
    with pytest.raises(NotFoundError):
        read_all(root / "a.bin")
    assert os.listdir(root.parent) == ["store"]


def test_an_object_that_is_missing_although_nobody_touched_the_session_is_damage(root):
    info = save(root, "a", n=3)
    Objects(root).remove(info.sections[1].digest)
    with pytest.raises(DamagedError, match="is missing from the store") as caught:
        read_all(info.path)
    assert caught.value.fields["digest"] == info.sections[1].digest
    report = verify_session(info.path)
    assert [damage.section for damage in report.damaged] == [info.sections[1]]
    with pytest.raises(DamagedError):
        extend_session(info, make_record(5), keep=info.sections, new=[cells(3, 4)])
    with SessionReader(info.path) as reader:
        assert len(list(reader.read([info.sections[0], info.sections[2]]))) == 2
        with pytest.raises(DamagedError):
            create_session(root / "b.bin", make_record(4), [], source=reader, keep=info.sections)
    assert os.listdir(Objects(root).folder / CLAIMS) == []


def test_a_fork_of_what_it_holds_survives_the_collector(root):
    info = save(root, "a", n=3)
    expected = read_all(info.path)
    with SessionReader(info.path) as reader:
        reader.hold(info.sections)
        SessionStore(root).remove("a")
        assert there(root) == set()
        create_session(root / "b.bin", make_record(4), [], source=reader, keep=info.sections)
    assert read_all(root / "b.bin") == expected
    check(root)


def test_more_sections_are_read_than_a_process_may_open_files_by_default(root, tmp_path):
    save(root, "a", n=120)
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (160, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "from llamakv.store.session_file import SessionReader\n"
        "readers = [SessionReader(sys.argv[1]) for _ in range(3)]\n"
        "print(sum(len(list(reader.read(reader.info.sections))) for reader in readers))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, root / "a.bin"], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("360\n", "")


# ---------------------------------------------------------------- moved, copied, linked


def test_a_store_moved_to_another_place_is_the_same_store(root, tmp_path):
    info = save(root, "a")
    expected = read_all(info.path)
    os.rename(root, tmp_path / "elsewhere")
    moved = tmp_path / "elsewhere" / "a.bin"
    assert read_all(moved) == expected
    base = read_session(moved)
    extend_session(base, make_record(4, n_saves=2), keep=base.sections, new=[cells(2, 3)])
    shutil.copytree(tmp_path / "elsewhere", tmp_path / "copy")
    assert len(read_all(tmp_path / "copy" / "a.bin")) == 3
    for place in ("elsewhere", "copy"):
        collect(tmp_path / place)
        check(tmp_path / place)


def test_an_index_copied_out_of_its_store_says_what_is_missing_and_what_to_do(root, tmp_path):
    info = save(root, "a")
    make_store(tmp_path / "other")
    for folder in (tmp_path, tmp_path / "other"):
        copy = Path(shutil.copy(info.path, folder))
        with pytest.raises(DamagedError, match=f"section {info.sections[0].digest[:16]} is missing") as caught:
            read_all(copy)
        assert "export it there instead" in (caught.value.hint or "")
        assert not verify_session(copy).is_sound
        assert read_session(copy).record == info.record, "what it says can still be read"
        copy.unlink()
    assert len(read_all(info.path)) == 2


def test_a_link_to_a_session_reads_it_from_its_store_wherever_the_link_is(root, tmp_path):
    info = save(root, "a")
    (tmp_path / "link.bin").symlink_to(info.path)
    (root / "link.bin").symlink_to(info.path)
    for link in (tmp_path / "link.bin", root / "link.bin"):
        assert read_all(link) == read_all(info.path)
        with SessionReader(link) as reader:
            create_session(root / "b.bin", make_record(3), [], source=reader, keep=reader.info.sections, overwrite=True)
        assert read_all(root / "b.bin") == read_all(info.path)
    SessionStore(root).remove("link")
    assert collect(root).n_objects == 0


def test_a_session_of_another_store_is_taken_over_verified(root, tmp_path):
    other = tmp_path / "other"
    make_store(other)
    info = save(other, "a", n=3)
    save(root, "b", n=2)  # the first two of these
    with SessionReader(info.path) as reader:
        taken = create_session(root / "a.bin", make_record(5), [cells(3, 4)], source=reader, keep=reader.info.sections)
    assert len(there(root)) == 4
    shutil.rmtree(other)
    assert read_all(taken.path)[:3] == contents(iter([cells(i, i + 1, n_bytes=300, seed=i) for i in range(3)]))
    check(root)


def test_a_damaged_section_is_not_taken_over_from_anywhere(root, tmp_path):
    other = tmp_path / "other"
    make_store(other)
    for folder in (other, tmp_path):
        info = save(folder, "a", n=3)
        place = info.sections[1]
        path = Objects(other).path_of(place.digest) if place.in_store else info.path
        data = bytearray(path.read_bytes())
        data[200 if place.in_store else place.offset + 60] ^= 4
        path.write_bytes(data)
        with SessionReader(info.path) as reader, pytest.raises(DamagedError):
            create_session(root / "b.bin", make_record(4), [], source=reader, keep=reader.info.sections)
        assert list(root.glob("*.bin")) == []
    collect(root)
    check(root)


def test_a_session_leaves_its_store_as_a_file_of_its_own(root, tmp_path):
    info = save(root, "a", n=3)
    with SessionReader(info.path) as reader:
        out = create_session(tmp_path / "out.bin", info.record, [], source=reader, keep=reader.info.sections)
    assert not out.in_store
    shutil.rmtree(root)
    assert len(read_all(tmp_path / "out.bin")) == 3
    assert verify_session(tmp_path / "out.bin").is_sound


def test_a_file_of_its_own_is_taken_apart_by_the_next_save_in_a_store(root, tmp_path):
    base = save(tmp_path, "a", n=3)
    expected = read_all(base.path)
    shutil.move(base.path, root)
    base = read_session(root / "a.bin")
    info = extend_session(base, make_record(5, n_saves=2), keep=base.sections, new=[cells(3, 4)])
    assert all(section.in_store for section in info.sections)
    assert (info.n_dead_bytes, info.n_live_bytes) == (0, info.n_file_bytes)
    assert read_all(info.path)[:3] == expected
    check(root)
