"""The folder that a measurement takes place in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llamakv.errors import WriteError
from llamakv.ops.bench.folders import own_folder


def test_it_is_gone_afterwards_and_says_whose_it_is(tmp_path: Path) -> None:
    with own_folder(tmp_path) as folder:
        (folder / "s.bin").write_bytes(b"x")
        assert folder.name.startswith(f"llamakv-bench-{os.getpid()}-")
        with own_folder(tmp_path) as other:
            assert folder.exists()
            assert other != folder
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_goes_with_the_next_one(tmp_path: Path) -> None:
    for name in ("llamakv-bench-4000000-1700000000-abc", f"llamakv-bench-{os.getpid()}-1-abc", "llamakv-bench-mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "s.bin").write_bytes(b"x")
    with own_folder(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["llamakv-bench-mine"]


def test_where_none_can_be_made_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="cannot make a folder in"), own_folder(tmp_path / "gone"):
        pass
