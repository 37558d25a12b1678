"""Digests of model files, remembered, and the way back from a digest to a file."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamakv.errors import LlamakvError, WriteError
from llamakv.store import files
from llamakv.store.digests import digest_bytes, digest_file

OnProgress = Callable[[int, int], None]

_FILE_NAME = "model-digests.json"
_SCHEMA = 1
_MAX_FILE = 4 << 20
_MAX_ENTRIES = 1000  # the oldest are forgotten
_FIRST_PART = re.compile(r"(.+)-00001-of-(\d{5})\.gguf", re.DOTALL)  # llama_split_path of llama.cpp
_ALL_PARTS = "\0"  # behind a path in the memory: the digest is that of all parts; no path has this character
_MIN_AGE_NS = 2_000_000_000  # coarsest clock of a file system (FAT): a later change is sure to show in the times


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stamp:
    """What changes when a file is replaced or rewritten, even where its modification time is put back."""

    device: int
    inode: int
    n_bytes: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    digest: str
    stamp: _Stamp | None  # None: the digest was true once; hash again before relying on it


class ModelFiles:
    """Digests of model files, remembered in ``cache_dir`` (a path that need not exist).

    A damaged cache counts as none, and one that cannot be written only costs time. Safe between processes: a file
    written at the same time by two keeps what one of them knew.
    """

    def __init__(self, cache_dir: str | os.PathLike[str]) -> None:
        self._path = Path(cache_dir) / _FILE_NAME

    def digest(self, path: str | os.PathLike[str], on_progress: OnProgress | None = None) -> tuple[str, int]:
        """Return the BLAKE3 hex digest of a file's content and its length in bytes. Of the first of several files that
        are one model together (``parts_of``) it is a digest of the digests of all, and the sum of their lengths.

        Remembered by real path, device, inode, length and both times, and only where these had been at rest for two
        seconds before, so a file replaced or rewritten in place is noticed. Hashes on all cores otherwise, calling
        ``on_progress(n_done, n_bytes)``.

        Raises: NotFoundError, NotASessionError (a folder), ReadError.
        """
        parts = parts_of(Path(path))
        if len(parts) == 1:
            return self._digest_one(parts[0], on_progress)
        n_all = sum(length_of(part) for part in parts)
        digests, n_before = [], 0
        for part in parts:
            digest, n_bytes = self._digest_one(part, _shifted(on_progress, n_before, n_all))
            digests.append(digest)
            n_before += n_bytes
        return digest_bytes("\n".join(digests).encode()).hex(), n_before

    def _digest_one(self, path: Path, on_progress: OnProgress | None) -> tuple[str, int]:
        real = Path(os.path.realpath(path))
        with files.reading(path):
            before = _stamp(real)
            entry = self._load().get(str(real))
            if entry is not None and entry.stamp == before:
                return entry.digest, before.n_bytes
            start_ns = time.time_ns()
            digest, n_bytes = digest_file(real, on_progress)
            after = _stamp(real)
        is_at_rest = max(before.mtime_ns, before.ctime_ns) < start_ns - _MIN_AGE_NS
        is_stable = before == after and is_at_rest and n_bytes == before.n_bytes
        self._store(str(real), _Entry(digest=digest, stamp=before if is_stable else None))
        return digest, n_bytes

    def remember(self, digest: str, path: str | os.PathLike[str]) -> None:
        """Note that a file with this digest was seen at ``path``; ``find`` will look there, and check."""
        key = os.path.realpath(path)
        if len(parts_of(Path(path))) > 1:
            key = os.path.abspath(path) + _ALL_PARTS  # the names of the others go by this one
        entry = self._load().get(key)
        if entry is None or entry.digest != digest:
            self._store(key, _Entry(digest=digest, stamp=None))

    def find(self, digest: str, n_bytes: int | None, folders: Sequence[str | os.PathLike[str]] = ()) -> Path | None:
        """Return a file whose content has this digest, or None.

        Looks at remembered paths, then at the ``*.gguf`` files directly in ``folders``; only files of ``n_bytes``
        are digested (all remembered ones, if that is None). Files that cannot be read are passed over.
        """
        remembered = [
            Path(path.removesuffix(_ALL_PARTS)) for path, entry in self._load().items() if entry.digest == digest
        ]
        seen: set[str] = set()
        for path in [*remembered, *_models_in(folders)]:
            own = os.path.abspath(path)
            if own in seen:
                continue
            seen.add(own)
            try:
                is_that_long = n_bytes is None or sum(map(length_of, parts_of(path))) == n_bytes
                if is_that_long and self.digest(path)[0] == digest:
                    return path
            except (OSError, LlamakvError):
                continue
        return None

    def _load(self) -> dict[str, _Entry]:
        try:
            fd = files.open_for_reading(self._path)  # never waits, as opening a pipe would
            with open(fd, "rb") as file:
                document = json.loads(file.read(_MAX_FILE + 1))
            if document["schema"] != _SCHEMA:
                return {}
            return {str(path): _parse_entry(item) for path, item in document["files"].items()}
        except (LlamakvError, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}

    def _store(self, path: str, entry: _Entry) -> None:
        entries = self._load()
        entries.pop(path, None)
        entries[path] = entry
        newest = list(entries.items())[-_MAX_ENTRIES:]
        document = {"schema": _SCHEMA, "files": {key: dataclasses.asdict(item) for key, item in newest}}
        try:
            files.make_private_folder(self._path.parent)
            files.remove_stale_temporaries(self._path.parent)
            files.replace_small_file(self._path, json.dumps(document, indent=1).encode())
        except WriteError:
            return  # only a memory: the digest itself is right


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return the files of a model: the one at the path or, where it is named as the first of several
    (``NAME-00001-of-00003.gguf``) and all are there, each of them. The engine opens them all, given the first one."""
    found = _FIRST_PART.fullmatch(path.name)
    if found is None:
        return (path,)
    n_parts = int(found[2])
    parts = [path.with_name(f"{found[1]}-{number:05}-of-{n_parts:05}.gguf") for number in range(1, n_parts + 1)]
    return tuple(parts) if parts and all(map(os.path.exists, parts)) else (path,)


def length_of(path: Path) -> int:
    """Return the length of a file. Raises OSError."""
    return os.stat(path).st_size


def _shifted(on_progress: OnProgress | None, n_before: int, n_all: int) -> OnProgress | None:
    """Progress with one of several files as progress with all of them."""
    if on_progress is None:
        return None
    return lambda n_done, _: on_progress(n_before + n_done, n_all)


def _stamp(path: Path) -> _Stamp:
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(None, "is a folder")
    if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for, a device read without an end
        raise OSError("it is not a regular file")
    return _Stamp(
        device=status.st_dev,
        inode=status.st_ino,
        n_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
    )


def _parse_entry(item: dict[str, object]) -> _Entry:
    digest, stamp = item["digest"], item["stamp"]
    if not isinstance(digest, str) or len(digest) != 64:
        raise ValueError("not a digest")
    if stamp is None:
        return _Entry(digest=digest, stamp=None)
    if not isinstance(stamp, dict) or not all(type(value) is int for value in stamp.values()):
        raise ValueError("not a stamp")
    return _Entry(digest=digest, stamp=_Stamp(**stamp))


def _models_in(folders: Iterable[str | os.PathLike[str]]) -> list[Path]:
    found: list[Path] = []
    for folder in folders:
        try:
            found += sorted(path for path in Path(folder).iterdir() if path.suffix.lower() == ".gguf")
        except OSError:
            continue
    return found
