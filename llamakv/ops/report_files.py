"""Files of results and pictures that people asked for: written whole, and never over others by accident."""

from __future__ import annotations

import os
from pathlib import Path

from llamakv.errors import ExistsError, UsageError
from llamakv.store import files


def check_place(path: Path, *, overwrite: bool) -> None:
    """Find out whether a file can be written there, before the work that fills it.

    Raises:
        ExistsError: there is one, and it is not to be replaced.
        UsageError: it is a folder, a pipe or a device.
        WriteError: its folder is missing or cannot be written to.
    """
    if path.is_dir():
        raise UsageError(f"'{path}' is a folder, expected a file", path=str(path))
    if path.exists() and not path.is_file():
        raise UsageError(f"'{path}' is not a regular file", path=str(path))
    if os.path.lexists(path) and not overwrite:
        raise ExistsError(f"'{path}' already exists", hint="add --force to replace it", path=str(path))
    with files.locked_temporary(path.parent):
        pass


def write_report_file(path: Path, data: bytes, *, overwrite: bool) -> None:
    """Write all of a file at once, readable by whom the user's umask allows.

    Raises:
        ExistsError, WriteError: what was there is as it was.
    """
    with files.replacement(path, overwrite=overwrite) as fd:
        files.write_at(fd, [data], 0, path)
        with files.writing(path):
            os.fchmod(fd, 0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0o077)  # there is no way to ask
    os.umask(mask)
    return mask
