"""Compression: what the bytes of a section look like inside zstd frames.

Measured on f16 keys and values: zstd alone gives 1.08, byte planes 1.17, because only the high byte (sign, exponent,
first bits of the mantissa) is predictable. So the low plane is stored as it is and the high one compressed. A probe of
the section itself decides, since other cache types behave otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import IO, TypeAlias, cast

import zstandard

from llamakv.store.digests import Digester


class Compress(StrEnum):
    """How hard to try: ``AUTO`` by what a probe says, ``NONE`` not at all."""

    AUTO = "auto"
    NONE = "none"


AUTO = Compress.AUTO
NONE = Compress.NONE

CompressOption: TypeAlias = Compress | int
"""``AUTO``, ``NONE``, or a zstd level from 1 to 19 (0 is ``NONE``)."""


class Encoding(StrEnum):
    """``RAW``: one frame, stored as it is; ``ZSTD``: one frame, compressed; ``PLANES``: two frames, the bytes at even
    offsets and those at odd ones."""

    RAW = "raw"
    ZSTD = "zstd"
    PLANES = "planes"


MAX_LEVEL = 19  # above it frames need a window larger than MAX_WINDOW_BYTES
MAX_WINDOW_BYTES = 8 << 20  # level 19's; a reader refuses frames that ask for more
N_FRAME_HEADER_BYTES = 18  # the longest zstd frame header
_STORE_LEVEL = -131072  # zstd's lowest: incompressible blocks are copied, at 9 GB/s here
_FAST_LEVEL = 1  # level 9 gains nothing on the high plane
_INDEX_LEVEL = 6  # 3.12 bytes a token; level 19 gives 2.97 in ten times the time
_MIN_GAIN = 0.03
_N_BLOCK = 1 << 18  # bytes of a section worked on at a time: stays in a core's second-level cache
_N_SAMPLE = 8 << 10
_N_SAMPLES = 8


class CodecError(Exception):
    """Stored bytes that do not decode to what the section says; callers turn it into a DamagedError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedSection:
    """A section ready to be written: each frame as a list of pieces, and the digest of the raw bytes."""

    encoding: Encoding
    frames: tuple[tuple[bytes, ...], ...]
    n_raw: int
    digest: bytes

    @property
    def frame_lengths(self) -> tuple[int, ...]:
        """Length of each frame in bytes."""
        return tuple(sum(map(len, frame)) for frame in self.frames)


@dataclass(frozen=True, slots=True)
class _Plan:
    encoding: Encoding
    level: int
    low_level: int = _STORE_LEVEL


# ---------------------------------------------------------------- encoding


def check_option(compress: CompressOption) -> None:
    """Refuse a level outside 0 to 19. Raises: ValueError."""
    if not isinstance(compress, Compress) and not 0 <= compress <= MAX_LEVEL:
        raise ValueError(f"compression level {compress} is not between 0 and {MAX_LEVEL}")


def encode(data: memoryview, compress: CompressOption) -> EncodedSection:
    """Return ``data`` (contiguous, at least one byte) as zstd frames with content size and checksum.

    Longer than ``data`` by at most 1 % and 64 bytes. Safe to call from several threads; works in 256 KiB steps, so
    that it needs little more memory than its result.
    """
    raw = data.cast("B")
    plan = _plan(raw, compress)
    digester = Digester()
    if plan.encoding is Encoding.PLANES:
        frames = _encode_planes(raw, plan, digester)
    else:
        whole = _compressor(plan.level, len(raw))
        pieces = []
        for start in range(0, len(raw), _N_BLOCK):
            block = raw[start : start + _N_BLOCK]
            pieces.append(whole.compress(block))
            digester.update(block)
        pieces.append(whole.flush())
        frames = (tuple(pieces),)
    return EncodedSection(encoding=plan.encoding, frames=frames, n_raw=len(raw), digest=digester.digest())


def _encode_planes(raw: memoryview, plan: _Plan, digester: Digester) -> tuple[tuple[bytes, ...], ...]:
    from llamakv.store import planes  # late: see there

    n_pairs = len(raw) // 2
    low_frame, high_frame = _compressor(plan.low_level, len(raw) - n_pairs), _compressor(plan.level, n_pairs)
    low_pieces, high_pieces = [], []
    low, high = planes.allocate(_N_BLOCK // 2), planes.allocate(_N_BLOCK // 2)
    for start in range(0, 2 * n_pairs, _N_BLOCK):
        block = raw[start : min(start + _N_BLOCK, 2 * n_pairs)]
        n = len(block) // 2
        planes.split(block, low[:n], high[:n])
        low_pieces.append(low_frame.compress(low[:n]))
        high_pieces.append(high_frame.compress(high[:n]))
        digester.update(block)
    if len(raw) % 2:
        low_pieces.append(low_frame.compress(raw[-1:]))
        digester.update(raw[-1:])
    low_pieces.append(low_frame.flush())
    high_pieces.append(high_frame.flush())
    return tuple(low_pieces), tuple(high_pieces)


def _compressor(level: int, n_bytes: int) -> zstandard.ZstdCompressionObj:
    return zstandard.ZstdCompressor(level=level, write_checksum=True).compressobj(size=n_bytes)


def _plan(raw: memoryview, compress: CompressOption) -> _Plan:
    check_option(compress)
    if compress is Compress.NONE or compress == 0:
        return _Plan(Encoding.RAW, _STORE_LEVEL)
    level = _FAST_LEVEL if isinstance(compress, Compress) else compress
    sample = _sample(raw)
    plain = _shrunk(sample)
    low, high = _shrunk(sample[0::2]), _shrunk(sample[1::2])
    is_low_stored = low > 1 - _MIN_GAIN
    planes = ((1.0 if is_low_stored else low) + high) / 2
    if planes <= 1 - _MIN_GAIN and planes < plain - 0.01:
        return _Plan(Encoding.PLANES, level, _STORE_LEVEL if is_low_stored else level)
    if plain <= 1 - _MIN_GAIN:
        return _Plan(Encoding.ZSTD, level)
    return _Plan(Encoding.RAW, _STORE_LEVEL)


def _sample(raw: memoryview) -> bytes:
    if len(raw) <= 2 * _N_SAMPLES * _N_SAMPLE:
        return bytes(raw)
    starts = [i * (len(raw) - _N_SAMPLE) // (_N_SAMPLES - 1) & ~1 for i in range(_N_SAMPLES)]
    return b"".join(raw[start : start + _N_SAMPLE] for start in starts)


def _shrunk(sample: bytes) -> float:
    if not sample:
        return 1.0
    return len(zstandard.ZstdCompressor(level=_FAST_LEVEL).compress(sample)) / len(sample)


# ---------------------------------------------------------------- decoding


class _StoredBytes:
    """The stored bytes of one frame as a file for the decoder, which asks for them in pieces."""

    def __init__(self, read: Callable[[int, int], bytes], offset: int, n_stored: int) -> None:
        self._read, self._offset, self._n_left = read, offset, n_stored

    def read(self, n_bytes: int) -> bytes:
        """Return the next bytes, none at the end. Raises: CodecError (the file is too short)."""
        n_wanted = min(n_bytes, self._n_left)
        data = self._read(n_wanted, self._offset) if n_wanted else b""
        if len(data) < n_wanted:
            raise CodecError(f"the file ends at {self._offset + len(data)}, inside a frame")
        self._offset += len(data)
        self._n_left -= len(data)
        return data


class _Frame:
    """The content of one frame, decoded in pieces."""

    def __init__(self, read: Callable[[int, int], bytes], offset: int, n_stored: int, n_raw: int) -> None:
        _check_frame(read(min(n_stored, N_FRAME_HEADER_BYTES), offset), n_raw)
        source = cast("IO[bytes]", _StoredBytes(read, offset, n_stored))
        self._reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(
            source, read_size=_N_BLOCK, closefd=False
        )

    def read_into(self, target: memoryview) -> None:
        """Fill ``target`` with the next raw bytes."""
        n_done = 0
        while n_done < len(target):
            n = self._reader.readinto(target[n_done:])
            if n == 0:
                raise CodecError(f"a frame ends {len(target) - n_done} bytes early")
            n_done += n

    def finish(self) -> None:
        """Check that the content has ended, and its checksum."""
        if self._reader.readinto(bytearray(1)) != 0:
            raise CodecError("a frame holds more than it says")


def _check_frame(header: bytes, n_raw: int) -> None:
    parameters = zstandard.get_frame_parameters(header)
    if parameters.content_size != n_raw:
        raise CodecError(f"a frame claims {parameters.content_size} bytes of content, expected {n_raw}")
    if parameters.window_size > MAX_WINDOW_BYTES:
        raise CodecError(f"a frame asks for a window of {parameters.window_size} bytes")
    if not parameters.has_checksum:
        raise CodecError("a frame has no checksum")


def decode(
    read: Callable[[int, int], bytes],
    *,
    encoding: Encoding,
    offset: int,
    frames: tuple[int, ...],
    n_raw: int,
    digest: bytes,
) -> memoryview:
    """Return the raw bytes of a section, their digest verified; the caller owns them.

    ``read(n_bytes, offset)`` gives stored bytes. Frame sizes are compared with ``n_raw`` before anything is
    allocated; no more than the result and about 2 MiB are. Safe to call from several threads.

    Raises: CodecError, and what ``read`` raises.
    """
    try:
        if encoding is Encoding.PLANES:
            n_low = n_raw - n_raw // 2
            low = _Frame(read, offset, frames[0], n_low)
            high = _Frame(read, offset + frames[0], frames[1], n_raw - n_low)
            raw, found = _merge(low, high, n_raw)
        else:
            raw, found = _decode_whole(_Frame(read, offset, frames[0], n_raw), n_raw)
    except zstandard.ZstdError as error:
        raise CodecError(f"zstd: {error}") from error
    if found != digest:
        raise CodecError(f"digest is {found.hex()[:16]}, expected {digest.hex()[:16]}")
    return raw


def _decode_whole(frame: _Frame, n_raw: int) -> tuple[memoryview, bytes]:
    from llamakv.store import planes

    raw = planes.allocate(n_raw)
    digester = Digester()
    for start in range(0, n_raw, _N_BLOCK):
        block = raw[start : start + _N_BLOCK]
        frame.read_into(block)
        digester.update(block)
    frame.finish()
    return raw, digester.digest()


def _merge(low_frame: _Frame, high_frame: _Frame, n_raw: int) -> tuple[memoryview, bytes]:
    from llamakv.store import planes

    raw = planes.allocate(n_raw)
    digester = Digester()
    n_paired = n_raw // 2 * 2
    low, high = planes.allocate(_N_BLOCK // 2), planes.allocate(_N_BLOCK // 2)
    for start in range(0, n_paired, _N_BLOCK):
        block = raw[start : min(start + _N_BLOCK, n_paired)]
        n = len(block) // 2
        low_frame.read_into(low[:n])
        high_frame.read_into(high[:n])
        planes.merge(low[:n], high[:n], block)
        digester.update(block)
    if n_raw % 2:
        low_frame.read_into(raw[-1:])
        digester.update(raw[-1:])
    low_frame.finish()
    high_frame.finish()
    return raw, digester.digest()


def make_ready() -> None:
    """Code a small section, so that the first real one waits for nothing to be loaded: 20 to 100 ms here."""
    raw = bytearray(b"\x3c") * _N_BLOCK  # f16 from 1.0 to 1.25, whose planes are coded apart
    raw[0::2] = random.Random(0).randbytes(_N_BLOCK // 2)
    encoded = encode(memoryview(raw), AUTO)
    stored = b"".join(piece for frame in encoded.frames for piece in frame)
    decode(
        lambda n_bytes, offset: stored[offset : offset + n_bytes],
        encoding=encoded.encoding,
        offset=0,
        frames=encoded.frame_lengths,
        n_raw=encoded.n_raw,
        digest=encoded.digest,
    )


# ---------------------------------------------------------------- the index


def compress_index(raw: bytes) -> bytes:
    """Return ``raw`` as one zstd frame with content size and checksum."""
    return zstandard.ZstdCompressor(level=_INDEX_LEVEL, write_checksum=True).compress(raw)


def decompress_index(stored: bytes, n_raw: int) -> bytes:
    """Return the content of a frame that must hold exactly ``n_raw`` bytes. Raises: CodecError."""
    try:
        _check_frame(stored[:N_FRAME_HEADER_BYTES], n_raw)
        raw = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompress(stored, max_output_size=n_raw)
    except zstandard.ZstdError as error:
        raise CodecError(f"zstd: {error}") from error
    if len(raw) != n_raw:
        raise CodecError(f"index is {len(raw)} bytes, expected {n_raw}")
    return raw
