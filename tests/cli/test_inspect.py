"""``inspect``: what it is asked about, and what it tells of a session beyond its index."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pytest

from llamakv.cli.commands.options import ModelInspectGroup
from llamakv.cli.render.bars import position_bar, share_bar
from llamakv.ops.requests import MemoryOptions
from llamakv.store.session_file import change_lineage, read_session
from llamakv.store.store_folder import make_store
from tests.cli.conftest import Ran, command, make_session
from tests.ops.driver import Driver
from tests.store import stores

Run = Callable[..., Ran]
TEXT = " ".join(f"word {n}" for n in range(40))
GOLDEN = Path(__file__).parent.parent / "store" / "golden"


@pytest.fixture(scope="module")
def windowed(models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session of a sliding-window model that keeps its window only."""
    folder = tmp_path_factory.mktemp("windowed")
    Driver(models("MS"), folder, memory=MemoryOptions(swa="window")).save(folder / "w.bin", TEXT, raw=True)
    return folder / "w.bin"


@pytest.fixture
def store(home: Path) -> Path:
    """Sessions ``one`` and ``two`` share two sections, ``alone`` has its own."""
    root = home / "store"
    make_store(root)
    stores.add_session(root, "one", 1025)
    stores.add_session(root, "two", 600)
    stores.add_session(root, "alone", 300, text=1)
    return root


def data_of(ran: Ran) -> dict[str, Any]:
    assert ran.status == 0, ran.err
    return ran.document["data"]


def in_terminal(*arguments: str | Path, columns: int = 80, encoding: str = "utf-8") -> str:
    """What a terminal shows, without colours."""
    program, *words = command(*arguments)
    env = {**os.environ, "NO_COLOR": "1", "PYTHONIOENCODING": encoding}
    env.pop("COLUMNS", None)
    child = pexpect.spawn(program, words, dimensions=(40, columns), encoding=encoding, timeout=30, env=env)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    return str(child.before).replace("\r\n", "\n")


# ---------------------------------------------------------------- a session, a model or a store


class TestWhatIsAskedAbout:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, ModelInspectGroup]]:
        """Model files that were asked about, and how."""
        found: list[tuple[Path, ModelInspectGroup]] = []
        monkeypatch.setattr(
            "llamakv.cli.commands.inspect_model.inspect_model",
            lambda output, path, group: found.append((path, group)),
        )
        return found

    def test_a_model_file_is_known_by_its_name_or_by_how_it_begins(self, run: Run, home: Path, asked: list) -> None:
        for name in ("m.gguf", "M.GGUF", "bytes", "x.bin"):
            (home / name).write_bytes(b"GGUF" + bytes(100))
            assert run("inspect", name, "--n-ctx", "512", "--layers").status == 0
        (home / "empty.gguf").write_bytes(b"")
        assert run("inspect", "empty.gguf").status == 0
        assert [path.name for path, _ in asked] == ["m.gguf", "M.GGUF", "bytes", "x.bin", "empty.gguf"]
        assert (asked[0][1].n_ctx, asked[0][1].layers) == ([512], True)

    def test_what_is_no_model_file_is_a_session(self, run: Run, home: Path, session: Path, asked: list) -> None:
        (home / "folder.gguf").mkdir()
        assert run("inspect", "session.bin").status == 0
        assert run("inspect", "folder.gguf").status != 0
        ran = run("inspect", "gone.gguf")
        assert (ran.status, ran.err) == (
            10,
            "error: session 'gone.gguf' does not exist\n"
            "hint: there is no file 'gone.gguf' either: a model is named by its path\n",
        )
        assert asked == []

    @pytest.mark.parametrize("option", ["--history", "--tokens", "--text", "--sections", "--cells", "--cost"])
    def test_options_of_sessions_mean_nothing_for_a_model(self, run: Run, home: Path, asked: list, option: str) -> None:
        (home / "m.gguf").write_bytes(b"GGUF")
        ran = run("inspect", "m.gguf", option)
        assert (ran.status, ran.err.splitlines()[0]) == (
            2,
            f"error: {option} means nothing for a model file, and m.gguf is one",
        )
        assert run("inspect", "m.gguf", "--store", home).status == 2
        assert asked == []

    @pytest.mark.parametrize(
        "options",
        [("--n-ctx", "512"), ("--parallel", "2"), ("--type-k", "q8_0"), ("--memory", "8GB"), ("--live",), ("-t", "1")],
    )
    def test_options_of_models_mean_nothing_for_a_session(
        self, run: Run, session: Path, options: tuple[str, ...]
    ) -> None:
        ran = run("inspect", "session.bin", *options)
        name = "--threads" if options[0] == "-t" else options[0]
        assert (ran.status, ran.err.splitlines()[0]) == (
            2,
            f"error: {name} means nothing for a session; session.bin is no model file",
        )

    def test_a_store_takes_neither(self, run: Run, store: Path) -> None:
        assert run("inspect", "--store").status == 0
        for option in ("--cost", "--layers", "--live"):
            assert run("inspect", "--store", option).status == 2

    def test_help_has_an_example_of_each(self, run: Run) -> None:
        text = run("inspect", "--help").out
        assert "llamakv inspect session.bin" in text
        assert "llamakv inspect model.gguf" in text
        assert "[REF|MODEL.gguf]" in text


# ---------------------------------------------------------------- sharing and resuming


class TestSharing:
    def test_one_line_says_what_is_shared_with_whom(self, run: Run, store: Path) -> None:
        assert re.search(r"^shared +2 of 4 sections \([\d.]+ kB\) with two$", run("inspect", "one").out, re.MULTILINE)
        assert "nothing: no other session has any of its sections" in run("inspect", "alone").out
        for name in ("a", "b", "c"):
            stores.add_session(store, name, 257)
        assert re.search(r"^shared +2 of 4 .* with two, a and 2 more$", run("inspect", "one").out, re.MULTILINE)

    def test_a_session_outside_a_store_has_no_such_line(self, run: Run, session: Path) -> None:
        assert not re.search("^shared", run("inspect", session).out, re.MULTILINE)
        data = data_of(run("inspect", session, "--json"))
        assert data["shared_with"] is None
        assert "shared_with" not in data["sections"][0]

    def test_sections_name_the_sessions_that_share_them(self, run: Run, store: Path) -> None:
        lines = run("inspect", "one", "--sections").out.splitlines()
        table = lines[lines.index("") + 1 :]
        assert table[0].split("  ")[-2:] == ["SHARED WITH", "DIGEST"]
        assert [" two " in line for line in table[1:]] == [True, True, False, False]

    def test_json_has_all_of_it(self, run: Run, store: Path) -> None:
        data = data_of(run("inspect", "one", "--json"))
        shared = data["sections"][:2]
        assert [section["shared_with"] for section in data["sections"]] == [["two"], ["two"], [], []]
        assert data["shared_with"] == [
            {"session": "two", "sections": 2, "stored_bytes": sum(section["stored_bytes"] for section in shared)}
        ]

    def test_a_cache_that_is_far_behind_is_brought_up_to_date_on_demand(
        self, run: Run, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("llamakv.ops.inspect._N_READ_QUICKLY", 1)
        assert "not known: the store's cache is out of date" in run("inspect", "one").out
        assert data_of(run("inspect", "one", "--json"))["shared_with"] is None
        assert "2 of 4 sections" in run("inspect", "one", "--sections").out

    def test_memory_is_told_from_the_index(self, run: Run, session: Path) -> None:
        ran = run("inspect", session)
        parts = "4.8 kB of state (599 cells) · 98.0 MB model file · up to 4.8 kB while reading"
        assert f"at least 98.0 MB in all: {parts}; a context has more cells (n_ctx " in ran.out
        record = read_session(session).record
        assert data_of(run("inspect", session, "--json"))["resume"] == {
            "n_ctx": record.n_ctx,
            "cells": 599,
            "bytes": 98_000_000 + 2 * 4792,
            "state_bytes": 4792,
            "model_bytes": 98_000_000,
            "reading_bytes": 4792,
        }

    def test_a_section_that_is_gone_is_missing(self, run: Run, store: Path) -> None:
        sections = data_of(run("inspect", "one", "--json"))["sections"]
        assert {(section["missing"], section["encoding"]) for section in sections} == {(False, "planes")}
        stores.object_of(store, "one", 2).unlink()
        ran = run("inspect", "one")
        assert ran.status == 0
        assert re.search(r"^sections +3 in the store's objects$", ran.out, re.MULTILINE)
        assert re.search(r"^missing +1 of 4 sections not in the store: 2 · .* cannot be resumed", ran.out, re.MULTILINE)
        rows = [line.split()[8] for line in ran.out.splitlines() if re.match(r"\d cells", line)]
        assert rows == ["planes", "planes", "missing", "planes"]
        assert re.search(r"^2 cells .* missing ", run("inspect", "one", "--sections").out, re.MULTILINE)
        data = data_of(run("inspect", "one", "--json"))
        assert data["missing"] is True
        assert [section["missing"] for section in data["sections"]] == [False, False, True, False]

    def test_a_section_that_cannot_be_read_is_said_to_be(self, run: Run, store: Path) -> None:
        path = stores.object_of(store, "one", 1)
        path.write_bytes(path.read_bytes()[:50])
        out = run("inspect", "one").out
        assert re.search(r"^unreadable +1 of 4 sections: 1 \(", out, re.MULTILINE)
        assert re.search(r"^1 cells .* unreadable ", out, re.MULTILINE)

    def test_cost_is_measured(self, run: Run, store: Path) -> None:
        out = run("inspect", "one", "--cost").out
        assert re.search(r"^time +[\d,.]+ ms on \d+ threads?, .*/s$", out, re.MULTILINE)
        assert "loading the model, setting the state, decoding the pending token: not measured" in out
        data = data_of(run("inspect", "one", "--cost", "--json"))
        cost = data["cost"]
        assert (cost["sections"], cost["raw_bytes"]) == (4, data["raw_bytes"])
        assert cost["raw_bytes_per_s"] == pytest.approx(cost["raw_bytes"] / cost["elapsed_s"])
        assert "cost" not in data_of(run("inspect", "one", "--json"))


# ---------------------------------------------------------------- layers and cells


class TestInside:
    def test_layers_in_json_add_up(self, run: Run, windowed: Path) -> None:
        data = data_of(run("inspect", windowed, "--layers", "--json"))
        layers = data["layers"]
        assert [(layer["kind"], layer["index"]) for layer in layers] == [
            ("full", 0),
            ("windowed", 0),
            ("windowed", 1),
            ("windowed", 2),
        ]
        raw = sum(layer["k_raw_bytes"] + layer["v_raw_bytes"] for layer in layers)
        assert raw + data["layers_other_raw_bytes"] == data["raw_bytes"]
        assert {(layer["type_k"], layer["type_v"]) for layer in layers} == {("f16", "f16")}
        assert all(0 < layer["k_stored_bytes"] <= layer["k_raw_bytes"] for layer in layers)
        assert data["unknown_sections"] == []
        assert "section_cells" not in data

    def test_cells_in_json_say_which_positions_are_held(self, run: Run, windowed: Path) -> None:
        data = data_of(run("inspect", windowed, "--cells", "--json"))
        n = data["cells"]
        assert [(part["kind"], part["positions"]) for part in data["section_cells"]] == [
            ("full", [[0, n]]),
            ("windowed", [[n - 32, n]]),
        ]
        assert "layers" not in data

    def test_tables_say_how_it_was_measured_and_what_is_missing(self, run: Run, windowed: Path) -> None:
        out = run("inspect", windowed, "--layers", "--cells").out
        assert "each layer's keys and values compressed alone" in out
        assert re.search(r"^windowed 2 +32 ", out, re.MULTILINE)
        assert re.search(r"^windowed +32 positions of [\d,]+, missing \[0, \d+\)$", out, re.MULTILINE)
        assert re.search(r"^full +(\d+) positions of \1, none missing$", out, re.MULTILINE)

    def test_sections_of_an_unknown_layout_are_said_to_be_so(self, run: Run, session: Path) -> None:
        out = run("inspect", session, "--layers", "--cells").out
        assert "3 sections, 4.8 kB, of a layout this llamakv does not know" in out
        assert "LAYER" not in out
        data = data_of(run("inspect", session, "--layers", "--json"))
        assert (data["layers"], [found["section"] for found in data["unknown_sections"]]) == ([], [0, 1, 2])

    @pytest.mark.parametrize("option", ["--layers", "--cells", "--cost"])
    def test_a_damaged_section_ends_it(self, run: Run, session: Path, option: str) -> None:
        stores.flip(session, lambda n: 1600)
        assert run("inspect", session).status == 0
        assert run("inspect", session, option).status == 13

    @pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.bin")), ids=lambda path: path.stem)
    def test_sessions_of_all_versions_can_be_looked_into(self, run: Run, home: Path, path: Path) -> None:
        shutil.copy(path, home / "old.bin")
        data = data_of(run("inspect", "old.bin", "--sections", "--layers", "--cells", "--cost", "--json"))
        assert sum(found["raw_bytes"] for found in data["unknown_sections"]) == data["raw_bytes"]
        assert data["cost"]["raw_bytes"] <= data["raw_bytes"]

    @pytest.mark.parametrize("columns", [80, 120])
    def test_a_terminal_has_bars_and_no_line_is_too_long(self, home: Path, windowed: Path, columns: int) -> None:
        shown = in_terminal("inspect", windowed, "--sections", "--layers", "--cells", "--cost", columns=columns)
        assert max(map(len, shown.split("\n"))) <= columns
        assert re.search("^full 0 .* ████████$", shown, re.MULTILINE)
        assert re.search("^0 windowed .* ·+[▒█]+$", shown, re.MULTILINE)

    def test_a_terminal_without_such_letters_has_others(self, home: Path, windowed: Path) -> None:
        shown = in_terminal("inspect", windowed, "--layers", "--cells", encoding="latin-1")
        assert re.search("^full 0 .* ########$", shown, re.MULTILINE)
        assert re.search(r"^0 windowed .* \.+[+#]+$", shown, re.MULTILINE)

    def test_off_a_terminal_there_are_no_bars(self, run: Run, windowed: Path) -> None:
        assert not re.search("[█▒]", run("inspect", windowed, "--sections", "--layers", "--cells").out)


def test_a_bar_is_as_long_as_its_share() -> None:
    assert [share_bar(part, 4) for part in (0, 1e-9, 0.5, 0.53125, 1, 2)] == ["", "▏", "██", "██▏", "████", "████"]


def test_a_map_tells_all_from_some_and_none() -> None:
    assert position_bar([(0, 4), (6, 7)], 8, 4) == "██·▒"
    assert position_bar([(0, 1)], 1, 4) == "████"
    assert position_bar([], 8, 4) == "····"
    assert position_bar([], 0, 4) == ""


# ---------------------------------------------------------------- text, and a plot


def test_text_is_printed_in_order(run: Run, session: Path, windowed: Path) -> None:
    assert run("inspect", session, "--text").out == "Hi 😀\n[/INST]\n"
    assert run("inspect", windowed, "--text").out == f"{TEXT}\n"
    assert data_of(run("inspect", session, "--text", "--tokens", "--history", "--json"))["text"] == "Hi 😀\n[/INST]"


@pytest.mark.parametrize("first", ["--history", "--tokens", "--text"])
@pytest.mark.parametrize("second", ["--sections", "--layers", "--cells", "--cost"])
def test_what_is_printed_instead_excludes_what_is_added(run: Run, session: Path, first: str, second: str) -> None:
    ran = run("inspect", session, second, first)
    assert (ran.status, ran.err.splitlines()[0]) == (2, f"error: {first} and {second} exclude each other")


@pytest.mark.parametrize(("name", "magic"), [("map.png", b"\x89PNG"), ("map.svg", b"<?xml")])
def test_a_plot_is_drawn_into_a_new_file(run: Run, store: Path, home: Path, name: str, magic: bytes) -> None:
    assert run("inspect", "one", "--plot", name).err == f"drawn: {name}\n"
    assert (home / name).read_bytes().startswith(magic)
    assert run("inspect", "one", "--plot", name).status == 11
    assert data_of(run("inspect", "one", "--plot", name, "--force", "--json"))["plot"] == name


def test_a_plot_in_the_terminal_shows_what_is_shared(run: Run, store: Path) -> None:
    strip = next(line for line in run("inspect", "one", "--plot", "-").out.splitlines() if line.startswith("cells "))
    assert strip.count("▒") > 10 < strip.count("█")


@pytest.mark.parametrize(
    "options", [("--plot", "-", "--json"), ("--plot", "map.txt"), ("--force",), ("--plot", "map.svg", "--text")]
)
def test_a_plot_that_cannot_be_had_is_refused_first(run: Run, session: Path, options: tuple[str, ...]) -> None:
    assert run("inspect", session, *options).status == 2


# ---------------------------------------------------------------- what worked before


def test_places_and_sessions_that_were_changed_are_told_of(run: Run, session: Path) -> None:
    change_lineage(session, lambda lineage: lineage)
    data = data_of(run("inspect", f"{session}@3", "--cost", "--json"))
    assert (data["tokens"], data["cells"], data["cost"]["sections"]) == (3, 2, 1)


def test_the_report_brings_no_engine_and_no_numpy(home: Path, session: Path) -> None:
    code = (
        "import sys; from llamakv.cli import app; status = app.run(['inspect', 'session.bin']); "
        "print(status, [m for m in ('numpy', 'llama_cpp', 'sqlite3', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_a_long_session_made_without_an_engine_is_listed_in_full(run: Run, home: Path) -> None:
    path = make_session(home / "long.bin", 256 * 20 + 1)
    rows = [line for line in run("inspect", path, "--sections").out.splitlines() if re.match(r"\d+ cells ", line)]
    assert len(rows) == 20


def test_a_model_file_that_is_not_there_is_not_found(run: Run) -> None:
    ran = run("inspect", "gone.gguf", "--n-ctx", "512")
    assert ran.status == 10
    assert ran.err == "error: the model file gone.gguf does not exist\n"
