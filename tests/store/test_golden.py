"""What earlier versions wrote is read value by value, goes on, and later versions are refused."""

import dataclasses
import math
import shutil
import struct
from pathlib import Path

import pytest

from llamakv import records
from llamakv.errors import NewerFormatError, WriteError
from llamakv.records import MemoryKind, SectionKind
from llamakv.store import files
from llamakv.store.codec import Encoding
from llamakv.store.collector import collect
from llamakv.store.digests import digest_bytes
from llamakv.store.objects import Objects
from llamakv.store.session_file import SessionReader, create_session, extend_session, read_session, verify_session
from llamakv.store.session_store import SessionStore
from llamakv.store.store_folder import StoreBudget, read_budget
from tests.store.samples import cells, make_record, tail

GOLDEN = Path(__file__).with_name("golden") / "v1-hybrid.bin"
GOLDEN_2 = GOLDEN.with_name("v2-hybrid.bin")
GOLDEN_STORE = GOLDEN.with_name("store-v1")


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


def test_the_golden_files_with_a_later_version_are_refused(tmp_path):
    for golden in (GOLDEN, GOLDEN_2):
        data = bytearray(golden.read_bytes())
        for version in (3, 4, 2**32 - 1):
            data[16:20] = struct.pack("<I", version)
            path = tmp_path / "newer.bin"
            path.write_bytes(data)
            with pytest.raises(NewerFormatError) as caught:
                read_session(path)
            assert (caught.value.exit_status, caught.value.fields["actual"]) == (13, version)


def test_a_file_of_version_1_goes_on_as_version_2_and_a_failed_save_leaves_it_as_it_was(tmp_path):
    path = Path(shutil.copy(GOLDEN, tmp_path / "s.bin"))
    before = path.read_bytes()
    base = read_session(path)
    record = make_record(8, kind=MemoryKind.HYBRID, n_saves=3)
    for name in ("sync", "write_at"):
        with pytest.MonkeyPatch.context() as patch:
            real, calls = getattr(files, name), []

            def step(*arguments, real=real, calls=calls):
                calls.append(arguments)
                if len(calls) == 2:
                    raise WriteError("injected")
                return real(*arguments)

            patch.setattr(files, name, step)
            with pytest.raises(WriteError):
                extend_session(base, record, keep=base.sections, new=[cells(6, 7), tail(7)])
        assert path.read_bytes() == before
    info = extend_session(base, record, keep=base.sections, new=[cells(6, 7), tail(7)])
    assert path.read_bytes()[16:20] == struct.pack("<I", 2)
    assert (info.generation, info.record.lineage.ttl_s) == (3, None)
    assert verify_session(path).is_sound
    assert read_session(GOLDEN).generation == 2


def sections_of(path):
    """Rows and raw bytes (digests of the longer ones) of all sections."""
    with SessionReader(path) as reader:
        info = reader.info
        assert [section.digest for section in info.sections] == [
            digest_bytes(section.data).hex() for section in reader.read(info.sections)
        ]
        return [
            (row.kind.value, row.p0, row.p1, row.p_used, row.n_raw, reader.in_file_form(row).encoding, row.digest[:16])
            for row in info.sections
        ]


def test_the_golden_file_of_version_2_is_read_value_by_value():
    assert GOLDEN_2.stat().st_size == 6541
    info = read_session(GOLDEN_2)
    record = make_record(7, kind=MemoryKind.HYBRID, n_saves=2)
    assert info.record == dataclasses.replace(
        record, lineage=dataclasses.replace(record.lineage, ttl_s=86400.25, pinned=True)
    )
    assert info.record.chat is not None
    assert [item.time_s for item in info.record.chat.messages] == [1700000100.5, 1700000101.5]
    assert (info.generation, info.n_file_bytes, info.n_cells_held) == (2, 6541, 6)
    assert sections_of(GOLDEN_2) == [
        ("cells", 0, 8, 4, 3001, "planes", "c2f5e9da5d438628"),
        ("tail", 4, 4, 4, 60, "raw", "20afed3e86707c72"),
        ("cells", 4, 6, 6, 50, "raw", "160d44a28b6e2974"),
        ("tail", 6, 6, 6, 60, "raw", "a5b36967fea4eb51"),
    ]


GOLDEN_STORE_SECTIONS = {
    "base": [(0, 4, 4, 120, "raw", "392659c262e015c8"), (4, 8, 8, 3001, "planes", "beaf05a98d1d9153")],
    "fork": [
        (0, 4, 4, 120, "raw", "392659c262e015c8"),
        (4, 8, 6, 3001, "planes", "beaf05a98d1d9153"),
        (6, 9, 9, 50, "raw", "7c19f789197401f3"),
    ],
    "partial": [(0, 4, 4, 120, "raw", "392659c262e015c8")],
    "pinned": [(0, 4, 4, 120, "raw", "392659c262e015c8")],
}


def everything_in(root):
    return {str(path.relative_to(root)): path.is_file() and path.read_bytes() for path in root.rglob("*")}


def test_the_golden_store_of_version_1_is_read_value_by_value():
    before = everything_in(GOLDEN_STORE)
    store = SessionStore(GOLDEN_STORE)
    assert store.names() == ("base", "fork", "partial", "pinned")
    assert read_budget(GOLDEN_STORE) == StoreBudget(max_bytes=1_000_000, ttl_s=2_592_000.5)
    records = {entry.name: entry.info.record for entry in store.list() if entry.info is not None}
    infos = {name: read_session(store.resolve(name)) for name in records}
    assert [len(records[name].tokens) for name in store.names()] == [9, 10, 9, 5]
    assert [(infos[name].generation, infos[name].n_cells_held) for name in store.names()] == [
        (2, 8),
        (1, 9),
        (1, 4),
        (2, 4),
    ]
    pinned = records["pinned"].lineage
    assert (pinned.pinned, pinned.note, pinned.tags, pinned.ttl_s) == (True, "keep\nthis", ("work", "数据"), 3600.0)
    fork = records["fork"].lineage
    assert (fork.parent_id, fork.parent_position, fork.name, fork.pinned) == ("base", 7, "é fork", False)
    assert records["base"].chat is not None
    assert [item.time_s for item in records["base"].chat.messages] == [1700000100.5, 1700000101.5]
    assert {name: [row[1:] for row in sections_of(store.resolve(name))] for name in records} == GOLDEN_STORE_SECTIONS
    assert len(list(Objects(GOLDEN_STORE).all())) == 3
    assert everything_in(GOLDEN_STORE) == before


def test_the_golden_store_goes_on(tmp_path):
    root = tmp_path / "store"
    shutil.copytree(GOLDEN_STORE, root)
    store = SessionStore(root)
    base = read_session(store.resolve("base"))
    extend_session(base, make_record(11, n_saves=3), keep=base.sections, new=[cells(8, 10)])
    with SessionReader(store.resolve("fork")) as reader:
        create_session(store.resolve("new"), reader.info.record, [], source=reader, keep=reader.info.sections)
    store.remove("fork", "pinned")
    collected = store.collect()
    assert collected is not None
    assert collected.n_objects == 0, "what the fork had alone is in the new session, the rest in the others"
    for name in store.names():
        assert verify_session(store.resolve(name)).is_sound
    assert len(list(Objects(root).all())) == 4


def test_the_golden_store_with_a_later_version_is_refused_and_left_alone(tmp_path):
    root = tmp_path / "store"
    shutil.copytree(GOLDEN_STORE, root)
    (root / ".store").write_text((root / ".store").read_text().replace('"llamakv_store": 1', '"llamakv_store": 2'))
    before = everything_in(root)
    for call in (
        lambda: SessionStore(root).resolve("base"),
        lambda: SessionStore(root).list(),
        lambda: collect(root),
        lambda: create_session(root / "new.bin", make_record(5), [cells(0, 4)]),
    ):
        with pytest.raises(NewerFormatError, match="has format version 2, this llamakv knows up to 1") as caught:
            call()
        assert (caught.value.exit_status, caught.value.fields["actual"]) == (13, 2)
    assert everything_in(root) == before


def test_an_object_of_a_later_version_in_the_golden_store_is_refused_and_left_alone(tmp_path):
    root = tmp_path / "store"
    shutil.copytree(GOLDEN_STORE, root)
    (path,) = (root / ".objects" / "be").iterdir()
    data = bytearray(path.read_bytes())
    data[16:20] = struct.pack("<I", 2)
    data[80:112] = digest_bytes(data[:80])
    path.write_bytes(data)
    before = everything_in(root)
    for name in ("base", "fork"):
        with pytest.raises(NewerFormatError, match="has object version 2, this llamakv reads up to 1") as caught:
            sections_of(root / f"{name}.bin")
        assert (caught.value.exit_status, caught.value.fields["actual"]) == (13, 2)
        assert [damage.section.p1 for damage in verify_session(root / f"{name}.bin").damaged] == [8]
    assert len(sections_of(root / "pinned.bin")) == 1, "the others are read"
    assert everything_in(root) == before
