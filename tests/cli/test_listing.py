"""ls: labels, tags, lineage, and the cache behind it."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pexpect
import pytest

from llamakv.cli import render
from llamakv.cli.commands.options import session_names
from llamakv.ops.listing import list_sessions
from llamakv.ops.tree import tree_of
from llamakv.store import session_reader
from llamakv.store.session_file import read_session
from llamakv.store.store_folder import StoreBudget, make_store, write_budget
from tests.cli.conftest import Ran, command
from tests.store import samples
from tests.store.indexes import rows_of, write_index


def add(
    root: Path, name: str, n_tokens: int = 100, *, parent: str | None = None, at: int | None = None, **lineage: Any
) -> Path:
    """A session whose id is its name, saved now; ``parent`` is the id of the one it was branched off from."""
    make_store(root)
    record = samples.make_record(n_tokens)
    values = {"tags": (), "note": "", "updated_s": time.time(), **lineage}
    new = replace(record.lineage, session_id=name, parent_id=parent, parent_position=at, **values)
    path = root / f"{name}.bin"
    write_index(path, replace(record, lineage=new), rows_of(record.kind, n_tokens - 1))
    return path


@pytest.fixture
def root(home: Path) -> Path:
    """A plan with two branches, one of them with one of its own, a branch of one that is gone, and a damaged file."""
    root = home / "store"
    now_s = time.time()
    add(root, "plan", 1200, tags=("work", "holiday"), pinned=True, updated_s=now_s - 5)
    add(root, "plan-b", 1300, parent="plan", at=1200, updated_s=now_s - 4)
    add(root, "plan-c", 900, parent="plan", at=800, tags=("work",), ttl_s=7 * 86400.0 + 60, updated_s=now_s - 3)
    add(root, "plan-c-2", 1000, parent="plan-c", at=900, note="incomplete: stopped", updated_s=now_s - 2)
    add(root, "lost", 100, parent="gone", at=50, updated_s=now_s - 1)
    (root / "broken.bin").write_bytes(b"x" * 600)
    return root


def terminal(columns: int, *arguments: str) -> list[str]:
    _, *words = command(*arguments)
    child = pexpect.spawn(
        sys.executable, words, dimensions=(60, columns), encoding="utf-8", timeout=30,
        env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    return str(child.before).replace("\r\n", "\n").splitlines()


# ---------------------------------------------------------------- the table


@pytest.mark.usefixtures("root")
def test_labels_are_a_column_where_there_are_any(run: Callable[..., Ran]) -> None:
    heading, *rows = run("ls").out.splitlines()
    assert heading.split() == ["NAME", "TOKENS", "TURNS", "SIZE", "SAVED", "LABELS", "MODEL"]
    start, end = heading.index("LABELS"), heading.index("MODEL")
    labels = {row.split()[0]: row[start:end].strip() for row in rows}
    assert labels == {
        "lost": "",
        "plan-c-2": "incomplete",
        "plan-c": "#work 7 d left",
        "plan-b": "",
        "plan": "pinned #work #holiday",
        "broken": "",
    }
    assert [row.split()[0] for row in rows] == ["lost", "plan-c-2", "plan-c", "plan-b", "plan", "broken"]


def test_without_labels_there_is_no_column_for_them(run: Callable[..., Ran], home: Path) -> None:
    add(home / "store", "a")
    assert run("ls").out.splitlines()[0].split() == ["NAME", "TOKENS", "TURNS", "SIZE", "SAVED", "MODEL"]


def test_a_session_is_as_large_as_its_index_and_the_sections_it_refers_to(run: Callable[..., Ran], home: Path) -> None:
    path = add(home / "store", "a", 2000)
    n_objects = sum(section.n_stored for section in read_session(path).sections)
    assert render.size(path.stat().st_size + n_objects) in run("ls").out
    (found,) = run("ls", "--json").document["data"]["sessions"]
    assert (found["file_bytes"], found["object_bytes"]) == (path.stat().st_size, n_objects)


def test_sessions_expire_as_they_say_or_as_their_store_does(
    run: Callable[..., Ran], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = home / "store"
    add(root, "own", ttl_s=3600.0)
    add(root, "any")
    add(root, "pinned", pinned=True)
    write_budget(root, StoreBudget(ttl_s=86400.0))
    used_s = time.time() - 7200
    for name in ("own", "any", "pinned"):
        os.utime(root / f"{name}.bin", (used_s, used_s))

    def found() -> dict[str, float | None]:
        sessions = run("ls", "--json").document["data"]["sessions"]
        return {session["name"]: session["expires_s"] for session in sessions}

    assert found() == {"own": pytest.approx(used_s + 3600), "any": pytest.approx(used_s + 86400), "pinned": None}
    table = {line.split()[0]: line for line in run("ls").out.splitlines()}
    assert "expired" in table["own"]
    assert "22 h left" in table["any"]
    monkeypatch.setenv("LLAMAKV_TTL", "none")
    assert found() == {"own": pytest.approx(used_s + 3600), "any": None, "pinned": None}


def test_json_tells_lineage_and_labels(run: Callable[..., Ran], root: Path) -> None:
    sessions = {session["name"]: session for session in run("ls", "--json").document["data"]["sessions"]}
    plan = sessions["plan-c"]
    assert (plan["id"], plan["parent_id"], plan["parent_position"]) == ("plan-c", "plan", 800)
    assert (plan["tags"], plan["note"], plan["pinned"], plan["ttl_s"]) == (["work"], "", False, 7 * 86400.0 + 60)
    assert plan["used_s"] == pytest.approx((root / "plan-c.bin").stat().st_mtime)
    assert set(plan) >= {
        "name", "path", "file_bytes", "error", "id", "kind", "tokens", "cells", "turns", "raw_bytes", "stored_bytes",
        "n_saves", "created_s", "updated_s", "identity", "settings",
    }  # fmt: skip
    assert plan["path"] == str(root / "plan-c.bin")
    assert plan["identity"]["name"] == "Tiny é 数据"
    assert set(sessions["broken"]) == {"name", "path", "file_bytes", "error"}


@pytest.mark.usefixtures("root")
def test_a_terminal_of_80_columns_has_room_for_the_table_and_the_tree() -> None:
    table = terminal(80, "ls")
    assert max(map(len, table)) <= 80
    assert "7 d left" in "".join(table)
    assert "pinned #work #holiday" in "".join(table)
    tree = terminal(80, "ls", "--tree")
    assert max(map(len, tree)) <= 80


def test_long_names_are_shown_whole_on_any_terminal(home: Path) -> None:
    name = "a-rather-long-name-for-a-session-" * 4
    add(home / "store", name)
    assert "".join(line.split(" ")[0] for line in terminal(50, "ls")[1:]) == name
    assert name in "".join(terminal(50, "ls", "--tree"))


# ---------------------------------------------------------------- tags


@pytest.mark.usefixtures("root")
def test_only_sessions_with_all_the_tags_are_shown(run: Callable[..., Ran]) -> None:
    def names(*arguments: str) -> list[str]:
        return [session["name"] for session in run("ls", "--json", *arguments).document["data"]["sessions"]]

    assert names("--tag", "work") == ["plan-c", "plan"]
    assert names("--tag", "work", "--tag", "holiday") == ["plan"]
    assert names("--tag", "nothing") == []
    ran = run("ls", "--tag", "work", "--tag", "nothing")
    assert (ran.status, ran.out) == (0, "")
    assert ran.err.endswith("with 'work' and 'nothing'\n")
    assert run("ls", "--tag", "").status == 2


# ---------------------------------------------------------------- the tree


@pytest.mark.usefixtures("root")
def test_each_session_is_below_the_one_it_was_branched_off_from(run: Callable[..., Ran]) -> None:
    lines = run("ls", "--tree").out.splitlines()
    assert [re.sub(r"(?<=\w)  .*", "", line) for line in lines] == [
        "lost",
        "plan",
        "├── plan-c",
        "│   └── plan-c-2",
        "└── plan-b",
        "broken",
    ]
    assert "from one that is gone at 50 · 100 tokens · 1 turn" in lines[0]
    assert "at 800 · 900 tokens" in lines[2]
    assert "after turn 1 · 1,000 tokens" in lines[3]
    assert "incomplete" in lines[3]
    assert "damaged · not a llamakv session" in lines[5]


@pytest.mark.usefixtures("root")
def test_a_parent_that_is_not_shown_is_named(run: Callable[..., Ran], home: Path) -> None:
    add(home / "store", "far", parent="plan-b", at=1300, tags=("far",))
    assert "far  from plan-b after turn 1" in run("ls", "--tree", "--tag", "far").out


@pytest.mark.usefixtures("root")
def test_the_tree_as_json_is_the_list(run: Callable[..., Ran]) -> None:
    assert run("ls", "--tree", "--json").document["data"] == run("ls", "--json").document["data"]


def _tree_names(root: Path) -> list[tuple[str, int]]:
    found = list_sessions(root)
    return [(entry.session.name, entry.depth) for entry in tree_of(found, found)]


@pytest.mark.parametrize(
    ("parents", "expected"),
    [
        ({"a": "a"}, [("a", 0)]),
        ({"a": "b", "b": "a"}, [("a", 0), ("b", 1)]),
        ({"a": "b", "b": "c", "c": "b"}, [("b", 0), ("a", 1), ("c", 1)]),
        ({"a": None, "b": "a", "c": "d", "d": "c"}, [("a", 0), ("b", 1), ("c", 0), ("d", 1)]),
    ],
)
def test_rings_end(home: Path, parents: dict[str, str | None], expected: Sequence[tuple[str, int]]) -> None:
    for index, (name, parent) in enumerate(parents.items()):
        add(home / "store", name, parent=parent, at=1, updated_s=1000.0 - index)
    found = _tree_names(home / "store")
    assert sorted(found) == sorted(expected)
    assert len(found) == len(parents)


def test_of_two_sessions_with_one_id_the_newest_is_the_parent(home: Path) -> None:
    add(home / "store", "old", updated_s=1.0)
    add(home / "store", "new", updated_s=2.0)
    for name in ("old", "new"):
        path = home / "store" / f"{name}.bin"
        info = read_session(path)
        lineage = replace(info.record.lineage, session_id="same")
        write_index(path, replace(info.record, lineage=lineage), info.sections)
    add(home / "store", "child", parent="same", at=3, updated_s=3.0)
    assert _tree_names(home / "store") == [("new", 0), ("child", 1), ("old", 0)]


@pytest.mark.slow
def test_a_line_of_thousands_of_branches_is_drawn(run: Callable[..., Ran], home: Path) -> None:
    root = home / "store"
    for index in range(1000):
        add(root, f"s{index:04}", 2, parent=f"s{index - 1:04}" if index else None, at=1, updated_s=float(index))
    lines = run("ls", "--tree").out.splitlines()
    assert len(lines) == 1000
    assert lines[-1].lstrip("⋯ ").startswith("└── s0999")
    assert max(map(len, lines)) < 130


# ---------------------------------------------------------------- reading as little as can be


def test_completing_a_name_reads_no_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_reader.files, "open_for_reading", pytest.fail)
    assert session_names(root) == ["broken", "lost", "plan", "plan-b", "plan-c", "plan-c-2"]
    assert session_names(root / "missing") == []


def test_listing_a_store_that_is_not_there_makes_none(run: Callable[..., Ran], home: Path) -> None:
    assert run("ls").err == f"no sessions in {home / 'store'}\n"
    assert not (home / "store").exists()


def test_a_damaged_cache_does_not_show(run: Callable[..., Ran], root: Path) -> None:
    first = run("ls").out
    (root / ".cache" / "sessions.sqlite").write_bytes(b"x" * 5000)
    assert run("ls").out == first
    assert run("ls").err == ""
