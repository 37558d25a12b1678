"""budget, prune, gc, verify, repair and inspect --store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pytest

from llamakv.cli.commands.values import size_limit, time_limit, time_span
from llamakv.store import files
from llamakv.store.session_file import read_session, verify_session
from llamakv.store.store_folder import StoreBudget, read_budget
from tests.cli.conftest import Ran, make_session
from tests.store import stores
from tests.store.stores import DAY_S, add_session, flip, object_of


@pytest.fixture
def store(home: Path) -> Path:
    """A store of five sessions: two that share, one pinned, one with a tag, one with a time to live of a day."""
    root = home / "store"
    add_session(root, "report", 1200, text=1, idle_s=3 * 3600)
    add_session(root, "report-fork", 900, text=1, idle_s=3 * DAY_S)
    add_session(root, "thesis", 700, text=2, idle_s=9 * DAY_S, pinned=True)
    add_session(root, "ticket", 500, text=3, idle_s=40 * DAY_S, tags=("release",))
    add_session(root, "draft", 300, text=4, idle_s=2 * DAY_S, ttl_s=DAY_S)
    return root


def names(root: Path) -> list[str]:
    return sorted(path.stem for path in root.glob("*.bin"))


def data_of(ran: Ran) -> Any:
    return ran.document["data"]


# ---------------------------------------------------------------- sizes and times


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("17", 17), ("100MB", 100_000_000), ("20GiB", 20 << 30), ("1.5G", 1_500_000_000), ("3 kB", 3000), ("2KiB", 2048),
     ("0.5M", 500_000), ("1TiB", 1 << 40), ("none", float("inf"))],
)  # fmt: skip
def test_sizes(text: str, n_bytes: float) -> None:
    assert size_limit(text) == n_bytes


@pytest.mark.parametrize(
    ("text", "elapsed_s"),
    [("90", 90.0), ("90s", 90.0), ("30m", 1800.0), ("12h", 43200.0), ("7d", 7 * DAY_S), ("2w", 14 * DAY_S),
     ("1.5h", 5400.0), ("none", float("inf"))],
)  # fmt: skip
def test_times(text: str, elapsed_s: float) -> None:
    assert time_limit(text) == elapsed_s
    if text != "none":
        assert time_span(text) == elapsed_s


@pytest.mark.parametrize(
    "arguments",
    [
        ("budget", "--max-bytes", "much"),
        ("budget", "--max-bytes", "0"),
        ("budget", "--max-bytes", "-5"),
        ("budget", "--max-bytes", "1i"),
        ("budget", "--max-bytes", "9999999999GB"),
        ("budget", "--ttl", "soon"),
        ("budget", "--ttl", "0d"),
        ("prune", "--keep-within", "none"),
        ("prune", "--keep-last", "0"),
        ("prune", "--keep-tag", ""),
        ("prune", "--keep-last", "2", "--ttl", "7d"),
    ],
)
def test_what_cannot_be_meant_is_2(run: Callable[..., Ran], store: Path, arguments: tuple[str, ...]) -> None:
    before = stores.files_of(store)
    ran = run(*arguments)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert stores.files_of(store) == before


# ---------------------------------------------------------------- budget


class TestBudget:
    def test_shows_and_sets_what_a_store_may_take(self, run: Callable[..., Ran], store: Path) -> None:
        assert "no limit" in run("budget").out
        ran = run("budget", "--max-bytes", "20GB", "--ttl", "30d")
        assert "may take      20.0 GB · 0% used" in ran.out
        assert "time to live  30 d unused" in ran.out
        assert read_budget(store) == StoreBudget(max_bytes=20_000_000_000, ttl_s=30 * DAY_S)
        assert run("budget", "--max-bytes", "none").status == 0
        assert read_budget(store) == StoreBudget(ttl_s=30 * DAY_S)
        assert names(store) == ["draft", "report", "report-fork", "thesis", "ticket"]

    def test_json_has_raw_numbers(self, run: Callable[..., Ran], store: Path) -> None:
        n_bytes = stores.n_bytes_on_disk(store)
        data = data_of(run("budget", "--max-bytes", "10kB", "--json"))
        assert data == {
            "store": str(store),
            "max_bytes": 10_000,
            "ttl_s": None,
            "effective_max_bytes": 10_000,
            "effective_ttl_s": None,
            "bytes": n_bytes,
            "sessions": 5,
            "over_bytes": n_bytes - 10_000,
        }
        assert "llamakv prune" in run("budget").err

    def test_the_environment_overrides_it(
        self, run: Callable[..., Ran], store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run("budget", "--max-bytes", "1GB")
        monkeypatch.setenv("LLAMAKV_MAX_BYTES", "2GB")
        monkeypatch.setenv("LLAMAKV_TTL", "12h")
        ran = run("budget")
        assert "2.0 GB · 0% used ($LLAMAKV_MAX_BYTES)" in ran.out
        assert "12 h unused ($LLAMAKV_TTL)" in ran.out
        assert (data_of(run("budget", "--json"))["max_bytes"], read_budget(store).max_bytes) == (10**9, 10**9)
        monkeypatch.setenv("LLAMAKV_TTL", "soon")
        assert run("budget").err.startswith("error: LLAMAKV_TTL: 'soon' is not a time")
        assert run("budget").status == 2

    def test_makes_a_store_that_is_not_there(self, run: Callable[..., Ran], home: Path) -> None:
        assert run("budget").status == 0
        assert not (home / "store").exists()
        assert run("budget", "--ttl", "7d").status == 0
        assert read_budget(home / "store").ttl_s == 7 * DAY_S


# ---------------------------------------------------------------- prune and gc


class TestPrune:
    def test_without_rules_only_what_expired_goes(self, run: Callable[..., Ran], store: Path) -> None:
        ran = run("prune")
        heading, *rows, last = ran.out.splitlines()
        assert heading.split() == ["NAME", "USED", "SIZE", "WHY"]
        assert [row.split()[:2] for row in rows] == [
            ["kept", "report"],
            ["removed", "draft"],
            ["kept", "report-fork"],
            ["kept", "thesis"],
            ["kept", "ticket"],
        ]
        assert "unused for more than 1 d" in rows[1]
        assert last.startswith("removed 1 of 5 sessions, freed ")
        assert (ran.status, names(store)) == (0, ["report", "report-fork", "thesis", "ticket"])

    def test_rules_keep_what_any_of_them_keeps(self, run: Callable[..., Ran], store: Path) -> None:
        ran = run("prune", "--keep-last", "1", "--keep-within", "60h", "--keep-tag", "release", "--json")
        reasons = {session["name"]: session["reason"] for session in data_of(ran)["sessions"]}
        assert reasons == {
            "report": "last",
            "draft": "within",
            "report-fork": "no_rule",
            "thesis": "pinned",
            "ticket": "tag",
        }
        assert data_of(ran)["removed"] == ["report-fork"]
        assert names(store) == ["draft", "report", "thesis", "ticket"]
        assert verify_session(store / "report.bin").is_sound

    def test_a_dry_run_changes_nothing_and_counts_what_is_shared_right(
        self, run: Callable[..., Ran], store: Path
    ) -> None:
        before, n_before = stores.files_of(store), stores.n_bytes_on_disk(store)
        dry = run("prune", "--keep-last", "1", "--dry-run", "--json")
        assert stores.files_of(store) == before
        real = run("prune", "--keep-last", "1", "--json")
        freed = data_of(real)["freed_bytes"]
        assert freed == data_of(dry)["freed_bytes"] == n_before - stores.n_bytes_on_disk(store)
        assert data_of(dry)["removed"] == data_of(real)["removed"] == ["draft", "report-fork", "ticket"]

    def test_the_words_of_a_dry_run_are_not_those_of_a_real_one(self, run: Callable[..., Ran], store: Path) -> None:
        out = run("prune", "--keep-last", "1", "--dry-run").out
        assert "would go" in out
        assert "would remove 3 of 5 sessions and free " in out
        assert "no rule keeps it" in out
        assert "among the last 1 used" in out

    def test_a_budget_takes_what_was_unused_for_longest(self, run: Callable[..., Ran], store: Path) -> None:
        run("budget", "--max-bytes", str(stores.n_bytes_on_disk(store) - 30_000))
        ran = run("prune")
        assert "ticket" not in names(store)
        assert "over the budget of" in ran.out
        assert run("prune").out.splitlines()[-1].startswith("nothing to remove: 3 sessions")

    def test_one_that_is_being_written_is_skipped_with_3(self, run: Callable[..., Ran], store: Path) -> None:
        with files.locked(store / "ticket.bin"):
            ran = run("prune", "--keep-last", "1")
            data = run("prune", "--keep-last", "1", "--json").document
        assert ran.status == 3
        assert "warning: 'ticket' is being written, or was used meanwhile: left alone" in ran.err
        assert names(store) == ["report", "thesis", "ticket"]
        assert (data["status"], data["data"]["sessions"][-1]["skipped"]) == ("partial", True)

    def test_what_cannot_be_told_removes_nothing(self, run: Callable[..., Ran], store: Path) -> None:
        (store / "bad.bin").write_bytes(b"x" * 3000)
        before = stores.files_of(store)
        for arguments in (("prune", "--keep-last", "1"), ("prune", "--dry-run"), ("gc",), ("gc", "--dry-run")):
            ran = run(*arguments)
            assert (ran.status, ran.out) == (13, "")
            assert "llamakv repair" in ran.err
        assert stores.files_of(store) == before

    def test_pinned_sessions_over_the_budget_are_15(self, run: Callable[..., Ran], store: Path) -> None:
        before = stores.files_of(store)
        ran = run("prune", "--max-bytes", "1kB")
        assert (ran.status, ran.out) == (15, "")
        assert "(thesis)" in ran.err
        assert stores.files_of(store) == before

    def test_quiet_says_nothing_but_trouble(self, run: Callable[..., Ran], store: Path) -> None:
        ran = run("prune", "-q", "--keep-last", "1")
        assert (ran.status, ran.out, ran.err) == (0, "", "")
        assert names(store) == ["report", "thesis"]

    def test_who_sets_no_limit_is_told_how(self, run: Callable[..., Ran], home: Path) -> None:
        add_session(home / "store", "one")
        ran = run("prune")
        assert "llamakv budget --max-bytes" in ran.err
        ran = run("prune", "--store", home / "none")
        assert ran.status == 10
        assert "there is no store" in ran.err

    def test_kill_9_leaves_whole_sessions(self, run: Callable[..., Ran], store: Path) -> None:
        script = (
            "import os, signal, sys; from llamakv.cli import app; from llamakv.store import files; "
            "files.discard = lambda path: os.kill(os.getpid(), signal.SIGKILL); app.run(sys.argv[1:])"
        )
        done = subprocess.run([sys.executable, "-c", script, "prune", "--keep-last", "1"])
        assert done.returncode == -signal.SIGKILL
        assert names(store) == ["report", "thesis"]
        assert all(verify_session(path).is_sound for path in store.glob("*.bin"))
        assert run("gc").out.startswith("removed ")
        assert run("verify").status == 0


class TestGc:
    def test_removes_what_no_session_refers_to(self, run: Callable[..., Ran], store: Path) -> None:
        assert run("gc").out == "nothing to remove\n"
        n_freed = read_session(store / "draft.bin").n_stored_bytes
        files.remove(store / "draft.bin")
        (store / ".llamakv-0011223344556677.tmp").touch()
        dry = run("gc", "--dry-run", "--json")
        assert data_of(dry)["object_bytes"] == n_freed
        assert run("gc", "--dry-run").out.startswith("would remove 2 sections of no session, ")
        ran = run("gc")
        assert ran.out.startswith("removed 2 sections of no session, ")
        assert ran.out.endswith(", and 1 temporary file\n")
        assert data_of(run("gc", "--json"))["objects"] == 0


class TestSaving:
    """B77 and B78, with a real model: the budget is kept by those who save."""

    @pytest.fixture
    def saved(self, run: Callable[..., Ran], home: Path, model: Path) -> Path:
        for index, name in enumerate(("one", "two")):
            (home / f"{name}.txt").write_text(f"{name} " * 120)
            assert run("save", "--raw", "-f", f"{name}.txt", "-t", "1", name).status == 0
            stores.set_idle(home / "store" / f"{name}.bin", 1000 - index)
        (home / "three.txt").write_text("three " * 120)
        return home / "store"

    def test_what_was_unused_for_longest_makes_room(self, run: Callable[..., Ran], saved: Path) -> None:
        most = str(stores.n_bytes_on_disk(saved) * 5 // 4)
        ran = run("save", "--raw", "-f", "three.txt", "-t", "1", "three", "--max-bytes", most)
        assert ran.status == 0
        assert "note: removed one: unused for longest" in ran.err
        assert names(saved) == ["three", "two"]
        assert stores.n_bytes_on_disk(saved) <= int(most)
        assert run("verify").status == 0

    def test_what_cannot_fit_is_15_and_changes_nothing(self, run: Callable[..., Ran], saved: Path) -> None:
        run("budget", "--max-bytes", "2kB")
        before = stores.files_of(saved)
        ran = run("save", "--raw", "-f", "three.txt", "-t", "1", "three")
        assert ran.status == 15
        assert "budget of 2.0 kB is too small" in ran.err
        assert stores.files_of(saved) == before

    def test_a_resumed_session_is_kept_however_often_it_is_read(self, run: Callable[..., Ran], saved: Path) -> None:
        run("budget", "--ttl", "5m")
        stores.set_idle(saved / "two.bin", 200)
        for _ in range(3):
            ran = run("load", "two", "-p", "and", "--max-tokens", "2", "-t", "1", "--json")
            assert ran.document["data"]["evaluated"] < 10
        ran = run("save", "--raw", "-f", "three.txt", "-t", "1", "three")
        assert "note: removed one: unused for longer than the time to live" in ran.err
        assert names(saved) == ["three", "two"]

    def test_a_session_can_have_a_time_of_its_own(self, run: Callable[..., Ran], saved: Path) -> None:
        more = ("save", "--raw", "-f", "three.txt", "-t", "1", "three")
        assert run(*more, "--ttl", "12h").status == 0
        assert read_session(saved / "three.bin").record.lineage.ttl_s == 12 * 3600
        (saved.parent / "three.txt").write_text("three " * 130)
        assert run(*more).status == 0
        assert read_session(saved / "three.bin").record.lineage.ttl_s == 12 * 3600
        (saved.parent / "three.txt").write_text("three " * 140)
        assert run(*more, "--ttl", "none").status == 0
        assert read_session(saved / "three.bin").record.lineage.ttl_s is None


# ---------------------------------------------------------------- verify and repair


class TestVerify:
    def test_a_whole_store_is_whole(self, run: Callable[..., Ran], store: Path) -> None:
        ran = run("verify")
        assert (ran.status, ran.err) == (0, "")
        assert ran.out.startswith(f"{store} is whole: 5 sessions, ")
        assert "has all its parts" in run("verify", "--fast").out
        data = data_of(run("verify", "--json"))
        assert (data["wrong"], len(data["sessions"]), data["bad_objects"]) == (0, 5, [])

    def test_all_that_is_wrong_is_told_with_whom_it_hits(self, run: Callable[..., Ran], store: Path) -> None:
        flip(object_of(store, "report", 1))
        object_of(store, "ticket", 1).unlink()
        (store / "junk.bin").write_bytes(b"x" * 3000)
        (store / ".store").write_text("{")
        ran = run("verify")
        lines = [line.split() for line in ran.out.splitlines()]
        assert ["damaged", ".store,", "the", "budget"] in lines
        assert ["damaged", "session", "junk", "junk"] in lines
        assert any(line[0] == "damaged" and line[3:] == ["report", "and", "report-fork"] for line in lines if line)
        assert any(line[0] == "missing" and line[3:] == ["ticket"] for line in lines if line)
        assert ["report", "1,200", "of", "the", "first", "256", "tokens"] in lines
        assert ran.status == 13
        assert (
            ran.err
            == f"error: 4 things are wrong in the store '{store}'\nhint: llamakv repair keeps all that is sound\n"
        )
        document = run("verify", "--json").document
        assert (document["status"], document["errors"][0]["exit_status"]) == ("error", 13)
        hit = {
            session["name"]: session["usable_cells"] for session in document["data"]["sessions"] if session["damage"]
        }
        assert hit == {"report": 256, "report-fork": 256, "ticket": 256}

    def test_several_sessions_each_get_their_line(self, run: Callable[..., Ran], store: Path) -> None:
        flip(object_of(store, "draft", 0))
        ran = run("verify", "thesis", "draft", "report")
        assert [line.split()[0] for line in ran.out.splitlines()] == ["thesis", "report"]
        assert ran.status == 13
        assert f"{store}/draft.bin is damaged: 1 of 2 sections, the first at positions 0 to 256: " in ran.err
        assert "keeps its 300 tokens and the state of the first 0" in ran.err
        assert run("verify", "--fast", "draft").status == 0

    def test_sections_of_no_session_are_mentioned(self, run: Callable[..., Ran], store: Path) -> None:
        files.remove(store / "draft.bin")
        ran = run("verify")
        assert ran.status == 0
        assert ran.err.startswith("2 sections of no session: ")

    @pytest.mark.slow
    def test_progress_is_shown_on_a_terminal(self, store: Path, home: Path) -> None:
        script = (
            "import sys, time; from llamakv.cli import app; from llamakv.store import checking; "
            "real = checking._check; "
            "checking._check = lambda *a, **b: (time.sleep(0.2), real(*a, **b))[1]; app.run(sys.argv[1:])"
        )
        child = pexpect.spawn(sys.executable, ["-c", script, "verify"], encoding="utf-8", timeout=30, env=os.environ)
        child.expect("checking")
        child.expect(r"is whole: 5 sessions")
        child.expect(pexpect.EOF)

    def test_ctrl_c_stops_it(self, store: Path) -> None:
        script = (
            "import os, signal, sys; from llamakv.cli import app; from llamakv.store import checking; "
            "real = checking._check; "
            "checking._check = lambda *a, **b: (os.kill(os.getpid(), signal.SIGINT), real(*a, **b))[1]; "
            "sys.exit(app.run(sys.argv[1:]))"
        )
        done = subprocess.run([sys.executable, "-c", script, "verify"], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (130, "")


class TestRepair:
    def test_says_what_is_kept_and_what_is_to_be_read_again(self, run: Callable[..., Ran], store: Path) -> None:
        flip(object_of(store, "report", 1))
        before = read_session(store / "report.bin")
        dry = run("repair", "--dry-run")
        assert dry.status == 13
        assert "would repair 2 of 5 sessions: all tokens and messages are kept" in dry.out
        assert read_session(store / "report.bin").commit == before.commit
        ran = run("repair")
        assert (ran.status, ran.err) == (0, "")
        assert ["report", "1,200", "256", "943", "1", "of", "5", "sections", "damaged"] in [
            line.split() for line in ran.out.splitlines()
        ]
        assert "repaired 2 of 5 sessions" in ran.out
        assert "removed 1 damaged section" in ran.out
        assert run("repair").out == "nothing wrong in 5 sessions\n"
        assert run("verify").status == 0
        assert "256 of 1,200 tokens have it" in run("verify", "report").out
        after = read_session(store / "report.bin")
        assert (after.record, after.n_cells_held) == (before.record, 256)

    def test_a_session_file_is_repaired(self, run: Callable[..., Ran], session: Path) -> None:
        section = read_session(session).sections[1]
        flip(session, lambda n: section.offset + section.n_stored // 2)
        assert run("verify", session).status == 13
        data = data_of(run("repair", session, "--json"))
        assert (data["sound"], data["sessions"][0]["outcome"]) == (True, "repaired")
        assert (data["sessions"][0]["kept_cells"], data["sessions"][0]["tokens_to_read"]) == (256, 343)
        assert run("verify", session).status == 0

    def test_what_cannot_be_read_is_moved_aside_in_a_store_and_left_elsewhere(
        self, run: Callable[..., Ran], store: Path, home: Path
    ) -> None:
        for path in (store / "junk.bin", home / "junk.bin"):
            path.write_bytes(b"x" * 3000)
        ran = run("repair")
        assert (ran.status, (store / "junk.bin.damaged").exists()) == (0, True)
        assert "moved aside 1 file that cannot be read" in ran.out
        assert [session["name"] for session in data_of(run("ls", "--json"))["sessions"] if session["error"]] == []
        elsewhere = run("repair", "./junk.bin")
        assert (elsewhere.status, (home / "junk.bin").exists()) == (13, True)
        assert "was left alone" in elsewhere.err

    def test_one_that_is_being_written_is_skipped_with_3(
        self, run: Callable[..., Ran], store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("llamakv.store.locks.locked.__wrapped__.__kwdefaults__", {"wait_s": 0.0})
        flip(object_of(store, "ticket", 1))
        with files.locked(store / "ticket.bin"):
            ran = run("repair")
        assert ran.status == 3
        assert "ticket was left alone" in ran.err
        assert run("repair").status == 0

    def test_a_damaged_budget_is_written_again(self, run: Callable[..., Ran], store: Path) -> None:
        (store / ".store").write_text("{")
        assert run("budget").status == 13
        assert "wrote the store's own file again, without a budget" in run("repair").out
        assert run("budget").status == 0


# ---------------------------------------------------------------- inspect --store


class TestInspectStore:
    @pytest.mark.parametrize(
        "arguments",
        [("--store",), ("--store", "--json"), ("--json", "--store"), ("--store", "{}", "--json"), ("--store={}",)],
    )
    def test_without_a_session_the_option_means_the_store(
        self, run: Callable[..., Ran], store: Path, arguments: tuple[str, ...]
    ) -> None:
        ran = run("inspect", *(argument.format(store) for argument in arguments))
        assert (ran.status, ran.err) == (0, "")
        assert str(store) in ran.out

    def test_json_has_sizes_by_session_and_by_model(self, run: Callable[..., Ran], store: Path) -> None:
        data = data_of(run("inspect", "--store", "--json"))
        assert data["bytes"] == stores.n_bytes_on_disk(store) == data["index_bytes"] + data["object_bytes"]
        sessions = {session["name"]: session for session in data["sessions"]}
        assert next(iter(sessions)) == "thesis"  # takes most for itself
        shared = sum(section.n_stored for section in read_session(store / "report-fork.bin").sections[:3])
        assert sessions["report"]["shared_bytes"] == sessions["report-fork"]["shared_bytes"] == shared
        for name, session in sessions.items():
            info = read_session(store / f"{name}.bin")
            assert session["unique_bytes"] + session["shared_bytes"] == info.n_stored_bytes + info.n_file_bytes
        apart = sum(read_session(path).n_stored_bytes for path in store.glob("*.bin"))
        assert data["apart_over_stored"] == apart / data["object_bytes"]
        assert data["raw_over_stored"] == data["raw_bytes"] / data["object_bytes"]
        assert (data["pinned"], data["used_first"], data["used_last"]) == (1, "ticket", "report")
        assert [(model["sessions"], model["bytes"]) for model in data["models"]] == [(5, data["bytes"])]

    def test_says_what_pruning_would_free(self, run: Callable[..., Ran], store: Path) -> None:
        files.remove(store / "report-fork.bin")
        data = data_of(run("inspect", "--store", "--json"))
        assert data["orphaned_objects"] == 1
        assert data["prunable_bytes"] == data_of(run("prune", "--dry-run", "--json"))["freed_bytes"]
        assert "1 section of no session" in run("inspect", "--store").out
        assert data_of(run("prune", "--json"))["freed_bytes"] == data["prunable_bytes"]
        assert data_of(run("inspect", "--store", "--json"))["prunable_bytes"] == 0

    def test_goes_on_past_a_damaged_session(self, run: Callable[..., Ran], store: Path) -> None:
        (store / "junk.bin").write_bytes(b"x" * 3000)
        ran = run("inspect", "--store")
        assert ran.status == 0
        assert "1 that cannot be read (llamakv repair)" in ran.out
        assert "junk cannot be read" in ran.err

    def test_lists_twenty_sessions(self, run: Callable[..., Ran], home: Path) -> None:
        for index in range(23):
            add_session(home / "store", f"s{index}", 2, text=index)
        ran = run("inspect", "--store")
        assert ran.out.splitlines()[-1] == "3 more sessions: --json lists all"
        assert len(data_of(run("inspect", "--store", "--json"))["sessions"]) == 23

    def test_a_session_is_inspected_as_before(self, run: Callable[..., Ran], store: Path, home: Path) -> None:
        make_session(home / "other" / "one.bin", 20)
        for arguments in (("one", "--store", home / "other"), ("--store", home / "other", "one")):
            assert "20 · 19 cells" in run("inspect", *arguments).out
        assert "1,200 · 1,199 cells" in run("inspect", "report", "--store").out

    def test_neither_is_2_and_a_store_that_is_not_there_10(self, run: Callable[..., Ran], home: Path) -> None:
        for arguments in ((), ("--json",), ("--", ), ("--history", "--store")):  # fmt: skip
            assert run("inspect", *arguments).status == 2
        assert run("inspect").err == (
            "error: missing argument 'REF': a session, or --store alone\nhint: llamakv inspect --store\n"
        )
        assert run("inspect", "--store", home / "none").status == 10
        assert run("inspect", "--store").status == 0  # the default store, that is not there yet
