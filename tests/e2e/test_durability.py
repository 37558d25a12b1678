"""No way to lose a session: the program killed, stopped, out of disk, fed with damage, run against itself.

Every test starts the program as a process or runs its command line here, with a tiny model. After each the session is
the old one or the new one, whole, and goes on with the words that belong to it.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest

from llamakv.errors import AbortedError
from llamakv.store.session_file import SessionInfo, read_session, verify_session
from tests.e2e.programs import GREEDY, TIMEOUT_S, Program, finish

SHORT, LONG = ("\n\n".join(["one two three."] * n) for n in (40, 60))


@pytest.fixture
def session(program: Program) -> Path:
    """A chat of two turns."""
    path = program.folder / "s.bin"
    assert program.here("chat", *GREEDY, "--message", "tell me", "--message", "more", "--save", path).status == 0
    return path


def whole(path: Path) -> SessionInfo:
    report = verify_session(path)
    assert report.is_sound
    return report.info


def asked(path: Path) -> list[str]:
    chat = whole(path).record.chat
    assert chat is not None
    return [message.content for message in chat.messages if message.role == "user"]


# ---------------------------------------------------------------- killed


def change(program: Program, name: str) -> tuple[Path, list[str | Path]]:
    """A file there is and a command that changes it, the same way each time."""
    path = program.folder / f"{name}.bin"
    (program.folder / "short.txt").write_text(SHORT)
    (program.folder / "long.txt").write_text(LONG)
    if name in ("chat", "load"):
        assert program.here("chat", *GREEDY, "--message", "tell me", "--message", "more", "--save", path).status == 0
    else:
        assert program.here("save", "-t", "1", "-f", "short.txt", path).status == 0
    if name == "compact":
        assert program.here("save", "-t", "1", "-f", "long.txt", path).status == 0
    commands: dict[str, list[str | Path]] = {
        "chat": ["chat", *GREEDY, "--resume", path, "--message", "go on"],
        "load": ["load", *GREEDY, path, "-p", "go on", "--save", path, "--force"],
        "save": ["save", "-t", "1", "-f", "long.txt", path],
        "replace": ["save", "-t", "1", "--force", "-f", "long.txt", path],
        "compact": ["compact", path],
    }
    return path, commands[name]


class OldOrNew:
    """What a killed run may leave: the session before it, or the one after it."""

    def __init__(self, program: Program, path: Path, command: list[str | Path]) -> None:
        self._program, self._path, self._command = program, path, command
        self.start = path.read_bytes()
        old = self._now()
        started = time.monotonic()
        assert program.run(*command).status == 0
        self.elapsed_s = time.monotonic() - started
        self._known = [old, self._now()]
        self.put_back()

    def _now(self) -> tuple[tuple[int, ...], str]:
        return whole(self._path).record.tokens, self._program.goes_on(self._path)

    def put_back(self) -> None:
        self._path.unlink(missing_ok=True)
        self._path.write_bytes(self.start)

    def check(self) -> bool:
        """Whether it is the new one; fails if it is neither."""
        return self._known.index(self._now()) == 1

    def check_goes_on_from_old(self) -> None:
        """Fails unless the session is whole and has all the old tokens, the pending one maybe replaced."""
        kept, old = whole(self._path).record.tokens, self._known[0][0][:-1]
        assert kept[: len(old)] == old

    def check_next_run(self) -> None:
        listed = self._program.here("ls")
        assert (listed.status, ".llamakv-" in listed.out) == (0, False)
        assert self._program.run(*self._command).status == 0
        assert verify_session(self._path).is_sound
        assert self._program.leftovers() == []


def die_at_each_step(program: Program, name: str) -> set[bool]:
    path, command = change(program, name)
    outcomes = OldOrNew(program, path, command)
    seen = set()
    for step in range(100):
        outcomes.put_back()
        status = program.run(*command, step=step).status
        seen.add(outcomes.check())
        if status == 0:
            assert step > 3
            break
        assert status == -signal.SIGKILL
    outcomes.put_back()
    outcomes.check_next_run()
    return seen


@pytest.mark.slow
def test_a_chat_killed_at_each_write_is_the_old_or_the_new_one(program: Program) -> None:
    assert die_at_each_step(program, "chat") == {False, True}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["load", "save", "replace", "compact"])
def test_a_command_killed_at_each_write_leaves_the_old_or_the_new_session(program: Program, name: str) -> None:
    assert die_at_each_step(program, name) == ({False} if name == "compact" else {False, True})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number", "n_times"),
    [
        ("chat", signal.SIGKILL, 50),
        ("load", signal.SIGKILL, 50),
        ("save", signal.SIGKILL, 50),
        ("chat", signal.SIGTERM, 10),
        ("save", signal.SIGTERM, 10),
    ],
)
def test_a_command_ended_at_any_moment_leaves_the_old_or_the_new_session(
    program: Program, name: str, number: signal.Signals, n_times: int
) -> None:
    path, command = change(program, name)
    outcomes = OldOrNew(program, path, command)
    moments = random.Random(name)
    for _ in range(n_times):
        outcomes.put_back()
        process = program.start(*command)
        try:
            process.wait(outcomes.elapsed_s * moments.uniform(0.4, 1.1))
        except subprocess.TimeoutExpired:
            process.send_signal(number)
        ran = finish(process)
        assert ran.status in (0, -number, 128 + number, AbortedError.exit_status)
        if ran.status == 143:  # it keeps the part that was read, or said
            outcomes.check_goes_on_from_old()
        else:
            assert outcomes.check() or ran.status != 0
        if ran.status >= 0:
            assert program.leftovers() == []
    outcomes.put_back()
    outcomes.check_next_run()


def test_a_terminated_chat_keeps_its_finished_turns(program: Program, session: Path) -> None:
    process = program.start("chat", *GREEDY, "--resume", session)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("third\n")
    process.stdin.flush()
    while len(asked(session)) < 3:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert finish(process).status == 143
    assert asked(session) == ["tell me", "more", "third"]
    assert program.leftovers() == []


# ---------------------------------------------------------------- nowhere to write


@pytest.mark.slow
def test_a_full_disk_leaves_the_session_byte_for_byte_and_nothing_beside_it(program: Program, session: Path) -> None:
    before, n = session.read_bytes(), session.stat().st_size
    for limit in (n - 100, n + 3000):
        ran = program.run("chat", *GREEDY, "--resume", session, "--message", "go on", limit=limit)
        assert (ran.status, ran.err.count("\n")) == (16, 1)
        assert f"cannot write '{session}'" in ran.err
    ran = program.run("chat", *GREEDY, "--message", "hello", "--save", "new.bin", limit=3000)
    assert (ran.status, ran.err.count("\n")) == (16, 1)
    assert session.read_bytes() == before
    assert os.listdir(program.folder) == ["s.bin"]


def test_a_read_only_session_is_loaded_and_refused_to_a_chat_before_any_work(program: Program, session: Path) -> None:
    expected, before = program.goes_on(session), session.read_bytes()
    session.chmod(0o444)
    assert program.goes_on(session) == expected
    for command in (("chat", *GREEDY, "--message", "x", "--resume"), ("compact",), ("chat", "--save", "--force")):
        ran = program.here(*command, session)
        assert ran.status in (2, 16)
    ran = program.here("chat", *GREEDY, "--message", "x", "--resume", session)
    assert (ran.status, ran.out) == (16, "")
    assert "it is read-only" in ran.err
    assert session.read_bytes() == before


def test_a_memory_of_models_that_cannot_be_used_costs_only_time(program: Program, session: Path) -> None:
    expected = program.goes_on(session)
    folder = program.folder.parent / "home" / "llamakv"
    memory = folder / "model-digests.json"
    good = memory.read_bytes()
    for content in (
        b"",
        b"[]",
        b"[" * 10_000,
        b"\xff",
        good[:-9],
        good.replace(b'"digest": "', b'"digest": 1, "x": "'),
    ):
        memory.write_bytes(content)
        assert program.goes_on(session) == expected
    memory.unlink()
    os.mkfifo(memory)
    assert program.goes_on(session) == expected
    shutil.rmtree(folder)
    folder.write_text("no folder")
    assert program.goes_on(session) == expected


# ---------------------------------------------------------------- other files, damaged files


def test_what_is_no_session_is_refused_in_one_line_and_left_alone(program: Program, session: Path) -> None:
    contents = {"empty": b"", "text": b"hello\n" * 99, "gguf": b"GGUF" + bytes(99), "pickle": pickle.dumps({"a": 1})}
    for name, content in contents.items():
        (program.folder / f"{name}.bin").write_bytes(content)
    (program.folder / "folder.bin").mkdir()
    os.mkfifo(program.folder / "pipe.bin")
    with socket.socket(socket.AF_UNIX) as server, chdir(program.folder):
        server.bind("socket.bin")
    names = [*(f"{name}.bin" for name in contents), "folder.bin", "pipe.bin", "socket.bin", "/dev/null", "/dev/zero"]
    for name in names:
        for command in (("load", *GREEDY), ("chat", *GREEDY, "--message", "x", "--resume"), ("verify",), ("compact",)):
            ran = program.here(*command, name)
            assert (ran.status, ran.out, ran.err.count("\n")) == (13, "", 1), (command, name)
            assert "not a llamakv session" in ran.err
    for name, content in contents.items():
        assert (program.folder / f"{name}.bin").read_bytes() == content


def test_a_link_is_read_and_not_written_through(program: Program, session: Path) -> None:
    before = session.read_bytes()
    (program.folder / "link.bin").symlink_to(session)
    (program.folder / "dangling.bin").symlink_to(program.folder / "nowhere.bin")
    assert program.goes_on(program.folder / "link.bin") == program.goes_on(session)
    ran = program.here("chat", *GREEDY, "--resume", "link.bin", "--message", "x")
    assert (ran.status, "it is a symbolic link" in ran.err) == (16, True)
    assert program.here("load", "dangling.bin").status == 10
    ran = program.here("chat", *GREEDY, "--save", "dangling.bin", "--message", "x")
    assert (ran.status, "it is a symbolic link" in ran.err) == (16, True)
    assert (session.read_bytes(), (program.folder / "nowhere.bin").exists()) == (before, False)


def check_damaged(program: Program, path: Path, expected: str, *, may_be_equal: bool) -> None:
    ran = program.here("load", *GREEDY, path, "-p", "and then?")
    if ran.status == 0:
        assert (may_be_equal, ran.out) == (True, expected)
        return
    assert (ran.status, ran.out, ran.err.splitlines()[0].startswith("error: ")) == (13, "", True)
    assert "internal" not in ran.err
    assert len(ran.err.splitlines()) <= 2  # the error, and what to do


def test_a_session_cut_at_every_sixty_fourth_is_refused(program: Program, session: Path) -> None:
    data, expected = session.read_bytes(), program.goes_on(session)
    for i in range(64):
        session.write_bytes(data[: len(data) * i // 64])
        check_damaged(program, session, expected, may_be_equal=False)
    session.write_bytes(data[:-1])
    check_damaged(program, session, expected, may_be_equal=False)
    session.write_bytes(data + bytes(5000))  # what a killed writer leaves
    assert program.goes_on(session) == expected


@pytest.mark.slow
def test_a_flip_in_every_4_kib_is_refused_or_changes_nothing(program: Program) -> None:
    (program.folder / "long.txt").write_text("one two three.\n\n" * 150)
    assert program.here("save", "-t", "1", "-f", "long.txt", "s.bin").status == 0
    path = program.folder / "s.bin"
    data, expected = path.read_bytes(), program.goes_on(path)
    places = random.Random(0)
    for start in range(0, len(data), 4096):
        at = places.randrange(start, min(start + 4096, len(data)))
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << places.randrange(8))]) + data[at + 1 :])
        check_damaged(program, path, expected, may_be_equal=True)
    assert len(data) > 60 * 4096


def test_a_damaged_session_is_read_again_from_its_tokens(program: Program, session: Path) -> None:
    expected, info = program.goes_on(session), read_session(session)
    data = bytearray(session.read_bytes())
    data[info.sections[0].offset + 40] ^= 1
    session.write_bytes(data)
    assert program.here("verify", session).status == 13
    assert program.here("load", *GREEDY, session, "-p", "and then?").status == 13
    assert program.here("load", *GREEDY, session, "-p", "and then?", "--recompute").out == expected


# ---------------------------------------------------------------- moved, replaced, used by many


def test_a_session_copied_and_renamed_says_the_same(program: Program, session: Path) -> None:
    expected = program.goes_on(session)
    (program.folder / "sub").mkdir()
    copy = program.folder / "sub" / "Ünïcode \U0001f600\nname.bin"
    shutil.copy(session, copy)
    assert program.goes_on(copy) == expected
    session.rename(program.folder / "t.bin")
    assert program.goes_on(program.folder / "t.bin") == expected


def test_another_model_under_the_old_name_and_time_is_refused_naming_both(
    program: Program, session: Path, models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = program.folder / "model.gguf"
    shutil.copy(models("M"), model)
    os.utime(model, (1_000_000_000, 1_000_000_000))
    monkeypatch.setenv("LLAMAKV_MODEL", str(model))
    before, digest = session.read_bytes(), read_session(session).record.identity.digest
    assert program.here("load", *GREEDY, session, "-p", "x", "-m", model).status == 0
    model.write_bytes(models("M2").read_bytes())
    os.utime(model, (1_000_000_000, 1_000_000_000))
    for command in (("load", *GREEDY, "-p", "x"), ("chat", *GREEDY, "--message", "x", "--resume")):
        ran = program.here(*command, session, "-m", model)
        assert (ran.status, ran.out) == (14, "")
        assert f"saved with model digest {digest[:16]}" in ran.err
        assert f"{model} has " in ran.err
    assert session.read_bytes() == before


def test_a_pipe_given_as_a_model_is_refused_instead_of_waited_for(program: Program, session: Path) -> None:
    os.mkfifo(program.folder / "pipe.gguf")
    process = program.start("load", *GREEDY, session, "-p", "x", "-m", "pipe.gguf")
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode != 0, out, "regular file" in err) == (True, "", True)


def opened(program: Program, session: Path) -> subprocess.Popen[str]:
    """A chat that has resumed the session and waits for its second message."""
    process = program.start("chat", *[word for word in GREEDY if word != "-q"], "--resume", session)
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write("first\n")  # the model is loaded once there is one
    process.stdin.flush()
    assert process.stderr.readline().startswith("resumed ")
    return process


@pytest.mark.slow
def test_of_two_chats_with_one_session_the_second_to_save_goes_beside_it(program: Program, session: Path) -> None:
    chats = []
    for n_turns in (3, 4):
        chats.append(opened(program, session))
        while len(asked(session)) < n_turns:
            time.sleep(0.01)
    late, early = (finish(chat, f"second of {i}\n") for i, chat in enumerate(chats))
    assert (late.status, early.status) == (0, 0)
    assert f"'{session}' was saved by somebody else" in late.err
    assert f"saved to {program.folder / 's-2.bin'} instead" in late.err
    assert "instead" not in early.err
    assert asked(session) == ["tell me", "more", "first", "first", "second of 1"]
    assert asked(program.folder / "s-2.bin") == ["tell me", "more", "first", "second of 0"]
    assert sorted(os.listdir(program.folder)) == ["s-2.bin", "s.bin"]


def test_a_session_that_was_replaced_between_two_turns_stays_and_the_chat_goes_beside_it(
    program: Program, session: Path
) -> None:
    assert program.here("chat", *GREEDY, "--message", "another", "--save", "other.bin").status == 0
    process = opened(program, session)
    while len(asked(session)) < 3:
        time.sleep(0.01)
    other = (program.folder / "other.bin").read_bytes()
    os.replace(program.folder / "other.bin", session)
    ran = finish(process, "second\n")
    assert ran.status == 0
    assert "saved to" in ran.err
    assert session.read_bytes() == other
    assert asked(program.folder / "s-2.bin") == ["tell me", "more", "first", "second"]


@pytest.mark.slow
def test_reading_while_another_process_saves_gives_the_session_of_one_moment(program: Program, session: Path) -> None:
    n_before = len(asked(session))
    process = program.start("chat", *GREEDY, "--resume", session)
    assert process.stdin is not None
    process.stdin.write("".join(f"message {i}\n" for i in range(25)))
    process.stdin.close()
    seen = set()
    while process.poll() is None:
        seen.add(len(asked(session)) - n_before)
        assert program.here("load", *GREEDY, session, "-p", "x").status == 0
        assert program.here("inspect", session, "--json").status == 0
    process.stdin = None
    assert finish(process).status == 0
    assert asked(session)[n_before:] == [f"message {i}" for i in range(25)]
    assert len(seen) > 1
    assert program.here("compact", session).status == 0
    assert len(asked(session)) == n_before + 25
