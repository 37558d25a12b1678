"""What ``fork`` prints and takes, and its exit statuses."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llamakv.store.session_file import read_session
from tests.cli.fork.forks import (
    ANSWER,
    ERROR,
    FEW,
    Run,
    texts_of,
)
from tests.ops.driver import Driver

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
    assert f"{n - 1} tokens is not stored: they are read again\n" in ran.err
    assert "note: hybrid memory is not decoded together: one branch at a time\n" in ran.err
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
    assert sorted(path.name for path in (sessions / "store").glob("*.bin")) == ["kept-0.bin", "kept-1.bin"]
