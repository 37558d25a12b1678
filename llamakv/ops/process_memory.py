"""What this process and this machine have of memory, as the operating system counts it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from llamakv.engine.memory_limit import within_limits


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedFile:
    """Files that are mapped into this process: the bytes that are, and those of them that are in memory now."""

    mapped_bytes: int
    resident_bytes: int


def available_bytes() -> int:
    """Memory that programs can still have without swapping; what the page cache would give up counts.
    In a control group with a limit (a container), not more than that leaves."""
    return within_limits(int(psutil.virtual_memory().available))


def resident_bytes() -> int:
    """What this process has in memory, mapped files that are there included."""
    return int(psutil.Process().memory_info().rss)


def mapped_file(paths: Iterable[Path]) -> MappedFile | None:
    """What of a model's files is mapped, and resident; None where the system does not tell (it is not Linux, or may not
    be asked), or nothing of them is mapped."""
    process = psutil.Process()
    if not hasattr(process, "memory_maps"):
        return None
    wanted = {os.path.realpath(path) for path in paths}
    try:
        maps = [part for part in process.memory_maps(grouped=True) if os.path.realpath(part.path) in wanted]
    except (psutil.Error, OSError):
        return None
    sizes = [(getattr(part, "size", None), part.rss) for part in maps]
    if not sizes or any(size is None for size, _ in sizes):
        return None
    return MappedFile(
        mapped_bytes=sum(int(size or 0) for size, _ in sizes), resident_bytes=sum(int(rss) for _, rss in sizes)
    )
