"""What inspecting finds inside sessions, made by the engine: layers, cells, and what resuming takes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from llamakv.errors import ConflictError, DamagedError, InterruptedByUser
from llamakv.ops.inspect import inspect_session, may_share, sharing_of
from llamakv.ops.requests import MemoryOptions, Reporter
from llamakv.ops.resume_cost import measure_cost, resume_memory, sections_restored
from llamakv.ops.session_layers import Inside, look_inside
from llamakv.records import MemoryKind
from llamakv.store import cache as cache_module
from llamakv.store.session_file import SessionInfo, change_lineage, create_session, read_session
from llamakv.store.store_folder import make_store
from tests.ops.driver import Driver
from tests.store import samples, stores

QUIET = Reporter()
TEXT = " ".join(f"word {n}" for n in range(40))


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory: pytest.TempPathFactory):
    """Sessions by the model's name and memory settings; each is made once."""
    folder = tmp_path_factory.mktemp("sessions")
    made: dict[str, SessionInfo] = {}

    def save(name: str, **memory: object) -> SessionInfo:
        key = name + "".join(f"-{value}" for value in memory.values())
        if key not in made:
            driver = Driver(models(name), folder, memory=MemoryOptions(**memory))
            driver.save(folder / f"{key}.bin", TEXT, raw=True)
            made[key] = read_session(folder / f"{key}.bin")
        return made[key]

    return save


def totals(inside: Inside) -> int:
    return sum(layer.n_raw for layer in inside.layers) + inside.n_other + sum(u.n_raw for u in inside.unknown)


@pytest.mark.parametrize(
    ("name", "memory", "layers"),
    [
        ("M", {}, ["full 0", "full 1"]),
        ("M", {"type_k": "q8_0", "type_v": "q4_0"}, ["full 0", "full 1"]),
        ("M", {"flash_attn": "off"}, ["full 0", "full 1"]),
        ("MS", {}, ["full 0", "windowed 0", "windowed 1", "windowed 2"]),
        ("MS", {"swa": "window"}, ["full 0", "windowed 0", "windowed 1", "windowed 2"]),
        ("MR", {}, ["recurrent 0", "recurrent 1"]),
        ("MH", {}, ["full 0", "recurrent 0", "recurrent 1"]),
        ("MH2", {}, ["full 0", "recurrent 0", "recurrent 1"]),
        ("ML", {}, None),
    ],
)
def test_layers_add_up_to_the_sections(saved, name: str, memory: dict, layers: list[str] | None) -> None:
    info = saved(name, **memory)
    inside = look_inside(info, QUIET, with_stored=True)
    assert inside.unknown == ()
    assert totals(inside) == inside.n_raw == info.n_raw_bytes
    assert inside.n_stored == info.n_stored_bytes
    assert layers is None or [f"{layer.kind} {layer.index}" for layer in inside.layers] == layers
    n_cells = len(info.record.tokens) - 1
    for layer in inside.layers:
        expected = min(32, n_cells) if layer.kind == "windowed" and "swa" in memory else n_cells
        assert layer.n_cells == (1 if layer.kind == "recurrent" else expected)
        assert layer.n_stored is not None
        assert 0 < layer.n_stored <= 1.01 * layer.n_raw + 200 * len(info.sections)
    assert sum(layer.n_stored or 0 for layer in inside.layers) == pytest.approx(info.n_stored_bytes, rel=0.2)


def test_cache_types_are_those_of_the_settings(saved) -> None:
    inside = look_inside(saved("M", type_k="q8_0", type_v="q4_0"), QUIET, with_stored=False)
    assert {(layer.type_k, layer.type_v) for layer in inside.layers} == {("q8_0", "q4_0")}
    assert {layer.n_stored for layer in inside.layers} == {None}
    assert {round(layer.k_raw / layer.v_raw, 3) for layer in inside.layers} == {round(34 / 18, 3)}
    assert {layer.type_v for layer in look_inside(saved("ML"), QUIET, with_stored=False).layers} == {None}


def test_a_layer_of_a_session_that_is_not_compressed_is_stored_as_it_is(models, tmp_path: Path) -> None:
    driver = Driver(models("M"), tmp_path)
    driver.save(tmp_path / "s.bin", TEXT, raw=True, compress="none")
    for layer in look_inside(read_session(tmp_path / "s.bin"), QUIET, with_stored=True).layers:
        assert layer.n_stored is not None
        assert layer.n_raw < layer.n_stored < layer.n_raw + 100


def test_cells_are_told_by_section_and_cache(saved) -> None:
    info = saved("MS", swa="window")
    n = len(info.record.tokens) - 1
    found = [(part.section, part.kind, part.positions) for part in look_inside(info, QUIET, with_stored=False).parts]
    assert found == [(0, "full", ((0, n),)), (0, "windowed", ((n - 32, n),))]
    info = saved("MS")
    parts = look_inside(info, QUIET, with_stored=False).parts
    assert [part.positions for part in parts if part.kind == "windowed"] == [((s.p0, s.p1),) for s in info.sections]
    assert sum(part.k_raw + part.v_raw for part in parts) < info.n_raw_bytes


def test_sections_of_an_unknown_layout_are_counted_and_nothing_is_guessed(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    create_session(path, samples.make_record(600), samples.cells_up_to(599))
    info = read_session(path)
    inside = look_inside(info, QUIET, with_stored=True)
    assert (inside.layers, inside.parts, inside.n_other) == ((), (), 0)
    assert [found.section for found in inside.unknown] == [0, 1, 2]
    assert totals(inside) == info.n_raw_bytes
    assert "expected 0xaf143cd8" in inside.unknown[0].reason


# ---------------------------------------------------------------- what resuming takes


@pytest.mark.parametrize("name", ["M", "MR", "MH"])
def test_memory_and_cost_are_of_what_a_resume_reads(saved, name: str) -> None:
    info = saved(name)
    memory, cost = resume_memory(info), measure_cost(info, QUIET)
    assert memory.n_state_bytes == cost.n_raw_bytes == sum(s.n_raw for s in sections_restored(info.sections))
    assert memory.n_model_bytes == info.record.identity.n_bytes
    assert memory.n_cells == len(info.record.tokens) - 1
    assert cost.n_sections == len(info.sections)
    assert cost.elapsed_s > 0
    assert cost.n_file_bytes == info.n_file_bytes
    assert cost.n_resident_bytes is None or 0 <= cost.n_resident_bytes <= cost.n_file_bytes


def test_earlier_tails_are_not_read(tmp_path: Path) -> None:
    sections = [*samples.cells_up_to(299), samples.tail(100), samples.tail(200), samples.tail(299)]
    create_session(tmp_path / "s.bin", samples.make_record(300, kind=MemoryKind.HYBRID), sections)
    info = read_session(tmp_path / "s.bin")
    wanted = sections_restored(info.sections)
    assert wanted == sections_restored(info.sections)
    assert [section.p1 for section in wanted] == [256, 299, 299]
    assert measure_cost(info, QUIET).n_sections == 3


def test_no_more_than_seven_sections_are_in_memory_at_a_time(tmp_path: Path) -> None:
    create_session(tmp_path / "s.bin", samples.make_record(2561), samples.cells_up_to(2560))
    memory = resume_memory(read_session(tmp_path / "s.bin"))
    assert (memory.n_state_bytes, memory.n_reading_bytes) == (2560 * 8, 7 * 256 * 8)
    create_session(tmp_path / "one.bin", samples.make_record(1), [])
    info = read_session(tmp_path / "one.bin")
    assert (resume_memory(info).n_reading_bytes, measure_cost(info, QUIET).raw_bytes_per_s) == (0, None)


@pytest.mark.parametrize("work", [measure_cost, lambda *a: look_inside(*a, with_stored=True)], ids=["cost", "layers"])
def test_what_is_wrong_with_a_session_is_said(saved, tmp_path: Path, work) -> None:
    path = Path(shutil.copy(saved("M").path, tmp_path / "s.bin"))
    info = read_session(path)
    with pytest.raises(InterruptedByUser):
        work(info, replace(QUIET, should_abort=lambda: True))
    stores.flip(path, lambda n: info.sections[0].offset + 400)
    with pytest.raises(DamagedError):
        work(info, QUIET)
    shutil.copy(saved("M").path, path)
    change_lineage(path, lambda lineage: replace(lineage, note="new"))
    with pytest.raises(ConflictError):
        work(info, QUIET)


def test_a_section_that_is_gone_from_the_store_is_damage(tmp_path: Path) -> None:
    stores.add_session(tmp_path, "s", 600)
    stores.object_of(tmp_path, "s", 1).unlink()
    with pytest.raises(DamagedError):
        measure_cost(read_session(tmp_path / "s.bin"), QUIET)


# ---------------------------------------------------------------- sharing and text


def test_what_is_shared_is_counted_with_whom(tmp_path: Path) -> None:
    make_store(tmp_path)
    stores.add_session(tmp_path, "one", 1025)
    stores.add_session(tmp_path, "two", 600)
    info = read_session(tmp_path / "one.bin")
    sharing = sharing_of(info, is_thorough=True)
    assert sharing is not None
    shared = info.sections[:2]
    assert (sharing.n_sections, sharing.n_bytes) == (2, sum(s.n_stored for s in shared))
    assert sharing.names == {section.digest: ["two"] for section in shared}
    assert sharing.n_bytes_with(sharing.sharers[0]) == sharing.n_bytes
    assert may_share(info)


def test_a_quick_look_reads_few_indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(3):
        stores.add_session(tmp_path, f"s{index}", 300)
    info = read_session(tmp_path / "s0.bin")
    monkeypatch.setattr("llamakv.ops.inspect._N_READ_QUICKLY", 2)
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "read_session", pytest.fail)
        assert sharing_of(info, is_thorough=False) is None
    found = sharing_of(info, is_thorough=True)
    assert found is not None
    assert len(found.sharers) == 2


def test_a_session_outside_a_store_shares_nothing(saved) -> None:
    assert not may_share(saved("M"))


def test_all_text_is_raw_text_or_what_the_messages_say(saved, tmp_path: Path) -> None:
    assert inspect_session(saved("M").path).text == TEXT
    create_session(tmp_path / "s.bin", samples.make_record(20), samples.cells_up_to(19))
    assert inspect_session(tmp_path / "s.bin").text == "Hi \U0001f600\n[/INST]"
