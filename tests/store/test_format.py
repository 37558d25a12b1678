"""The specification, the golden files and the code say the same."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

from llamakv import records
from llamakv.records import SectionKind
from llamakv.store import codec, format, objects, record_json, store_folder
from llamakv.store.codec import CodecError, Encoding
from llamakv.store.sections import StoredSection
from llamakv.store.session_file import read_session, verify_session
from tests.store.samples import make_record

SPECIFICATION = Path(format.__file__).with_name("FORMAT.md").read_text()


def table(title):
    """The rows of the first table under a heading."""
    part = SPECIFICATION.split(f"\n## {title}\n")[1].split("\n## ")[0]
    first = re.search(r"((?:^\|.*\n)+)", part, re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in first[1].splitlines()]
    return rows[2:]


# ---------------------------------------------------------------- FORMAT.md


@pytest.mark.parametrize(
    ("title", "size"),
    [("Commit record", 104), ("Section table row", 104), ("Header", format.N_HEADER), ("Store", objects.N_HEAD)],
)
def test_the_fields_of_a_structure_follow_each_other_without_gaps(title, size):
    end = 0
    for offset, n_bytes, *_ in table(title):
        assert int(offset) == end
        end += int(n_bytes) if n_bytes != "..." else 0
    assert end == size


def test_the_sizes_in_the_code_are_those_specified():
    assert (format._N_COMMIT, format._ENTRY.size, format._INDEX_HEAD.size) == (104, 104, 16)
    assert (format.VERSION, objects.VERSION, store_folder.VERSION) == (2, 1, 1)


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
