"""Help: every command says in one sentence what it does, and shows an example that runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version

import pytest

from llamakv import __version__
from llamakv.cli import app
from tests.cli.conftest import Ran

COMMANDS = [
    "chat", "save", "warm", "load", "fork", "inspect", "bench", "serve", "ls", "rm", "verify", "repair", "compact",
    "budget", "prune", "gc", "log", "diff", "tag", "note", "pin", "unpin", "mv", "cp", "export", "import",
]  # fmt: skip
EVERYWHERE = {"--json", "--verbose", "--quiet"}
OF_A_MODEL = {
    "--model", "--model-dir", "--lora", "--gpu-layers", "--threads", "--n-ctx", "--type-k", "--type-v", "--flash-attn",
    "--swa", "--rope-freq-base", "--rope-freq-scale", "--recompute", "--trust-state", "--compress", "--temperature",
    "--seed", "--max-tokens", "--stop", "--top-k", "--top-p", "--min-p", "--repeat-penalty", "--frequency-penalty",
    "--presence-penalty", "--penalty-last-n", "--logit-bias", "--grammar", "--store", "--force",
}  # fmt: skip
SHORT = {
    "--model": "-m", "--n-ctx": "-c", "--threads": "-t", "--gpu-layers": "-ngl", "--type-k": "-ctk", "--type-v": "-ctv",
    "--prompt": "-p", "--file": "-f", "--verbose": "-v", "--quiet": "-q", "--yes": "-y", "--samples": "-n",
}  # fmt: skip


def _parameters(command: str) -> dict[str, list[str]]:
    """Long option names of a command, each with its short ones."""
    group = app.command_of()
    found = group.commands[command].params  # type: ignore[attr-defined]
    named = [option.opts for option in found if option.opts[0].startswith("-")]
    return {next(name for name in names if name.startswith("--")): names for names in named}


def _example(command: str) -> str:
    group = app.command_of()
    help_text = group.commands[command].help or ""  # type: ignore[attr-defined]
    sentence, example = help_text.split("\n\n")
    assert re.fullmatch(r"[A-Z][^.]+\.", sentence)
    assert example.startswith(f"Example: llamakv {command}")
    return example.removeprefix("Example: ").strip()


def test_every_command_is_listed_here() -> None:
    assert list(app.COMMANDS) == COMMANDS == list(app.command_of().commands)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_one_sentence_and_an_example_whose_options_exist(command: str) -> None:
    words = shlex.split(_example(command))
    options = {name for names in _parameters(command).values() for name in names}
    assert [word for word in words if word.startswith("-") and word not in options] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_common_options(command: str) -> None:
    assert set(_parameters(command)) >= EVERYWHERE


@pytest.mark.parametrize("command", ["chat", "save", "load", "fork"])
def test_commands_with_a_model_have_all_its_options(command: str) -> None:
    assert set(_parameters(command)) >= OF_A_MODEL


def test_one_option_name_means_one_thing_everywhere() -> None:
    seen: dict[str, list[str]] = {}
    for command in COMMANDS:
        for name, names in _parameters(command).items():
            assert seen.setdefault(name, names) == names
    assert {name: short for name, short in SHORT.items() if short not in seen[name]} == {}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns_and_leaves_with_0(command: str, run: Callable[..., Ran]) -> None:
    ran = run(command, "--help")
    assert (ran.status, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "Example: llamakv" in ran.out


def test_help_has_the_table_of_exit_statuses(run: Callable[..., Ran]) -> None:
    shown = run("--help").out
    for status, meaning in ((10, "not found"), (13, "damaged"), (14, "does not fit"), (16, "could not write")):
        assert re.search(rf"{status} +{meaning}", shown), status


def test_without_a_command_help_is_shown(run: Callable[..., Ran]) -> None:
    assert run().status == 0
    assert run().out == run("--help").out


def test_version_names_the_engine_without_importing_it(run: Callable[..., Ran]) -> None:
    ran = run("--version")
    assert ran.out == f"llamakv {__version__} (llama-cpp-python {version('llama-cpp-python')})\n"


def test_the_engine_is_not_imported_where_it_is_not_needed(home: object) -> None:
    """One process runs them one after the other: what one imports is seen after it."""
    lines = (
        "--help", "--version", "chat --help", "fork --help", "ls", "verify", "prune", "inspect --store",
        "inspect missing.bin", "rm -y missing.bin",
    )  # fmt: skip
    script = (
        "import sys; from llamakv.cli import app\n"
        "for line in sys.argv[1:]:\n"
        "    app.run(line.split())\n"
        "    modules = {name.split('.')[0] for name in sys.modules}\n"
        "    print('imported by', line, modules & {'llama_cpp', 'prompt_toolkit', 'jinja2', 'psutil'}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script, *lines], capture_output=True, text=True)
    shown = [line for line in done.stderr.splitlines() if line.startswith("imported by ")]
    assert shown == [f"imported by {line} set()" for line in lines]
