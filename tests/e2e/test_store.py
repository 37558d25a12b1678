"""Sessions by name: what one run of the program saves, others resume, fork and remove at the same time, and are killed.

Each session goes on with the same tokens as one that a single run made, alone in its store.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llamakv.store.collector import session_files
from llamakv.store.objects import Objects
from llamakv.store.session_file import read_session, verify_session
from tests.conftest import TinyModels
from tests.e2e.programs import GREEDY, Program, Ran, finish
from tests.store.at_rest import left_over, referenced, there

TURNS = ("tell me of the river", "more", "and then?", "why?", "go on", "is that all?", "the end")
QUESTION = "what is it about?"
FORK = ("fork", *GREEDY, "--parallel", "1", "--force")


class Store:
    """The program with a store of its own."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program, self.folder = program, folder

    def here(self, command: str, *arguments: str | Path) -> Ran:
        return self.program.here(command, *arguments, "--store", self.folder)

    def start(self, command: str, *arguments: str | Path) -> subprocess.Popen[str]:
        return self.program.start(command, *arguments, "--store", self.folder)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.bin"

    def tokens(self, name: str) -> tuple[int, ...]:
        """The tokens of a session, whose sections are sound; none if there is no such session."""
        if not self.path(name).exists():
            return ()
        report = verify_session(self.path(name))
        assert report.is_sound
        return report.info.record.tokens

    def check_nothing_leaks(self) -> None:
        """After collecting there is what the sessions refer to, and what was computed from it."""
        assert self.here("gc", "-q").status == 0
        assert there(self.folder) == referenced(self.folder)
        assert [path for path in left_over(self.folder) if ".cache" not in path.parts] == []


@pytest.fixture
def store(program: Program, tmp_path: Path) -> Store:
    return Store(program, tmp_path / "store")


@dataclass(frozen=True)
class Expected:
    """The tokens of a session after each number of turns, and of its forks made then; of the first turn on."""

    tokens: tuple[tuple[int, ...], ...]
    forks: frozenset[tuple[int, ...]]


def said(name: str, turn: str) -> str:
    return f"{name}, {turn}"


def expected(program: Program, folder: Path, name: str, n_turns: int) -> Expected:
    """What runs say that nothing interrupts, each alone in a store."""
    tokens: list[tuple[int, ...]] = [()]
    forks = set()
    for n in range(1, n_turns + 1):
        alone = Store(program, folder / f"{name}-{n}")
        messages = [word for turn in TURNS[:n] for word in ("--message", said(name, turn))]
        assert alone.here("chat", *GREEDY, *messages, "--save", name).status == 0
        assert alone.here(*FORK, name, QUESTION, "--save-as", "fork").status == 0
        tokens.append(alone.tokens(name))
        forks.add(alone.tokens("fork"))
        shutil.rmtree(alone.folder)
    return Expected(tuple(tokens), frozenset(forks))


# ---------------------------------------------------------------- one at a time


def test_a_fork_costs_its_index_and_goes_on_when_its_parent_is_gone(store: Store, tmp_path: Path) -> None:
    long = said("notes", "a long story. " * 60)
    assert store.here("chat", *GREEDY, "--message", long, "--save", "notes").status == 0
    alone = Store(store.program, tmp_path / "alone")
    shutil.copytree(store.folder, alone.folder)
    n_before = len(there(store.folder))
    assert n_before > 1
    assert store.here(*FORK, "notes", QUESTION, "--save-as", "fork").status == 0
    info = read_session(store.path("fork"))
    assert info.in_store
    assert len(there(store.folder)) == n_before + 1
    assert store.here("rm", "-y", "notes").status == 0
    assert store.here("chat", *GREEDY, "--resume", "fork", "--message", "go on").status == 0
    assert alone.here(*FORK, "notes", QUESTION, "--save-as", "fork").status == 0
    assert alone.here("chat", *GREEDY, "--resume", "fork", "--message", "go on").status == 0
    assert store.tokens("fork") == alone.tokens("fork")
    store.check_nothing_leaks()
    assert store.here("rm", "-y", "fork").status == 0
    assert there(store.folder) == set()


def test_a_store_that_was_moved_goes_on(store: Store, tmp_path: Path) -> None:
    known = expected(store.program, tmp_path / "expected", "a", 2)
    assert store.here("chat", *GREEDY, "--message", said("a", TURNS[0]), "--save", "a").status == 0
    os.rename(store.folder, tmp_path / "moved")
    moved = Store(store.program, tmp_path / "moved")
    assert moved.here("chat", *GREEDY, "--message", said("a", TURNS[1]), "--resume", "a").status == 0
    assert moved.tokens("a") == known.tokens[2]


def test_an_index_copied_out_of_its_store_is_refused_and_says_how_to_export_it(store: Store) -> None:
    assert store.here("chat", *GREEDY, "--message", "hello", "--save", "a").status == 0
    shutil.copy(store.path("a"), "copy.bin")
    ran = store.here("load", *GREEDY, "copy.bin", "-p", "x")
    assert (ran.status, ran.out) == (13, "")
    assert "export it there instead" in ran.err
    assert store.here("load", *GREEDY, "copy.bin", "-p", "x", "--recompute").status == 0


def test_a_store_of_a_later_version_is_refused_in_every_command_and_left_alone(store: Store) -> None:
    assert store.here("chat", *GREEDY, "--message", "hello", "--save", "a").status == 0
    (store.folder / ".store").write_text('{"llamakv_store": 2}\n')
    before = {path: path.stat().st_mtime_ns for path in store.folder.rglob("*") if ".cache" not in path.parts}
    for command, *arguments in (
        ("load", *GREEDY, "a", "-p", "x"),
        ("chat", *GREEDY, "--resume", "a", "--message", "x"),
        ("chat", *GREEDY, "--save", "b", "--message", "x"),
        (*FORK, "a", "x"),
        ("ls",),
        ("rm", "-y", "a"),
        ("gc",),
        ("verify", "a"),
    ):
        ran = store.here(command, *arguments)
        assert (ran.status, ran.out) == (13, ""), command
        assert "has format version 2, this llamakv knows up to 1" in ran.err
        assert "pip install --upgrade llamakv" in ran.err
    after = {path: path.stat().st_mtime_ns for path in store.folder.rglob("*") if ".cache" not in path.parts}
    assert after == before


@pytest.fixture
def read_only_store(store: Store) -> Store:
    """A session in a store on a file system that was made read-only; needs root, as in CI."""
    store.folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", store.folder]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount here ({mounted.stderr.strip()})")
    return store


def test_a_read_only_store_is_resumed_and_forked_from_and_saving_is_refused(read_only_store: Store) -> None:
    store = read_only_store
    try:
        assert store.here("chat", *GREEDY, "--message", "hello", "--save", "a").status == 0
        expected_out = store.here("load", *GREEDY, "a", "-p", "x").out
        subprocess.run(["mount", "-o", "remount,ro", store.folder], check=True)
        ran = store.here("load", *GREEDY, "a", "-p", "x")
        assert (ran.status, ran.out, ran.err) == (0, expected_out, "")
        ran = store.here(*FORK, "a", QUESTION)
        assert (ran.status, ran.err) == (0, "")
        for command in ("ls", "gc", "verify"):
            ran = store.here(command, *(["a"] if command == "verify" else []))
            assert ran.status in (0, 16), (command, ran.err)
        ran = store.here(*FORK, "a", QUESTION, "--save-as", str(store.program.folder / "fork.bin"))
        assert ran.status == 0
        for command, *arguments in (
            ("chat", *GREEDY, "--message", "x", "--save", "b"),
            ("chat", *GREEDY, "--message", "x", "--resume", "a"),
            (*FORK, "a", QUESTION, "--save-as", "fork"),
            ("rm", "-y", "a"),
        ):
            ran = store.here(command, *arguments)
            assert (ran.status, ran.out) == (16, ""), (command, ran.err)
            assert "Read-only file system" in ran.err
    finally:
        subprocess.run(["umount", "-l", store.folder], check=True)


# ---------------------------------------------------------------- many at a time, killed


@dataclass
class Running:
    process: subprocess.Popen[str]
    command: str
    name: str
    dies_s: float
    allowed: frozenset[int]


@dataclass
class Crowd:
    """Processes that work in one store, some of which are killed."""

    store: Store
    known: dict[str, Expected]
    n_turns: int
    n_processes: int
    elapsed_s: float
    chance: random.Random
    done: dict[str, int] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)
    n_killed: int = 0

    def run(self) -> None:
        self.done = dict.fromkeys(self.known, 0)
        while min(self.done.values()) < self.n_turns or self.running:
            if min(self.done.values()) < self.n_turns and len(self.running) < self.n_processes:
                self.start_one()
            for item in [item for item in self.running if self.has_ended(item)]:
                self.running.remove(item)
                self.look_at(item)
            time.sleep(0.005)

    def start_one(self) -> None:
        busy = {item.name for item in self.running if item.command == "chat"}
        idle = [name for name, n in self.done.items() if name not in busy and n < self.n_turns]
        if idle and self.chance.random() < 0.6:
            name = self.chance.choice(idle)
            where = "--resume" if self.done[name] else "--save"
            self.begin(name, {0}, "chat", *GREEDY, "--message", said(name, TURNS[self.done[name]]), where, name)
            return
        name = self.chance.choice(list(self.known))
        fork = f"fork-{name}-{self.chance.randrange(2)}"
        self.begin(
            name,
            *self.chance.choice(
                [
                    ({0, 3, 10, 12}, *FORK, name, QUESTION, "--save-as", fork),
                    ({0, 10, 12}, "load", *GREEDY, self.chance.choice([name, fork]), "-p", "so?"),
                    ({0, 10, 12}, "rm", "-y", fork),
                    ({0, 3, 10, 12}, "rm", "-y", *(f"fork-{each}-0" for each in self.known)),
                    ({0, 12}, "gc"),
                    ({0}, "ls"),
                    ({0, 10, 12}, "verify", name),
                ]
            ),
        )

    def begin(self, name: str, allowed: set[int], command: str, *arguments: str) -> None:
        dies_s = time.monotonic() + self.elapsed_s * self.n_processes * self.chance.uniform(0.1, 1.2)
        if self.chance.random() < 0.4:
            dies_s = float("inf")
        process = self.store.start(command, *arguments)
        self.running.append(Running(process, command, name, dies_s, frozenset(allowed)))

    def has_ended(self, item: Running) -> bool:
        if item.process.poll() is None and time.monotonic() > item.dies_s:
            item.process.kill()
            item.process.wait()
        return item.process.poll() is not None

    def look_at(self, item: Running) -> None:
        ran = finish(item.process)
        is_killed = ran.status == -signal.SIGKILL
        self.n_killed += is_killed
        assert is_killed or ran.status in item.allowed, (item.command, item.name, ran)
        if item.command == "chat":
            n_before, tokens = self.done[item.name], self.store.tokens(item.name)
            self.done[item.name] = self.known[item.name].tokens.index(tokens)
            assert self.done[item.name] - n_before in ((0, 1) if is_killed else (1,))


def crowded(store: Store, tmp_path: Path, *, n_names: int, n_turns: int, n_processes: int, seed: int) -> None:
    known = {name: expected(store.program, tmp_path / "expected", name, n_turns + 1) for name in "abcdef"[:n_names]}
    started_s = time.monotonic()
    assert store.program.run("chat", *GREEDY, "--message", "x", "--save", "alone.bin").status == 0
    elapsed_s = time.monotonic() - started_s
    store.folder.mkdir(exist_ok=True)  # gc and others refuse one that is named and not there
    crowd = Crowd(store, known, n_turns, n_processes, elapsed_s, random.Random(seed))
    crowd.run()
    assert crowd.n_killed > 0
    for name, path, _ in session_files(store.folder):
        tokens = store.tokens(name)
        assert path.exists()
        if name in known:
            assert tokens == known[name].tokens[n_turns]
        else:
            assert tokens in known[name.split("-")[1]].forks
    store.check_nothing_leaks()
    for name in known:
        message = said(name, TURNS[n_turns])
        assert store.here("chat", *GREEDY, "--message", message, "--resume", name).status == 0
        assert store.tokens(name) == known[name].tokens[n_turns + 1]
    assert store.here("verify", *known).status == 0
    store.check_nothing_leaks()
    assert len(list(Objects(store.folder).all())) > n_names


@pytest.mark.slow
def test_sessions_of_processes_that_are_killed_go_on_as_if_they_had_not_been(store: Store, tmp_path: Path) -> None:
    crowded(store, tmp_path, n_names=2, n_turns=2, n_processes=3, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["M", "MS", "MH", "MR"])
def test_sessions_of_many_processes_go_on_with_every_kind_of_memory(
    store: Store, tmp_path: Path, models: TinyModels, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMAKV_MODEL", str(models(model)))
    crowded(store, tmp_path, n_names=4, n_turns=6, n_processes=6, seed=2)
