"""The specification, the golden files and the code say the same."""

import dataclasses
import math
import re
import struct
from pathlib import Path

import pytest

from llamakv import records
from llamakv.errors import NewerFormatError
from llamakv.records import MemoryKind, SectionKind
from llamakv.store import codec, format, record_json
from llamakv.store.codec import CodecError, Encoding
from llamakv.store.sections import StoredSection
from llamakv.store.session_file import SessionReader, read_session, verify_session
from tests.store.samples import make_record

SPECIFICATION = Path(format.__file__).with_name("FORMAT.md").read_text()
GOLDEN = Path(__file__).with_name("golden") / "v1-hybrid.bin"


def table(title):
    """The rows of the first table under a heading."""
    part = SPECIFICATION.split(f"\n## {title}\n")[1].split("\n## ")[0]
    first = re.search(r"((?:^\|.*\n)+)", part, re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in first[1].splitlines()]
    return rows[2:]


# ---------------------------------------------------------------- FORMAT.md


@pytest.mark.parametrize(
    ("title", "size"), [("Commit record", 104), ("Section table row", 104), ("Header", format.N_HEADER)]
)
def test_the_fields_of_a_structure_follow_each_other_without_gaps(title, size):
    end = 0
    for offset, n_bytes, *_ in table(title):
        assert int(offset) == end
        end += int(n_bytes)
    assert end == size


def test_the_sizes_in_the_code_are_those_specified():
    assert (format._N_COMMIT, format._ENTRY.size, format._INDEX_HEAD.size) == (104, 104, 16)
    assert format.VERSION == 2


def test_the_keys_of_the_record_are_those_specified():
    for name, keys in table("Record"):
        fields = [item.name for item in dataclasses.fields(getattr(records, name))]
        if name == "SessionRecord":
            fields.remove(record_json.TOKENS_KEY)
        assert fields == keys.split(), "a change of the record is a new format version"


def test_the_limits_in_the_code_are_those_specified():
    limits = {name: int(re.match(r"\d+", value)[0]) for name, value in table("Limits")}
    assert limits == {
        "version": format.VERSION,
        "n_index_raw": format.MAX_INDEX_RAW,
        "n_tokens": format.MAX_TOKENS,
        "n_sections": format.MAX_SECTIONS,
        "strings, commas, `[` and `{` of the record, those inside strings not counted": record_json.MAX_MARKS,
        "n_raw of a section": format.MAX_SECTION_RAW,
        "positions and token ids": format.MAX_POSITION,
        "offsets and lengths": format.MAX_FILE,
        "raw bytes of a section or index": format.FREE_RAW,
        "window of a zstd frame": codec.MAX_WINDOW_BYTES,
    }
    assert f"{format.FREE_RAW} + {format.MAX_RAW_OVER_STORED} × stored" in SPECIFICATION


def test_the_example_is_read_as_described(tmp_path):
    text = SPECIFICATION.split("\n## Example\n")[1].split("```")[1]
    data = bytearray()
    for line in text.split("\n"):
        if line:
            offset, row = int(line.split()[0], 16), bytes.fromhex(line.split()[1])
            data.extend(bytes(offset - len(data)) + row)
    path = tmp_path / "example.bin"
    path.write_bytes(data)
    info = read_session(path)
    assert (info.record.tokens, info.record.text, info.record.lineage.session_id) == ((1,), "a", "example")
    assert (info.sections, info.generation, info.n_dead_bytes) == ((), 1, 0)
    assert verify_session(path).is_sound


# ---------------------------------------------------------------- golden files

GOLDEN_SECTIONS = [
    # kind, p0, p1, p_used, n_raw, encoding, raw bytes in hex
    (
        SectionKind.CELLS,
        0,
        4,
        4,
        301,
        Encoding.RAW,
        "7fbcb2bc643484b9a63a5f338fac933c8fb01a3fed3a5cbb7fbd0abbbeb0c53888b25f3f763d16b9"
        "edb7032fe0ad6e3ebac038af42bcaeb819bfd130e3b7e63c0e38633da33ecfbea9b032ac393460b3"
        "c8bd763071bbfb380ebcc8b746b222abfec4ba3804bb0dbc2cb704ba3db831bdb71dd943722e97bc"
        "1eb0bc3aa7b8b53cc53c0031f43d0fbaf13ac0a4c1b86ec0e435292cba3caf414a35ae3dfd32ee40"
        "a42f8bb96738553937406dbbbd40873b34c1193838bc263d519e0738603036b89c3980ae6dbd783e"
        "cbb8662c44b2f8bbcf38952aa035b7b249b6e83c55368bb93941c9388c3838409837c1394435d138"
        "e4327938febc533c8140b8407a3b31ad76389339aa44a440faaab430edb6fd365b2c563ba4bd02c1"
        "13b7ecbd11b9cfc683b24cb6b3b9e33b343e8eb02c",
    ),
    (
        SectionKind.TAIL,
        4,
        4,
        4,
        60,
        Encoding.RAW,
        "124013b3f3af8937e0303c3dbeb891391b31efb7d63ef738a7bd5ca1cfb6a4387c2c0bc1573913be"
        "0fb92e40baab29ba5a34cd3907bcce2d65a9ccb7",
    ),
    (
        SectionKind.CELLS,
        4,
        6,
        6,
        50,
        Encoding.RAW,
        "43ac87b068c82c38a9b4c53aec34403c02b78a38eb3274c008be70b1313413ba42b53339a0bd13b797c033b4a2b80bbe29b9",
    ),
    (
        SectionKind.TAIL,
        6,
        6,
        6,
        60,
        Encoding.RAW,
        "58415fb1823d97c010b97fbe6c1db3b0312a76b7653e753d5c2c653813a947b9b1ac1b3649baa63c"
        "622eba3a1ebcc9b1f3b9043199b886c0c92b681f",
    ),
]


def test_the_golden_file_of_version_1_is_read_value_by_value():
    assert GOLDEN.stat().st_size == 3977
    info = read_session(GOLDEN)
    assert info.record == dataclasses.replace(make_record(7, kind=MemoryKind.HYBRID, n_saves=2))
    record = info.record
    assert record.tokens == (0, 7919, 15838, 23757, 31676, 39595, 47514)
    assert record.identity.name == "Tiny é 数据"
    assert record.identity.adapters == (records.Adapter(digest="ef" * 32, scale=0.5),)
    assert record.settings == records.MemorySettings(
        type_k="f16", type_v="q8_0", flash_attn=False, rope_freq_base=10000.0
    )
    assert record.sampling.logit_bias == ((3, -math.inf), (4, 1.5))
    assert record.sampling.stop == ("</s>", "\ud83d")
    assert record.chat is not None
    assert [(item.role, item.content, item.p0, item.p1) for item in record.chat.messages] == [
        ("user", "Hi \U0001f600", 0, 3),
        ("assistant", "[/INST]", 3, 7),
    ]
    assert (record.lineage.updated_s, record.lineage.n_saves, record.lineage.tags) == (1700000003.5, 2, ("a", "b"))
    assert (info.generation, info.n_file_bytes) == (2, 3977)
    with SessionReader(GOLDEN) as reader:
        found = [
            (stored.kind, stored.p0, stored.p1, stored.p_used, stored.n_raw, stored.encoding, section.data.hex())
            for stored, section in zip(info.sections, reader.read(info.sections), strict=True)
        ]
    assert found == GOLDEN_SECTIONS


def test_the_golden_file_with_a_later_version_is_refused(tmp_path):
    data = bytearray(GOLDEN.read_bytes())
    for version in (3, 4, 2**32 - 1):
        data[16:20] = struct.pack("<I", version)
        path = tmp_path / "newer.bin"
        path.write_bytes(data)
        with pytest.raises(NewerFormatError) as caught:
            read_session(path)
        assert (caught.value.exit_status, caught.value.fields["actual"]) == (13, version)


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("n_bytes", [1, 2**31, 3 << 30, 2**32, 5 << 30])
def test_states_above_4_gib_have_rows(n_bytes):
    section = StoredSection(
        kind=SectionKind.WHOLE,
        p0=0,
        p1=2**31 - 1,
        p_used=2**31 - 1,
        n_raw=n_bytes,
        n_stored=n_bytes + 8,
        offset=7 * n_bytes,
        digest="0123456789abcdef" * 4,
        encoding=Encoding.PLANES,
        frames=(n_bytes // 2 + 1, n_bytes // 2 + 2),
    )
    assert format.unpack_entry(format.pack_entry(section)) == section


def test_a_section_over_the_limit_has_no_row():
    section = StoredSection(
        kind=SectionKind.WHOLE,
        p0=0,
        p1=9,
        p_used=9,
        n_raw=format.MAX_SECTION_RAW + 1,
        n_stored=1 << 30,
        offset=4096,
        digest="00" * 32,
        encoding=Encoding.RAW,
        frames=(1 << 30,),
    )
    with pytest.raises(CodecError):
        format.unpack_entry(format.pack_entry(section))


@pytest.mark.parametrize("n_raw", [1, 2**20, 2**20 + 1, 2**20 + 64, 2**20 + 65 * 64, 2**30])
@pytest.mark.parametrize("n_stored", [1, 20, 64, 10_000])
def test_padding_is_enough_and_not_more_than_needed(n_raw, n_stored):
    pad = format.padding(n_raw, n_stored)
    assert n_raw <= format.largest_raw(n_stored + len(pad))
    if pad:
        assert n_raw > format.largest_raw(n_stored)
        assert len(pad) == 8 or n_raw > format.largest_raw(n_stored + len(pad) - 1)


# ---------------------------------------------------------------- the record


@pytest.mark.parametrize("value", [math.inf, -math.inf, 0.1, -0.0, 1e308, 5e-324, 3])
def test_floats_come_back_equal(value):
    record = dataclasses.replace(make_record(), sampling=records.Sampling(temperature=value))
    found = record_json.decode_record(record_json.encode_record(record), record.tokens, version=2)
    assert found == record
    assert type(found.sampling.temperature) is float
    assert math.copysign(1, found.sampling.temperature) == math.copysign(1, value)


def test_nan_comes_back():
    record = dataclasses.replace(make_record(), sampling=records.Sampling(temperature=math.nan))
    data = record_json.encode_record(record)
    assert b"NaN" not in data
    assert math.isnan(record_json.decode_record(data, (), version=2).sampling.temperature)


def test_any_text_comes_back():
    text = "".join(map(chr, range(0x300))) + "\ud800 \udfff \U0001f600 \\ud800"
    record = dataclasses.replace(make_record(), text=text, chat=None)
    assert record_json.decode_record(record_json.encode_record(record), record.tokens, version=2) == record


@pytest.mark.parametrize("token", [-1, 2**31])
def test_a_token_that_is_no_31_bit_number_is_not_written(token):
    with pytest.raises(ValueError, match="token id"):
        format.pack_index(dataclasses.replace(make_record(), tokens=(1, token)), ())


def test_an_index_takes_few_bytes_per_token():
    words = [f"word{i * i % 997} " for i in range(20_000)]
    record = dataclasses.replace(
        make_record(),
        text="".join(words),
        tokens=tuple((i * i % 997) * 13 for i in range(20_000)),
    )
    frame, _ = format.pack_index(record, ())
    assert len(frame) <= 4 * 20_000
