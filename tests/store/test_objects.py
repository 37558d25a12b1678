"""Sections as objects: what was put comes back or is refused by name, and is on the disk before it is relied on."""

import os
import random
import shutil
import struct
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamakv.errors import DamagedError, FormatError, NewerFormatError, NotFoundError, WriteError
from llamakv.store import codec, files, format, objects
from llamakv.store.codec import AUTO, NONE, Encoding
from llamakv.store.digests import digest_bytes
from llamakv.store.objects import N_HEAD, Objects
from llamakv.store.session_file import create_session, extend_session, read_session, verify_session
from llamakv.store.store_folder import make_store
from tests.store.samples import cells, f16_bytes, make_record

FILLS = {
    Encoding.RAW: lambda n: memoryview(random.Random(n).randbytes(n)),
    Encoding.ZSTD: lambda n: memoryview((b"a word or two; " * (n // 15 + 1))[:n]),
    Encoding.PLANES: lambda n: f16_bytes(n, n),
}
SMALL = {Encoding.RAW: 400, Encoding.ZSTD: 400, Encoding.PLANES: 3001}
"""How many bytes of it are encoded that way."""


@pytest.fixture
def store(tmp_path):
    return Objects(tmp_path)


def put(store, data, compress=AUTO):
    """Put a section; return its digest."""
    encoded = codec.encode(data, compress)
    store.put(encoded)
    store.sync()
    return encoded.digest.hex()


def read(store, digest):
    found = store.open(digest)
    try:
        objects.check_object(found)
        return bytes(
            codec.decode(
                lambda n, offset: files.read_at(found.fd, n, offset, found.path),
                encoding=found.encoding,
                offset=N_HEAD,
                frames=found.frames,
                n_raw=found.n_raw,
                digest=bytes.fromhex(digest),
            )
        )
    finally:
        os.close(found.fd)


def outcome(store, digest):
    """The bytes, or the error; anything else is a failed test."""
    try:
        return read(store, digest)
    except FormatError as error:
        refusal = error
    assert (refusal.exit_status, "\n" in str(refusal)) == (13, False)
    return type(refusal)


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("n_bytes", [1, 2, 3, 255, 4096, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 3_000_001])
@pytest.mark.parametrize("fill", FILLS)
def test_sections_of_any_size_and_encoding_come_back_equal(store, fill, n_bytes):
    data = FILLS[fill](n_bytes)
    digest = put(store, data)
    found = store.open(digest)
    os.close(found.fd)
    if n_bytes >= SMALL[fill]:
        assert found.encoding is fill
    assert (found.n_raw, found.n_bytes) == (n_bytes, store.path_of(digest).stat().st_size)
    assert read(store, digest) == bytes(data)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=1, max_size=3000), compress=st.sampled_from([AUTO, NONE, 0, 1, 19]))
def test_any_bytes_come_back_equal(store, data, compress):
    assert read(store, put(store, memoryview(data), compress)) == data


def test_what_compresses_well_is_padded_so_that_a_reader_accepts_it(store):
    data = memoryview(bytes(20 << 20))
    digest = put(store, data)
    n_bytes = store.path_of(digest).stat().st_size
    assert 19 << 20 < 64 * n_bytes < 21 << 20
    assert read(store, digest) == bytes(data)


@pytest.mark.parametrize("fill", FILLS)
def test_an_object_is_a_file_that_zstd_understands(store, fill, tmp_path):
    data = FILLS[fill](10_000)
    path = store.path_of(put(store, data))
    zstd = shutil.which("zstd")
    if zstd is None:
        pytest.skip("no zstd program here")
    assert subprocess.run([zstd, "-q", "-t", path], check=False).returncode == 0
    done = subprocess.run([zstd, "-q", "-d", "-c", path], check=True, capture_output=True)
    assert done.stdout == (bytes(data[0::2]) + bytes(data[1::2]) if fill is Encoding.PLANES else bytes(data))


def test_an_object_that_is_there_is_not_written_again(store):
    data = f16_bytes(5000)
    encoded = codec.encode(data, AUTO)
    assert store.put(encoded) == N_HEAD + sum(encoded.frame_lengths)
    path = store.path_of(encoded.digest.hex())
    before = path.stat().st_ino, path.stat().st_mtime_ns
    assert store.put(encoded) == 0
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == before
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_an_object_encoded_otherwise_is_the_same_object(store):
    data = f16_bytes(5000)
    digest = put(store, data, AUTO)
    reader = store.open(digest)
    assert put(store, data, NONE) == digest
    assert [found for found, _ in store.all()] == [digest]
    assert read(store, digest) == bytes(data)
    objects.check_object(reader)  # what is open does not change
    os.close(reader.fd)


def test_an_object_that_was_never_there_is_not_found(store):
    with pytest.raises(NotFoundError):
        store.open("ab" * 32)
    assert not store.has("ab" * 32)
    assert store.remove("ab" * 32) == 0
    assert list(store.all()) == []


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("flip", [0xFF, 0x01])
@pytest.mark.parametrize("fill", FILLS)
def test_a_flip_of_every_byte_is_equal_or_an_error(store, fill, flip):
    data = FILLS[fill](SMALL[fill])
    digest = put(store, data)
    path = store.path_of(digest)
    whole = path.read_bytes()
    equal, newer = [], []
    with open(path, "r+b", buffering=0) as file:
        for offset, byte in enumerate(whole):
            os.pwrite(file.fileno(), bytes([byte ^ flip]), offset)
            found = outcome(store, digest)
            if isinstance(found, bytes):
                assert found == bytes(data), offset
                equal.append(offset)
            elif found is NewerFormatError:
                newer.append(offset)
            os.pwrite(file.fileno(), whole[offset : offset + 1], offset)
    assert read(store, digest) == bytes(data)
    assert set(newer) <= {16, 17, 18, 19}
    assert all(offset >= N_HEAD for offset in equal)
    assert len(equal) <= 8, "at most a bit of a frame's header that nobody reads"


@pytest.mark.parametrize("fill", FILLS)
def test_a_cut_at_every_offset_is_damage(store, fill):
    digest = put(store, FILLS[fill](SMALL[fill]))
    path = store.path_of(digest)
    for n_bytes in reversed(range(path.stat().st_size)):
        os.truncate(path, n_bytes)
        assert outcome(store, digest) is DamagedError, n_bytes


def test_bytes_behind_the_end_are_damage(store):
    digest = put(store, f16_bytes(400))
    with open(store.path_of(digest), "ab") as file:
        file.write(b"\0")
    assert outcome(store, digest) is DamagedError


def test_padding_that_changed_changes_nothing_and_padding_that_is_missing_is_damage(store):
    data = memoryview(bytes(4 << 20))
    digest = put(store, data)
    path = store.path_of(digest)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100] + b"\xff" + whole[-99:])
    assert read(store, digest) == bytes(data)
    path.write_bytes(whole[:-100])
    assert outcome(store, digest) is DamagedError


def test_an_object_under_the_name_of_another_is_refused(store):
    one, other = put(store, f16_bytes(400, 1)), put(store, f16_bytes(400, 2))
    shutil.copy(store.path_of(one), store.path_of(other))
    with pytest.raises(DamagedError, match=f"it is section {one[:16]}"):
        store.open(other)


@pytest.mark.parametrize("content", [b"", b"x", b"GGUF" + bytes(4000), b"\x28\xb5\x2f\xfd" * 99])
def test_something_else_under_the_name_of_an_object_is_refused(store, content):
    digest = put(store, f16_bytes(400))
    store.path_of(digest).write_bytes(content)
    assert outcome(store, digest) is DamagedError


def test_a_folder_or_pipe_in_the_place_of_an_object_is_a_named_error(store):
    data = f16_bytes(400)
    digest = put(store, data)
    path = store.path_of(digest)
    for make in (os.mkdir, os.mkfifo):
        path.unlink()
        make(path)
        assert issubclass(outcome(store, digest), FormatError)
        assert not store.has(digest)
        assert list(store.all()) == [], "not an object: the collector leaves it alone"
        if make is os.mkdir:
            with pytest.raises(WriteError):
                put(store, data)
            path.rmdir()
            path.touch()
    assert put(store, data) == digest
    assert read(store, digest) == bytes(data)


def test_names_that_are_no_digests_are_no_objects(store):
    digest = put(store, f16_bytes(400))
    folder = store.path_of(digest).parent
    for name in ("notes.txt", digest[:-1], digest.upper(), digest[:2] + "z" * 62, "00" * 32):
        if name != digest:
            (folder / name).touch()
    (store.folder / "zz").touch()
    (store.folder / "README").touch()
    assert [found for found, _ in store.all()] == [digest]


# ---------------------------------------------------------------- hostile headers with right digests


def reseal(path, frames=None, **changes):
    """Write an object again with changed fields of its header, the header's digest right."""
    data = path.read_bytes()
    names = ("frame", "n_frame", "magic", "version", "encoding", "zero", "n_raw", "first", "second", "digest")
    layout = struct.Struct("<II8sIHHQQQ32s")
    fields = dict(zip(names, layout.unpack_from(data), strict=True)) | changes
    body = layout.pack(*fields.values())
    path.write_bytes(body + digest_bytes(body) + (data[N_HEAD:] if frames is None else frames))


@pytest.mark.parametrize(
    "changes",
    [
        {"frame": 0x184D2A5D},
        {"n_frame": 103},
        {"magic": b"llkvobj1"},
        {"version": 0},
        {"encoding": 0},
        {"encoding": 1},
        {"encoding": 3},
        {"encoding": 65535},
        {"zero": 1},
        {"n_raw": 0},
        {"n_raw": 3999},
        {"n_raw": 4001},
        {"n_raw": 1 << 20},
        {"n_raw": 1 << 34},
        {"n_raw": 2**62},
        {"n_raw": 2**64 - 1},
        {"first": 0},
        {"second": 0},
        {"first": 1, "second": 1},
        {"first": 2**63, "second": 2**63},
        {"first": 2**64 - 1},
        {"digest": bytes(32)},
    ],
    ids=str,
)
def test_a_header_that_cannot_be_is_refused(store, changes):
    digest = put(store, f16_bytes(4000))
    reseal(store.path_of(digest), **changes)
    assert outcome(store, digest) is DamagedError


@pytest.mark.parametrize("version", [2, 3, 2**32 - 1])
def test_an_object_of_a_later_version_is_refused_by_name(store, version):
    digest = put(store, f16_bytes(400))
    path = store.path_of(digest)
    reseal(path, version=version)
    before = path.read_bytes()
    with pytest.raises(NewerFormatError, match=f"object version {version}, this llamakv reads up to 1") as caught:
        store.open(digest)
    assert (caught.value.exit_status, caught.value.fields["actual"]) == (13, version)
    assert path.read_bytes() == before


TERABYTE_FRAME = bytes.fromhex("28b52ffde0") + struct.pack("<Q", 2**40)

_BOUNDED = """
import resource, sys
from pathlib import Path
from llamakv.errors import FormatError
from llamakv.store import objects, planes
found = None
n_before = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (n_before + (200 << 20),) * 2)
try:
    found = objects.Objects(Path(sys.argv[1])).open(sys.argv[2])
    objects.check_object(found)
except FormatError as error:
    print("refused", error.code)
else:
    print("read")
"""


@pytest.mark.parametrize(
    ("n_raw", "n_sparse"), [(400, 0), (1 << 20, 0), (1 << 34, 0), (1 << 34, (1 << 34) // 64), (2**62, 1 << 40)]
)
def test_a_small_or_sparse_object_that_claims_a_lot_is_refused_in_bounded_memory(store, n_raw, n_sparse):
    digest = put(store, memoryview(os.urandom(400)))
    path = store.path_of(digest)
    reseal(path, TERABYTE_FRAME, first=len(TERABYTE_FRAME), n_raw=n_raw)
    if n_sparse:
        os.truncate(path, N_HEAD + max(n_sparse, len(TERABYTE_FRAME) + 8))
    command = [sys.executable, "-c", _BOUNDED, store.root, digest]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("refused damaged\n", "")


# ---------------------------------------------------------------- in sessions


def test_a_damaged_object_is_written_again_with_the_next_session_that_has_the_section(store, tmp_path):
    make_store(tmp_path)
    create_session(tmp_path / "a.bin", make_record(5), [cells(0, 4, n_bytes=400)])
    (digest,) = (found for found, _ in store.all())
    path = store.path_of(digest)
    for offset in (3, N_HEAD + 20, path.stat().st_size - 1):
        data = bytearray(path.read_bytes())
        data[offset] ^= 0x40
        path.write_bytes(data)
        assert not verify_session(tmp_path / "a.bin").is_sound
        create_session(tmp_path / "b.bin", make_record(5), [cells(0, 4, n_bytes=400)], overwrite=True)
        assert verify_session(tmp_path / "a.bin").is_sound
        assert verify_session(tmp_path / "b.bin").is_sound


def test_sessions_of_a_store_share_what_is_equal_and_write_only_what_is_new(store, tmp_path):
    make_store(tmp_path)
    sections = [cells(i, i + 1, n_bytes=50_000) for i in range(4)]
    one = create_session(tmp_path / "a.bin", make_record(5), sections)
    other = create_session(tmp_path / "b.bin", make_record(5, session_id="b"), sections)
    assert other.n_written == other.n_file_bytes < 4096
    assert one.n_written == one.n_file_bytes + one.n_stored_bytes
    assert one.n_file_bytes < 4096
    info = extend_session(one, make_record(6), keep=one.sections, new=[cells(4, 5, n_bytes=50_000)])
    assert info.n_written == info.n_file_bytes + info.sections[-1].n_stored
    assert len(list(store.all())) == 5
    assert info == read_session(tmp_path / "a.bin")


def test_the_padding_of_an_object_and_of_a_section_follow_the_same_rule():
    for n_raw in (1, 1 << 20, (1 << 20) + 1, (1 << 20) + 65 * 64, 1 << 30):
        for n_stored in (1, 20, 10_000):
            assert format.n_padding(n_raw, n_stored) == len(format.padding(n_raw, n_stored))
