"""``fork`` with pipes and terminals, interrupted, and going on."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pytest

from tests.cli.conftest import command, make_session
from tests.cli.fork.forks import (
    FEW,
    MANY,
    N_MANY,
    TIMEOUT_S,
    Run,
    appending,
    lines_of,
    started,
    texts_of,
)

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


@pytest.mark.slow
@pytest.mark.parametrize("env", [ASCII, {"LC_ALL": "C"}], ids=["ASCII", "C"])
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


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_interrupted_whole_lines_are_out_and_the_rest_comes_with_skip_done(
    questions: Path, uninterrupted: dict[object, str], number: int, status: int
) -> None:
    out = Path("out.jsonl")
    arguments = ("fork", "chat.bin", "--prompts", questions, *MANY, "--parallel", "1")
    child = started(out, 3, *arguments)
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
    child = started(out, 3, "fork", "chat.bin", "--prompts", questions, *MANY, "--json")
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=TIMEOUT_S)
    *lines, done = lines_of(out.read_bytes())
    assert (child.returncode, err) == (130, "")
    assert (done["type"], done["status"], done["data"]["interrupted"]) == ("done", "partial", True)
    assert done["data"]["answers"] == len(lines)
    assert done["errors"][0]["code"] == "interrupted"
    assert done["errors"][0]["hint"].endswith("--skip-done FILE >> FILE, where FILE holds what is out")


@pytest.mark.slow
def test_killed_the_lines_that_are_there_stay_and_the_rest_comes(
    questions: Path, uninterrupted: dict[object, str]
) -> None:
    out = Path("out.jsonl")
    arguments = ("fork", "chat.bin", "--prompts", questions, *MANY, "--unordered", "--parallel", "4")
    child = started(out, 5, *arguments)
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
