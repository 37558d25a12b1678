"""A folder for what is measured with, which is gone afterwards; what a killed run left goes with the next one."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from llamakv.errors import WriteError

_PREFIX = "llamakv-bench"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-.*")


@contextmanager
def own_folder(work_dir: Path) -> Iterator[Path]:
    """A new folder in ``work_dir``, as long as it is needed. Its name says whose it is.

    Raises:
        WriteError: it cannot be made.
    """
    _remove_left(work_dir)
    owner = os.getpid()
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{owner}-{_begun(owner)}-", dir=work_dir))
    except OSError as error:
        raise WriteError(f"cannot make a folder in {work_dir}: {error.strerror}", path=str(work_dir)) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left(work_dir: Path) -> None:
    """Remove the folders of processes that are there no longer."""
    with contextlib.suppress(OSError):
        for path in work_dir.iterdir():
            found = _NAME.fullmatch(path.name)
            if found and path.is_dir() and not path.is_symlink() and _begun(int(found[1])) != int(found[2]):
                shutil.rmtree(path, ignore_errors=True)


def _begun(pid: int) -> int | None:
    """When a process began, in whole seconds; None if there is none."""
    try:
        return int(psutil.Process(pid).create_time())
    except (psutil.Error, OverflowError):
        return None
