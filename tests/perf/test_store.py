"""What a store of many sessions costs. Prints a table (pytest -m perf -s -n 0)."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llamakv.store.cache import StoreCache, space_of
from llamakv.store.collector import collect
from llamakv.store.objects import Objects
from llamakv.store.session_file import create_session, read_session
from llamakv.store.session_store import SessionStore
from llamakv.store.store_folder import make_store
from llamakv.store.survey import take_survey
from tests.store import samples
from tests.store.indexes import write_index

pytestmark = pytest.mark.perf

SIZES = (100, 1_000, 10_000)
N_TOKENS = 2_000
N_PROMPT = 32_768
SETTLE_S = 2.1  # a file younger than that is read again next time

RECORD = samples.make_record(N_TOKENS)
SPACE = space_of(RECORD.identity, RECORD.settings, RECORD.versions)


def build(root: Path, n_sessions: int) -> None:
    """Sessions that are branched off from each other, each somewhere in the one it comes from; all share objects."""
    make_store(root)
    info = create_session(root / "s00000.bin", RECORD, samples.cells_up_to(N_TOKENS - 1))
    choice = random.Random(n_sessions)
    texts = [RECORD.tokens]
    for index in range(1, n_sessions):
        parent, at = index // 3, choice.randrange(1, N_TOKENS - 1)
        tokens = texts[parent][:at] + tuple(choice.randrange(49_152) for _ in range(N_TOKENS - at))
        texts.append(tokens)
        lineage = replace(
            RECORD.lineage,
            session_id=f"id-{index}",
            parent_id=f"id-{parent}" if parent else "id-1",
            parent_position=at,
            updated_s=1.7e9 + index,
            tags=("work",) if index % 5 == 0 else (),
        )
        write_index(root / f"s{index:05}.bin", replace(RECORD, tokens=tokens, lineage=lineage), info.sections)


def timed(work: Callable[[], object], n: int = 1) -> float:
    """The shortest of some times, in milliseconds."""
    times = []
    for _ in range(n):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return 1000 * min(times)


def ls(root: Path, *options: str) -> Callable[[], None]:
    command = [sys.executable, "-m", "llamakv", "ls", "--store", str(root), *options]

    def work() -> None:
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)

    return work


def measure(root: Path, n_sessions: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    found = {"files written": timed(lambda: build(root, n_sessions))}
    time.sleep(SETTLE_S)
    choice = random.Random(1)
    info = read_session(root / f"s{n_sessions // 2:05}.bin")
    prompt = info.record.tokens + tuple(choice.randrange(49_152) for _ in range(N_PROMPT - N_TOKENS))
    hints = []

    def look_up() -> None:
        with StoreCache(root) as cache:
            hints.append(cache.longest_prefix(SPACE, prompt))

    def refresh() -> None:
        with StoreCache(root) as cache:
            cache.refresh()

    def save_and_look_up() -> None:
        write_index(root / "s00001.bin", RECORD, info.sections)
        look_up()

    def list_all() -> None:
        with StoreCache(root) as cache:
            assert len(cache.summaries()) == n_sessions

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "open", pytest.fail)
        found["cache built"] = timed(refresh)
        time.sleep(SETTLE_S)
        found["cache refreshed, nothing new"] = timed(refresh, 5)
        found["cache listed"] = timed(list_all, 3)
        found["survey"] = timed(lambda: take_survey(root), 3)
        found["look-up of 32,768 tokens"] = timed(look_up, 5)
        found["look-up after a save"] = timed(save_and_look_up, 3)
        assert all(hint is not None and hint.n_cells >= N_TOKENS - 1 for hint in hints)
    found["names"] = timed(SessionStore(root).names, 3)
    found["ls"] = timed(ls(root), 3)
    found["ls --tree"] = timed(ls(root, "--tree"), 3)
    found["ls --json"] = timed(ls(root, "--json"), 3)
    found["gc"] = timed(lambda: collect(root))
    found["cache MB"] = (root / ".cache" / "sessions.sqlite").stat().st_size / 1e6
    return found


def test_a_store_of_ten_thousand_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    columns = [measure(tmp_path / str(n), n, monkeypatch) for n in SIZES]
    print(f"\nsessions of {N_TOKENS:,} tokens, milliseconds{''.join(f'{n:>12,}' for n in SIZES)}")
    for name in columns[0]:
        print(f"  {name:<36}{''.join(f'{column[name]:>12,.1f}' for column in columns)}")
    _, thousand, many = columns
    for name in ("cache built", "cache refreshed, nothing new", "cache listed", "ls", "gc"):
        assert many[name] / 10_000 <= 4 * thousand[name] / 1_000, name  # linear is 1, quadratic 10
    assert many["look-up of 32,768 tokens"] <= 20 * thousand["look-up of 32,768 tokens"]
