"""Where the sessions of each space are, on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

SPACES = "spaces"
"""The folder of a store that holds the stores of keys that share nothing."""


class Folders:
    """Where the sessions of each space are. ``root`` None: nowhere."""

    def __init__(self, root: Path | None) -> None:
        self._root = root

    def of(self, space: str) -> Path | None:
        """The store of a space; it may not exist yet."""
        if self._root is None or not space:
            return self._root
        return self._root / SPACES / hashlib.blake2b(space.encode(), digest_size=16, person=b"llamakv").hexdigest()


def path_of(root: Path, name: str) -> Path:
    """Where a conversation of this name is saved."""
    return root / f"{name}.bin"


def changed_s(path: Path) -> float:
    """When a file was changed or used last; 0 if it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
