"""The command line under the conditions that broke other programs (known-faults, all parts)."""

from __future__ import annotations

import ast
import hashlib
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from llamakv.engine.llamacpp import native
from llamakv.store.session_file import read_session
from tests.cli.conftest import Ran, command
from tests.faults.test_restoring import with_tokens, words
from tests.models.vocabulary import FIRST_BYTE
from tests.store.test_damage import reseal

FEW = ("--max-tokens", "4", "--temperature", "0", "-t", "1")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def raw_file(run: Callable[..., Ran], home: Path, model: Path) -> Path:
    """A raw session of 900 tokens."""
    (home / "text.txt").write_text(words(900), encoding="utf-8")
    assert run("save", "--raw", "-f", "text.txt", "-t", "1", "raw.bin").status == 0
    return home / "raw.bin"


# ---------------------------------------------------------------- finding sessions and models


def test_sessions_are_listed_and_resumed_without_any_cache(
    run: Callable[..., Ran], process: Callable[..., Ran], home: Path, model: Path
) -> None:
    # B08
    for name in ("one", "two"):
        assert run("chat", "--save", name, "--message", "hi", *FEW).status == 0
    assert (home / "cache" / "llamakv").is_dir()
    shutil.rmtree(home / "cache")
    listed = process("ls", "--json").document["data"]["sessions"]
    assert [entry["name"] for entry in listed] == ["two", "one"]
    assert not (home / "cache").exists()
    again = run("chat", "--resume", "one", "--message", "yo", "--json").lines
    assert (again[0]["type"], again[0]["evaluated"]) == ("opened", 0)
    assert process("ls", "--json").document["data"]["sessions"][0]["name"] == "one"  # B09: the last one saved


@pytest.mark.parametrize("surplus", [-1, 2])
def test_tokens_and_cells_that_disagree_are_13_with_both_numbers(
    run: Callable[..., Ran], raw_file: Path, surplus: int
) -> None:
    # B10, B17
    reseal(raw_file, with_tokens(surplus))
    for arguments in (("load", raw_file), ("inspect", raw_file), ("chat", "--resume", raw_file, "--message", "x")):
        ran = run(*arguments)
        assert (ran.status, ran.out) == (13, "")
        assert ran.err.startswith("error: ")
        assert {str(900 + surplus), "899"} <= set(re.findall(r"\d+", ran.err.replace(str(raw_file), "")))
        assert "Traceback" not in ran.err


def test_inspect_shows_tokens_and_cells(run: Callable[..., Ran], raw_file: Path) -> None:
    # B10, B80
    data = run("inspect", raw_file, "--json").document["data"]
    assert (data["tokens"], data["cells"]) == (900, 899)


def test_a_context_that_cannot_hold_the_session_is_15_with_both_numbers(
    run: Callable[..., Ran], raw_file: Path
) -> None:
    # B25
    before = digest(raw_file)
    ran = run("load", raw_file, "-c", "512", *FEW)
    assert (ran.status, ran.out) == (15, "")
    assert "900" in ran.err
    assert "512" in ran.err
    assert digest(raw_file) == before
    stored = run("load", raw_file, *FEW)
    assert (stored.status, run("load", raw_file, "-c", "8192", *FEW).out) == (0, stored.out)


@pytest.mark.parametrize("option", ["--model-draft", "--image", "--mmproj", "--audio"])
def test_what_is_not_supported_has_no_option(run: Callable[..., Ran], raw_file: Path, option: str) -> None:
    # B18 (no draft models), B60 (text only: a model is never given an image)
    before = digest(raw_file)
    for name in ("chat", "load", "save"):
        ran = run(name, option, "x.gguf", "--resume" if name == "chat" else "-q", raw_file)
        assert ran.status == 2
        assert f"no such option: {option}" in ran.err.lower()
    assert digest(raw_file) == before


# ---------------------------------------------------------------- the engine


REMOVING = (
    "import sys, llama_cpp.llama_cpp as api\ndelattr(api, sys.argv.pop(1))\nfrom llamakv.cli.app import main\nmain()\n"
)


@pytest.mark.parametrize(
    "name",
    [
        "llama_state_seq_get_data_ext",
        pytest.param("llama_memory_seq_cp", marks=pytest.mark.slow),
        pytest.param("llama_set_adapters_lora", marks=pytest.mark.slow),
    ],
)
def test_a_binding_without_what_is_needed_is_2_and_names_the_versions(home: Path, model: Path, name: str) -> None:
    # B31
    done = subprocess.run(
        [sys.executable, "-c", REMOVING, name, "chat", "--message", "hi", "--save", "s.bin"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"error: llama-cpp-python {version('llama-cpp-python')} is not supported: it lacks {name} "
        "(need 0.3.36 or later, before 0.4)\n"
    )
    assert not (home / "s.bin").exists()


def test_the_versions_are_told_whatever_the_binding_lacks(home: Path) -> None:
    # B31
    shown = subprocess.run(
        [sys.executable, "-c", REMOVING, "llama_decode", "--version"], capture_output=True, text=True, timeout=60
    )
    assert shown.stdout.startswith("llamakv ")


# ---------------------------------------------------------------- files that are none


@pytest.mark.parametrize("what", ["empty", "one byte", "folder", "text", "model", "pickle"])
def test_what_is_no_session_is_13_in_one_line(run: Callable[..., Ran], home: Path, model: Path, what: str) -> None:
    # B35, B76
    path, marker = home / "odd.bin", home / "executed"
    match what:
        case "empty":
            path.touch()
        case "one byte":
            path.write_bytes(b"\x28")
        case "folder":
            path.mkdir()
        case "text":
            path.write_text("hello\n" * 1000)
        case "model":
            shutil.copy(model, path)
        case "pickle":
            path.write_bytes(pickle.dumps(_Bomb(marker)))
    for arguments in (("inspect", path), ("load", path, "-p", "x"), ("chat", "--resume", path, "--message", "x")):
        ran = run(*arguments)
        if what == "model" and arguments[0] == "inspect":  # which tells of models too, whatever they are called
            assert (ran.status, ran.out.startswith("model ")) == (0, True)
            continue
        assert (ran.status, ran.out) == (13, "")
        assert re.match(r"error: not a llamakv session: .*odd\.bin.*\n", ran.err)
        assert [line for line in ran.err.splitlines() if not line.startswith("hint: ")] == [ran.err.splitlines()[0]]
    assert not marker.exists()


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("text", ["", " \n\t\n"])
def test_an_empty_text_is_2_and_makes_no_file(run: Callable[..., Ran], home: Path, model: Path, text: str) -> None:
    # B34
    (home / "empty.txt").write_text(text)
    for raw in ((), ("--raw",)):
        assert run("save", "-f", "empty.txt", *raw, "s.bin").status == 2
    assert not (home / "s.bin").exists()


# ---------------------------------------------------------------- text, paths and streams


def test_json_is_strict_with_a_bias_of_minus_infinity(run: Callable[..., Ran], home: Path, model: Path) -> None:
    # B56
    ran = run("chat", "--save", "s.bin", "--message", "hi", "--logit-bias", "400=-inf", "--logit-bias", "401=1.5", *FEW)
    assert ran.status == 0
    assert read_session(home / "s.bin").record.sampling.logit_bias == ((400, float("-inf")), (401, 1.5))
    shown = run("inspect", "s.bin", "--json").document["data"]
    assert [row[0] for row in shown["sampling"]["logit_bias"]] == [400, 401]
    assert run("chat", "--resume", "s.bin", "--message", "yo", "--json").lines[-1]["status"] == "ok"


def force(home: Path, text: str) -> tuple[str, ...]:
    """Options that make the model write this text and nothing else."""
    (home / "only.gbnf").write_text(f'root ::= "{text}"', encoding="utf-8")
    return ("--grammar", "only.gbnf", "--max-tokens", "100", "--temperature", "0", "-t", "1")


def test_brackets_in_text_and_names_are_printed_as_they_are(run: Callable[..., Ran], home: Path, model: Path) -> None:
    # B87
    text, path = "[/INST] [bold]x [1] [red", "[WIP] a.bin"
    ran = run("chat", "--save", path, "--message", "[b]hi[/b]", *force(home, text))
    assert (ran.status, ran.out) == (0, f"{text}\n")
    history = run("inspect", "--history", path).out
    assert text in history
    assert "[b]hi[/b]" in history
    assert path in run("inspect", path).out
    missing = run("inspect", "[bold]none.bin")
    assert (missing.status, "[bold]none.bin" in missing.err) == (10, True)
    assert run("load", path, "-p", "[/x]", *force(home, text)).out == f"{text}\n"


@pytest.mark.slow
def test_characters_of_several_tokens_arrive_whole(run: Callable[..., Ran], home: Path, model: Path) -> None:
    # B86: as UTF-8, and (B93) replaced where the output cannot show them
    text = "🙂数é"
    options = ("chat", "--message", "hi", *force(home, text))
    assert run(*options).out == f"{text}\n"
    for env in ({"PYTHONIOENCODING": "cp1252"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}):
        done = subprocess.run(command(*options), capture_output=True, timeout=60, env={**os.environ, **env})
        assert done.returncode == 0
        assert len(done.stdout) >= 3
        assert b"Traceback" not in done.stderr


def test_text_cut_inside_a_character_goes_on_after_a_resume(run: Callable[..., Ran], home: Path, model: Path) -> None:
    # B86
    (home / "text.txt").write_text("Say it:")
    assert run("save", "--raw", "-f", "text.txt", "s.bin").status == 0
    tokens = [FIRST_BYTE + byte for byte in "🙂".encode()]
    for i, token in enumerate(tokens):
        ran = run("load", "s.bin" if i == 0 else f"{i}.bin", "--save", f"{i + 1}.bin", f"--logit-bias={token}=1000",
                  "--max-tokens", "1", "--temperature", "0")  # fmt: skip
        assert ran.status == 0
        record = read_session(home / f"{i + 1}.bin").record
        assert list(record.tokens)[-i - 1 :] == tokens[: i + 1]
    assert record.text == "Say it:🙂"
    assert ran.out == "🙂\n"  # the last token completes the character


def test_only_answers_are_on_stdout_and_engine_lines_need_v(
    process: Callable[..., Ran], run: Callable[..., Ran], home: Path, raw_file: Path
) -> None:
    # B88, B89
    plain = run("load", raw_file, *FEW)
    assert (plain.status, plain.out.count("\n")) == (0, 1)
    assert all(line.startswith(("note: ", "899 reused")) for line in plain.err.splitlines())
    loud = process("load", raw_file, *FEW, "-v")
    assert loud.out == plain.out
    assert "llama_context" in loud.err
    assert "resumed 899 tokens: 899 reused, 0 evaluated" in loud.err
    assert run("load", raw_file, *FEW, "--json", "-v").document["data"]["reused"] == 899


@pytest.mark.slow
def test_without_a_terminal_nothing_is_coloured_or_redrawn(
    process: Callable[..., Ran], home: Path, model: Path
) -> None:
    # B92
    (home / "text.txt").write_text(words(600))
    for arguments, env in (
        (("save", "-f", "text.txt", "s.bin", "-t", "1"), {"FORCE_COLOR": "1"}),
        (("load", "s.bin", "-p", "q", *FEW), {}),
        (("chat", "--resume", "s.bin", "--message", "q", *FEW), {"FORCE_COLOR": "1"}),
        (("inspect", "s.bin"), {"FORCE_COLOR": "1", "NO_COLOR": "1"}),
        (("inspect", "missing.bin"), {"FORCE_COLOR": "1"}),
    ):
        ran = process(*arguments, env=env)
        assert {"\x1b", "\r", "\x08"} & set(ran.out + ran.err) == set()


@pytest.mark.slow
def test_odd_paths_work_everywhere_and_are_shown_unmangled(
    process: Callable[..., Ran], home: Path, model_path: Path
) -> None:
    # B94
    folder = home / "é 数据"
    folder.mkdir()
    model, text, session = folder / "a b.gguf", folder / "t '1'.txt", folder / "a b.bin"
    shutil.copy(model_path, model)
    text.write_text("the river\n")
    saved = process("save", "-m", model, "-f", text, session, "-t", "1")
    assert (saved.status, f"saved {session}: " in saved.out) == (0, True)
    answer = process("load", session, "-p", "q", *FEW, "--save", folder / "c d.bin", "--json")
    assert answer.document["data"]["saved"]["path"] == str(folder / "c d.bin")
    assert process("chat", "--resume", session, "--message", "yo", *FEW).status == 0
    names = [entry["name"] for entry in process("ls", "--store", folder, "--json").document["data"]["sessions"]]
    assert sorted(names) == ["a b", "c d"]
    for name in ("verify", "compact", "inspect"):
        ran = process(name, session)
        assert (ran.status, str(session) in ran.out) == (0, True)
    session.write_bytes(session.read_bytes()[:100])
    assert str(session) in process("inspect", session).err


def test_the_end_of_input_is_the_end(process: Callable[..., Ran], home: Path, model: Path) -> None:
    # B91
    assert process("chat", stdin="").status == 2
    one = process("chat", "--save", "s.bin", *FEW, stdin="hi\n")
    assert (one.status, one.out.count("\n")) == (0, 1)
    again = process("chat", "--resume", "s.bin", stdin="no newline at the end")
    assert (again.status, again.out.count("\n")) == (0, 1)
    chat = read_session(home / "s.bin").record.chat
    assert chat is not None
    assert [m.content for m in chat.messages if m.role == "user"] == ["hi", "no newline at the end"]


# ---------------------------------------------------------------- every function that is called is checked


def names_used() -> set[str]:
    """What llamakv takes from the binding."""
    folder = Path(native.__file__).parent
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.py"))]
    return {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "api"
    }
