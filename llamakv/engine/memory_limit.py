"""What a control group leaves of the machine's memory: in a container, less than the machine has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# limit, use, and the lines of memory.stat that tell what of it the page cache would give up (cgroups(7))
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
_V2 = "memory.max", "memory.current", ("inactive_file", "active_file")


def within_limits(n_available: int, *, root: Path = Path("/")) -> int:
    """Bytes of memory this process can still have where the machine has ``n_available``: not more than each control
    group that it is in leaves. What the page cache would give up counts as free. ``root`` is where ``/proc`` and
    ``/sys`` are."""
    return max(0, min([n_available, *_left(root)]))


def _left(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", _V1
        elif not controllers:
            mount, names = root / "sys/fs/cgroup", _V2
        else:
            continue
        own = PurePosixPath(path)
        for group in (own, *own.parents):  # the mount may show a container's own group as the topmost
            left = _left_in(mount / str(group).lstrip("/"), *names)
            if left is not None:
                yield left


def _left_in(folder: Path, limit_file: str, use_file: str, cached: tuple[str, ...]) -> int | None:
    """What a group leaves; None where it has no limit, or does not tell."""
    try:
        limit = (folder / limit_file).read_text().strip()
        if limit == "max":
            return None
        used = int((folder / use_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(limit) - used + sum(int(stat.get(name, 0)) for name in cached)
    except (OSError, ValueError):
        return None
