"""What resuming a session takes: memory, told from its index, and time, measured by reading its sections."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llamakv.errors import ConflictError, InterruptedByUser, NotFoundError
from llamakv.records import SectionKind
from llamakv.store.objects import Objects
from llamakv.store.page_cache import n_resident_bytes
from llamakv.store.pipeline import n_cores
from llamakv.store.session_file import SessionInfo, SessionReader, StoredSection
from llamakv.store.session_reader import N_AHEAD, folder_of

if TYPE_CHECKING:
    from llamakv.ops.requests import Reporter

N_IN_FLIGHT = N_AHEAD + 2
"""Sections that a reader has in memory at most: those ahead, the next one and the one being consumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeMemory:
    """What resuming takes in memory, in bytes, as far as the index tells: ``n_state_bytes`` of state that fill
    ``n_cells`` cells of the context (which may have more cells than these: when the session was saved it had
    ``n_ctx``), the model's file, and at most ``n_reading_bytes`` for sections on their way."""

    n_ctx: int
    n_cells: int
    n_state_bytes: int
    n_model_bytes: int
    n_reading_bytes: int

    @property
    def n_bytes(self) -> int:
        """All of it; the process takes more: the program, the context's other cells, what a decode call works in."""
        return self.n_state_bytes + self.n_model_bytes + self.n_reading_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeCost:
    """What reading, decompressing and checking took, as resuming does it, on ``n_threads`` threads.

    ``n_resident_bytes`` of the ``n_file_bytes`` in the files to be read were in the system's memory before; None where
    it does not tell. Not in ``elapsed_s``: loading the model, setting the state, decoding the pending token.
    """

    n_sections: int
    n_raw_bytes: int
    n_stored_bytes: int
    n_file_bytes: int
    n_resident_bytes: int | None
    n_threads: int
    elapsed_s: float

    @property
    def raw_bytes_per_s(self) -> float | None:
        """Bytes of state a second; None where there were none."""
        return self.n_raw_bytes / self.elapsed_s if self.n_raw_bytes and self.elapsed_s > 0 else None


def sections_restored(sections: Sequence[StoredSection]) -> list[StoredSection]:
    """What resuming reads: all but earlier tails, which only going back needs."""
    last_tail = max((s.p1 for s in sections if s.kind is SectionKind.TAIL), default=-1)
    return [s for s in sections if s.kind is not SectionKind.TAIL or s.p1 == last_tail]


def resume_memory(info: SessionInfo) -> ResumeMemory:
    """What bringing a session back takes in memory; nothing is read."""
    lengths = [section.n_raw for section in sections_restored(info.sections)]
    return ResumeMemory(
        n_ctx=info.record.n_ctx,
        n_cells=info.n_cells_held,
        n_state_bytes=sum(lengths),
        n_model_bytes=info.record.identity.n_bytes,
        n_reading_bytes=max((sum(lengths[i : i + N_IN_FLIGHT]) for i in range(len(lengths))), default=0),
    )


def measure_cost(info: SessionInfo, reporter: Reporter) -> ResumeCost:
    """Read the sections that resuming would read, on all threads it would use, and time it. Nothing is changed.

    Raises:
        DamagedError: a section is not what was saved, or is gone.
        ConflictError: the session was saved again since ``info`` was read.
        InterruptedByUser: stopped.
        ReadError, NotFoundError, NewerFormatError.
    """
    from llamakv.store import planes  # before the clock runs: it brings numpy, which a resume has anyway

    planes.allocate(0)
    wanted = sections_restored(info.sections)
    n_raw = sum(section.n_raw for section in wanted)
    resident = _residence(info, wanted)
    n_done = 0
    with unchanged(info) as reader:
        started = time.perf_counter()
        for section in reader.read(wanted):
            n_done += len(section.data)
            reporter.progress("verify", n_done, n_raw)
            if reporter.should_abort():
                raise InterruptedByUser("interrupted while reading; nothing was changed", status=130)
        elapsed_s = time.perf_counter() - started
    n_resident = [n for _, n in resident]
    return ResumeCost(
        n_sections=len(wanted),
        n_raw_bytes=n_raw,
        n_stored_bytes=sum(section.n_stored for section in wanted),
        n_file_bytes=sum(n for n, _ in resident),
        n_resident_bytes=None if None in n_resident else sum(n or 0 for n in n_resident),
        n_threads=min(n_cores(), N_AHEAD),
        elapsed_s=elapsed_s,
    )


@contextlib.contextmanager
def unchanged(info: SessionInfo) -> Iterator[SessionReader]:
    """The file that ``info`` was read from, held open to read its sections.

    Raises:
        ConflictError: it was saved again meanwhile.
        FormatError, ReadError, NotFoundError: as ``SessionReader``.
    """
    with SessionReader(info.path) as reader:
        if reader.info.commit != info.commit:
            raise ConflictError(
                f"'{info.path}' was saved by somebody else while it was looked at",
                hint="the same command again reads what is there now",
                path=str(info.path),
            )
        yield reader


def _residence(info: SessionInfo, sections: Sequence[StoredSection]) -> list[tuple[int, int | None]]:
    """Of each file that is to be read its length, and how much of it is in memory; of one that is gone nothing: reading
    it says so."""
    objects = Objects(folder_of(info.path))
    paths: dict[Path, int] = {}
    for section in sections:
        if section.in_store:
            paths[objects.path_of(section.digest)] = section.n_stored
        else:
            paths[info.path] = info.n_file_bytes
    found = []
    for path, n_bytes in paths.items():
        with contextlib.suppress(NotFoundError):
            found.append((n_bytes, n_resident_bytes(path)))
    return found
