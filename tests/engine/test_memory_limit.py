"""What is left of the machine's memory in a control group."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamakv.engine.memory_limit import within_limits

MACHINE = 1_000_000


def group(root: Path, path: str, *, is_v1: bool, limit: str, used: int, inactive: int = 0, active: int = 0) -> None:
    """Files of a control group as Linux shows them."""
    folder = root / "sys/fs/cgroup" / ("memory" if is_v1 else "") / path
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_v1 else ("memory.max", "memory.current")
    total = "total_" if is_v1 else ""
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{total}inactive_file {inactive}\n{total}active_file {active}\n")


def membership(root: Path, *lines: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize(("is_v1", "line"), [(True, "4:cpu,memory:/a/b"), (False, "0::/a/b")])
class TestGroups:
    def test_the_tightest_of_all_groups_counts(self, tmp_path: Path, is_v1: bool, line: str) -> None:
        membership(tmp_path, "3:cpuset:/", line)
        group(tmp_path, "a", is_v1=is_v1, limit="500000", used=450_000)
        group(tmp_path, "a/b", is_v1=is_v1, limit="400000", used=100_000)
        assert within_limits(MACHINE, root=tmp_path) == 50_000
        assert within_limits(20_000, root=tmp_path) == 20_000

    def test_what_the_page_cache_gives_up_counts(self, tmp_path: Path, is_v1: bool, line: str) -> None:
        membership(tmp_path, line)
        group(tmp_path, "a/b", is_v1=is_v1, limit="500000", used=450_000, inactive=100_000, active=30_000)
        assert within_limits(MACHINE, root=tmp_path) == 180_000

    def test_a_container_that_is_shown_its_group_as_the_topmost(self, tmp_path: Path, is_v1: bool, line: str) -> None:
        membership(tmp_path, line)
        group(tmp_path, "", is_v1=is_v1, limit="500000", used=600_000)
        assert within_limits(MACHINE, root=tmp_path) == 0

    @pytest.mark.parametrize("limit", ["max", "9223372036854771712", "?"])
    def test_without_a_limit_the_machine_counts(self, tmp_path: Path, is_v1: bool, line: str, limit: str) -> None:
        membership(tmp_path, line)
        group(tmp_path, "a/b", is_v1=is_v1, limit=limit, used=450_000)
        assert within_limits(MACHINE, root=tmp_path) == MACHINE


def test_where_there_are_no_groups_the_machine_counts(tmp_path: Path) -> None:
    assert within_limits(MACHINE, root=tmp_path) == MACHINE
