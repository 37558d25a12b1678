"""The power may go at any moment: what is on the disk then never refers to what is not."""

import os
from pathlib import Path

import pytest

from llamakv.store import files
from llamakv.store.objects import Objects
from llamakv.store.session_file import create_session, extend_session, read_session
from llamakv.store.store_folder import make_store
from tests.store.samples import cells, make_record
from tests.store.test_durability import Died


class Disk:
    """What is sure to be there after the power went: names whose folder was synced, of files that were synced."""

    def __init__(self, patch):
        self.unsynced, self.contents, self.checks = set(), set(), []
        real_mkdir, real_sync, real_publish, real_sync_folder = os.mkdir, files.sync, files.publish, files.sync_folder

        def mkdir(path, *arguments, **options):
            real_mkdir(path, *arguments, **options)
            self.unsynced.add(Path(path))

        def sync(fd, path):
            real_sync(fd, path)
            self.contents.add(os.fstat(fd).st_ino)

        def publish(temporary, path, *, overwrite):
            assert temporary.stat().st_ino in self.contents, "a name is given to what is on the disk"
            if path.suffix == ".bin":
                self.check(temporary, path.parent)
            real_publish(temporary, path, overwrite=overwrite)
            self.unsynced.add(path)

        def sync_folder(folder):
            real_sync_folder(folder)
            self.unsynced -= {name for name in self.unsynced if name.parent == folder}

        patch.setattr(os, "mkdir", mkdir)
        patch.setattr(files, "sync", sync)
        patch.setattr(files, "publish", publish)
        patch.setattr(files, "sync_folder", sync_folder)

    def check(self, index, root):
        digests = {section.digest for section in read_session(index).sections}
        self.checks.append(len(digests))
        for digest in digests:
            path = Objects(root).path_of(digest)
            names = {path, path.parent, path.parent.parent}
            assert not names & self.unsynced, "an index refers to what may be lost with the power"


def die(self):
    raise Died


def test_objects_and_the_folders_they_are_in_are_on_the_disk_before_the_index_is(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    root = tmp_path / "new" / "store"
    make_store(root)
    base = create_session(root / "a.bin", make_record(5), [cells(i, i + 1) for i in range(4)])
    extend_session(base, make_record(7), keep=base.sections, new=[cells(4, 6)])
    assert disk.checks == [4, 5]


def test_an_object_that_another_writer_left_unsynced_is_synced_before_it_is_relied_on(tmp_path, monkeypatch):
    make_store(tmp_path)
    disk = Disk(monkeypatch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objects, "sync", die)
        with pytest.raises(Died):
            create_session(tmp_path / "a.bin", make_record(5), [cells(0, 2), cells(2, 4)])
    assert disk.unsynced
    create_session(tmp_path / "b.bin", make_record(5), [cells(0, 2), cells(2, 4)])
    assert disk.checks == [2]
