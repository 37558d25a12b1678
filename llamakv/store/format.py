"""The bytes of a session file around its sections: header, commit records, index. ``FORMAT.md`` is the specification.

Nothing here opens a file. Every length is checked against the file's real length and a limit before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llamakv.errors import DamagedError, FormatError, NewerFormatError, NotASessionError, WriteError
from llamakv.records import SectionKind, SessionRecord
from llamakv.store import codec
from llamakv.store.codec import CodecError, Encoding
from llamakv.store.digests import N_DIGEST_BYTES, digest_bytes
from llamakv.store.record_json import RecordError, decode_record, encode_record
from llamakv.store.sections import SectionsError, StoredSection, check_partial, check_sections

VERSION = 2
MAGIC = b"llamakv\0"
_HEADER_FRAME = 0x184D2A5C  # skippable frame magics; zstd leaves sixteen to applications
_INDEX_FRAME = 0x184D2A5D
_PADDING_FRAME = 0x184D2A5E
_FRAME_HEAD = struct.Struct("<II")

N_SECTOR = 512
N_SLOTS_END = 3 * N_SECTOR
_EMPTY_FRAME = bytes.fromhex("28b52ffd240001000099e9d851")  # so that `file` sees a zstd frame in every session
N_HEADER = N_SLOTS_END + len(_EMPTY_FRAME)
_IDENTIFYING = _FRAME_HEAD.pack(_HEADER_FRAME, N_SLOTS_END - _FRAME_HEAD.size) + MAGIC
_N_IDENTIFYING = len(_IDENTIFYING)

_COMMIT = struct.Struct("<5Q32s")
_N_COMMIT = _COMMIT.size + N_DIGEST_BYTES
_COPY_OFFSETS = (0, N_SECTOR // 2)

_INDEX_HEAD = struct.Struct("<3IHH")
_PARTIAL = 1  # the one flag
_ENTRY = struct.Struct("<BBBBI8Q32s")
_IN_STORE = 1

MAX_INDEX_RAW = 64 << 20  # three million tokens with their text
MAX_POSITION = 2**31 - 1  # llama.cpp's positions are 32-bit
MAX_TOKENS = 1 << 22  # as numbers in memory 36 bytes each
MAX_SECTIONS = 1 << 17  # about 700 bytes each
MAX_SECTION_RAW = 16 << 30
MAX_FILE = 2**62
MAX_RAW_OVER_STORED = 64  # a claim of more is hostile: writers pad, so that memory is bounded by the file's size
FREE_RAW = 1 << 20  # ... beyond this much

_KINDS = (SectionKind.CELLS, SectionKind.TAIL, SectionKind.WHOLE)
ENCODINGS = (Encoding.RAW, Encoding.ZSTD, Encoding.PLANES)
N_FRAMES = {Encoding.RAW: 1, Encoding.ZSTD: 1, Encoding.PLANES: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One generation of a session file: where its index is and how long the file was.

    The index frame lies at ``[index_offset, n_file)``; what follows ``n_file`` does not belong to this generation.
    """

    generation: int
    index_offset: int
    n_index_raw: int
    n_file: int
    index_digest: bytes

    @property
    def n_index(self) -> int:
        """Length of the index frame in bytes."""
        return self.n_file - self.index_offset


# ---------------------------------------------------------------- header


def first_sector(version: int = VERSION) -> bytes:
    """Return the fixed part of a header, one sector long."""
    return (_IDENTIFYING + struct.pack("<I", version)).ljust(N_SECTOR, b"\0")


def pack_header(commit: Commit) -> bytes:
    """Return the header of a new file whose only generation is ``commit``."""
    slots = [bytes(N_SECTOR), bytes(N_SECTOR)]
    slots[commit.generation % 2] = pack_slot(commit)
    return first_sector() + slots[0] + slots[1] + _EMPTY_FRAME


def slot_offset(generation: int) -> int:
    """Return where in the file the slot of ``generation`` begins: never the newest one's before it."""
    return N_SECTOR * (1 + generation % 2)


def pack_slot(commit: Commit) -> bytes:
    """Return a slot, one sector long: the record twice, so that damage to one byte changes nothing."""
    body = _COMMIT.pack(
        commit.generation, commit.index_offset, commit.n_file, commit.n_index_raw, 0, commit.index_digest
    )
    return (body + digest_bytes(body)).ljust(N_SECTOR // 2, b"\0") * 2


def parse_header(header: bytes, n_file: int, path: Path) -> Commit:
    """Return the newest generation a file of ``n_file`` bytes was committed with, given its first ``N_HEADER`` bytes.

    Raises: NotASessionError, NewerFormatError, DamagedError.
    """
    if header[:_N_IDENTIFYING] != _IDENTIFYING:
        what = "is empty" if not header else "is something else or its first bytes are damaged"
        raise NotASessionError(f"not a llamakv session: '{path}' {what}", path=str(path))
    if len(header) < N_HEADER:
        raise damaged(path, f"file ends after {len(header)} bytes, inside the header")
    version = int.from_bytes(header[_N_IDENTIFYING : _N_IDENTIFYING + 4], "little")
    if version > VERSION:
        raise newer(path, version)
    if version < 1 or header[:N_SECTOR] != first_sector(version) or header[N_SLOTS_END:] != _EMPTY_FRAME:
        raise damaged(path, "the fixed part of the header is wrong")
    commits = [
        commit
        for slot in (0, 1)
        for copy in _COPY_OFFSETS
        if (commit := _parse_commit(header, slot, N_SECTOR * (1 + slot) + copy)) is not None
    ]
    if not commits:
        raise damaged(path, "no commit record is intact")
    newest = max(commits, key=lambda commit: commit.generation)
    if newest.n_file > n_file:
        raise damaged(path, f"file is {n_file} bytes, expected {newest.n_file}")
    _check_index_size(newest, path)
    return newest


def _parse_commit(header: bytes, slot: int, offset: int) -> Commit | None:
    record = header[offset : offset + _N_COMMIT]
    body = record[: _COMMIT.size]
    generation, index_offset, n_file, n_index_raw, reserved, digest = _COMMIT.unpack(body)
    if record[_COMMIT.size :] != digest_bytes(body) or generation % 2 != slot or reserved:
        return None
    return Commit(
        generation=generation,
        index_offset=index_offset,
        n_file=n_file,
        n_index_raw=n_index_raw,
        index_digest=digest,
    )


def _check_index_size(commit: Commit, path: Path) -> None:
    n_content = commit.n_index - _FRAME_HEAD.size
    if commit.index_offset < N_HEADER or n_content <= 0 or commit.n_file > MAX_FILE:
        raise damaged(path, f"index at [{commit.index_offset}, {commit.n_file}) is impossible")
    if commit.n_index_raw > MAX_INDEX_RAW or n_content > MAX_INDEX_RAW:
        raise damaged(path, f"index of {commit.n_index_raw} bytes is over the limit of {MAX_INDEX_RAW}")
    if commit.n_index_raw > largest_raw(n_content):
        raise damaged(path, f"index claims {commit.n_index_raw} bytes from {n_content}")


# ---------------------------------------------------------------- index


def largest_raw(n_stored: int) -> int:
    """Return how many raw bytes a reader accepts from ``n_stored`` stored ones."""
    return FREE_RAW + MAX_RAW_OVER_STORED * n_stored


def n_padding(n_raw: int, n_stored: int) -> int:
    """Return how many bytes of padding ``n_raw`` raw bytes stored as ``n_stored`` need."""
    n_missing = -(-(n_raw - FREE_RAW) // MAX_RAW_OVER_STORED) - n_stored
    return max(n_missing, _FRAME_HEAD.size) if n_missing > 0 else 0


def padding(n_raw: int, n_stored: int) -> bytes:
    """Return the skippable frame, often empty, that makes ``n_stored`` long enough for ``n_raw`` raw bytes."""
    n_bytes = n_padding(n_raw, n_stored)
    if not n_bytes:
        return b""
    n_content = n_bytes - _FRAME_HEAD.size
    return _FRAME_HEAD.pack(_PADDING_FRAME, n_content) + bytes(n_content)


def pack_index(
    record: SessionRecord, sections: Sequence[StoredSection], *, is_partial: bool = False
) -> tuple[bytes, int]:
    """Return the index frame and the raw length of its content.

    Raises: WriteError (more text, tokens or sections than the format can hold), ValueError (a token id that is no
    31-bit number).
    """
    for what, n, limit in (("tokens", len(record.tokens), MAX_TOKENS), ("sections", len(sections), MAX_SECTIONS)):
        if n > limit:
            raise WriteError(f"session too large: {n} {what}, the limit is {limit}", expected=limit, actual=n)
    text = encode_record(record)
    tokens = _pack_tokens(record.tokens)
    raw = b"".join(
        [
            _INDEX_HEAD.pack(len(text), len(record.tokens), len(sections), VERSION, _PARTIAL * is_partial),
            text,
            tokens,
            *map(pack_entry, sections),
        ]
    )
    if len(raw) > MAX_INDEX_RAW:
        raise WriteError(
            f"session too large: text and tokens take {len(raw)} bytes, the limit is {MAX_INDEX_RAW}",
            expected=MAX_INDEX_RAW,
            actual=len(raw),
        )
    content = codec.compress_index(raw)
    content += padding(len(raw), len(content))
    return _FRAME_HEAD.pack(_INDEX_FRAME, len(content)) + content, len(raw)


def _pack_tokens(tokens: Sequence[int]) -> bytes:
    if tokens and not (min(tokens) >= 0 and max(tokens) <= MAX_POSITION):
        raise ValueError("a token id is negative or does not fit 32 bits")
    return struct.pack(f"<{len(tokens)}i", *tokens)


def pack_entry(section: StoredSection) -> bytes:
    """Return one row of the section table."""
    first, second = (*section.frames, 0, 0)[:2]
    return _ENTRY.pack(
        _KINDS.index(section.kind),
        ENCODINGS.index(section.encoding),
        section.in_store,
        0,
        0,
        section.p0,
        section.p1,
        section.p_used,
        section.n_raw,
        section.n_stored,
        section.offset,
        first,
        second,
        bytes.fromhex(section.digest),
    )


def commit_index(frame: bytes, *, generation: int, index_offset: int, n_index_raw: int) -> Commit:
    """Return the commit record of an index frame written at ``index_offset``."""
    return Commit(
        generation=generation,
        index_offset=index_offset,
        n_index_raw=n_index_raw,
        n_file=index_offset + len(frame),
        index_digest=digest_bytes(frame),
    )


def parse_index(frame: bytes, commit: Commit, path: Path) -> tuple[SessionRecord, tuple[StoredSection, ...]]:
    """Return record and section table, everything checked that can be without reading a section.

    Raises: NewerFormatError, DamagedError.
    """
    raw = _unpack_index(frame, commit, path)
    try:
        record, sections, is_partial = _split_index(raw, path)
        check = check_partial if is_partial else check_sections
        check(record.kind, len(record.tokens), sections)
        _check_places(sections, commit)
    except (CodecError, RecordError, SectionsError) as error:
        raise damaged(path, str(error)) from error
    return record, sections


def parse_digests(frame: bytes, commit: Commit, path: Path) -> set[str]:
    """Return the digests of the objects an index refers to, without decoding its record.

    Raises: NewerFormatError, DamagedError.
    """
    raw = _unpack_index(frame, commit, path)
    try:
        *_, table_start = _parts(raw, path)
    except CodecError as error:
        raise damaged(path, str(error)) from error
    rows = _ENTRY.iter_unpack(memoryview(raw)[table_start:])
    return {row[-1].hex() for row in rows if row[2] == _IN_STORE}


def _unpack_index(frame: bytes, commit: Commit, path: Path) -> bytes:
    if len(frame) != commit.n_index or digest_bytes(frame) != commit.index_digest:
        raise damaged(path, "the digest of the index is wrong")
    content = frame[_FRAME_HEAD.size :]
    if _FRAME_HEAD.unpack_from(frame) != (_INDEX_FRAME, len(content)):
        raise damaged(path, "the index is not in an index frame")
    try:
        return codec.decompress_index(content, commit.n_index_raw)
    except CodecError as error:
        raise damaged(path, str(error)) from error


def _parts(raw: bytes, path: Path) -> tuple[int, bool, int, int]:
    """The version of an index, whether a part of the state is lost, and where its tokens and its table begin."""
    if len(raw) < _INDEX_HEAD.size:
        raise CodecError("index has no head")
    n_text, n_tokens, n_sections, version, flags = _INDEX_HEAD.unpack_from(raw)
    if version > VERSION:
        raise newer(path, version)
    if n_tokens > MAX_TOKENS or n_sections > MAX_SECTIONS:
        raise CodecError(f"index of {n_tokens} tokens and {n_sections} sections is over the limits")
    tokens_start = _INDEX_HEAD.size + n_text
    table_start = tokens_start + 4 * n_tokens
    if version == 1 or flags > (_PARTIAL if version else 0) or table_start + _ENTRY.size * n_sections != len(raw):
        raise CodecError(f"index of {len(raw)} bytes cannot hold what its head says")
    return version or 1, flags == _PARTIAL, tokens_start, table_start


def _split_index(raw: bytes, path: Path) -> tuple[SessionRecord, tuple[StoredSection, ...], bool]:
    version, is_partial, tokens_start, table_start = _parts(raw, path)
    tokens = struct.unpack_from(f"<{(table_start - tokens_start) // 4}i", raw, tokens_start)
    if tokens and min(tokens) < 0:
        raise CodecError("negative token id")
    record = decode_record(raw[_INDEX_HEAD.size : tokens_start], tokens, version=version)
    rows = memoryview(raw)[table_start:]
    table = tuple(map(unpack_entry, (rows[i : i + _ENTRY.size] for i in range(0, len(rows), _ENTRY.size))))
    if version < 2 and any(section.in_store for section in table):
        raise CodecError("a section of format 1 cannot be in a store")
    return record, table, is_partial


def unpack_entry(row: bytes | memoryview) -> StoredSection:
    """Return the section a row of the table describes. Raises: CodecError."""
    kind, encoding, place, zero, zero_32, *numbers, digest = _ENTRY.unpack(row)
    if kind >= len(_KINDS) or encoding >= len(ENCODINGS) or place > _IN_STORE or zero or zero_32:
        raise CodecError(f"unknown section kind {kind}, encoding {encoding} or place {place}")
    p0, p1, p_used, n_raw, n_stored, offset, first, second = numbers
    frames = () if place == _IN_STORE else (first, second)[: N_FRAMES[ENCODINGS[encoding]]]
    if max(p0, p1, p_used) > MAX_POSITION or not 0 < n_raw <= MAX_SECTION_RAW or max(offset, n_stored) > MAX_FILE:
        raise CodecError(f"a section of {n_raw} bytes for positions up to {p1} is over the limits")
    if place == _IN_STORE and (encoding or offset or first or second):
        raise CodecError("a section in the store has a place in the file too")
    if sum(frames) != first + second or min(frames, default=1) < 1 or sum(frames) > n_stored:
        raise CodecError(f"frames of {first} and {second} bytes in a section of {n_stored}")
    if n_raw > largest_raw(n_stored):
        raise CodecError(f"a section claims {n_raw} bytes from {n_stored}")
    return StoredSection(
        kind=_KINDS[kind],
        p0=p0,
        p1=p1,
        p_used=p_used,
        n_raw=n_raw,
        n_stored=n_stored,
        offset=offset,
        digest=digest.hex(),
        encoding=ENCODINGS[encoding],
        frames=frames,
        in_store=place == _IN_STORE,
    )


def _check_places(sections: Sequence[StoredSection], commit: Commit) -> None:
    end = N_HEADER
    in_file = [section for section in sections if not section.in_store]
    for section in sorted(in_file, key=lambda section: section.offset):
        if section.offset < end:
            raise CodecError(f"a section at {section.offset} overlaps what ends at {end}")
        end = section.offset + section.n_stored
    if end > commit.index_offset:
        raise CodecError(f"sections end at {end}, behind the index at {commit.index_offset}")


def newer(path: Path, version: int) -> NewerFormatError:
    """Return the error for a file of a later version."""
    return NewerFormatError(
        f"'{path}' has format version {version}, this llamakv reads up to {VERSION}",
        hint="pip install --upgrade llamakv",
        path=str(path),
        expected=VERSION,
        actual=version,
    )


def damaged(path: Path, reason: str) -> FormatError:
    """Return the error for a file that contradicts itself."""
    return DamagedError(f"damaged session '{path}': {reason}", path=str(path))
