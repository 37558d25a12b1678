"""Which sessions of a store are open somewhere, so that nobody takes them for unused.

Who has a session open holds a file of its own, locked for as long as it lives, with the session's name in it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from llamakv.errors import StoreError
from llamakv.store import files
from llamakv.store.objects import FOLDER, USERS
from llamakv.store.store_folder import SUFFIX, is_in_store

_N_TRIES, _MOMENT_S = 20, 0.005


@contextlib.contextmanager
def using(path: Path) -> Iterator[None]:
    """Have a session open until the block is left. Does nothing for one outside a store, or in one that cannot be
    written."""
    with contextlib.ExitStack() as stack:
        if is_in_store(path):
            with contextlib.suppress(StoreError):
                folder = path.parent / FOLDER / USERS
                files.make_private_folder(folder)
                fd = stack.enter_context(files.locked_temporary(folder))
                files.append(fd, b"/".join(_names(path)), folder)
        yield


def names_in_use(root: Path) -> set[str]:
    """Return the names of the sessions that somebody has open. Raises: ReadError."""
    found = files.live_temporaries(root / FOLDER / USERS)
    for _ in range(_N_TRIES):
        if all(found):
            break
        time.sleep(_MOMENT_S)  # somebody is about to write a name
        found = files.live_temporaries(root / FOLDER / USERS)
    return {name.decode("utf-8", "surrogateescape") for data in found for name in data.split(b"/") if name}


def _names(path: Path) -> list[bytes]:
    """A session's name in its store, and that of the one it is a link to."""
    names = [path.name]
    with contextlib.suppress(OSError):
        target = path.resolve()
        if target.parent == path.parent.resolve():
            names.append(target.name)
    return [name.removesuffix(SUFFIX).encode("utf-8", "surrogateescape") for name in dict.fromkeys(names)]
