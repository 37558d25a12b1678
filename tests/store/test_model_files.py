"""A remembered digest is only believed while nothing can have changed."""

import json
import os
import stat
import time

import blake3
import pytest

from llamakv.errors import NotASessionError, NotFoundError, ReadError
from llamakv.store import model_files
from llamakv.store.model_files import ModelFiles


@pytest.fixture
def cache(tmp_path):
    return ModelFiles(tmp_path / "cache" / "llamakv")


@pytest.fixture
def cache_path(tmp_path):
    return tmp_path / "cache" / "llamakv" / "model-digests.json"


@pytest.fixture
def hashed(monkeypatch):
    """The paths that were really hashed."""
    seen = []
    real = model_files.digest_file

    def digest_file(path, on_progress=None):
        seen.append(path.name)
        return real(path, on_progress)

    monkeypatch.setattr(model_files, "digest_file", digest_file)
    return seen


@pytest.fixture
def later(monkeypatch):
    """As if it were a minute later, so that files made now are at rest."""
    real = time.time_ns
    monkeypatch.setattr(model_files.time, "time_ns", lambda: real() + 60_000_000_000)


def model(folder, name="m.gguf", content=b"GGUF model"):
    path = folder / name
    path.write_bytes(content)
    return path


def digest_of(content):
    return blake3.blake3(content).hexdigest()


def test_a_digest_is_of_the_content(cache, tmp_path):
    for content in (b"", b"x", b"GGUF" * 100_000):
        path = model(tmp_path, content=content)
        assert cache.digest(path) == (digest_of(content), len(content))


def test_progress_is_told(cache, tmp_path):
    seen = []
    cache.digest(model(tmp_path), lambda n_done, n_bytes: seen.append((n_done, n_bytes)))
    assert seen == [(10, 10)]


def test_a_file_at_rest_is_hashed_once(cache, cache_path, tmp_path, hashed, later):
    path = model(tmp_path)
    (tmp_path / "link.gguf").symlink_to(path)
    for name in ("m.gguf", "m.gguf", "link.gguf"):
        assert cache.digest(tmp_path / name) == (digest_of(b"GGUF model"), 10)
    assert ModelFiles(cache_path.parent).digest(path)[1] == 10
    assert hashed == ["m.gguf"]
    assert stat.S_IMODE(cache_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache_path.parent.stat().st_mode) == 0o700
    assert os.listdir(cache_path.parent) == ["model-digests.json"]


def test_a_file_just_written_is_not_remembered(cache, tmp_path, hashed):
    path = model(tmp_path)
    cache.digest(path)
    cache.digest(path)
    assert hashed == ["m.gguf", "m.gguf"]


def test_a_rewrite_in_place_with_the_old_time_is_noticed(cache, tmp_path, later):
    path = model(tmp_path, content=b"model one!")
    before = path.stat()
    assert cache.digest(path)[0] == digest_of(b"model one!")
    with open(path, "r+b") as file:
        file.write(b"model two!")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, 10, before.st_mtime_ns)
    assert cache.digest(path)[0] == digest_of(b"model two!")


def test_a_replacement_by_rename_with_the_old_time_is_noticed(cache, tmp_path, later):
    path = model(tmp_path, content=b"model one!")
    before = path.stat()
    cache.digest(path)
    other = model(tmp_path, "other", b"model two!")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.rename(other, path)
    assert cache.digest(path)[0] == digest_of(b"model two!")


def test_a_file_that_changes_while_it_is_hashed_is_not_remembered(cache, tmp_path, monkeypatch, later):
    path = model(tmp_path, content=b"model one!")
    real = model_files.digest_file

    def digest_file(at, on_progress=None):
        found = real(at, on_progress)
        path.write_bytes(b"model two!")
        return found

    monkeypatch.setattr(model_files, "digest_file", digest_file)
    cache.digest(path)
    monkeypatch.setattr(model_files, "digest_file", real)
    assert cache.digest(path)[0] == digest_of(b"model two!")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"schema": 2, "files": {}}',
        b'{"schema": 1, "files": []}',
        b'{"schema": 1, "files": {"x": 1}}',
        b'{"schema": 1, "files": {"x": {"digest": "y", "stamp": null}}}',
        b'{"schema": 1, "files": {"x": {"digest": "' + b"0" * 64 + b'", "stamp": {"a": 1}}}}',
    ],
    ids=range(10),
)
def test_a_damaged_cache_is_no_cache_and_is_replaced(cache, cache_path, tmp_path, content, later):
    cache_path.parent.mkdir(parents=True)
    cache_path.write_bytes(content)
    assert cache.find("00" * 32, 10) is None
    assert cache.digest(model(tmp_path)) == (digest_of(b"GGUF model"), 10)
    assert list(json.loads(cache_path.read_text())["files"]) == [str(tmp_path / "m.gguf")]


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path, hashed, later):
    (tmp_path / "file").touch()
    cache = ModelFiles(tmp_path / "file" / "cache")
    path = model(tmp_path)
    assert cache.digest(path) == cache.digest(path)
    assert hashed == ["m.gguf", "m.gguf"]


def test_missing_files_and_folders_are_named_errors(cache, tmp_path):
    with pytest.raises(NotFoundError):
        cache.digest(tmp_path / "missing.gguf")
    with pytest.raises(NotASessionError):
        cache.digest(tmp_path)


# ---------------------------------------------------------------- finding


def test_a_model_is_found_by_content_whatever_its_name(cache, tmp_path):
    for name, content in (("a.gguf", b"model one!"), ("b.gguf", b"model two!"), ("c.GGUF", b"longer model")):
        model(tmp_path, name, content)
    model(tmp_path, "d.txt", b"model 4 !!")
    folders = [tmp_path / "missing", tmp_path]
    assert cache.find(digest_of(b"model two!"), 10, folders) == tmp_path / "b.gguf"
    assert cache.find(digest_of(b"longer model"), 12, folders) == tmp_path / "c.GGUF"
    assert cache.find(digest_of(b"model 4 !!"), 10, folders) is None
    assert cache.find(digest_of(b"model two!"), 11, folders) is None


def test_only_files_of_the_right_length_are_hashed(cache, tmp_path, hashed):
    model(tmp_path, "a.gguf", b"model one!")
    model(tmp_path, "b.gguf", b"another model")
    cache.find("00" * 32, 13, [tmp_path])
    assert hashed == ["b.gguf"]


def test_a_remembered_path_is_looked_at_first_and_checked(cache, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    path = model(tmp_path / "elsewhere", "model")
    digest = digest_of(b"GGUF model")
    assert cache.find(digest, 10) is None
    cache.remember(digest, path)
    assert cache.find(digest, 10) == path
    path.write_bytes(b"GGUF other")
    assert cache.find(digest, 10) is None
    path.unlink()
    assert cache.find(digest, 10) is None


def test_remembering_keeps_a_digest_that_is_known(cache, tmp_path, hashed, later):
    path = model(tmp_path)
    digest, n_bytes = cache.digest(path)
    cache.remember(digest, path)
    assert cache.find(digest, n_bytes) == path
    assert hashed == ["m.gguf"]


def test_a_pipe_is_refused_as_a_model_and_as_a_memory_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ReadError, match="not a regular file"):
        ModelFiles(tmp_path / "cache").digest(tmp_path / "pipe.gguf")
    (tmp_path / "cache").mkdir(exist_ok=True)
    os.mkfifo(tmp_path / "cache" / "model-digests.json")
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    assert ModelFiles(tmp_path / "cache").digest(model)[1] == 4


def test_what_a_killed_writer_left_beside_the_memory_is_removed(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / ".llamakv-dead.tmp").touch()
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    ModelFiles(tmp_path / "cache").digest(tmp_path / "m.gguf")
    assert os.listdir(tmp_path / "cache") == ["model-digests.json"]


def parts(folder, *contents, name="m"):
    n = len(contents)
    return [model(folder, f"{name}-{i:05}-of-{n:05}.gguf", content) for i, content in enumerate(contents, 1)]


def test_a_model_in_parts_is_known_by_all_of_them(cache, tmp_path, hashed, later):
    first, second, third = parts(tmp_path, b"GGUF one", b"GGUF two!", b"GGUF three")
    seen = []
    digest, n_bytes = cache.digest(first, lambda *values: seen.append(values))
    assert n_bytes == 8 + 9 + 10
    assert seen == [(8, 27), (17, 27), (27, 27)]
    assert len(hashed) == 3
    assert cache.digest(first) == (digest, n_bytes)
    assert len(hashed) == 3  # each is remembered
    third.write_bytes(b"GGUF THREE")
    assert cache.digest(first)[0] != digest
    assert hashed[3:] == [third.name]
    assert cache.digest(second)[0] == blake3.blake3(b"GGUF two!").hexdigest()  # not what the engine opens


def test_a_model_in_parts_is_found_again_by_its_digest(cache, tmp_path, hashed, later):
    (tmp_path / "models").mkdir()
    first, *_ = parts(tmp_path / "models", b"GGUF one", b"GGUF two!")
    digest, n_bytes = cache.digest(first)
    assert cache.find(digest, n_bytes, [tmp_path / "models"]) == first
    cache.remember(digest, first)
    assert cache.find(digest, n_bytes) == first
    assert len(hashed) == 2  # what is remembered of all of them takes nothing from what is of each


def test_the_first_part_alone_is_a_file_like_others(cache, tmp_path):
    first, second = parts(tmp_path, b"GGUF one", b"GGUF two!")
    second.unlink()
    assert cache.digest(first) == (blake3.blake3(b"GGUF one").hexdigest(), 8)
