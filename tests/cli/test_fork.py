"""``fork`` as a shell script uses it: JSON lines, exit statuses, pipes, interruptions, and going on after them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pexpect
import pytest

from llamakv.ops.requests import SamplingOptions
from llamakv.store.session_file import read_session
from tests.cli.conftest import Ran, command, make_session
from tests.ops.driver import Driver, Heard

Run = Callable[..., Ran]

FEW = ("--max-tokens", "3", "-t", "1")
MANY = ("--max-tokens", "60", "--temperature", "0", "-t", "1")
N_MANY = 30
ANSWER = {
    "type", "id", "index", "text", "finish_reason", "reused", "evaluated", "generated", "seed", "elapsed_s",
    "first_token_s", "key",
}  # fmt: skip
ERROR = {"type", "id", "index", "code", "message", "hint", "fields", "exit_status"}
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Path:
    """A folder with a conversation, raw text and a document."""
    folder = tmp_path_factory.mktemp("saved")
    driver = Driver(model_path, folder)
    sampling = SamplingOptions(temperature=0.5, seed=7, max_tokens=5)
    with driver.chat(save=folder / "chat.bin", sampling=sampling, system="Be brief.") as live:
        live.send("Hello there.", Heard().reporter)
        live.send("Go on.", Heard().reporter)
    for name in ("raw", "document"):
        driver.save(folder / f"{name}.bin", "The river is long. " * 20, raw=name == "raw", sampling=sampling)
    return folder


@pytest.fixture
def sessions(saved: Path, home: Path, model: Path) -> Path:
    """The home, with these sessions in it."""
    for path in saved.glob("*.bin"):
        shutil.copy(path, home)
    return home


@pytest.fixture
def questions(sessions: Path) -> Path:
    """Prompts as JSON lines, with ids beyond ASCII."""
    path = sessions / "questions.jsonl"
    lines = [{"id": f"é-{number}", "prompt": f"question {number}"} for number in range(N_MANY)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def lines_of(data: bytes | str) -> list[dict[str, Any]]:
    """Whole JSON lines, all of it."""
    text = data.decode() if isinstance(data, bytes) else data
    assert text == "" or text.endswith("\n")
    return Ran(0, text, "").lines


def texts_of(lines: Sequence[dict[str, Any]]) -> dict[object, str]:
    """What was answered, by id; each id once."""
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["id"]: line["text"] for line in lines}


def appending(file: Path, *arguments: str | Path, **env: str) -> Ran:
    """The program with ``>> FILE``."""
    with file.open("ab") as out:
        done = subprocess.run(
            command(*arguments), stdout=out, stderr=subprocess.PIPE, timeout=TIMEOUT_S, env={**os.environ, **env},
        )  # fmt: skip
    return Ran(done.returncode, "", done.stderr.decode())


# ---------------------------------------------------------------- what comes out


def test_each_answer_is_a_json_line(run: Run, sessions: Path) -> None:
    ran = run("fork", "chat.bin", "one", "two", *FEW)
    assert ran.status == 0
    n_cells = len(read_session("chat.bin").record.tokens) - 1
    first, second = ran.lines
    assert (set(first), set(second)) == (ANSWER, ANSWER)
    assert [(line["type"], line["id"], line["index"]) for line in ran.lines] == [("answer", 0, 0), ("answer", 1, 1)]
    for line in ran.lines:
        assert (line["finish_reason"], line["generated"], line["reused"], line["seed"]) == ("length", 3, n_cells, 7)
        assert line["evaluated"] > 5
        assert line["elapsed_s"] >= line["first_token_s"] > 0
        assert re.fullmatch(r"[0-9a-f]{16}", line["key"])
    assert first["text"] != second["text"]
    n_read = first["evaluated"] + second["evaluated"]
    tail = r"6 generated · [\d.]+ s · [\d,.]+ tokens/s\n"
    assert re.fullmatch(rf"2 answers · {n_cells} reused, {n_read} evaluated, {tail}", ran.err)


def test_what_cannot_be_shared_or_decoded_together_is_said(
    run: Run, sessions: Path, models: Callable[[str], Path]
) -> None:
    driver = Driver(models("MH"), sessions)
    driver.save(sessions / "hybrid.bin", "The river is long. " * 20, raw=True)
    n = 37
    ran = run("fork", "hybrid.bin", "one", "two", "--at", str(n), *FEW, "-m", models("MH"))
    assert ran.status == 0
    assert f"{n - 1} tokens were read again\n" in ran.err
    assert "note: this model's memory (hybrid) is not decoded together: one branch at a time\n" in ran.err
    assert f"2 answers · {n - 1} read again, " in ran.err
    data = run("fork", "hybrid.bin", "one", "two", "--at", str(n), *FEW, "-m", models("MH"), "--json").lines[-1]["data"]
    assert (data["reused"], data["evaluated"], data["parallel"], data["decoded_together"]) == (0, n - 1, 1, False)


def test_an_answer_is_what_load_says(run: Run, sessions: Path) -> None:
    for name in ("chat", "raw", "document"):
        lines = run("fork", f"{name}.bin", "one", "two", *FEW, "--parallel", "1").lines
        for line, prompt in zip(lines, ("one", "two"), strict=True):
            data = run("load", f"{name}.bin", "-p", prompt, *FEW, "--json").document["data"]
            for key in ("text", "finish_reason", "generated", "reused", "evaluated", "seed"):
                assert line[key] == data[key]


def test_a_failed_prompt_is_a_line_and_the_status_is_3(run: Run, sessions: Path) -> None:
    """B68."""
    (sessions / "q.txt").write_text("one\n\n" + "word " * 600 + "\nthree\n")
    ran = run("fork", "chat.bin", "--prompts", "q.txt", *FEW, "-c", "256")
    assert ran.status == 3
    assert [(line["type"], line["id"]) for line in ran.lines] == [("answer", 0), ("error", 1), ("answer", 2)]
    error = ran.lines[1]
    assert set(error) == ERROR | {"key"}
    assert (error["code"], error["exit_status"], error["fields"]["limit"]) == ("no_room", 15, 256)
    assert "2 answers, 1 error · " in ran.err
    alone = run("fork", "chat.bin", "", *FEW)
    assert (alone.status, set(alone.lines[0]), alone.lines[0]["code"]) == (3, ERROR, "usage")


def test_json_closes_with_a_document(run: Run, sessions: Path) -> None:
    ran = run("fork", "chat.bin", "one", "", "--json", *FEW)
    assert (ran.status, ran.err) == (3, "")
    *lines, done = ran.lines
    assert [line["type"] for line in lines] == ["answer", "error"]
    assert (done["type"], done["schema_version"], done["command"], done["status"]) == ("done", 1, "fork", "partial")
    data = done["data"]
    assert set(data) == {
        "session", "answers", "timeouts", "errors", "skipped", "reused", "evaluated", "branch_reused",
        "branch_evaluated", "generated", "parallel", "decoded_together", "cells_peak", "steps", "restore_s",
        "model_load_s", "elapsed_s", "tokens_per_s", "interrupted",
    }  # fmt: skip
    assert (data["answers"], data["errors"], data["skipped"], data["interrupted"]) == (1, 1, 0, False)
    assert (data["reused"], data["evaluated"]) == (len(read_session("chat.bin").record.tokens) - 1, 0)
    assert run("fork", "chat.bin", "one", "--json", *FEW).lines[-1]["status"] == "ok"


def test_json_is_a_document_where_nothing_could_be_run(run: Run, sessions: Path) -> None:
    for arguments, status in ((("no.bin", "q"), 10), (("chat.bin",), 2), (("chat.bin", "q", "--format", "text"), 2)):
        ran = run("fork", *arguments, "--json")
        assert (ran.status, ran.err) == (status, "")
        (done,) = ran.lines
        assert (done["command"], done["status"], done["data"]) == ("fork", "error", None)
        assert done["errors"][0]["exit_status"] == status


def test_text_is_the_answers_and_errors_go_to_stderr(run: Run, sessions: Path) -> None:
    lines = run("fork", "chat.bin", "one", "two", *FEW).lines
    ran = run("fork", "chat.bin", "one", "", "two", "--format", "text", *FEW)
    assert ran.status == 3
    assert ran.out == "".join(line["text"].removesuffix("\n") + "\n" for line in lines)
    assert ran.err.startswith("error: prompt 1: the message is empty\n")
    assert run("fork", "chat.bin", "one", "two", "--format", "text", "-q", *FEW).err == ""


def test_text_may_be_laid_out_with_names(run: Run, sessions: Path) -> None:
    (sessions / "q.jsonl").write_text(
        '{"id": "a", "prompt": "one {text}"}\n{"prompt": ""}\n{"messages": [{"role": "user", "content": "two"}]}\n'
    )
    lines = run("fork", "chat.bin", "--prompts", "q.jsonl", *FEW).lines
    form = "{id}\t{index}\t{sample}\t{prompt}\t{finish_reason}\t{seed}\t{generated}\t{{}}\t{text}"
    ran = run("fork", "chat.bin", "--prompts", "q.jsonl", "--format", form, *FEW)
    assert ran.status == 3
    assert ran.out == (
        f"a\t0\t0\tone {{text}}\tlength\t7\t3\t{{}}\t{lines[0]['text']}\n"
        f"2\t2\t0\ttwo\tlength\t7\t3\t{{}}\t{lines[2]['text']}\n"
    )


def test_samples_have_seeds_of_their_own(run: Run, sessions: Path) -> None:
    lines = run("fork", "raw.bin", "-n", "4", "--temperature", "2", "--seed", "5", "--max-tokens", "8", "-t", "1").lines
    assert [(line["id"], line["sample"], line["seed"]) for line in lines] == [(n, n, 5 + n) for n in range(4)]
    assert len({line["text"] for line in lines}) == 4
    again = run("fork", "raw.bin", "-n", "4", "--temperature", "2", "--seed", "5", "--max-tokens", "8", "-t", "1").lines
    assert texts_of(again) == texts_of(lines)


def test_300_prompts_are_answered_in_order(run: Run, sessions: Path) -> None:
    """B63."""
    (sessions / "q.txt").write_text("".join(f"question {number}\n" for number in range(300)))
    arguments = ("fork", "chat.bin", "--prompts", "q.txt", "--max-tokens", "2", "-t", "1")
    ran = run(*arguments, "--parallel", "1000", "--json")
    *lines, done = ran.lines
    assert (ran.status, [line["id"] for line in lines]) == (0, list(range(300)))
    assert (done["data"]["answers"], done["data"]["parallel"]) == (300, 254)
    assert ran.err == "note: --parallel 1000 is more than the engine can: 254 at the same time\n"
    waves = run(*arguments)
    assert (waves.status, [line["id"] for line in waves.lines]) == (0, list(range(300)))


def test_unordered_answers_come_as_they_finish(run: Run, sessions: Path) -> None:
    (sessions / "q.jsonl").write_text('{"prompt": "a", "max_tokens": 60}\n{"prompt": "b", "max_tokens": 2}\n')
    arguments = ("fork", "chat.bin", "--prompts", "q.jsonl", "-t", "1")
    assert [line["id"] for line in run(*arguments, "--unordered").lines] == [1, 0]
    assert [line["id"] for line in run(*arguments).lines] == [0, 1]


# ---------------------------------------------------------------- what goes in


def test_prompts_come_from_standard_input(process: Run, run: Run, sessions: Path) -> None:
    text = 'one\r\n\r\ntwo é "quoted"\r\n'
    ran = process("fork", "chat.bin", "--prompts", "-", *FEW, stdin=text)
    assert (ran.status, [line["id"] for line in ran.lines]) == (0, [0, 1])
    same = run("fork", "chat.bin", "one", 'two é "quoted"', *FEW).lines
    assert texts_of(ran.lines) == texts_of(same)


def test_what_is_wrong_with_standard_input_is_said_with_its_line(
    run: Run, sessions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = io.BytesIO(b'{"prompt": "a"}\n{"x": 1}')
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data, encoding="utf-8"))
    ran = run("fork", "chat.bin", "--prompts", "-", *FEW)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("error: standard input line 2: unknown key 'x'\n")


def test_json_lines_have_settings_of_their_own(run: Run, sessions: Path) -> None:
    lines = [
        {"id": "a", "prompt": "one", "max_tokens": 1},
        {"messages": [{"role": "user", "content": "one"}], "seed": 9, "temperature": 1.5},
        {"id": 9, "prompt": "one", "system": "Be long.", "stop": ["e", "a"]},
    ]
    (sessions / "q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    told = run("fork", "chat.bin", "--prompts", "q.jsonl", *FEW).lines
    assert [(line["id"], line["index"]) for line in told] == [("a", 0), (1, 1), (9, 2)]
    assert (told[0]["generated"], told[1]["seed"], told[2]["seed"]) == (1, 9, 7)
    assert told[2]["reused"] < told[0]["reused"]


def test_a_table_and_a_template_make_prompts(run: Run, sessions: Path) -> None:
    (sessions / "t.csv").write_text('id,title,body\nx,"A, b","two\nlines"\ny,c,d\n')
    told = run("fork", "chat.bin", "--prompts", "t.csv", "--template", "{title}: {body}", *FEW).lines
    assert [line["id"] for line in told] == ["x", "y"]
    same = run("fork", "chat.bin", "A, b: two\nlines", "c: d", *FEW).lines
    assert [line["text"] for line in told] == [line["text"] for line in same]
    assert (
        run("fork", "chat.bin", "b", "--template", "c: {prompt}", *FEW).lines[0]["text"]
        == (run("fork", "chat.bin", "c: b", *FEW).lines[0]["text"])
    )


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("chat.bin",), 2, "there are no prompts"),
        (("chat.bin", "q", "--prompts", "q.txt"), 2, "prompts are given twice"),
        (("chat.bin", "--prompts", "no.txt"), 10, "file 'no.txt' does not exist"),
        (("chat.bin", "--prompts", "."), 2, "'.' is a directory, expected a text file"),
        (("chat.bin", "--prompts", "empty.txt"), 2, "empty.txt holds no prompt"),
        (("chat.bin", "--prompts", "latin.txt"), 2, "latin.txt is not UTF-8 text: byte 0xe9 at offset 1"),
        (("chat.bin", "--prompts", "bad.jsonl"), 2, "bad.jsonl line 2: unknown key 'promt'"),
        (("chat.bin", "--prompts", "deep.jsonl"), 2, "deep.jsonl line 1: not JSON: nested too deeply"),
        (("chat.bin", "q", "--template", "{a}"), 2, "prompt 0: the template's {a} is not there; there is prompt"),
        (("chat.bin", "q", "--template", "same"), 2, "the template names nothing"),
        (("chat.bin", "q", "--format", "csv"), 2, "'csv' is not a format"),
        (("chat.bin", "q", "--format", "{text"), 2, "the template cannot be read"),
        (("chat.bin", "q", "--format", "{text!r}"), 2, "the template's {text!r} is not a name in braces"),
        (("chat.bin", "q", "--format", "{text} {x}"), 2, "--format has no {x}"),
        (("chat.bin", "q", "--format", "{text}", "--skip-done", "x"), 2, "--skip-done needs JSON lines"),
        (("chat.bin", "q", "--format", "text", "--skip-done", "x"), 2, "--skip-done needs JSON lines"),
        (("chat.bin", "q", "-n", "0"), 2, "invalid value for '--samples' / '-n': 0 is less than 1"),
        (("chat.bin", "q", "--parallel", "0"), 2, "invalid value for '--parallel': 0 is less than 1"),
        (("chat.bin", "q", "--timeout", "-1"), 2, "invalid value for '--timeout': -1.0 is less than 0.0"),
        (("chat.bin", "q", "--timeout", "nan"), 2, "invalid value for '--timeout': 'nan' is not a finite number"),
        (("chat.bin", "q", "--at", "there"), 2, "'there' is not a place in a session"),
        (("chat.bin", "q", "--at", "turn9"), 10, "there is no turn 9 in the session: it has 2"),
        (("chat.bin", "q", "--at", "9" * 5000), 2, "'999"),
        (("raw.bin", "q", "--at", "turn1"), 2, "raw text has no turns"),
        (("chat.bin", "-n", "3"), 2, "the conversation ends with a reply, and there is no prompt"),
        (("no.bin", "q"), 10, "session 'no.bin' does not exist"),
        (("no-such-name", "q"), 10, "session 'no-such-name' does not exist"),
        (("chat.bin", "q", "-m", "no.gguf"), 10, ""),
        (("cut.bin", "q"), 13, ""),
        (("empty.txt.bin", "q"), 13, ""),
        (("chat.bin", "q", "-m", "other.gguf"), 14, ""),
        (("chat.bin", "q", "-ctk", "q8_0"), 14, "the session was saved with --type-k f16, q8_0 was asked for"),
        (("chat.bin", "q", "-c", "8"), 15, ""),
        (("chat.bin", "q", "--save-as", "raw.bin"), 11, "'raw.bin' already exists"),
        (("chat.bin", "q", "--save-as", "chat.bin", "--force"), 2, "id 0 would be saved to chat.bin, which is the ses"),
        (("chat.bin", "q", "r", "--save-as", "same"), 2, "id 1 would be saved to "),
        (("chat.bin", "q", "--save-as", "no/{id}.bin"), 16, ""),
        (("chat.bin", "q", "--skip-done", "-"), 2, "--skip-done needs a file"),
        (("chat.bin", "q", "--skip-done", "."), 2, "'.' is a directory"),
        (("chat.bin", "q", "--skip-done", "empty.txt.bin"), 2, "empty.txt.bin line 1 is not a line of answers"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_what_cannot_be_done_is_refused_before_anything_is_run(
    run: Run, sessions: Path, models: Callable[[str], Path], arguments: tuple[str, ...], status: int, said: str
) -> None:
    (sessions / "q.txt").write_text("a\n")
    (sessions / "empty.txt").write_text("\n\n")
    (sessions / "empty.txt.bin").write_text("not a session\n" * 100)
    (sessions / "latin.txt").write_bytes("né\n".encode("latin-1"))
    (sessions / "bad.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    (sessions / "deep.jsonl").write_text("[" * 100_000)
    (sessions / "cut.bin").write_bytes((sessions / "chat.bin").read_bytes()[:2000])
    if "other.gguf" in arguments:
        shutil.copy(models("M2"), sessions / "other.gguf")
    before = {path.name for path in sessions.iterdir()}
    ran = run("fork", *arguments, "-t", "1")
    assert (ran.status, ran.out) == (status, "")
    assert ran.err.splitlines()[-2 if "\nhint: " in ran.err else -1].startswith(f"error: {said}")
    assert "Traceback" not in ran.err
    assert {path.name for path in sessions.iterdir()} - before <= {"cache", "store"}


def test_names_with_brackets_and_text_like_markup_are_shown_as_they_are(run: Run, sessions: Path) -> None:
    """B87."""
    folder = sessions / "[WIP] é 数据"
    folder.mkdir()
    name = shutil.copy(sessions / "chat.bin", folder / "a[bold]b.bin")
    (folder / "[q].jsonl").write_text('{"id": "[/INST] [red]x[/red]", "prompt": ""}\n')
    ran = run("fork", name, "--prompts", folder / "[q].jsonl", *FEW, "--json")
    assert (ran.lines[0]["id"], ran.lines[1]["data"]["session"]) == ("[/INST] [red]x[/red]", str(name))
    shown = run("fork", name, "--prompts", folder / "[q].jsonl", *FEW, "--format", "text")
    assert shown.err.startswith(f"error: {folder}/[q].jsonl line 1: the message is empty\n")
    (folder / "[q].jsonl").write_text('{"[/b]": 1}\n')
    shown = run("fork", name, "--prompts", folder / "[q].jsonl")
    assert shown.err.startswith(f"error: {folder}/[q].jsonl line 1: unknown key '[/b]'\n")
    missing = run("fork", folder / "[x].bin", "q")
    assert missing.err.startswith(f"error: session '{folder}/[x].bin' does not exist\n")


# ---------------------------------------------------------------- branches that are kept


def test_branches_are_kept_as_sessions_with_a_lineage(run: Run, sessions: Path) -> None:
    (sessions / "q.jsonl").write_text('{"id": "a b", "prompt": "one"}\n{"id": "é[1]", "prompt": "two"}\n')
    ran = run("fork", "chat.bin", "--prompts", "q.jsonl", "--save-as", "answer-{id}", *FEW)
    assert ran.status == 0
    store = sessions / "store"
    assert [line["saved"] for line in ran.lines] == [str(store / f"answer-{name}.bin") for name in ("a b", "é[1]")]
    parent = read_session("chat.bin").record
    for line in ran.lines:
        name = Path(line["saved"]).stem
        data = run("inspect", name, "--json").document["data"]
        assert data["lineage"]["parent_id"] == parent.lineage.session_id
        assert (data["lineage"]["name"], data["lineage"]["parent_position"]) == (name, len(parent.tokens))
        more = run("load", name, "-p", "on", *FEW, "--json").document["data"]
        assert more["reused"] == line["reused"] + line["evaluated"] - 1 + line["generated"]
        assert run("verify", name).status == 0


def test_indices_and_ids_are_parts_of_names(run: Run, sessions: Path) -> None:
    (sessions / "runs").mkdir()
    ran = run("fork", "chat.bin", "one", "-n", "2", "--save-as", "runs/{index}-{id}.bin", *FEW)
    assert (ran.status, sorted(os.listdir("runs"))) == (0, ["0-0.bin", "1-1.bin"])
    (sessions / "q.jsonl").write_text('{"id": "{index}", "prompt": "one"}\n')
    assert run("fork", "chat.bin", "--prompts", "q.jsonl", "--save-as", "runs/x{id}.bin", *FEW).status == 0
    assert sorted(os.listdir("runs")) == ["0-0.bin", "1-1.bin", "x{index}.bin"]


@pytest.mark.parametrize(
    "identity", ["../up", "a/b", "/tmp/x", ".", "..", "a\\u0000b", ".hidden", "-x", " x", "a" * 300]
)
def test_an_id_never_leads_to_another_folder(run: Run, sessions: Path, identity: str) -> None:
    (sessions / "q.jsonl").write_text(f'{{"id": "{identity}", "prompt": "one"}}\n'.replace("\\u", "\\u"))
    ran = run("fork", "chat.bin", "--prompts", "q.jsonl", "--save-as", "{id}", *FEW)
    assert (ran.status, ran.out) == (2, "")


@pytest.mark.parametrize("identity", ["raw.bin", "new.bin", "README"])
def test_an_id_that_looks_like_a_file_stays_in_the_store(run: Run, sessions: Path, identity: str) -> None:
    (sessions / "README").write_text("precious")
    (sessions / "q.jsonl").write_text(json.dumps({"id": identity, "prompt": "one"}))
    before = {path.name: _digest(path) for path in sessions.iterdir() if path.is_file()}
    ran = run("fork", "chat.bin", "--prompts", "q.jsonl", "--save-as", "{id}", "--force", *FEW)
    assert {path.name: _digest(path) for path in sessions.iterdir() if path.is_file()} == before
    assert ran.status in (0, 2, 11)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_session_in_a_read_only_folder_is_left_as_it_is(process: Run, run: Run, sessions: Path) -> None:
    """B67; for root, to whom no mode matters, nothing in the folder changes either."""
    folder = sessions / "read-only"
    folder.mkdir()
    path = Path(shutil.copy(sessions / "chat.bin", folder))
    path.chmod(0o444)
    folder.chmod(0o555)
    try:
        before = (_digest(path), path.stat().st_mtime_ns, os.listdir(folder), folder.stat().st_mtime_ns)
        assert run("fork", path, "one", "two", *FEW).status == 0
        assert process("fork", path, "one", "two", *FEW, "--save-as", "kept-{id}", "--at", "turn1").status == 0
        assert (_digest(path), path.stat().st_mtime_ns, os.listdir(folder), folder.stat().st_mtime_ns) == before
    finally:
        folder.chmod(0o755)
    assert sorted(os.listdir(sessions / "store")) == ["kept-0.bin", "kept-1.bin"]


# ---------------------------------------------------------------- pipes and terminals


def _shell(script: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of shell in which ``llamakv`` is the program."""
    function = f'llamakv() {{ "{sys.executable}" -m llamakv "$@"; }}\n'
    return subprocess.run(["bash", "-c", function + script], capture_output=True, timeout=60, env={**os.environ, **env})


def test_reading_only_the_first_answer_is_no_error(questions: Path) -> None:
    """B90."""
    done = _shell(
        "llamakv fork chat.bin --prompts questions.jsonl --max-tokens 60 -t 1 | head -1; echo ${PIPESTATUS[0]}"
    )
    first, status = done.stdout.splitlines()
    assert (json.loads(first)["id"], status) == ("é-0", b"141")
    assert done.stderr == b""


@pytest.mark.slow
def test_a_full_disk_behind_stdout_is_16(sessions: Path) -> None:
    done = _shell("llamakv fork chat.bin one two three --max-tokens 3 -t 1 >/dev/full")
    assert done.returncode == 16
    assert done.stderr == b"error: standard output could not be written: No space left on device\n"


def test_closed_stderr_and_stdin_do_no_harm(sessions: Path) -> None:
    """B89."""
    done = _shell("llamakv fork chat.bin one '' --max-tokens 3 -t 1 -v 2>&- <&-")
    assert done.returncode == 3
    assert [line["type"] for line in lines_of(done.stdout)] == ["answer", "error"]


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("env", "more"),
    [
        (ASCII, "--json"),
        pytest.param(ASCII, "--format=text", marks=pytest.mark.slow),
        pytest.param({"LC_ALL": "C"}, "--json", marks=pytest.mark.slow),
        pytest.param({"PYTHONIOENCODING": "cp1252"}, "-q", marks=pytest.mark.slow),
    ],
    ids=["ASCII", "ASCII text", "C", "cp1252"],
)
def test_answers_are_whole_in_any_locale(process: Run, questions: Path, env: dict[str, str], more: str) -> None:
    """B93."""
    questions.write_text('{"id": "é 数据 🙂", "prompt": "é 数据 🙂"}\n', encoding="utf-8")
    ran = process("fork", "chat.bin", "--prompts", questions, *FEW, "-q", more, env=env)
    assert (ran.status, ran.err) == (0, "")
    if more == "--format=text":
        assert len(ran.out) > 1
    else:
        assert ran.lines[0]["id"] == "é 数据 🙂"


@pytest.mark.parametrize("env", [ASCII, pytest.param({"LC_ALL": "C"}, marks=pytest.mark.slow)], ids=["ASCII", "C"])
def test_prompts_beyond_ascii_are_taken_from_the_command_line_in_any_locale(
    process: Run, run: Run, sessions: Path, env: dict[str, str]
) -> None:
    expected = run("fork", "chat.bin", "é 数据", *FEW).lines[0]
    ran = process("fork", "chat.bin", "é 数据", *FEW, env=env)
    assert (ran.status, ran.lines[0]["text"], ran.lines[0]["key"]) == (0, expected["text"], expected["key"])


def _on_a_terminal(out: Path, *arguments: str | Path, **env: str) -> tuple[int, str]:
    """Run with stderr on a terminal and stdout in a file: the exit status, and what the terminal got."""
    ours, theirs = pty.openpty()
    with out.open("wb") as file:
        child = subprocess.Popen(
            command(*arguments), stdin=subprocess.DEVNULL, stdout=file, stderr=theirs, env={**os.environ, **env}
        )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    return child.wait(timeout=TIMEOUT_S), shown.decode()


@pytest.mark.parametrize(
    "env", [pytest.param({}, marks=pytest.mark.slow), {"NO_COLOR": "1"}], ids=["colour", "NO_COLOR"]
)
def test_on_a_terminal_progress_shows_answers_speed_and_the_time_left(questions: Path, env: dict[str, str]) -> None:
    """B92."""
    out = Path("out.jsonl")
    arguments = ("fork", "chat.bin", "--prompts", questions, "--max-tokens", "100", "-t", "1", "--parallel", "1")
    status, shown = _on_a_terminal(out, *arguments, **env)
    assert status == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    seen = re.findall(rf"answering .*?(\d+) of {N_MANY} answers · [\d,]+ tokens/s · \d+ s left", plain)
    assert len(seen) >= 2
    assert [int(n) for n in seen] == sorted(map(int, seen))
    assert (re.search(r"\x1b\[[0-9;]+m", shown) is None) == ("NO_COLOR" in env)
    assert plain.splitlines()[-1].startswith(f"{N_MANY} answers · ")
    assert b"\x1b" not in out.read_bytes()
    assert [line["id"] for line in lines_of(out.read_bytes())] == [f"é-{n}" for n in range(N_MANY)]


@pytest.mark.slow
def test_the_progress_line_keeps_out_of_the_answers_way_on_one_terminal(questions: Path) -> None:
    child = pexpect.spawn(
        sys.executable,
        [
            "-m", "llamakv", "fork", "chat.bin", "--prompts", str(questions), "--max-tokens", "100", "-t", "1",
            "--parallel", "1", "--format", "text",
        ],
        encoding="utf-8", timeout=TIMEOUT_S, dimensions=(100, 4000),
    )  # fmt: skip
    shown = child.read()
    child.close()
    assert child.exitstatus == 0
    with_progress = [line for line in shown.split("\r\n") if "answering" in line]
    written = re.sub(r"\r\x1b\[2K|\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert len(with_progress) > 1
    plain = _shell("llamakv fork chat.bin --prompts questions.jsonl --max-tokens 100 -t 1 --parallel 1 --format text")
    for line in plain.stdout.decode().splitlines():
        assert line in written


# ---------------------------------------------------------------- interrupted, and going on


def _started(out: Path, n_lines: int, *arguments: str | Path) -> subprocess.Popen[str]:
    """A process that has written so many lines to a file."""
    with out.open("ab") as file:
        child = subprocess.Popen(command(*arguments), stdout=file, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + TIMEOUT_S
    while out.read_bytes().count(b"\n") < n_lines:
        assert child.poll() is None, child.stderr and child.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.005)
    return child


@pytest.fixture(scope="module")
def uninterrupted(saved: Path, model_path: Path) -> dict[object, str]:
    """What all questions are answered with, one branch at a time."""
    prompts = [f"question {number}" for number in range(N_MANY)]
    greedy = SamplingOptions(max_tokens=60, temperature=0.0)
    forked = Driver(model_path, saved).fork(saved / "chat.bin", *prompts, sampling=greedy)
    return {f"é-{number}": text for number, text in enumerate(forked.texts)}


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_interrupted_whole_lines_are_out_and_the_rest_comes_with_skip_done(
    questions: Path, uninterrupted: dict[object, str], number: int, status: int
) -> None:
    out = Path("out.jsonl")
    arguments = ("fork", "chat.bin", "--prompts", questions, *MANY, "--parallel", "1")
    child = _started(out, 3, *arguments)
    child.send_signal(number)
    _, err = child.communicate(timeout=TIMEOUT_S)
    first = lines_of(out.read_bytes())
    assert (child.returncode, 3 <= len(first) < N_MANY) == (status, True)
    assert [line["id"] for line in first] == [f"é-{n}" for n in range(len(first))]
    assert "Traceback" not in err
    ran = appending(out, *arguments, "--skip-done", out)
    assert ran.status == 0
    assert ran.err.startswith(f"{N_MANY - len(first)} answers, {len(first)} skipped · ")
    assert texts_of(lines_of(out.read_bytes())) == uninterrupted
    assert lines_of(out.read_bytes())[: len(first)] == first


@pytest.mark.slow
def test_an_interruption_says_how_to_go_on(process: Run, questions: Path) -> None:
    out = Path("out.jsonl")
    child = _started(out, 3, "fork", "chat.bin", "--prompts", questions, *MANY, "--json")
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=TIMEOUT_S)
    *lines, done = lines_of(out.read_bytes())
    assert (child.returncode, err) == (130, "")
    assert (done["type"], done["status"], done["data"]["interrupted"]) == ("done", "partial", True)
    assert done["data"]["answers"] == len(lines)
    assert done["errors"][0]["code"] == "interrupted"
    assert done["errors"][0]["hint"].endswith("--skip-done FILE >> FILE, where FILE holds what is out")


def test_killed_the_lines_that_are_there_stay_and_the_rest_comes(
    questions: Path, uninterrupted: dict[object, str]
) -> None:
    out = Path("out.jsonl")
    arguments = ("fork", "chat.bin", "--prompts", questions, *MANY, "--unordered", "--parallel", "4")
    child = _started(out, 5, *arguments)
    child.kill()
    child.communicate(timeout=TIMEOUT_S)
    data = out.read_bytes()
    n_first = data.count(b"\n")
    assert (child.returncode, 5 <= n_first < N_MANY) == (-signal.SIGKILL, True)
    assert appending(out, *arguments, "--skip-done", out).status == 0
    assert out.read_bytes().startswith(data[: data.rindex(b"\n") + 1])
    texts = texts_of(lines_of(out.read_bytes()))
    assert set(texts) == set(uninterrupted)
    assert sum(texts[name] == text for name, text in uninterrupted.items()) >= 0.9 * N_MANY


@pytest.fixture(scope="module")
def answered(saved: Path, model_path: Path) -> bytes:
    """The output for four prompts."""
    folder = saved / "answered"
    folder.mkdir()
    (folder / "q.jsonl").write_text("".join(f'{{"id": "é{n}", "prompt": "q{n}"}}\n' for n in range(4)))
    done = subprocess.run(
        command("fork", saved / "chat.bin", "--prompts", folder / "q.jsonl", *FEW, "-m", model_path),
        capture_output=True, check=True, timeout=TIMEOUT_S, env={**os.environ, "XDG_CACHE_HOME": str(folder)},
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize(
    "cut",
    [
        "in a character",
        pytest.param("before the line end", marks=pytest.mark.slow),
        pytest.param("in the last line", marks=pytest.mark.slow),
        pytest.param("to the first byte", marks=pytest.mark.slow),
    ],
)
def test_half_a_line_at_the_end_is_answered_again(sessions: Path, answered: bytes, cut: str) -> None:
    """Twice, since a batch may be cut off more than once."""
    out = Path("out.jsonl")
    (sessions / "q.jsonl").write_text("".join(f'{{"id": "é{n}", "prompt": "q{n}"}}\n' for n in range(4)))
    arguments = ("fork", "chat.bin", "--prompts", "q.jsonl", *FEW, "--skip-done", out)
    third = answered.index("é2".encode())
    starts = [0, *(match.end() for match in re.finditer(b"\n", answered))]
    end = {
        "in the last line": third + 50,
        "in a character": third + 1,
        "before the line end": starts[3] - 1,
        "to the first byte": starts[2] + 1,
    }[cut]
    out.write_bytes(answered[:end])
    ran = appending(out, *arguments)
    n_done = 3 if cut == "before the line end" else 2
    assert ran.status == 0
    *notes, summary = ran.err.splitlines()
    assert summary.startswith(f"{4 - n_done} answer{'s' * (n_done == 2)}, {n_done} skipped · ")
    said = ["note: the last line of out.jsonl was not finished: its prompt is answered again"]
    assert notes == (said if n_done == 2 else [])
    assert out.read_bytes().startswith(answered[: starts[2]])
    assert texts_of(lines_of(out.read_bytes())) == texts_of(lines_of(answered))
    if cut == "in a character":
        whole = out.read_bytes()
        again = appending(out, *arguments)
        assert (again.status, out.read_bytes()) == (0, whole)
        assert again.err.startswith("0 answers, 4 skipped · ")


def test_an_earlier_output_that_is_only_read_is_left_as_it_is(run: Run, sessions: Path, answered: bytes) -> None:
    (sessions / "q.jsonl").write_text("".join(f'{{"id": "é{n}", "prompt": "q{n}"}}\n' for n in range(4)))
    Path("earlier.jsonl").write_bytes(answered[:-30])
    ran = run("fork", "chat.bin", "--prompts", "q.jsonl", *FEW, "--skip-done", "earlier.jsonl")
    assert (ran.status, [line["id"] for line in ran.lines]) == (0, ["é3"])
    assert "note: the last line of earlier.jsonl was not finished" in ran.err
    assert Path("earlier.jsonl").read_bytes() == answered[:-30]


def test_what_is_not_there_yet_holds_no_answers(run: Run, sessions: Path) -> None:
    ran = run("fork", "chat.bin", "one", *FEW, "--skip-done", "no.jsonl")
    assert (ran.status, len(ran.lines), os.path.exists("no.jsonl")) == (0, 1, False)


def test_errors_are_tried_again(run: Run, sessions: Path) -> None:
    (sessions / "q.txt").write_text("one\n" + "word " * 300 + "\nthree\n")
    first = run("fork", "chat.bin", "--prompts", "q.txt", *FEW, "-c", "256")
    assert (first.status, [line["type"] for line in first.lines]) == (3, ["answer", "error", "answer"])
    Path("out.jsonl").write_text(first.out)
    second = run("fork", "chat.bin", "--prompts", "q.txt", *FEW, "--skip-done", "out.jsonl")
    assert (second.status, [(line["type"], line["id"]) for line in second.lines]) == (0, [("answer", 1)])
    assert second.err.startswith("1 answer, 2 skipped · ")
    Path("out.jsonl").write_text(first.out + second.out)
    assert run("fork", "chat.bin", "--prompts", "q.txt", *FEW, "--skip-done", "out.jsonl").out == ""


def test_kept_branches_that_were_not_told_before_a_kill_are_no_dead_end(run: Run, sessions: Path) -> None:
    """In the order of the input a branch may be kept long before it is told."""
    arguments = ("fork", "chat.bin", "one", "two", *FEW, "--save-as", "kept-{id}", "--skip-done", "out.jsonl")
    whole = run(*arguments)
    Path("out.jsonl").write_text(whole.out[: whole.out.index("\n") + 1])
    ran = run(*arguments)
    assert ran.status in (0, 11)
    if ran.status == 11:
        assert re.search(r"^hint: .*--force", ran.err, re.MULTILINE)
        ran = run(*arguments, "--force")
    assert (ran.status, [line["id"] for line in ran.lines]) == (0, [1])
    assert ran.lines[0]["text"] == whole.lines[1]["text"]


def test_another_prompt_under_the_same_id_is_refused_and_nothing_is_run(run: Run, sessions: Path) -> None:
    first = run("fork", "chat.bin", "one", "two", *FEW)
    Path("out.jsonl").write_text(first.out)
    for arguments in (
        ("chat.bin", "one", "another", *FEW),
        ("document.bin", "one", "two", *FEW),
        ("chat.bin", "one", "two", "-t", "1", "--max-tokens", "4"),
    ):
        ran = run("fork", *arguments, "three", "--skip-done", "out.jsonl")
        assert (ran.status, ran.out) == (2, "")
        assert "was answered before for another prompt, session, model or options" in ran.err
    same = run("fork", "chat.bin", "one", "two", "three", *FEW, "--skip-done", "out.jsonl", "--parallel", "1")
    assert [line["id"] for line in same.lines] == [2]


def test_a_file_that_is_no_earlier_output_is_refused_and_stays(run: Run, sessions: Path) -> None:
    out = Path("notes.txt")
    said = "error: notes.txt line 1 is not a line of answers as fork writes them\n"
    for text in ("# README\n", '{"prompt": "a"}\n', "\0" * 99, '{"type": "message"}\n'):
        out.write_text(text)
        ran = run("fork", "chat.bin", "one", *FEW, "--skip-done", out)
        assert (ran.status, ran.out, ran.err.startswith(said)) == (2, "", True)
    text = '{"type": "message", "text": "a"}'
    out.write_text(text)
    ran = appending(out, "fork", "chat.bin", "one", *FEW, "--skip-done", out)
    assert (ran.status, out.read_text(), ran.err.startswith(said)) == (2, text, True)


def test_a_session_made_without_an_engine_needs_its_model(run: Run, home: Path) -> None:
    make_session(home / "session.bin")
    ran = run("fork", "session.bin", "one")
    assert (ran.status, ran.out) == (10, "")
    assert "--model-dir" in ran.err


@pytest.mark.slow
def test_an_output_that_another_program_set_not_to_block_gets_every_line(sessions: Path) -> None:
    (sessions / "many.txt").write_text("".join(f"Question {i}?\n" for i in range(700)))
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    words = ["fork", "raw.bin", "--prompts", "many.txt", "--max-tokens", "1", "-t", "1", "-q"]
    with subprocess.Popen([sys.executable, "-m", "llamakv", *words], cwd=sessions, stdout=writer) as process:
        os.close(writer)
        parts = []
        while part := os.read(reader, 4096):
            parts.append(part)
            time.sleep(0.001)  # slower than it writes
        os.close(reader)
    assert process.returncode == 0
    assert [json.loads(line)["id"] for line in b"".join(parts).splitlines()] == list(range(700))
