"""log, diff, tag, note, pin, unpin, mv, cp, export and import."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pexpect
import pytest

from llamakv.records import MemoryKind
from llamakv.store.session_file import create_session, read_session, verify_session
from tests.cli.conftest import Ran, command
from tests.ops.talks import talk
from tests.store import samples

Run = Callable[..., Ran]

WORDS = ["Where to?", "To Rome.", "When?", "In May.", "By train?", "Yes."]


@pytest.fixture
def store(home: Path) -> Path:
    """The store, with a session of three turns in it, and a branch after the first."""
    store = home / "store"
    talk(store / "plan.bin", *WORDS, system="Be brief.", in_store=True, name="plan", tags=("a", "b"), note="the trip")
    talk(
        store / "rain.bin",
        *WORDS[:2],
        "When it rains?",
        "Stay.",
        system="Be brief.",
        name="rain",
        parent_id="plan",
        parent_position=300,
    )
    return store


def names(store: Path) -> list[str]:
    return sorted(path.stem for path in store.glob("*.bin"))


# ---------------------------------------------------------------- log


class TestLog:
    def test_tells_turn_by_turn_in_80_columns(self, run: Run, store: Path) -> None:
        ran = run("log", "plan")
        assert (ran.status, ran.err) == (0, "")
        head, *turns = ran.out.split("\n\n")
        assert [line.split()[0] for line in head.splitlines()] == ["session", "id", "tags", "note", "size", "saved"]
        assert [turn.split()[0] for turn in turns] == ["system", "turn1", "turn2", "turn3"]
        assert "200 tokens" in turns[1]
        assert turns[1].splitlines()[1:] == ["  user: Where to?", "  assistant: To Rome."]
        assert turns[0].splitlines()[1:] == ["  system: Be brief."]
        assert max(map(len, ran.out.splitlines())) <= 80

    def test_a_parent_is_a_reference_that_can_be_used(self, run: Run, store: Path) -> None:
        assert "parent   plan@turn1 (300 tokens)" in run("log", "rain").out
        assert run("log", "plan@turn1").status == 0
        run("rm", "-y", "plan")
        assert "parent   plan at position 300 (not in this store)" in run("log", "rain").out

    def test_long_and_wild_texts_stay_on_their_line(self, run: Run, home: Path) -> None:
        talk(home / "x.bin", "One\n\ntwo\x1b[31m " * 1000, "数据 " * 1000)
        lines = run("log", "x.bin").out.splitlines()
        assert lines[-2].startswith("  user: One two␛[31m One two")
        assert lines[-2].endswith("…")
        assert lines[-1].count("数") < 20  # each takes two columns
        assert max(map(len, lines)) <= 80

    def test_json_is_complete(self, run: Run, store: Path) -> None:
        data = run("log", "rain", "--json").document["data"]
        assert set(data) >= {
            "session", "path", "at", "id", "name", "parent", "tags", "note", "incomplete", "pinned", "tokens", "turns",
            "raw_bytes", "stored_bytes", "created_s", "updated_s", "entries",
        }  # fmt: skip
        assert data["parent"] == {"session_id": "plan", "position": 300, "name": "plan", "place": "turn1"}
        system, first, _ = data["entries"]
        assert set(first) == {
            "kind", "turn", "p0", "p1", "tokens", "stored_bytes", "time_s", "messages", "section",
        }  # fmt: skip
        assert (system["kind"], first["kind"], first["turn"], first["tokens"]) == ("system", "turn", 1, 200)
        assert [message["content"] for message in first["messages"]] == WORDS[:2]
        assert first["messages"][1]["time_s"] == first["time_s"]
        assert sum(entry["stored_bytes"] for entry in data["entries"]) == data["stored_bytes"]

    def test_a_place_ends_it(self, run: Run, store: Path) -> None:
        assert "turn3" not in run("log", "plan@turn2").out
        data = run("log", "plan@turn2", "--json").document["data"]
        assert (data["session"], data["at"], data["turns"], data["tokens"]) == ("plan", "turn2", 2, 500)

    def test_raw_text_is_told_by_sections(self, run: Run, home: Path) -> None:
        record = replace(samples.make_record(600), chat=None, text="Once upon a time.")
        create_session(home / "raw.bin", record, samples.cells_up_to(599))
        lines = run("log", "raw.bin").out.splitlines()
        assert [line.split()[:4] for line in lines[-3:]] == [
            ["cells", "[0,", "256)", "256"],
            ["cells", "[256,", "512)", "256"],
            ["cells", "[512,", "599)", "87"],
        ]
        entries = run("log", "raw.bin", "--json").document["data"]["entries"]
        assert [(entry["kind"], entry["section"]["p1"]) for entry in entries] == [
            ("section", 256),
            ("section", 512),
            ("section", 599),
        ]


# ---------------------------------------------------------------- diff


class TestDiff:
    def test_says_where_they_part_and_leaves_with_0(self, run: Run, store: Path) -> None:
        ran = run("diff", "plan", "rain")
        assert (ran.status, ran.err) == (0, "")
        lines = {line[:13].strip(): line[13:] for line in ran.out.splitlines()}
        assert lines["in common"] == "the first 300 tokens"
        assert lines["they part"] == "in turn 2, in the user's words"
        assert lines["after"] == "When"
        assert (lines["model"], lines["settings"]) == ("the same", "the same")
        assert lines["only first"].startswith("400 tokens · 2 sections, ")
        assert lines["in both"].endswith(", stored once")
        assert run("diff", "plan", "plan").status == 0
        assert "all tokens" in run("diff", "plan", "plan").out
        assert "the second goes on where the first ends" in run("diff", "plan@turn1", "plan").out
        assert "the first goes on where the second ends" in run("diff", "plan", "plan@turn1").out

    def test_json_has_the_promised_keys(self, run: Run, store: Path) -> None:
        data = run("diff", "plan@turn3", "rain", "--json").document["data"]
        assert set(data) == {
            "a", "b", "relation", "common_tokens", "same_model", "same_settings", "differences", "shared_sections",
            "shared_bytes", "stored_once",
        }  # fmt: skip
        assert set(data["a"]) == set(data["b"]) == {
            "session", "path", "at", "id", "tokens", "own_tokens", "turn", "role", "text_before", "text_after",
            "own_sections", "own_bytes",
        }  # fmt: skip
        assert (data["relation"], data["common_tokens"], data["same_model"]) == ("parted", 300, True)
        assert (data["a"]["at"], data["a"]["own_tokens"], data["b"]["own_tokens"]) == ("turn3", 400, 200)

    def test_other_models_are_named(self, run: Run, store: Path, home: Path) -> None:
        talk(home / "other.bin", *WORDS, kind=MemoryKind.HYBRID)
        assert "kind dense and hybrid" in run("diff", "plan", "other.bin").out


# ---------------------------------------------------------------- tags, notes, pins


class TestWords:
    def test_tags_are_shown_added_and_removed(self, run: Run, store: Path) -> None:
        assert run("tag", "plan").out == "a\nb\n"
        ran = run("tag", "plan", "ü", "a")
        assert (ran.status, ran.out, ran.err) == (0, "", "plan: tags a, b, ü\n")
        assert run("tag", "plan", "--remove", "a", "b", "--json").document["data"] == {
            "session": "plan",
            "path": str(store / "plan.bin"),
            "tags": ["ü"],
        }
        assert run("tag", "--remove", "plan", "ü").err == "plan: no tags\n"
        assert (run("tag", "plan").out, run("tag", "plan", "--json").document["data"]["tags"]) == ("", [])

    def test_notes_are_shown_written_and_removed(self, run: Run, process: Run, store: Path) -> None:
        assert run("note", "plan").out == "the trip\n"
        assert run("note", "plan", "another trip").err == "plan: noted\n"
        assert process("note", "plan", "-", stdin="of two\nlines\n").status == 0
        assert run("note", "plan").out == "of two\nlines\n"
        assert run("note", "plan", "--json").document["data"] == {
            "session": "plan",
            "path": str(store / "plan.bin"),
            "note": "of two\nlines",
            "incomplete": None,
        }
        assert run("note", "--remove", "plan").err == "plan: no note\n"
        ran = run("note", "plan")
        assert (ran.status, ran.out, ran.err) == (0, "", "plan has no note\n")

    def test_pins_are_set_and_let_go_all_or_none(self, run: Run, store: Path) -> None:
        assert run("pin", "plan", "missing").status == 10
        assert not read_session(store / "plan.bin").record.lineage.pinned
        assert run("pin", "plan", "rain").err == "pinned plan\npinned rain\n"
        assert "pinned   yes" in run("log", "rain").out
        data = run("unpin", "rain", "--json").document["data"]
        assert data == {"sessions": [{"session": "rain", "path": str(store / "rain.bin"), "pinned": False}]}
        assert [read_session(store / f"{name}.bin").record.lineage.pinned for name in ("plan", "rain")] == [True, False]

    def test_files_outside_a_store_have_them_too(self, run: Run, session: Path) -> None:
        assert run("tag", session, "x").status == 0
        assert run("note", "session.bin", "n").status == 0
        assert run("pin", "./session.bin").status == 0
        lineage = read_session(session).record.lineage
        assert (lineage.tags, lineage.note, lineage.pinned) == (("a", "b", "x"), "n", True)
        assert verify_session(session).is_sound

    @pytest.mark.parametrize(
        ("arguments", "status", "message"),
        [
            (("tag", "plan", "a b"), 2, "not a tag: 'a b': it has white space"),
            (("tag", "plan", "--remove"), 2, "name the tags to take away"),
            (("tag", "plan", "--remove", "nope"), 10, "/plan.bin has no tag 'nope'"),
            (("tag", "plan@turn1", "x"), 2, "it ends like a position"),
            (("tag", "missing"), 10, "session 'missing' does not exist"),
            (("note", "plan", ""), 2, "the note is empty"),
            (("note", "plan", "x", "--remove"), 2, "a note is either written or removed"),
            (("note", "plan", "incomplete: 3 of 5"), 2, "a note cannot begin with 'incomplete:'"),
            (("note", "missing", "x"), 10, "session 'missing' does not exist"),
            (("unpin", "missing"), 10, "session 'missing' does not exist"),
            (("log", "missing"), 10, "session 'missing' does not exist"),
            (("log", "missing@turn1"), 10, "session 'missing' does not exist"),
            (("log", "plan@turn9"), 10, "there is no turn 9 in the session: it has 3"),
            (("log", "plan@9999"), 10, "position 9,999 is not in the session"),
            (("log", "plan@250"), 2, "position 250 is inside a message"),
            (("log", "@turn1"), 2, "not a session name"),
            (("diff", "plan", "missing"), 10, "session 'missing' does not exist"),
            (("mv", "missing", "x"), 10, "session 'missing' does not exist"),
            (("mv", "plan", "rain"), 11, "session 'rain' already exists"),
            (("mv", "plan", "plan", "--force"), 2, "cannot be moved to itself"),
            (("mv", "plan", "x@turn1"), 2, "it ends like a position"),
            (("mv", "plan", "no/folder.bin"), 16, "there is no folder"),
            (("cp", "missing", "x"), 10, "session 'missing' does not exist"),
            (("cp", "plan", "rain"), 11, "session 'rain' already exists"),
            (("cp", "plan", "plan", "--force"), 2, "cannot be copied to itself"),
            (("cp", "plan@250", "x"), 2, "position 250 is inside a message, which cannot be cut without the model"),
            (("cp", "plan@turn9", "x"), 10, "there is no turn 9"),
            (("export", "missing", "x.bin"), 10, "session 'missing' does not exist"),
            (("export", "plan", "store/x.bin"), 2, "store is a store"),
            (("export", "plan", "-", "--json"), 2, "standard output cannot take both"),
            (("import", "missing.bin"), 10, "missing.bin"),
            (("import", "text.bin"), 13, "not a llamakv session"),
            (("import", "plan.bin"), 11, "session 'plan' already exists"),
            (("import", "plan.bin", "a/b"), 2, "it has a path separator"),
            (("import", "plan.bin", "x.bin"), 2, "what ends in '.bin' is a path"),
        ],
    )
    def test_what_cannot_be_done_is_one_line_and_changes_nothing(
        self, run: Run, store: Path, home: Path, arguments: tuple[str, ...], status: int, message: str
    ) -> None:
        run("export", "plan", "plan.bin")
        (home / "text.bin").write_text("just text, long enough to be looked at\n" * 100)
        before = {path: path.read_bytes() for path in home.rglob("*.bin")}
        ran = run(*arguments)
        assert (ran.status, ran.out if "--json" not in arguments else "") == (status, "")
        assert message in (ran.err or ran.out)
        assert len(ran.err.splitlines()) <= 2
        assert {path: path.read_bytes() for path in home.rglob("*.bin")} == before
        if "--json" not in arguments:
            failed = run(*arguments, "--json")
            assert (failed.status, failed.document["errors"][0]["exit_status"]) == (status, status)


# ---------------------------------------------------------------- mv, cp, export, import


class TestMv:
    def test_renames_in_the_store(self, run: Run, store: Path) -> None:
        ran = run("mv", "plan", "the trip é 数据")
        assert (ran.status, ran.out, ran.err) == (0, "", "moved plan to the trip é 数据\n")
        assert names(store) == ["rain", "the trip é 数据"]
        assert read_session(store / "the trip é 数据.bin").record.lineage.name == "the trip é 数据"
        assert run("verify", "the trip é 数据").status == 0
        assert run("log", "the trip é 数据").status == 0

    def test_json_has_the_promised_keys(self, run: Run, store: Path) -> None:
        data = run("mv", "plan", "new", "--json").document["data"]
        assert set(data) >= {"from", "session", "path", "name", "id", "tokens", "stored_bytes"}
        assert (data["from"], data["session"], data["path"], data["id"]) == (
            str(store / "plan.bin"),
            "new",
            str(store / "new.bin"),
            "plan",
        )

    def test_files_are_moved_too(self, run: Run, session: Path, home: Path) -> None:
        (home / "folder").mkdir()
        before = session.read_bytes()
        assert run("mv", "session.bin", "folder/new.bin").status == 0
        assert ((home / "folder" / "new.bin").read_bytes(), session.exists()) == (before, False)

    def test_force_replaces(self, run: Run, store: Path) -> None:
        assert run("mv", "plan", "rain", "--force").status == 0
        assert (names(store), read_session(store / "rain.bin").record.lineage.session_id) == (["rain"], "plan")

    def test_killed_in_between_it_is_finished_by_the_same_again(self, run: Run, store: Path) -> None:
        script = (
            "import sys\nfrom llamakv.cli import app\nfrom llamakv.store import files\n"
            "def wait(*_):\n    print('here', flush=True)\n    sys.stdin.read()\n"
            "files.discard = wait\napp.run(sys.argv[1:])\n"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", script, "mv", "plan", "new"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdin.close()
        child.stdout.close()
        assert names(store) == ["new", "plan", "rain"]
        assert [run("verify", name).status for name in names(store)] == [0, 0, 0]
        assert run("mv", "plan", "new").status == 0
        assert names(store) == ["new", "rain"]
        assert run("verify", "new").status == 0


class TestCp:
    def test_copies_whole_and_up_to_a_turn(self, run: Run, store: Path) -> None:
        ran = run("cp", "plan@turn2", "branch")
        assert ran.status == 0
        assert ran.err.startswith("copied plan@turn2 to branch: 500 tokens, ")
        assert "parent   plan@turn2 (500 tokens)" in run("log", "branch").out
        data = run("cp", "plan", "whole", "--json").document["data"]
        assert set(data) >= {"from", "at", "to_read", "session", "path", "name", "parent_id", "parent_position", "id"}
        assert (data["parent_id"], data["parent_position"], data["to_read"], data["at"]) == ("plan", 700, 0, None)

    def test_says_what_will_be_read_again(self, run: Run, store: Path) -> None:
        words = [f"{number}" for number in range(10)]
        talk(store / "r.bin", *words, kind=MemoryKind.RECURRENT)
        ran = run("cp", "r@turn1", "branch")
        assert ran.err.splitlines()[1] == (
            "note: this model's memory cannot be cut there: 199 tokens will be read again when branch is resumed"
        )
        assert run("cp", "r@turn4", "other", "--json").document["data"]["to_read"] == 0

    def test_a_file_that_ends_like_a_place_is_itself(self, run: Run, session: Path, home: Path) -> None:
        shutil.copy(session, home / "x@turn1")
        assert run("cp", "x@turn1", "branch").err.startswith("copied x@turn1 to branch: 600 tokens")
        assert run("cp", "x@turn1@turn1", "again").err.startswith("copied x@turn1@turn1 to again: 600 tokens")


class TestExportAndImport:
    def test_a_session_goes_out_and_in(self, run: Run, store: Path, home: Path) -> None:
        ran = run("export", "plan", "out.bin")
        assert (ran.status, ran.out) == (0, "")
        assert run("export", "plan", "out.bin").status == 11
        assert run("export", "plan", "out.bin", "--force").status == 0
        record = read_session(store / "plan.bin").record
        assert read_session(home / "out.bin").record == record
        data = run("import", "out.bin", "--store", home / "other", "--json").document["data"]
        assert set(data) >= {"file", "written_bytes", "session", "path", "name", "id", "tokens", "stored_bytes"}
        assert (data["session"], data["path"], data["id"]) == ("plan", str(home / "other" / "plan.bin"), "plan")
        assert read_session(home / "other" / "plan.bin").record == record
        ran = run("import", "out.bin", "again", "--store", home / "other")
        assert ran.err.startswith("imported again: 700 tokens, ")
        assert run("verify", "again", "--store", home / "other").status == 0

    def test_json_of_an_export_has_the_promised_keys(self, run: Run, store: Path, home: Path) -> None:
        data = run("export", "plan@turn1", "out.bin", "--json").document["data"]
        assert set(data) >= {"session", "path", "at", "file", "file_bytes", "id", "tokens", "stored_bytes"}
        assert (data["file"], data["file_bytes"]) == ("out.bin", (home / "out.bin").stat().st_size)
        assert (data["at"], data["tokens"]) == ("turn1", 300)

    def test_a_session_goes_through_a_pipe(self, store: Path, home: Path) -> None:
        out, into = command("export", "plan", "-"), command("import", "-", "piped", "--store", home / "other")
        first = subprocess.Popen(out, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        done = subprocess.run(into, stdin=first.stdout, capture_output=True, text=True, timeout=60)
        assert first.stdout is not None
        assert first.stderr is not None
        first.stdout.close()
        assert (first.wait(), first.stderr.read().startswith(b"exported plan: ")) == (0, True)
        first.stderr.close()
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr.startswith("imported piped: 700 tokens, ")
        assert verify_session(home / "other" / "piped.bin").is_sound

    def test_what_is_piped_is_the_file(self, run: Run, store: Path, home: Path) -> None:
        run("export", "plan", "out.bin")
        done = subprocess.run(command("export", "plan", "-", "-q"), capture_output=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout == (home / "out.bin").read_bytes()

    def test_a_reader_that_went_away_is_no_error_of_ours(self, store: Path) -> None:
        talk(store / "long.bin", *(f"{number}" for number in range(400)))
        child = subprocess.Popen(command("export", "long", "-"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.read(10)
        child.stdout.close()
        assert (child.wait(timeout=60), child.stderr.read()) == (141, b"")
        child.stderr.close()

    def test_a_terminal_gets_no_session(self, store: Path) -> None:
        for arguments, said in (
            (("export", "plan", "-"), "a session is not written to a terminal"),
            (("import", "-"), "standard input is a terminal, not a session"),
        ):
            _, *rest = command(*arguments)
            child = pexpect.spawn(sys.executable, rest, encoding="utf-8", timeout=20, env=dict(os.environ))
            child.expect_exact(said)
            child.expect(pexpect.EOF)
            child.close()
            assert child.exitstatus == 2

    def test_damage_is_named_and_nothing_half_imported_stays(
        self, run: Run, process: Run, store: Path, home: Path
    ) -> None:
        run("export", "plan", "out.bin")
        section = read_session(home / "out.bin").sections[1]
        data = bytearray((home / "out.bin").read_bytes())
        data[section.offset + section.n_stored // 2] ^= 1
        (home / "out.bin").write_bytes(data)
        other = home / "other"
        for ran in (
            run("import", "out.bin", "--store", other),
            process("import", "-", "--store", other, stdin=bytes(data)),
        ):
            assert (ran.status, ran.out) == (13, "")
            assert "cells section [256, 512)" in ran.err
        assert [*other.glob("*.bin"), *other.glob(".objects/??/*")] == []
        assert run("export", "out.bin", "copy.bin").status == 13
        assert not (home / "copy.bin").exists()

    def test_an_index_out_of_a_store_is_refused(self, run: Run, store: Path, home: Path) -> None:
        shutil.copy(store / "plan.bin", home / "index.bin")
        ran = run("import", "index.bin", "x", "--store", home / "other")
        assert ran.status == 13
        assert ran.err.splitlines()[1] == "hint: in that store: llamakv export NAME FILE"
        assert run("import", store / "plan.bin", "x", "--store", home / "other").status == 0


# ---------------------------------------------------------------- places elsewhere


def test_inspect_shows_a_session_as_it_was(run: Run, store: Path) -> None:
    assert "session     plan@turn1 (" in run("inspect", "plan@turn1").out
    data = run("inspect", "plan@turn1", "--json").document["data"]
    assert (data["session"], data["tokens"], data["cells"], data["turns"]) == ("plan@turn1", 300, 299, 1)
    assert run("inspect", "plan@turn1", "--history").out.endswith("assistant:\nTo Rome.\n")
    assert run("inspect", "plan@250").status == 2
    assert run("inspect", "plan@turn9").status == 10


def test_none_of_them_imports_the_engine(run: Run, store: Path, home: Path) -> None:
    """One process runs them one after the other: what one imports is seen after it."""
    lines = (
        "log plan@turn1", "diff plan rain", "tag plan x", "note plan", "pin plan", "cp plan@turn1 x",
        "export plan own.bin", "import own.bin y", "mv plan z",
    )  # fmt: skip
    script = (
        "import sys; from llamakv.cli import app\n"
        "for line in sys.argv[1:]:\n"
        "    status = app.run(line.split())\n"
        "    modules = {name.split('.')[0] for name in sys.modules}\n"
        "    heavy = modules & {'llama_cpp', 'prompt_toolkit', 'jinja2', 'psutil'}\n"
        "    print('imported by', line, status, heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script, *lines], capture_output=True, text=True)
    shown = [line for line in done.stderr.splitlines() if line.startswith("imported by ")]
    assert shown == [f"imported by {line} 0 set()" for line in lines]
