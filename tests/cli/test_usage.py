"""Bad input: one clear line, a hint, the right exit status, and the same as JSON."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from llamakv.cli import app, config
from tests.cli.conftest import Ran, make_session


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bogus",), "no such command 'bogus'"),
        (("ls", "--bogus"), "no such option"),
        (("inspect",), "missing argument 'REF'"),
        (("save", "x", "-c", "many"), "invalid value for '--n-ctx' / '-c': 'many' is not a whole number"),
        (("save", "x", "-c", "0"), "invalid value for '--n-ctx' / '-c': 0 is less than 1"),
        (("chat", "--temperature", "-1"), "invalid value for '--temperature': -1.0 is less than 0.0"),
        (("chat", "--temperature", "nan"), "invalid value for '--temperature': 'nan' is not a finite number"),
        (("chat", "--top-p", "1.5"), "invalid value for '--top-p': 1.5 is more than 1.0"),
        (("chat", "--seed", "4294967296"), "invalid value for '--seed': 4294967296 is more than 4294967295"),
        (("chat", "--flash-attn", "yes"), "invalid value for '--flash-attn': 'yes' is not one of auto, on, off"),
        (("chat", "--swa", "half"), "invalid value for '--swa': 'half' is not one of full, window"),
        (("chat", "--logit-bias", "x=1"), "invalid value for '--logit-bias': 'x=1' is not TOKEN_ID=BIAS"),
        (("chat", "--logit-bias", "3=inf"), "invalid value for '--logit-bias': '3=inf' is not TOKEN_ID=BIAS"),
        (("chat", "--stop", ""), "invalid value for '--stop': it must not be empty"),
        (("save", "x"), "nothing to read: give a text or a system prompt"),
        (("save", "x", "--raw", "--system", "s", "-f", "t"), "--raw has no system prompt"),
        (("save", "x", "-f", "folder"), "'folder' is a directory, expected a text file"),
        (("save", "x", "-f", "latin1"), "latin1 is not UTF-8 text: byte 0xe9 at offset 3"),
        (("save", "x", "-f", "empty"), "empty is empty"),
        (("load", "session.bin", "-p", " "), "the prompt is empty"),
        (("rm", "session.bin"), "removing needs -y where nobody can be asked"),
        (("inspect", "session.bin", "--history", "--tokens"), "--history and --tokens exclude each other"),
        (("chat", "--grammar", "folder", "--message", "x"), "'folder' is a directory, expected a text file"),
        (("chat", "--grammar", "empty", "--message", "x"), "the grammar empty is empty"),
        (("chat", "--message", "first", "--message", " "), "a message is empty"),
        (("ls", "../up"), "got unexpected extra argument"),
        (("inspect", ".hidden"), "not a session name: '.hidden': it begins with '.'"),
    ],
)
def test_wrong_usage_is_one_line_and_2(
    run: Callable[..., Ran], session: Path, arguments: tuple[str, ...], message: str
) -> None:
    (session.parent / "folder").mkdir()
    (session.parent / "empty").write_bytes(b"")
    (session.parent / "latin1").write_bytes("café".encode("latin-1"))
    ran = run(*arguments)
    assert (ran.status, ran.out) == (2, "")
    error, *hint = ran.err.splitlines()
    assert error.startswith(f"error: {message}")
    assert all(line.startswith("hint: ") for line in hint)
    assert len(hint) <= 1


@pytest.mark.parametrize(
    ("arguments", "command", "code", "status"),
    [
        (("ls", "--bogus", "--json"), "ls", "usage", 2),
        (("inspect", "--json"), "inspect", "usage", 2),
        (("inspect", "missing", "--json"), "inspect", "not_found", 10),
        (("load", "missing.bin", "--json"), "load", "not_found", 10),
        (("inspect", "text.bin", "--json"), "inspect", "not_a_session", 13),
        (("rm", "missing", "--json", "-y"), "rm", "not_found", 10),
        (("load", "session.bin", "--save", "session.bin", "--json"), "load", "exists", 11),
        (("save", "new.bin", "-f", "missing.txt", "--json"), "save", "not_found", 10),
        (("bogus", "--json"), "", "usage", 2),
    ],
)
def test_json_is_one_document_also_on_failure(
    run: Callable[..., Ran], session: Path, arguments: tuple[str, ...], command: str, code: str, status: int
) -> None:
    (session.parent / "text.bin").write_text("just text, long enough to be looked at\n" * 10)
    ran = run(*arguments)
    assert (ran.status, ran.err) == (status, "")
    document = ran.document
    assert list(document) == ["schema_version", "command", "status", "data", "errors"]
    assert (document["schema_version"], document["command"]) == (1, command)
    assert (document["status"], document["data"]) == ("error", None)
    (error,) = document["errors"]
    assert (error["code"], error["exit_status"]) == (code, status)
    assert set(error) == {"code", "message", "hint", "fields", "exit_status"}


def test_json_of_chat_closes_with_a_line_of_type_done(run: Callable[..., Ran]) -> None:
    ran = run("chat", "--resume", "missing", "--json")
    assert ran.status == 10
    (line,) = ran.lines
    assert (line["type"], line["status"], line["errors"][0]["code"]) == ("done", "error", "not_found")
    assert line["errors"][0]["fields"]["path"].endswith("missing.bin")


def test_a_missing_session_is_10_and_says_how_to_begin_one(run: Callable[..., Ran]) -> None:
    ran = run("chat", "--resume", "session.bin")
    assert ran.status == 10
    assert ran.err == "error: session 'session.bin' does not exist\nhint: begin it: llamakv chat --save session.bin\n"


def test_a_session_that_exists_is_11_and_is_left_alone(run: Callable[..., Ran], session: Path) -> None:
    before = session.read_bytes()
    ran = run("chat", "--save", "session.bin")
    assert ran.status == 11
    assert ran.err == (
        "error: session 'session.bin' already exists\n"
        "hint: go on with it: llamakv chat --resume session.bin (or replace it: --force)\n"
    )
    assert session.read_bytes() == before


def test_a_folder_is_no_session_to_go_on_with(run: Callable[..., Ran], home: Path, model: Path) -> None:
    (home / "folder").mkdir()
    ran = run("chat", "--save", "folder/", "--message", "hi")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("error: 'folder/' names a folder or nothing, not a session file\n")
    ran = run("chat", "--save", "./folder", "--message", "hi")
    assert (ran.status, ran.out) == (16, "")
    assert ran.err == "error: cannot write 'folder': it is a folder\n"


def test_markup_in_names_is_printed_as_it_is(run: Callable[..., Ran]) -> None:
    ran = run("inspect", "[bold]x[/bold] [WIP].bin")
    assert ran.err.splitlines()[0] == "error: session '[bold]x[/bold] [WIP].bin' does not exist"


def test_escape_codes_in_names_do_not_reach_the_terminal(run: Callable[..., Ran], home: Path) -> None:
    make_session(home / "a\x1b[31mb.bin")
    assert "\x1b" not in run("inspect", "a\x1b[31mb.bin").out + run("inspect", "c\x1b[31m.bin").err


def test_a_bug_is_one_line_and_a_traceback_only_with_v(
    run: Callable[..., Ran], session: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path, **_options: object) -> None:
        raise RuntimeError("[boom]\nsecond line")

    monkeypatch.setattr("llamakv.ops.inspect.inspect_session", fail)
    ran = run("inspect", session)
    assert ran.status == 1
    assert ran.err == "error: internal error: RuntimeError: [boom] (run again with -v for a traceback)\n"
    told = run("inspect", session, "-v")
    assert told.status == 1
    assert "Traceback (most recent call last)" in told.err
    assert "second line" in told.err
    document = run("inspect", session, "--json").document
    assert document["errors"][0]["code"] == "internal"


def test_a_signal_that_an_import_turned_into_another_error_is_still_a_signal(
    run: Callable[..., Ran], session: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(_: Path, **_options: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception as error:
            raise RuntimeError(f"failed to load a library: {error}") from error

    monkeypatch.setattr("llamakv.ops.inspect.inspect_session", load)
    ran = run("inspect", session)
    assert (ran.status, ran.err) == (143, "ended by SIGTERM\n")


def test_without_a_model_it_says_where_it_looked(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "demo_model", lambda: None)
    ran = run("chat", "--message", "hi")
    assert ran.status == 10
    assert "LLAMAKV_MODEL" in ran.err
    assert "hint: " in ran.err


def test_every_exit_status_of_an_error_is_in_the_help() -> None:
    from llamakv import errors

    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    statuses = {found.exit_status for found in classes if issubclass(found, errors.LlamakvError)}
    listed = {int(word) for word in app._EXIT_STATUSES.split() if word.isdigit()}
    assert statuses - listed == set()


def test_a_json_document_survives_a_strict_parser(run: Callable[..., Ran], session: Path) -> None:
    sampling = run("inspect", session, "--json").document["data"]["sampling"]
    assert sampling["logit_bias"] == [[3, "-inf"], [4, 1.5]]
    assert json.loads(json.dumps(sampling, allow_nan=False)) == sampling
