"""What sessions that share a beginning take on disk, with a real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.run import run
from tests.real.text import story

pytestmark = pytest.mark.real

WORKER = "tests.real.store_worker"


def test_64_forks_of_a_long_session_cost_their_own_tokens(smollm2_path: Path, tmp_path: Path) -> None:
    job = {"model": smollm2_path, "cache": tmp_path / "cache", "store": tmp_path / "store", "text": story(181)}
    found = run("forks", module=WORKER, branches=64, own=50, **job)
    assert 1900 <= found["tokens"] <= 2200
    assert sum(found["own_tokens"]) >= 64 * 40  # a few end by themselves
    per_token = found["prefix_bytes"] / found["tokens"]
    print(f"\n{found['tokens']} tokens in {found['prefix_bytes']:,} bytes; 64 forks, {sum(found['own_tokens'])} "
          f"own tokens: {found['own_bytes']:,} bytes of state, {found['index_bytes']:,} of index, "
          f"{found['store_bytes']:,} in all")  # fmt: skip
    assert found["store_bytes"] < 1.5 * (found["prefix_bytes"] + found["own_bytes"])
    assert found["store_bytes"] < 1.5 * (found["prefix_bytes"] + per_token * sum(found["own_tokens"]))


def test_a_hundred_turns_saved_one_by_one_take_little_more_than_saved_once(smollm2_path: Path, tmp_path: Path) -> None:
    job = {"model": smollm2_path, "cache": tmp_path / "cache", "store": tmp_path}
    found = run("turns", module=WORKER, turns=100, max_tokens=12, **job)
    assert found["each_tokens"] == found["once_tokens"]
    assert found["each_sections"] >= 100 > found["once_sections"]
    print(f"\n{found['each_tokens']} tokens: {found['each']:,} bytes turn by turn, {found['once']:,} at once")
    assert found["each"] < 1.2 * found["once"]
