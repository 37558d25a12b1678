"""Sections of a store that were found damaged."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from llamakv.errors import LlamakvError
from llamakv.store.objects import Objects, check_object
from llamakv.store.session_file import SessionInfo, read_session


class Damage:
    """Remembers damaged sections: nothing is brought back from sessions that refer to them, and nothing is saved that
    does. What is read again is written again, whole. Safe between threads."""

    def __init__(self) -> None:
        self._digests: set[str] = set()

    def is_in(self, info: SessionInfo) -> bool:
        """Whether a session refers to a section that was found damaged."""
        return any(section.digest in self._digests for section in info.sections)

    def look_for(self, path: Path) -> None:
        """Read all sections of a session that could not be read, and remember which are damaged."""
        objects = Objects(path.parent)
        with contextlib.suppress(LlamakvError):
            for section in read_session(path).sections:
                if section.in_store and not _is_whole(objects, section.digest):
                    self._digests.add(section.digest)


def _is_whole(objects: Objects, digest: str) -> bool:
    try:
        found = objects.open(digest)
        try:
            check_object(found)
        finally:
            os.close(found.fd)
    except LlamakvError:
        return False
    return True
