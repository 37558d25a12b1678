"""Keeping objects from being collected while a session that refers to them is being written.

A writer holds a *claim*: a file of its own, locked for as long as it lives, that lists the digests it relies on. It
adds to it under the store's lock, shared, and only then looks whether the objects are there. The collector takes that
lock alone, reads the claims first and then the indexes that changed since it last looked, and removes what neither
names. So an object is claimed before it is relied on, and referred to before the claim ends. Both hold the store's
lock for moments only. All locks vanish with their owner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from llamakv.store import files
from llamakv.store.digests import N_DIGEST_BYTES
from llamakv.store.objects import CLAIMS, Objects

_LOCK = ".lock"
WAIT_S = 30.0


class Claim:
    """Digests a writer relies on, until it is closed. Not to be shared by threads."""

    def __init__(self, objects: Objects, fd: int) -> None:
        self._objects, self._fd = objects, fd
        self._digests: set[str] = set()

    def add(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Claim objects, there or yet to be written; return those that are not there.

        Raises: WriteError, LockedError.
        """
        wanted = list(dict.fromkeys(digests))
        new = [digest for digest in wanted if digest not in self._digests]
        path = self._objects.folder / CLAIMS
        with store_lock(self._objects, shared=True):
            files.append(self._fd, b"".join(bytes.fromhex(digest) for digest in new), path)
            self._digests.update(new)
            return tuple(digest for digest in wanted if not self._objects.has(digest))


@contextlib.contextmanager
def claiming(objects: Objects) -> Iterator[Claim]:
    """Give a claim that lives until the block is left. Raises: WriteError."""
    folder = objects.folder / CLAIMS
    files.make_private_folder(folder)
    with files.locked_temporary(folder) as fd:
        yield Claim(objects, fd)


def claimed(objects: Objects) -> set[str]:
    """Return all digests that live claims name; those of dead writers are removed. The store's lock must be held."""
    found: set[str] = set()
    for data in files.live_temporaries(objects.folder / CLAIMS):
        found.update(data[i : i + N_DIGEST_BYTES].hex() for i in range(0, len(data), N_DIGEST_BYTES))
    return found


@contextlib.contextmanager
def store_lock(objects: Objects, *, shared: bool) -> Iterator[None]:
    """Hold the lock of a store's objects for a moment. Raises: WriteError, LockedError."""
    files.make_private_folder(objects.folder)
    with files.lock_of(objects.folder / _LOCK, shared=shared, wait_s=WAIT_S):
        yield
