"""inspect MODEL.gguf and save --estimate, as they are typed."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from llamakv.cli.commands.model_report import ranges
from tests.cli.conftest import Ran, command

Run = Callable[..., Ran]
Models = Callable[[str], Path]


def unknown_model(models: Models, path: Path) -> Path:
    """A model file of an architecture that nobody knows."""
    path.write_bytes(models("M").read_bytes().replace(b"llama", b"nonex"))
    return path


def on_terminal(*arguments: str | Path) -> list[str]:
    """The lines that a program shows on a terminal of 80 columns."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    with subprocess.Popen(command(*arguments), stdout=follower, stderr=follower, env=environment) as running:
        os.close(follower)
        shown = b""
        with contextlib.suppress(OSError):  # the other end was closed
            while piece := os.read(leader, 65536):
                shown += piece
        os.close(leader)
        assert running.wait(60) == 0
    return shown.decode().replace("\r", "").splitlines()


class TestText:
    def test_tells_what_it_is_what_it_takes_and_what_fits(self, run: Run, models: Models) -> None:
        ran = run("inspect", models("MS"), "-c", "1024", "-c", "512", "--memory", "4GB")
        assert (ran.status, ran.err) == (0, "")
        lines = [line.split() for line in ran.out.splitlines()]
        assert ["model", "tiny", "gemma3", "·", "gemma3", "·", "F16"] in lines
        assert "windowed        " in ran.out
        assert " · a window of 32 tokens" in ran.out
        rows = [line for line in lines if line[:1] in (["512"], ["1,024"])]
        assert [row[:2] for row in rows] == [
            [n_ctx, kind] for n_ctx in ("512", "1,024") for kind in ("f16", "q8_0", "q4_0")
        ]
        assert "GB available now  f16" in ran.out
        assert "4.0 GB (--memory)  " in ran.out
        assert "8,192" in ran.out
        assert "at least: the program takes " in ran.out
        assert "what fits: the program, weights and the largest context" in ran.out

    def test_layers_are_told_one_by_one_where_that_is_asked_for(self, run: Run, models: Models) -> None:
        assert "LAYER" not in run("inspect", models("MH")).out
        out = run("inspect", models("MH"), "--layers").out
        table = out[out.index("LAYER") :].splitlines()[1:4]
        assert [line.split()[:2] for line in table] == [["0", "recurrent"], ["1", "full"], ["2", "recurrent"]]

    def test_a_refused_type_is_a_row_that_says_so(self, run: Run, models: Models) -> None:
        ran = run("inspect", models("M"), "-c", "512", "-ctv", "q4_0", "-ctv", "f16", "--flash-attn", "off")
        assert ran.status == 0
        assert "f16/q4_0  refused" in ran.out
        none = run("inspect", models("M"), "-c", "512", "-ctv", "q4_0", "--flash-attn", "off")
        assert "what fits is not told: the engine refuses all these types, see above\n" in none.out
        assert "f16/q4_0 is refused: cache type q4_0 for V needs flash attention\n" in ran.out
        assert [line.split()[1] for line in ran.out.splitlines() if line.lstrip().startswith("512 ")] == ["f16"]

    def test_more_than_it_was_trained_with_is_said_to_be_more(self, run: Run, models: Models) -> None:
        said = "it was trained with contexts of 8,192 tokens; beyond that it may answer badly\n"
        assert said in run("inspect", models("M"), "-c", "8448").out
        assert said not in run("inspect", models("M"), "-c", "8448", "--parallel", "2").out

    def test_types_are_paired_and_what_is_not_given_is_f16(self, run: Run, models: Models) -> None:
        data = run("inspect", models("M"), "-c", "512", "-ctk", "q8_0", "-ctk", "f16", "--json").document["data"]
        assert [(found["type_k"], found["type_v"]) for found in data["types"]] == [("q8_0", "f16"), ("f16", "f16")]

    def test_weights_that_may_be_repacked_are_at_least(
        self, run: Run, models: Models, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("llamakv.ops.inspect_live.may_repack", lambda quantisation: True)
        said = "MB; some may be kept repacked as well: --live tells\n"
        assert said in run("inspect", models("M"), "-c", "512").out
        out = run("inspect", models("M"), "-c", "512", "--live", "-t", "1").out
        assert said not in out

    def test_one_branch_is_one(self, run: Callable[..., Ran], models: Callable[[str], Path]) -> None:
        out = run("inspect", models("M"), "-c", "512", "--parallel", "1").out
        assert "for a prefix and 1 branch\n" in out
        assert "for a prefix and 2 branches\n" in run("inspect", models("M"), "-c", "512", "--parallel", "2").out

    def test_it_fits_80_columns(self, home: Path, models: Models) -> None:
        options = ("--live", "-t", "1", "--layers", "--parallel", "2")
        lines = on_terminal("inspect", models("MG"), "--memory", "1GB", *options)
        assert len(lines) > 30
        assert max(map(len, lines)) <= 80
        assert sum(line.endswith(" each, as trained") for line in lines) == 6

    @pytest.mark.parametrize(
        ("indices", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 3, 4, 6, 7], "0-4, 6-7"), ([1, 3, 5], "1, 3, 5")]
    )
    def test_layer_numbers_are_written_compactly(self, indices: list[int], text: str) -> None:
        assert ranges(indices) == text


class TestJson:
    def test_all_figures_are_there_raw(self, run: Run, models: Models) -> None:
        data = run("inspect", models("MH"), "-c", "512", "--parallel", "2", "--json").document["data"]
        assert set(data) == {
            "model", "file_bytes", "architecture", "name", "quantisation", "unknown", "kind", "parameters",
            "weights_bytes", "n_ctx_train", "n_vocab", "n_embd", "n_layer", "n_window", "key_length", "value_length",
            "latent_length", "layers", "n_parallel", "n_ctx", "limits", "may_repack", "types", "live", "plot",
        }  # fmt: skip
        assert (data["architecture"], data["kind"], data["n_layer"], data["n_parallel"]) == (
            "granitehybrid", "hybrid", 3, 2,
        )  # fmt: skip
        assert [layer["kinds"] for layer in data["layers"]] == [["recurrent"], ["full"], ["recurrent"]]
        f16, q8_0, _ = data["types"]
        (context,) = f16["contexts"]
        assert context["kv_bytes"] == 512 * f16["kv_bytes_per_token"] == 131_072
        assert context["recurrent_bytes"] == 4 * f16["recurrent_bytes_per_sequence"]  # root, two branches, scratch
        assert context["bytes"] == sum(context[f"{part}_bytes"] for part in ("kv", "recurrent", "compute", "output"))
        assert context["with_weights_bytes"] == data["weights_bytes"] + context["bytes"]
        assert q8_0["kv_bytes_per_token"] * 32 == f16["kv_bytes_per_token"] * 17
        assert f16["fits"][0]["limit"] == data["limits"][0]["name"] == "available"

    def test_an_unknown_architecture_is_unknown(self, run: Run, models: Models, tmp_path: Path) -> None:
        path = unknown_model(models, tmp_path / "new.gguf")
        ran = run("inspect", path)
        assert ran.status == 0
        assert "memory      unknown: " in ran.out
        assert "CONTEXT" not in ran.out
        data = run("inspect", path, "--json").document["data"]
        assert (data["types"], data["layers"], data["kind"], data["live"]) == (None, None, None, None)
        assert "nonex" in data["unknown"]
        assert (data["architecture"], data["name"], data["n_layer"]) == ("nonex", "tiny nonex", 2)

    def test_a_live_context_is_set_against_the_estimate(self, run: Run, models: Models) -> None:
        data = run("inspect", models("MS"), "-c", "512", "--live", "-t", "1", "--json").document["data"]
        live = data["live"]
        assert live["agrees"] is True
        assert [part["part"] for part in live["compared"]] == [
            "weights", "full", "windowed", "compute", "output", "total",
        ]  # fmt: skip
        assert (
            live["context"]["kv_bytes"] == live["estimate"]["kv_bytes"] == data["types"][0]["contexts"][0]["kv_bytes"]
        )
        assert set(live["rss_bytes"]) == {"before", "weights", "context", "batch"}
        assert live["batch_tokens"] == 256
        out = run("inspect", models("MS"), "-c", "512", "--live", "-t", "1").out
        assert "estimate and allocation agree (within 2 %)\n" in out
        assert "model file: " in out


class TestErrors:
    def test_a_missing_file_is_10(self, run: Run, home: Path) -> None:
        assert run("inspect", "no/such/model.gguf").status == 10

    def test_a_file_that_is_no_model_is_14(self, run: Run, home: Path) -> None:
        Path("no.gguf").write_bytes(b"something else")
        ran = run("inspect", "no.gguf")
        assert (ran.status, ran.err) == (14, "error: no.gguf is not a GGUF model file\n")

    def test_a_header_that_is_cut_off_is_14(self, run: Run, models: Models, home: Path) -> None:
        Path("cut.gguf").write_bytes(models("M").read_bytes()[:3000])
        assert run("inspect", "cut.gguf").status == 14

    def test_what_is_no_regular_file_or_is_cut_or_empty_is_14(self, run: Run, models: Models, home: Path) -> None:
        Path("folder.gguf").mkdir()
        os.mkfifo("pipe.gguf")
        Path("empty.gguf").touch()
        Path("cut.gguf").write_bytes(models("M").read_bytes()[:-100_000])
        said = [(ran.status, ran.err.split(":")[1].strip()) for name in ("folder", "pipe", "empty", "cut")
                for ran in (run("inspect", f"{name}.gguf"),)]  # fmt: skip
        assert said == [
            (14, "folder.gguf is a folder, not a model file"),
            (14, "pipe.gguf is a pipe, not a model file"),
            (14, "empty.gguf is not a GGUF model file"),
            (14, "cut.gguf is damaged or cut off"),
        ]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--memory", "much"), "'much' is not a size (such as 100MB, 20GiB or 1.5G)"),
            (("--memory", "none"), "'none' is not a size"),
            (("--memory", "16"), "--memory 16 bytes are too few for any model: at least 1,000,000 (1MB)"),
            (("-c", "100000000"), "a context of 100,000,000 cells is larger than any can be"),
            (("-c", "0"), "0 is less than 1"),
            (("-ctk", "q3"), "'q3' is not one of"),
            (("--parallel", "255"), "255 is more than 254"),
            (("--plot", "a.txt"), "neither an .svg nor a .png file"),
            (("--plot", "-", "--json"), "--json and --plot - exclude each other"),
        ],
    )
    def test_wrong_options_are_2(self, run: Run, models: Models, options: tuple[str, ...], message: str) -> None:
        ran = run("inspect", models("M"), *options)
        assert ran.status == 2
        assert message in ran.err + ran.out

    def test_what_cannot_be_opened_is_14_with_live(self, run: Run, models: Models, tmp_path: Path) -> None:
        ran = run("inspect", unknown_model(models, tmp_path / "new.gguf"), "--live")
        assert ran.status == 14
        assert "nonex" in ran.err


class TestPlot:
    @pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is an extra")
    def test_a_picture_has_a_line_for_each_type(self, run: Run, models: Models, home: Path) -> None:
        ran = run("inspect", models("M"), "--plot", "memory.svg")
        assert (ran.status, ran.err) == (0, "drawn: memory.svg\n")
        assert Path("memory.svg").read_bytes().startswith(b"<?xml")
        assert run("inspect", models("M"), "--plot", "memory.svg").status == 11
        data = run("inspect", models("M"), "--plot", "memory.svg", "--force", "--json").document["data"]
        assert data["plot"] == "memory.svg"
        assert [context["n_ctx"] for context in data["types"][0]["curve"]] == [512, 1024, 2048, 4096, 8192]

    def test_a_terminal_plot_names_its_lines(self, run: Run, models: Models) -> None:
        ran = run("inspect", models("M"), "--plot", "-")
        assert ran.status == 0
        for label in ("f16", "q8_0", "q4_0", "weights alone"):
            assert label in ran.out[ran.out.index("memory by context length") :]

    def test_the_plot_names_scale_branches_and_limits(
        self, run: Run, models: Models, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = run("inspect", models("M"), "-c", "512", "--parallel", "3", "--memory", "200MB", "--plot", "-").out
        plot = out[out.index("memory by context length") :]
        assert "a prefix and 3 branches\n" in plot
        assert "right: context, tokens (logarithmic)\n" in plot
        assert "GB available now" in plot
        assert "8,192" in plot
        assert "MiB" not in plot
        monkeypatch.setattr("llamakv.ops.inspect_model.resident_bytes", lambda: 90_000_000)
        near = run("inspect", models("M"), "--memory", "100MB", "--plot", "-").out
        assert "100 MB (--memory)" in near[near.index("memory by context length") :]

    def test_nothing_is_drawn_of_what_is_unknown(self, run: Run, models: Models, tmp_path: Path) -> None:
        ran = run("inspect", unknown_model(models, tmp_path / "new.gguf"), "--plot", "-")
        assert (ran.status, ran.out) == (14, "")
        assert "nothing can be drawn" in ran.err


class TestSaveEstimate:
    @pytest.fixture(autouse=True)
    def text(self, home: Path) -> None:
        Path("text.txt").write_text("the river is a story about the house\n" * 20)

    def test_the_figures_are_those_of_the_save(self, run: Run, model: Path, home: Path) -> None:
        told = run("save", "--estimate", "-f", "text.txt", "text", "--json").document["data"]
        assert not (home / "store").exists()
        saved = run("save", "-f", "text.txt", "text", "-t", "1", "--json").document["data"]
        for key in ("session", "tokens", "cells", "raw_bytes", "reused", "evaluated"):
            assert told[key] == saved[key], key
        assert told["stored_bytes"] >= saved["stored_bytes"]
        assert (told["estimate"], told["is_upper_bound"], told["measured_sessions"]) == (True, True, 0)
        assert told["written_bytes"] > told["new_stored_bytes"] + told["index_bytes"]
        assert told["memory_bytes"] == told["own_bytes"] + told["weights_bytes"] + told["context_bytes"]

    def test_the_text_says_what_it_goes_by(self, run: Run, model: Path, home: Path) -> None:
        first = run("save", "--estimate", "-f", "text.txt", "text")
        assert first.status == 0
        assert "estimate  text · nothing was written\n" in first.out
        assert "to write  at most " in first.out
        assert "(no session of this model and settings to go by)" in first.out
        run("save", "-f", "text.txt", "text", "-t", "1")
        Path("longer.txt").write_text(Path("text.txt").read_text() * 2)
        second = run("save", "--estimate", "-f", "longer.txt", "other")
        assert "to write  about " in second.out
        assert "raw over stored, as in 1 session of this model and settings)" in second.out
        assert " reused from " in second.out
        assert run("save", "--estimate", "-f", "longer.txt", "other", "--no-reuse", "--json").document["data"][
            "reused"
        ] == 0  # fmt: skip

    def test_too_little_room_is_told_and_ends_as_the_save_would(
        self, run: Run, model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("llamakv.ops.estimate._free_bytes", lambda folder: 1_000)
        ran = run("save", "--estimate", "-f", "text.txt", "text", "--compress", "none")
        assert ran.status == 16
        assert re.search(r"^room +not enough: needs \d+ kB, 1\.0 kB free on the disk$", ran.out, re.MULTILINE)
        assert ran.err.startswith("error: not enough room for ")
        assert "may not be enough: needs at most " in run("save", "--estimate", "-f", "text.txt", "text").out
        told = run("save", "--estimate", "-f", "text.txt", "text", "--json")
        assert (told.status, told.document["data"]["is_enough_room"]) == (16, False)
        assert run("save", "--estimate", "-f", "text.txt", "no/such/text.bin").status == 16

    def test_it_refuses_what_the_save_refuses(self, run: Run, model: Path, models: Models, home: Path) -> None:
        run("save", "-f", "text.txt", "text", "-t", "1")
        Path("other.txt").write_text("another thing")
        assert run("save", "--estimate", "-f", "other.txt", "text").status == 11
        assert run("save", "--estimate", "-f", "other.txt", "text", "--force").status == 0
        assert run("save", "--estimate", "-f", "text.txt", "new", "-c", "16").status == 15
        assert run("save", "--estimate", "-f", "missing.txt", "new").status == 10
        assert run("save", "--estimate", "-f", "text.txt", "new", "-m", "no.gguf").status == 10
