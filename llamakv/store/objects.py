"""Sections as files of their own, named by their content and shared by all sessions of a store.

``ROOT/.objects/ab/abcd...`` holds the section whose raw bytes have that BLAKE3 digest; ``FORMAT.md`` describes the
file. An object never changes, and appears complete and durable or not at all.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamakv.errors import (
    ConflictError,
    DamagedError,
    FormatError,
    LlamakvError,
    NewerFormatError,
    NotFoundError,
    ReadError,
)
from llamakv.store import codec, files, format
from llamakv.store.codec import CodecError, EncodedSection, Encoding
from llamakv.store.digests import N_DIGEST_BYTES, digest_bytes

FOLDER = ".objects"
CLAIMS = ".claims"
USERS = ".users"
VERSION = 1
_MAGIC = b"llkvobj\0"
_FRAME_MAGIC = 0x184D2A5C
_HEAD = struct.Struct("<II8sIHHQQQ32s")
N_HEAD = _HEAD.size + N_DIGEST_BYTES
_N_COMPARE = 1 << 20
_IS_DIGEST = re.compile(f"[0-9a-f]{{{2 * N_DIGEST_BYTES}}}").fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenObject:
    """An object held open: its bytes stay readable whatever happens to its name. ``fd`` is the owner's to close."""

    fd: int
    path: Path
    digest: str
    encoding: Encoding
    frames: tuple[int, ...]
    n_raw: int
    n_bytes: int

    @property
    def n_frames(self) -> int:
        """Bytes of its frames, padding left out."""
        return sum(self.frames)


class Objects:
    """The objects of one store. Safe between threads and processes; what is not claimed may be collected."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / FOLDER
        self._touched: set[Path] = set()

    def path_of(self, digest: str) -> Path:
        """Return where the object with a digest is, or would be."""
        return self.folder / digest[:2] / digest

    def has(self, digest: str) -> bool:
        """Return whether there is an object of that name; it is not read."""
        return os.path.isfile(self.path_of(digest))

    def open(self, digest: str) -> OpenObject:
        """Open an object and check its header and length.

        Raises: NotFoundError, NewerFormatError, DamagedError, ReadError.
        """
        path = self.path_of(digest)
        fd = files.open_for_reading(path)
        try:
            return _parse(fd, path, digest)
        except BaseException:
            os.close(fd)
            raise

    def put(self, encoded: EncodedSection) -> int:
        """Make sure that a section's object is there, byte for byte as given; return the bytes that had to be written
        for it: 0 if it was there. Durable after ``sync``.

        Raises: WriteError.
        """
        pieces = [piece for frame in encoded.frames for piece in frame]
        return self._put(encoded.digest.hex(), encoded.encoding, encoded.frame_lengths, encoded.n_raw, pieces)

    def put_stored(
        self, digest: str, encoding: Encoding, frames: tuple[int, ...], n_raw: int, stored: Iterable[bytes]
    ) -> int:
        """As ``put``, for a section that is encoded already; ``stored`` are its frames' bytes.

        Raises: WriteError.
        """
        return self._put(digest, encoding, frames, n_raw, list(stored))

    def _put(
        self,
        digest: str,
        encoding: Encoding,
        frames: tuple[int, ...],
        n_raw: int,
        pieces: Sequence[bytes | memoryview],
    ) -> int:
        path = self.path_of(digest)
        head = _pack_head(digest, encoding, frames, n_raw)
        whole = [head, *pieces, format.padding(n_raw, sum(frames))]
        self._touched |= {self.folder, path.parent}  # whoever put what is there may not have synced its name
        if _holds(path, whole):
            return 0
        files.make_private_folder(path.parent)
        with files.replacement(path, overwrite=True, sync_parent=False) as fd:
            return files.write_at(fd, whole, 0, path)

    def n_bytes_of(self, digest: str) -> int:
        """Return how long an object's file is. Raises: NotFoundError, ReadError."""
        path = self.path_of(digest)
        with files.reading(path):
            return path.stat().st_size

    def sync(self) -> None:
        """Make the names of all objects put so far durable. Raises: WriteError."""
        while self._touched:
            folder = self._touched.pop()
            if folder.exists():
                files.sync_folder(folder)

    def all(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield digest and directory entry of each object, in no order. Raises: ReadError."""
        for folder in _folders(self.folder):
            for entry in files.entries(folder):
                if (
                    _IS_DIGEST(entry.name)
                    and entry.name.startswith(folder.name)
                    and entry.is_file(follow_symlinks=False)
                ):
                    yield entry.name, entry

    def remove(self, digest: str) -> int:
        """Remove an object nobody refers to; return the bytes freed, 0 if it was gone. Raises: WriteError."""
        return files.discard(self.path_of(digest))

    def remove_stale_temporaries(self) -> list[Path]:
        """Remove what killed writers left; return the paths."""
        removed = []
        for folder in (*_folders(self.folder), self.folder / CLAIMS, self.folder / USERS):
            removed += files.remove_stale_temporaries(folder)
        return removed


def check_object(found: OpenObject) -> None:
    """Read an open object and verify its digest. Raises: DamagedError, ReadError."""
    try:
        codec.decode(
            lambda n_bytes, offset: files.read_at(found.fd, n_bytes, offset, found.path),
            encoding=found.encoding,
            offset=N_HEAD,
            frames=found.frames,
            n_raw=found.n_raw,
            digest=bytes.fromhex(found.digest),
        )
    except CodecError as error:
        raise damaged(found.path, str(error)) from error


def damaged(path: Path, reason: str) -> FormatError:
    """Return the error for an object that is not what its name says."""
    return DamagedError(f"damaged section '{path}': {reason}", path=str(path))


def replaced(path: Path) -> ConflictError:
    """Return the error for an index that is not what it was when it was locked."""
    return ConflictError(f"'{path}' was replaced or removed while it was saved", path=str(path))


def lost(path: Path, digest: str) -> FormatError:
    """Return the error for an index whose object is gone."""
    return DamagedError(
        f"damaged session '{path}': section {digest[:16]} is missing from the store",
        hint="if this file was copied out of a store, export it there instead; else: llamakv repair",
        path=str(path),
        digest=digest,
    )


def open_for(path: Path, objects: Objects, digest: str, n_raw: int) -> OpenObject:
    """Open the object that the session at ``path`` refers to.

    Raises: DamagedError (it is gone, or not what the session says), NewerFormatError, ReadError.
    """
    try:
        found = objects.open(digest)
    except NotFoundError as error:
        raise lost(path, digest) from error
    if found.n_raw != n_raw:
        os.close(found.fd)
        raise damaged(found.path, f"it holds {found.n_raw} bytes, session '{path}' says {n_raw}")
    return found


# ---------------------------------------------------------------- private


def _pack_head(digest: str, encoding: Encoding, frames: tuple[int, ...], n_raw: int) -> bytes:
    first, second = (*frames, 0)[:2]
    body = _HEAD.pack(
        _FRAME_MAGIC,
        N_HEAD - 8,
        _MAGIC,
        VERSION,
        format.ENCODINGS.index(encoding),
        0,
        n_raw,
        first,
        second,
        bytes.fromhex(digest),
    )
    return body + digest_bytes(body)


def _parse(fd: int, path: Path, digest: str) -> OpenObject:
    head = files.read_at(fd, N_HEAD, 0, path)
    n_bytes = files.file_length(fd)
    if len(head) < N_HEAD:
        raise damaged(path, f"file is {n_bytes} bytes, shorter than a header")
    body = head[: _HEAD.size]
    frame, n_frame, magic, version, encoding, zero, n_raw, first, second, found = _HEAD.unpack(body)
    if (frame, n_frame, magic) != (_FRAME_MAGIC, N_HEAD - 8, _MAGIC):
        raise damaged(path, "it is something else, or its first bytes are damaged")
    if digest_bytes(body) != head[_HEAD.size :]:
        raise damaged(path, "its header is damaged")
    if version > VERSION:
        raise NewerFormatError(
            f"'{path}' has object version {version}, this llamakv reads up to {VERSION}",
            hint="pip install --upgrade llamakv",
            path=str(path),
            expected=VERSION,
            actual=version,
        )
    if zero or version < 1 or encoding >= len(format.ENCODINGS):
        raise damaged(path, "its header is damaged")
    if found.hex() != digest:
        raise damaged(path, f"it is section {found.hex()[:16]}")
    kind = format.ENCODINGS[encoding]
    frames = (first, second)[: format.N_FRAMES[kind]]
    n_stored = n_bytes - N_HEAD
    if not 0 < n_raw <= min(format.MAX_SECTION_RAW, format.largest_raw(n_stored)):
        raise damaged(path, f"it claims {n_raw} bytes from {n_stored}")
    n_frames = sum(frames)
    if n_frames != first + second or min(frames) < 1 or n_stored != n_frames + format.n_padding(n_raw, n_frames):
        raise damaged(path, f"file is {n_bytes} bytes, its header speaks of frames of {first} and {second}")
    return OpenObject(fd=fd, path=path, digest=digest, encoding=kind, frames=frames, n_raw=n_raw, n_bytes=n_bytes)


def _holds(path: Path, pieces: Sequence[bytes | memoryview]) -> bool:
    """Whether a file is exactly these bytes: one that was damaged, or encoded otherwise, is written again."""
    try:
        fd = files.open_for_reading(path)
    except LlamakvError:
        return False
    try:
        if files.file_length(fd) != sum(map(len, pieces)):
            return False
        offset = 0
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, len(view), _N_COMPARE):
                part = view[start : start + _N_COMPARE]
                if files.read_at(fd, len(part), offset, path) != part:
                    return False
                offset += len(part)
    except ReadError:
        return False
    finally:
        os.close(fd)
    return True


def _folders(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in files.entries(folder) if len(entry.name) == 2]
