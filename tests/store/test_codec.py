"""How sections are encoded, and work in order."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamakv.store import codec
from llamakv.store.codec import AUTO, NONE, CodecError, Encoding
from llamakv.store.digests import digest_bytes
from llamakv.store.pipeline import map_ahead, n_cores
from tests.store.samples import f16_bytes


def decode(encoded, stored=None, **changes):
    data = b"".join(piece for frame in encoded.frames for piece in frame) if stored is None else stored
    wanted = {
        "encoding": encoded.encoding,
        "offset": 0,
        "frames": encoded.frame_lengths,
        "n_raw": encoded.n_raw,
        "digest": encoded.digest,
    }
    return codec.decode(lambda n_bytes, offset: data[offset : offset + n_bytes], **(wanted | changes))


def q8_bytes(n_blocks):
    """Blocks of q8_0: an f16 scale and 32 random bytes."""
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (n_blocks, 34), np.uint8)
    blocks[:, :2] = np.abs(random.standard_normal(n_blocks)).astype(np.float16).view(np.uint8).reshape(-1, 2)
    return memoryview(blocks.tobytes())


@pytest.mark.parametrize("n_bytes", [1, 2, 3, 255, 65_537, 262_143, 262_144, 262_145, 524_289, 3_000_001])
@pytest.mark.parametrize("compress", [AUTO, NONE, 3])
def test_sections_of_any_length_come_back(n_bytes, compress):
    for data in (f16_bytes(n_bytes), memoryview(os.urandom(n_bytes)), memoryview(bytes(n_bytes))):
        encoded = codec.encode(data, compress)
        assert encoded.digest == digest_bytes(data)
        assert decode(encoded) == data
        assert sum(encoded.frame_lengths) <= 1.01 * n_bytes + 64


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=2000), st.sampled_from([AUTO, NONE, 1, 19]))
def test_any_bytes_come_back(data, compress):
    assert bytes(decode(codec.encode(memoryview(data), compress))) == data


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (f16_bytes(1 << 20), Encoding.PLANES),
        (memoryview(os.urandom(1 << 20)), Encoding.RAW),
        (memoryview(b"some words, again and again; " * 40_000), Encoding.ZSTD),
        (memoryview(bytes(1 << 20)), Encoding.ZSTD),
    ],
    ids=["f16", "random", "text", "zeros"],
)
def test_the_probe_chooses(data, encoding):
    assert codec.encode(data, AUTO).encoding is encoding
    assert codec.encode(data, NONE).encoding is Encoding.RAW


def test_f16_values_take_86_hundredths_and_q8_do_not_grow():
    data = f16_bytes(4 << 20)
    encoded = codec.encode(data, AUTO)
    assert sum(encoded.frame_lengths) / data.nbytes < 0.865  # what these numbers' entropy allows, real ones less
    low, high = encoded.frame_lengths
    assert high < 0.73 * low
    data = q8_bytes(100_000)
    assert sum(codec.encode(data, AUTO).frame_lengths) <= data.nbytes * 1.001


@pytest.mark.parametrize("compress", [-1, 20, 100])
def test_levels_outside_the_range_are_the_callers_bug(compress):
    with pytest.raises(ValueError, match="not between 0 and 19"):
        codec.encode(memoryview(b"x"), compress)


def test_what_is_not_what_was_encoded_is_refused():
    encoded = codec.encode(f16_bytes(300_001), AUTO)
    stored = b"".join(piece for frame in encoded.frames for piece in frame)
    low, high = encoded.frame_lengths
    for changes in (
        {"digest": bytes(32)},
        {"n_raw": 300_000},
        {"n_raw": 300_003},
        {"frames": (low - 5, high)},
        {"frames": (4, high)},
        {"offset": 1},
        {"encoding": Encoding.ZSTD},
    ):
        with pytest.raises(CodecError):
            decode(encoded, **changes)
    with pytest.raises(CodecError):
        decode(encoded, stored[:-1])


def test_an_index_that_is_not_as_long_as_it_says_is_refused():
    stored = codec.compress_index(b"abc")
    assert codec.decompress_index(stored, 3) == b"abc"
    for broken, n_raw in ((stored, 2), (stored, 4), (stored[:-1], 3), (b"", 3), (b"junk" * 9, 3)):
        with pytest.raises(CodecError):
            codec.decompress_index(broken, n_raw)


def test_work_runs_ahead_in_order_and_no_further_than_allowed():
    taken, consumed = [], 0

    def items():
        for i in range(40):
            taken.append(i)
            yield i

    with ThreadPoolExecutor(4) as executor:
        for result in map_ahead(executor, lambda i: i * i, items(), 3):
            assert result == consumed**2
            consumed += 1
            assert len(taken) <= consumed + 3
    assert consumed == 40


def test_an_error_of_the_work_comes_in_its_place():
    with ThreadPoolExecutor(2) as executor:
        results = map_ahead(executor, lambda i: 6 // (3 - i), range(9), 4)
        assert [next(results) for _ in range(3)] == [2, 3, 6]
        with pytest.raises(ZeroDivisionError):
            next(results)


def test_the_cores_this_process_may_use_are_counted():
    assert n_cores() == len(os.sched_getaffinity(0))
