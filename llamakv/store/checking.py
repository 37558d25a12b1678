"""Looking for damage in sessions: each of their objects is read once, on all cores, whoever shares it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from llamakv.errors import ConflictError, FormatError, NewerFormatError, NotFoundError, ReadError
from llamakv.store.objects import Objects, check_object
from llamakv.store.pipeline import map_ahead, n_cores
from llamakv.store.sections import StoredSection, n_cells_held, sections_up_to
from llamakv.store.session_info import SessionInfo
from llamakv.store.session_reader import SessionReader
from llamakv.store.system_errors import is_lost

_N_AHEAD = 5  # as when sections are read to be used


class Trouble(StrEnum):
    """Why something cannot be used: its bytes are not there, not what was saved, of a later llamakv, or the system
    refuses to read them."""

    MISSING = "missing"
    DAMAGED = "damaged"
    NEWER = "newer"
    UNREADABLE = "unreadable"

    @property
    def is_loss(self) -> bool:
        """Whether waiting or upgrading will not help."""
        return self in (Trouble.MISSING, Trouble.DAMAGED)


def trouble_of(error: FormatError | ReadError) -> Trouble:
    """Return what kind of trouble an error of reading is."""
    if isinstance(error, ReadError):
        return Trouble.DAMAGED if is_lost(error) else Trouble.UNREADABLE
    return Trouble.NEWER if isinstance(error, NewerFormatError) else Trouble.DAMAGED


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedObject:
    """An object that was looked at: the bytes of its file and of its state, or why it cannot be used."""

    digest: str
    n_bytes: int = 0
    n_raw: int = 0
    trouble: Trouble | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSection:
    """A section that cannot be used."""

    section: StoredSection
    trouble: Trouble
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What can still be used of a session: ``sections``, which bring back ``n_cells`` of its leading cells."""

    sections: tuple[StoredSection, ...]
    n_cells: int


def check_objects(objects: Objects, digests: Iterable[str], *, fast: bool) -> Iterator[CheckedObject]:
    """Read and verify objects, in the order given; ``fast`` looks at their headers and lengths only."""
    with ThreadPoolExecutor(min(n_cores(), _N_AHEAD), thread_name_prefix="llamakv-check") as executor:
        yield from map_ahead(executor, partial(_check, objects, fast=fast), digests, _N_AHEAD)


def _check(objects: Objects, digest: str, *, fast: bool) -> CheckedObject:
    try:
        found = objects.open(digest)
        try:
            if not fast:
                check_object(found)
        finally:
            os.close(found.fd)
    except NotFoundError:
        reason = f"section {digest[:16]} is missing from the store"
        return CheckedObject(digest=digest, trouble=Trouble.MISSING, reason=reason)
    except (FormatError, ReadError) as error:
        return CheckedObject(digest=digest, trouble=trouble_of(error), reason=error.message)
    return CheckedObject(digest=digest, n_bytes=found.n_bytes, n_raw=found.n_raw)


def bad_sections(info: SessionInfo, checked: Mapping[str, CheckedObject], *, fast: bool) -> tuple[BadSection, ...]:
    """Return the sections of a session that cannot be used: those whose objects, all ``checked``, are not right, and,
    unless ``fast``, the damaged ones of its own file, which are read now.

    Raises: as ``SessionReader``; ConflictError where it was saved since ``info`` was read.
    """
    bad = []
    for section in info.sections:
        if section.in_store:
            found = checked[section.digest]
            if found.trouble is not None:
                bad.append(BadSection(section=section, trouble=found.trouble, reason=found.reason))
            elif found.n_raw != section.n_raw:
                reason = f"its object holds {found.n_raw} bytes, not {section.n_raw}"
                bad.append(BadSection(section=section, trouble=Trouble.DAMAGED, reason=reason))
    own = [section for section in info.sections if not section.in_store]
    if own and not fast:
        with SessionReader(info.path) as reader:
            if reader.info.commit != info.commit:
                raise ConflictError(f"'{info.path}' was saved while it was checked", path=str(info.path))
            for damage in reader.find_damage(own):
                if damage is not None:
                    bad.append(BadSection(section=damage.section, trouble=Trouble.DAMAGED, reason=damage.reason))
    return tuple(bad)


def rest_of(info: SessionInfo, bad: Collection[BadSection]) -> Rest:
    """Return what of a session can still be used without some of its sections."""
    kind = info.record.kind
    lost = [found.section for found in bad]
    sound = tuple(section for section in info.sections if section not in lost)
    n_cells = n_cells_held(kind, sound)
    return Rest(sections=sections_up_to(kind, sound, n_cells), n_cells=n_cells)
