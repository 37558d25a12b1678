"""Damaged, partial and hostile files end in equality or in one named error, without a large allocation."""

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace

import pytest
import zstandard

from llamakv.errors import DamagedError, FormatError, NewerFormatError, NotASessionError
from llamakv.records import MemoryKind
from llamakv.store import format
from llamakv.store.digests import digest_bytes
from llamakv.store.session_file import (
    SessionReader,
    create_session,
    extend_session,
    read_session,
    verify_session,
)
from llamakv.store.session_info import load_info
from tests.store.samples import cells, cells_up_to, contents, make_record, tail


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s.bin"


def small_session(path):
    """Two generations, two kinds of section, one of them in planes."""
    record = make_record(5, kind=MemoryKind.HYBRID)
    base = create_session(path, record, [cells(0, 4, n_bytes=301), tail(4)])
    record = make_record(7, kind=MemoryKind.HYBRID, n_saves=2)
    return extend_session(base, record, keep=base.sections, new=[cells(4, 6, n_bytes=50), tail(6)])


def read_everything(path):
    with SessionReader(path) as reader:
        return reader.info.record, contents(reader.read(reader.info.sections))


def outcome(path):
    """What reading gives: the session, or the error; anything else is a failed test."""
    try:
        return read_everything(path)
    except FormatError as error:
        refusal = error
    assert (refusal.exit_status, "\n" in str(refusal)) == (13, False)
    return type(refusal)


def test_truncation_at_every_offset_is_an_error(path):
    small_session(path)
    data = path.read_bytes()
    for n_bytes in reversed(range(len(data))):
        os.truncate(path, n_bytes)
        found = outcome(path)
        assert found in (DamagedError, NotASessionError), n_bytes
        assert (found is NotASessionError) == (n_bytes < 16)


def test_truncation_of_a_larger_file_is_an_error(path):
    create_session(path, make_record(2001), cells_up_to(2000, bytes_per_cell=300))
    data = path.read_bytes()
    for i in range(64):
        path.write_bytes(data[: len(data) * i // 64])
        assert outcome(path) in (DamagedError, NotASessionError)
    path.write_bytes(data[:-1])
    assert outcome(path) is DamagedError


@pytest.mark.parametrize("flip", [0xFF, pytest.param(0x01, marks=pytest.mark.slow)])
def test_a_flip_of_every_byte_is_equal_or_an_error(path, flip):
    small_session(path)
    right, data = read_everything(path), path.read_bytes()
    n_equal = 0
    with open(path, "r+b", buffering=0) as file:
        for offset in range(len(data)):
            file.seek(offset)
            file.write(bytes([data[offset] ^ flip]))
            found = outcome(path)
            if isinstance(found, tuple):
                assert found == right, offset
                n_equal += 1
            file.seek(offset)
            file.write(data[offset : offset + 1])
    assert read_everything(path) == right
    # the slots (each record is there twice, the older one is not needed), and what nobody reads any more
    assert n_equal < 1024 + read_session(path).n_dead_bytes + 8 * len(read_session(path).sections)


def test_any_two_sections_exchanged_or_one_repeated_is_an_error(path):
    info = create_session(path, make_record(9), [cells(i, i + 1, n_bytes=64) for i in range(8)])
    data = path.read_bytes()
    first, second = info.sections[:2]
    one = data[first.offset : first.offset + first.n_stored]
    other = data[second.offset : second.offset + second.n_stored]
    for middle in (other + one, one + one, one, one + other + other):
        path.write_bytes(data[: first.offset] + middle + data[second.offset + second.n_stored :])
        assert outcome(path) is DamagedError


def test_verify_reports_the_damaged_section_and_the_others_stay_readable(path):
    info = create_session(path, make_record(9), [cells(i, i + 1, n_bytes=64) for i in range(8)])
    place = info.sections[3].offset + 12
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    report = verify_session(path)
    assert not report.is_sound
    assert [damage.section for damage in report.damaged] == [info.sections[3]]
    assert "cells section [3, 4)" in report.damaged[0].reason
    assert verify_session(path, fast=True).is_sound
    with SessionReader(path) as reader:
        sections = reader.read(info.sections)
        assert [next(sections).p0 for _ in range(3)] == [0, 1, 2]
        with pytest.raises(DamagedError):
            next(sections)


# ---------------------------------------------------------------- hostile files with right digests


def reseal(path, change_index=None, *, pads=False, **commit_changes):
    """Write the file again with a changed index or commit record, all digests right."""
    data = path.read_bytes()
    commit = format.parse_header(data[: format.N_HEADER], len(data), path)
    frame = data[commit.index_offset : commit.n_file]
    if change_index:
        raw = change_index(zstandard.ZstdDecompressor().decompress(frame[8:], max_output_size=1 << 26))
        content = zstandard.ZstdCompressor(write_checksum=True).compress(raw)
        content += format.padding(len(raw), len(content)) if pads else b""
        frame = frame[:4] + struct.pack("<I", len(content)) + content
        commit = replace(commit, n_index_raw=len(raw), n_file=commit.index_offset + len(frame))
    commit = replace(commit, **({"index_digest": digest_bytes(frame)} | commit_changes))
    path.write_bytes(format.pack_header(commit) + data[format.N_HEADER : commit.index_offset] + frame)


def split(raw):
    n_text, n_tokens, n_sections, _ = struct.unpack_from("<4I", raw)
    end = 16 + n_text
    return json.loads(raw[16:end]), raw[end : end + 4 * n_tokens], raw[end + 4 * n_tokens :], n_sections


def join(values, tokens, table, text=None):
    text = json.dumps(values).encode() if text is None else text
    return struct.pack("<4I", len(text), len(tokens) // 4, len(table) // 104, format.VERSION) + text + tokens + table


@pytest.fixture
def sealed(path):
    create_session(path, make_record(5), [cells(0, 4, n_bytes=301)])
    return path


def changing_json(change):
    def rewrite(raw):
        values, tokens, table, _ = split(raw)
        change(values)
        return join(values, tokens, table)

    return rewrite


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.update(surprise=1),
        lambda values: values.pop("n_ctx"),
        lambda values: values.update(kind="unheard-of"),
        lambda values: values.update(n_ctx=True),
        lambda values: values.update(n_ctx=1.5),
        lambda values: values.update(n_ctx=2**70),
        lambda values: values.update(text=7),
        lambda values: values.update(tokens=[1]),
        lambda values: values["sampling"].update(temperature=float("inf")),
        lambda values: values["sampling"].update(temperature={"float": "huge"}),
        lambda values: values["sampling"].update(logit_bias=[[1]]),
        lambda values: values["lineage"].update(tags="ab"),
        lambda values: values["chat"].update(messages=[3]),
        lambda values: values.update(identity=[]),
    ],
)
def test_a_record_that_is_not_as_specified_is_refused(sealed, change):
    reseal(sealed, changing_json(change))
    with pytest.raises(DamagedError):
        read_session(sealed)


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"null", b"\xff", b"{}{}", b"[" * 100_000, b'{"a":1,"a":1}', b'{"n":' + b"9" * 5000 + b"}"],
    ids=range(8),
)
def test_json_that_is_no_record_is_refused(sealed, text):
    reseal(sealed, lambda raw: join(None, *split(raw)[1:3], text=text))
    with pytest.raises(DamagedError):
        read_session(sealed)


@pytest.mark.parametrize("n_tokens", [0, 1, 4, 6, 7])
def test_tokens_and_cells_that_differ_are_refused_naming_both(sealed, n_tokens):
    def change(raw):
        values, _, table, _ = split(raw)
        return join(values, bytes(4 * n_tokens), table)

    reseal(sealed, change)
    with pytest.raises(DamagedError) as caught:
        read_session(sealed)
    assert n_tokens < 2 or (f"{n_tokens} tokens" in str(caught.value) and "4" in str(caught.value))


def changing_row(**changes):
    def change(raw):
        values, tokens, table, _ = split(raw)
        row = format.unpack_entry(table)
        return join(values, tokens, format.pack_entry(replace(row, **changes)))

    return change


@pytest.mark.parametrize(
    "changes",
    [
        {"n_raw": 2**40},
        {"n_raw": 2**34 + 1},
        {"n_raw": 300},
        {"n_raw": 302},
        {"n_raw": 0},
        {"n_stored": 2**63},
        {"n_stored": 10_000},
        {"offset": 0},
        {"offset": 2**63},
        {"frames": (0, 100)},
        {"frames": (2**63, 2**63)},
        {"frames": (10, 20)},
        {"p_used": 5},
        {"p_used": 0},
        {"p1": 2**40},
        {"p0": 1},
        {"p1": 3},
        {"digest": "00" * 32},
    ],
    ids=str,
)
def test_a_row_that_cannot_be_is_refused(sealed, changes):
    reseal(sealed, changing_row(**changes))
    assert outcome(sealed) is DamagedError


@pytest.mark.parametrize("place", [0, 1, 2, 4])
def test_unknown_kinds_encodings_and_reserved_bytes_are_refused(sealed, place):
    def change(raw):
        row = bytearray(split(raw)[2])
        row[place] = 9
        return join(*split(raw)[:2], bytes(row))

    reseal(sealed, change)
    assert outcome(sealed) is DamagedError


def test_sections_that_share_bytes_are_refused(sealed):
    def change(raw):
        values, tokens, table, _ = split(raw)
        row = format.unpack_entry(table)
        both = replace(row, p1=2, p_used=2), replace(row, p0=2)
        return join(values, tokens, b"".join(map(format.pack_entry, both)))

    reseal(sealed, change)
    with pytest.raises(DamagedError, match="overlaps"):
        read_session(sealed)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_index_raw": 2**63},
        {"n_index_raw": format.MAX_INDEX_RAW + 1},
        {"n_index_raw": format.MAX_INDEX_RAW},
        {"n_index_raw": 3},
        {"index_offset": 0},
        {"index_offset": 2**64 - 1},
        {"n_file": 2**64 - 1},
        {"n_file": 0},
        {"index_digest": bytes(32)},
    ],
    ids=str,
)
def test_a_commit_record_that_cannot_be_is_refused(sealed, changes):
    data = sealed.read_bytes()
    commit = replace(format.parse_header(data[: format.N_HEADER], len(data), sealed), **changes)
    sealed.write_bytes(format.pack_header(commit) + data[format.N_HEADER :])
    assert outcome(sealed) is DamagedError


def test_a_newer_version_is_refused_by_name(sealed):
    data = bytearray(sealed.read_bytes())
    data[16:20] = struct.pack("<I", 3)
    sealed.write_bytes(data)
    with pytest.raises(NewerFormatError, match="format version 3, this llamakv reads up to 2"):
        read_session(sealed)


def test_a_flip_in_a_newest_record_still_finds_the_newest(path):
    right = small_session(path)
    data = bytearray(path.read_bytes())
    data[format.slot_offset(right.generation)] ^= 0xFF
    path.write_bytes(data)
    assert read_session(path) == right


# ---------------------------------------------------------------- memory

_BOUNDED = """
import resource, sys
from llamakv.errors import FormatError
from llamakv.store.session_file import SessionReader
n_before = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = n_before + (200 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    with SessionReader(sys.argv[1]) as reader:
        for section in reader.read(reader.info.sections):
            pass
except FormatError as error:
    print("refused", error.code)
else:
    print("read")
"""
_PEAK = """
n_peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
print(n_peak - n_before)
"""


def read_with_200_mb(path):
    done = subprocess.run([sys.executable, "-c", _BOUNDED, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


TERABYTE_FRAME = bytes.fromhex("28b52ffde0") + struct.pack("<Q", 2**40)


@pytest.mark.parametrize("n_raw", [301, 2**20, 2**34])
def test_thirteen_bytes_that_claim_a_terabyte_are_refused(sealed, n_raw):
    data = bytearray(sealed.read_bytes())
    offset = read_session(sealed).sections[0].offset
    data[offset : offset + len(TERABYTE_FRAME)] = TERABYTE_FRAME
    sealed.write_bytes(data)
    reseal(sealed, changing_row(n_raw=n_raw))
    assert read_with_200_mb(sealed) == "refused damaged"


def test_an_index_that_claims_a_terabyte_is_refused(sealed):
    data = sealed.read_bytes()
    commit = format.parse_header(data[: format.N_HEADER], len(data), sealed)
    frame = struct.pack("<II", 0x184D2A5D, len(TERABYTE_FRAME)) + TERABYTE_FRAME
    commit = replace(commit, n_file=commit.index_offset + len(frame), index_digest=digest_bytes(frame))
    sealed.write_bytes(format.pack_header(commit) + data[format.N_HEADER : commit.index_offset] + frame)
    assert read_with_200_mb(sealed) == "refused damaged"


def test_an_index_that_expands_a_thousandfold_is_refused(sealed):
    reseal(sealed, lambda raw: raw + bytes(60 << 20))
    assert sealed.stat().st_size < 20_000
    assert read_with_200_mb(sealed) == "refused damaged"


def test_sections_that_expand_a_thousandfold_are_refused(path):
    info = create_session(path, make_record(2), [cells(0, 1, n_bytes=100)])
    bomb = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(1 << 30))
    data = path.read_bytes()
    index = data[info.commit.index_offset :]
    commit = replace(
        info.commit, index_offset=format.N_HEADER + len(bomb), n_file=format.N_HEADER + len(bomb) + len(index)
    )
    path.write_bytes(format.pack_header(commit) + bomb + index)
    reseal(path, changing_row(n_raw=1 << 30, n_stored=len(bomb), frames=(len(bomb),)))
    assert read_with_200_mb(path) == "refused damaged"


@pytest.mark.slow
def test_a_sound_file_of_a_gigabyte_of_zeros_is_read_in_bounded_memory(path):
    piece = cells(0, 1)
    zeros = memoryview(bytes(6 << 20))
    sections = (replace(piece, p0=i, p1=i + 1, p_used=i + 1, data=zeros) for i in range(170))
    info = create_session(path, make_record(171), sections)
    assert info.n_file_bytes < 20 << 20
    script = _BOUNDED.replace("resource.setrlimit", "# ") + _PEAK  # address space also counts what threads reserve
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[1]) < 8 * (6 << 20) + (36 << 20)  # and what the allocator keeps of what was freed


def test_loading_works_on_a_descriptor_whose_path_is_gone(path):
    right = small_session(path)
    with SessionReader(path) as reader:
        path.unlink()
        assert load_info(reader._fd, path) == right
        assert len(list(reader.read(right.sections))) == 4


@pytest.mark.parametrize(
    "unit", [b"{},", b'"",', *(pytest.param(one, marks=pytest.mark.slow) for one in (b"[],", b'"ab",', b"1e9,"))]
)
def test_a_record_of_countless_small_values_is_refused_in_little_memory(sealed, unit):
    text = b'{"x":[' + unit * (format.MAX_INDEX_RAW // 2 // len(unit)) + b"1]}"
    reseal(sealed, lambda raw: join(None, *split(raw)[1:3], text=text), pads=True)
    assert peak_memory_of_reading(sealed) < 250 << 20  # the text itself is there three times


def test_more_tokens_or_sections_than_the_limit_are_refused(sealed):
    def tokens(raw):
        values, _, table, _ = split(raw)
        return join(values, bytes(4 * (format.MAX_TOKENS + 1)), table)

    def sections(raw):
        values, tokens, table, _ = split(raw)
        return join(values, tokens, table * (format.MAX_SECTIONS + 1))

    start = sealed.read_bytes()
    for change in (tokens, sections):
        sealed.write_bytes(start)
        reseal(sealed, change, pads=True)
        with pytest.raises(DamagedError, match="over the limits"):
            read_session(sealed)


@pytest.mark.parametrize("text", [b'"' + b'\\"' * 2_000_000, b'["\\', b'"', b"[" + b'"a\\"b[,{",' * 9])
def test_counting_values_takes_time_in_proportion_whatever_the_text(sealed, text):
    reseal(sealed, lambda raw: join(None, *split(raw)[1:3], text=text), pads=True)
    with pytest.raises(DamagedError, match="not JSON"):
        read_session(sealed)


def peak_memory_of_reading(path):
    """What a process that reads a session it must refuse takes at most, beyond what it began with, in bytes."""
    code = (
        "import resource, sys\n"
        "from llamakv.errors import DamagedError\n"
        "from llamakv.store.session_file import read_session\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    read_session(sys.argv[1])\n"
        "except DamagedError:\n    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
    unit = 1 if sys.platform == "darwin" else 1024
    return int(done.stdout) * unit
