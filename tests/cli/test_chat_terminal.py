"""The conversation in a terminal: typing, slash commands, Ctrl-C, and leaving."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest

from llamakv.cli.repl import COMMANDS
from llamakv.cli.terminal import is_open_block, unquoted
from llamakv.store.session_file import read_session
from tests.cli.conftest import Ran

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")
_END = "\x04"
_INTERRUPT = "\x03"


class Screen:
    """The program in a terminal of 80 columns."""

    def __init__(self, arguments: tuple[str, ...], env: dict[str, str]) -> None:
        self.child = pexpect.spawn(
            sys.executable, ["-m", "llamakv", *arguments], encoding="utf-8", timeout=20, dimensions=(40, 80),
            env={**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1", **env},
        )  # fmt: skip
        self.child.delaybeforesend = 0

    def prompt(self) -> str:
        """Wait for the prompt; what was shown since the last one, without escape codes."""
        self.child.expect_exact("\x1b[?2004h")
        shown = str(self.child.before)
        self.child.expect_exact(">")
        return _ESCAPES.sub("", shown)

    def say(self, text: str) -> str:
        """Type a line and wait for the next prompt."""
        self.child.send(text + "\r")
        return self.prompt()

    def leave(self, keys: str = _END) -> tuple[int, str]:
        """Leave; the exit status and what was shown last."""
        self.child.send(keys)
        return self.ended()

    def ended(self) -> tuple[int, str]:
        """Wait for the end; the exit status and what was shown last."""
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus, _ESCAPES.sub("", str(self.child.before))


@pytest.fixture
def chat(home: Path, model: Path) -> Iterator[Callable[..., Screen]]:
    screens: list[Screen] = []

    def start(*arguments: str, **env: str) -> Screen:
        screen = Screen(("chat", *arguments), env)
        screens.append(screen)
        return screen

    yield start
    for screen in screens:
        screen.child.close(force=True)


FEW = ("--max-tokens", "4", "--temperature", "0", "-t", "1")
ENDLESS = ("--temperature", "1", "--seed", "1", "--max-tokens", "8000", "-t", "1")


def _contents(path: Path, role: str) -> list[str]:
    chat = read_session(path).record.chat
    assert chat is not None
    return [message.content for message in chat.messages if message.role == role]


def test_a_conversation_is_saved_after_every_turn(chat: Callable[..., Screen], home: Path) -> None:
    screen = chat("--save", "s.bin", *FEW)
    banner = screen.prompt()
    assert "tiny llama F16 · context up to 8,192 tokens\n" in banner
    assert "saving to s.bin · /help lists the commands" in banner
    shown = screen.say("hi there")
    assert "4 generated" in shown
    assert re.search(r"· \+\d+ B|· \+[0-9.]+ kB", shown)
    assert _contents(home / "s.bin", "user") == ["hi there"]
    screen.say("and now")
    assert _contents(home / "s.bin", "user") == ["hi there", "and now"]
    status, last = screen.leave()
    assert status == 0
    assert "go on with: llamakv chat --resume s.bin" in last


def test_resuming_tells_what_was_reused_and_how_it_ended(chat: Callable[..., Screen], home: Path) -> None:
    first = chat("--save", "notes", *FEW)
    first.prompt()
    first.say("remember the house")
    assert "llamakv chat --resume notes" in first.leave()[1]
    n_cells = len(read_session(home / "store" / "notes.bin").record.tokens) - 1
    banner = chat("--resume", "notes", *FEW).prompt()
    assert f"resumed notes: {n_cells} tokens reused, 0 evaluated, " in banner
    assert "user: remember the house" in banner


def test_slash_commands(chat: Callable[..., Screen], home: Path) -> None:
    screen = chat(*FEW)
    screen.prompt()
    help_text = screen.say("/help")
    assert [name for name in COMMANDS if name not in help_text] == []
    assert "this conversation has no session yet" in screen.say("/save")
    assert "nothing said yet" in screen.say("/history")
    assert "no system prompt" in screen.say("/system")
    screen.say("/system be brief")
    assert "be brief" in screen.say("/system")
    screen.say("hello")
    history = screen.say("/history")
    assert "system:\nbe brief" in history
    assert "user:\nhello" in history
    assert "assistant (length):" in history
    assert "1 turn" in screen.say("/stats")
    assert "4 generated" in screen.say("/retry")
    assert "saved one: " in screen.say("/save one")
    assert "saved one: " in screen.say("/save one")
    (home / "store" / "two.bin").write_bytes((home / "store" / "one.bin").read_bytes())
    assert "already exists" in screen.say("/save two")
    assert "not a session file" in screen.say("/save store/")
    assert "saved one: " in screen.say("/save --force one")
    assert "took back 2 messages" in screen.say("/undo")
    assert "nothing to take back" in screen.say("/undo")
    assert screen.leave("/exit\r")[0] == 0


def test_what_is_no_command_is_never_sent(chat: Callable[..., Screen], home: Path) -> None:
    screen = chat("--save", "s.bin", *FEW)
    screen.prompt()
    assert "error: no command '/bogus'; nothing was sent" in screen.say("/bogus [x]")
    assert not (home / "s.bin").exists()
    screen.say("//slash at the start")
    assert _contents(home / "s.bin", "user") == ["/slash at the start"]


def test_load_replaces_the_conversation_and_fails_without_harm(chat: Callable[..., Screen], home: Path) -> None:
    screen = chat("--save", "a.bin", *FEW)
    screen.prompt()
    screen.say("first")
    (home / "broken.bin").write_bytes((home / "a.bin").read_bytes()[:700])
    assert "error: " in screen.say("/load broken.bin")
    assert "does not exist" in screen.say("/load missing")
    assert "user:\nfirst" in screen.say("/history")
    screen.say("/save b.bin")
    screen.say("second")
    shown = screen.say("/load a.bin")
    assert "resumed a.bin: " in shown
    screen.say("third")
    assert _contents(home / "a.bin", "user") == ["first", "third"]
    assert _contents(home / "b.bin", "user") == ["first", "second"]


def test_load_does_not_throw_an_unsaved_conversation_away(
    chat: Callable[..., Screen], run: Callable[..., Ran], home: Path
) -> None:
    assert run("chat", "--save", "a.bin", "--message", "kept", *FEW).status == 0
    screen = chat(*FEW)
    screen.prompt()
    screen.say("unsaved")
    assert "is not saved and would be lost" in screen.say("/load a.bin")
    assert "resumed a.bin" in screen.say("/load --force a.bin")


def test_several_lines(chat: Callable[..., Screen], home: Path) -> None:
    screen = chat("--save", "s.bin", *FEW)
    screen.prompt()
    screen.child.send("one\x1b\rtwo\r")
    screen.prompt()
    screen.child.send('"""\rthree\rfour"""\r')
    screen.prompt()
    screen.child.send("\x1b[200~five\nsix\x1b[201~\r")
    screen.prompt()
    assert _contents(home / "s.bin", "user") == ["one\ntwo", "three\nfour", "five\nsix"]


def test_ctrl_c_stops_the_reply_and_keeps_what_was_said(chat: Callable[..., Screen], home: Path) -> None:
    screen = chat("--save", "s.bin", *ENDLESS)
    screen.prompt()
    screen.child.send("go on\r")
    screen.child.expect("[a-z]+ [a-z]+ [a-z]+")
    screen.child.send(_INTERRUPT)
    assert "interrupted" in screen.prompt()
    record = read_session(home / "s.bin").record
    assert record.chat is not None
    assert record.chat.messages[-1].finish == "interrupted"
    assert record.chat.messages[-1].p1 == len(record.tokens)
    screen.child.send("again\r")
    screen.child.expect("[a-z]+ [a-z]+ [a-z]+")
    screen.child.send(_INTERRUPT)
    assert "interrupted" in screen.prompt()
    assert len(_contents(home / "s.bin", "assistant")) == 2


def test_ctrl_c_at_the_prompt_clears_the_line_and_leaves_an_empty_one(chat: Callable[..., Screen], home: Path) -> None:
    screen = chat("--save", "s.bin", *FEW)
    screen.prompt()
    screen.child.send("not this" + _INTERRUPT + "but this\r")
    screen.prompt()
    assert _contents(home / "s.bin", "user") == ["but this"]
    status, last = screen.leave(_INTERRUPT)
    assert status == 130
    assert "error" not in last


@pytest.mark.slow
def test_a_system_prompt_nothing_was_said_under_is_not_lost_in_silence(chat: Callable[..., Screen]) -> None:
    screen = chat("--save", "s.bin", *FEW)
    screen.prompt()
    screen.say("/system be brief")
    assert "the new system prompt is not saved" in screen.leave()[1]
    again = chat("--save", "s.bin", *FEW)
    again.prompt()
    again.say("/system be brief")
    again.say("hi")
    assert "system prompt" not in again.leave()[1]


def test_odd_keys_neither_break_the_prompt_nor_get_into_the_message(chat: Callable[..., Screen], home: Path) -> None:
    screen = chat("--save", "s.bin", *FEW)
    screen.prompt()
    screen.say("a\x1b[31mb\x07c")
    assert _contents(home / "s.bin", "user") == ["abc"]
    screen.child.send("\x1a")
    screen.prompt()
    screen.say("d")
    assert _contents(home / "s.bin", "user") == ["abc", "d"]


@pytest.mark.parametrize("during", [pytest.param("prompt", marks=pytest.mark.slow), "reply"])
def test_a_terminal_that_closes_keeps_everything_and_is_129(
    chat: Callable[..., Screen], home: Path, during: str
) -> None:
    screen = chat("--save", "s.bin", *ENDLESS)
    screen.prompt()
    screen.child.send("go on\r")
    screen.child.expect("[a-z]+ [a-z]+ [a-z]+")
    if during == "prompt":
        screen.child.send(_INTERRUPT)
        screen.prompt()
    pid = screen.child.pid
    screen.child.ptyproc.fileobj.close()
    screen.child.ptyproc.terminated = True
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 129
    assert len(_contents(home / "s.bin", "assistant")) == 1


@pytest.mark.parametrize("during", ["prompt", pytest.param("reply", marks=pytest.mark.slow)])
def test_sigterm_keeps_everything_and_is_143(chat: Callable[..., Screen], home: Path, during: str) -> None:
    screen = chat("--save", "s.bin", *ENDLESS)
    screen.prompt()
    screen.child.send("go on\r")
    screen.child.expect("[a-z]+ [a-z]+ [a-z]+")
    if during == "prompt":
        screen.child.send(_INTERRUPT)
        screen.prompt()
    screen.child.kill(signal.SIGTERM)
    status, last = screen.ended()
    assert status == 143
    assert "ended by SIGTERM" in last
    assert len(_contents(home / "s.bin", "assistant")) == 1


@pytest.mark.slow
def test_quiet_shows_the_reply_and_nothing_else(chat: Callable[..., Screen]) -> None:
    screen = chat("-q", *FEW)
    assert screen.prompt() == ""
    assert "generated" not in screen.say("hi")
    assert screen.leave()[0] == 0


@pytest.mark.slow
def test_what_was_typed_is_remembered_for_its_user_only(chat: Callable[..., Screen], home: Path) -> None:
    screen = chat(*FEW)
    screen.prompt()
    screen.say("a thing to remember")
    screen.leave()
    history = home / "data" / "llamakv" / "history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "a thing to remember" in history.read_text()
    again = chat("--save", "s.bin", *FEW)
    again.prompt()
    again.child.send("\x1b[A\r")
    again.prompt()
    assert _contents(home / "s.bin", "user") == ["a thing to remember"]


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_only_costs_the_history(chat: Callable[..., Screen], home: Path) -> None:
    (home / "data").write_text("a file where a folder should be")
    screen = chat(*FEW)
    screen.prompt()
    assert "4 generated" in screen.say("hi")
    assert screen.leave()[0] == 0


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, pytest.param({"TERM": "dumb"}, marks=pytest.mark.slow)])
def test_without_colours_no_colours(chat: Callable[..., Screen], env: dict[str, str]) -> None:
    screen = chat(*FEW, **env)
    screen.child.expect_exact(">")
    screen.child.send("hi\r")
    screen.child.expect("generated")
    screen.child.send("/exit\r")
    screen.child.expect(pexpect.EOF)
    assert re.search(r"\x1b\[(?:1|2|33|[0-9;]*3[0-7])m", str(screen.child.before)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [("plain", "plain"), ('"""x"""', "x"), ('"""\na\n\nb\n"""', "a\n\nb"), ('""', '""'), ('say """x"""', 'say """x"""'),
     ('""""""', "")],
)  # fmt: skip
def test_quotes_around_a_message_are_taken_off(text: str, message: str) -> None:
    assert unquoted(text) == message


@pytest.mark.parametrize(
    ("text", "is_open"),
    [('"""', True), ('"""a\nb', True), ('"""a"""', False), ("a", False), ('a"""', False), ('"""""', True)],
)
def test_a_block_is_open_until_its_quotes_are_closed(text: str, is_open: bool) -> None:
    assert is_open_block(text) is is_open
