"""ls, rm, inspect, verify and compact."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest

from llamakv.cli.commands import inspect_session as inspect_command
from llamakv.records import MemoryKind, SessionRecord
from llamakv.store.session_file import create_session, extend_session, read_session, truncate_sections
from tests.cli.conftest import Ran, command, make_session
from tests.store import samples


class TestLs:
    def test_an_empty_store_lists_nothing(self, run: Callable[..., Ran]) -> None:
        assert run("ls").out == ""
        assert run("ls", "-q").err == ""
        assert run("ls", "--json").document["data"]["sessions"] == []

    def test_lists_the_newest_first_and_damaged_ones_last(self, run: Callable[..., Ran], home: Path) -> None:
        make_session(home / "store" / "old.bin", 10, n_saves=1)
        make_session(home / "store" / "new.bin", 1234, n_saves=9)
        (home / "store" / "broken.bin").write_bytes(make_session(home / "x.bin").read_bytes()[:300])
        ran = run("ls")
        heading, *rows = ran.out.splitlines()
        assert heading.split() == ["NAME", "TOKENS", "TURNS", "SIZE", "SAVED", "LABELS", "MODEL"]
        assert [row.split()[0] for row in rows] == ["new", "old", "broken"]
        assert "1,234" in rows[0]
        assert "damaged" in rows[2]
        assert ran.status == 0

    def test_json_has_raw_numbers_and_the_error_of_a_damaged_one(self, run: Callable[..., Ran], home: Path) -> None:
        path = make_session(home / "store" / "new.bin", 1234)
        (home / "store" / "broken.bin").write_bytes(b"x" * 500)
        new, broken = run("ls", "--json").document["data"]["sessions"]
        assert (new["name"], new["tokens"], new["cells"], new["turns"]) == ("new", 1234, 1233, 1)
        assert (new["file_bytes"], new["error"]) == (path.stat().st_size, None)
        assert broken["error"]["exit_status"] == 13
        assert "tokens" not in broken

    def test_the_option_names_another_store(self, run: Callable[..., Ran], home: Path) -> None:
        make_session(home / "elsewhere" / "a.bin")
        assert run("ls", "--store", home / "elsewhere").out.splitlines()[1].split()[0] == "a"


class TestRm:
    def test_removes_all_or_nothing(self, run: Callable[..., Ran], home: Path) -> None:
        kept = make_session(home / "store" / "a.bin")
        assert run("rm", "-y", "a", "missing").status == 10
        assert kept.exists()
        other = make_session(home / "b.bin")
        ran = run("rm", "-y", "a", "b.bin")
        assert (ran.status, ran.out, ran.err) == (0, "", "removed a\nremoved b.bin\n")
        assert not kept.exists()
        assert not other.exists()

    def test_json_lists_what_was_removed(self, run: Callable[..., Ran], home: Path) -> None:
        path = make_session(home / "store" / "a.bin")
        assert run("rm", "-y", "a", "--json").document["data"] == {"removed": [str(path)]}

    def test_never_asks_where_nobody_can_answer(self, run: Callable[..., Ran], session: Path) -> None:
        assert run("rm", "session.bin").err.endswith("hint: llamakv rm -y session.bin\n")
        assert session.exists()

    @pytest.mark.parametrize(("answer", "status"), [("y", 0), ("n", 1), ("", 1)])
    def test_asks_on_a_terminal(self, session: Path, answer: str, status: int) -> None:
        _, *arguments = command("rm", "session.bin")
        child = pexpect.spawn(sys.executable, arguments, encoding="utf-8", timeout=20, env=dict(os.environ))
        child.expect_exact("remove session.bin? [y/N] ")
        child.sendline(answer)
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == status
        assert session.exists() is (status == 1)

    def test_a_file_that_is_no_session_is_left_alone(self, run: Callable[..., Ran], home: Path) -> None:
        (home / "notes.txt").write_text("important\n" * 100)
        assert run("rm", "-y", "./notes.txt").status == 13
        assert (home / "notes.txt").exists()


class TestInspect:
    def test_shows_identity_settings_tokens_and_sizes(self, run: Callable[..., Ran], session: Path) -> None:
        ran = run("inspect", session)
        assert (ran.status, ran.err) == (0, "")
        for fact in ("600 · 599 cells · 1 turn", "Tiny é 数据 Q4_1", "abababab", "values q8_0", "temperature 0.7",
                     "llama.cpp 0.5.0 (0c1e570)", "Hi 😀", "[/INST]", "id-0 at position 2"):  # fmt: skip
            assert fact in ran.out
        assert "[512, 599)" in ran.out

    def test_many_sections_are_listed_on_demand(self, run: Callable[..., Ran], home: Path) -> None:
        path = make_session(home / "long.bin", 256 * 20 + 1)
        short, full = run("inspect", path).out, run("inspect", path, "--sections").out
        assert "[4864, 5120)" in short
        assert "8 more sections: --sections lists all 20" in short
        assert re.findall(r"^(\d+) cells ", full, re.MULTILINE) == list(map(str, range(20)))
        assert inspect_command.MOST_ROWS == 12

    def test_json_has_the_promised_keys(self, run: Callable[..., Ran], session: Path) -> None:
        data = run("inspect", session, "--json").document["data"]
        assert set(data) >= {
            "tokens",
            "cells",
            "turns",
            "raw_bytes",
            "stored_bytes",
            "sections",
            "identity",
            "settings",
        }
        assert (data["tokens"], data["cells"], data["turns"]) == (600, 599, 1)
        assert data["file_bytes"] == session.stat().st_size
        assert [(section["p0"], section["p1"]) for section in data["sections"]] == [(0, 256), (256, 512), (512, 599)]
        assert data["raw_bytes"] == sum(section["raw_bytes"] for section in data["sections"])
        assert "messages" not in data

    def test_history_shows_all_messages_with_roles(self, run: Callable[..., Ran], session: Path) -> None:
        assert run("inspect", session, "--history").out == "user:\nHi 😀\n\nassistant:\n[/INST]\n"
        messages = run("inspect", session, "--history", "--json").document["data"]["messages"]
        assert [(message["role"], message["content"]) for message in messages] == [
            ("user", "Hi 😀"),
            ("assistant", "[/INST]"),
        ]

    def test_tokens_are_printed_one_a_line(self, run: Callable[..., Ran], session: Path) -> None:
        expected = list(read_session(session).record.tokens)
        assert [int(line) for line in run("inspect", session, "--tokens").out.split()] == expected
        assert run("inspect", session, "--tokens", "--json").document["data"]["token_ids"] == expected

    def test_a_session_of_one_token_has_no_sections(self, run: Callable[..., Ran], home: Path) -> None:
        path = make_session(home / "one.bin", 1)
        ran = run("inspect", path)
        assert "1 · 0 cells" in ran.out
        assert run("inspect", path, "--json").document["data"]["raw_over_stored"] is None

    @pytest.mark.parametrize("columns", ["40", "80", "200"])
    def test_off_a_terminal_the_width_does_not_matter(
        self, run: Callable[..., Ran], session: Path, columns: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reference = run("inspect", session).out
        monkeypatch.setenv("COLUMNS", columns)
        assert run("inspect", session).out == reference

    def test_recurrent_sessions_show_their_tails(self, run: Callable[..., Ran], home: Path) -> None:
        record: SessionRecord = samples.make_record(100, kind=MemoryKind.RECURRENT)
        create_session(home / "r.bin", record, [samples.tail(50), samples.tail(99)])
        assert "at 99" in run("inspect", "r.bin").out


class TestVerifyAndCompact:
    def test_a_whole_session_is_whole(self, run: Callable[..., Ran], session: Path) -> None:
        assert run("verify", session).out.startswith(f"{session} is whole: 600 tokens, 3 sections")
        assert run("verify", session, "--json").document["data"]["tokens"] == 600

    def test_a_flipped_byte_is_13(self, run: Callable[..., Ran], session: Path) -> None:
        data = bytearray(session.read_bytes())
        section = read_session(session).sections[1]
        data[section.offset + section.n_stored // 2] ^= 1
        session.write_bytes(data)
        ran = run("verify", session)
        assert (ran.status, ran.out) == (13, "")
        assert "positions 256 to 512" in ran.err

    def test_compact_tells_both_sizes(self, run: Callable[..., Ran], session: Path) -> None:
        info = read_session(session)
        keep = truncate_sections(info.sections, 300)
        new = samples.cells_up_to(599, p0=300)
        extend_session(info, samples.make_record(600, n_saves=2), keep=keep, new=new)
        before = session.stat().st_size
        data = run("compact", session, "--json").document["data"]
        assert data["bytes_before"] == before
        assert data["bytes_after"] == session.stat().st_size <= before
        assert run("compact", session).status == 0
