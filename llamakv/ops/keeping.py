"""Putting a live sequence on disk: only what is new, into the file it came from, or all of it into a new one."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from llamakv import __version__
from llamakv.engine.contract import LiveSequence, Run, RunRequest, Scheduler
from llamakv.engine.prefix import n_common
from llamakv.engine.prompt import template_digest
from llamakv.engine.text import join
from llamakv.errors import (
    ConflictError,
    ExistsError,
    FormatError,
    LlamakvError,
    LockedError,
    NotFoundError,
    StoreError,
    UsageError,
)
from llamakv.ops.opening import OpenModel
from llamakv.ops.requests import Compress, Reporter, Saved
from llamakv.records import Chat, Lineage, Message, Sampling, SectionKind, SessionRecord, StateSection
from llamakv.store import codec as store_codec
from llamakv.store.session_file import (
    SessionInfo,
    SessionReader,
    StoredSection,
    create_session,
    extend_session,
    read_session,
    truncate_sections,
)

_MAX_NAME_BYTES = 255  # NAME_MAX of the usual file systems

_N_TAILS = 3
"""Recurrent tails kept in a file: the present one, and the ends of the two turns before it to go back to."""


class Keeper:
    """Knows the file a live sequence was last saved to or restored from, and saves the difference.

    ``stored`` is the session as it is in that file; sections of it up to the sequence's ``n_settled`` are still true.
    """

    def __init__(self, opened: OpenModel, stored: SessionInfo | None, *, compress: Compress) -> None:
        self._opened = opened
        self._stored = stored
        self._compress = store_codec.Compress(compress)

    @property
    def stored(self) -> SessionInfo | None:
        """The session as it was last saved or read."""
        return self._stored

    def replace_stored(self, stored: SessionInfo | None) -> None:
        """The live sequence now is the session of another file, or of none."""
        self._stored = stored

    def save(
        self,
        path: Path,
        *,
        chat: Chat | None,
        text: str | None,
        sampling: Sampling,
        reporter: Reporter,
        overwrite: bool = False,
        name: str | None = None,
        note: str | None = None,
        aside_on_conflict: bool = False,
    ) -> Saved:
        """Save the live sequence to ``path``. Writes new sections only if that is the file it came from.

        With ``aside_on_conflict`` a file that somebody else saved, removed, spoilt or keeps locked meanwhile is left
        alone, and the session goes to a new file beside it.

        Raises:
            ConflictError, LockedError, ExistsError, WriteError: nothing is lost; the file is as it was.
        """
        sequence = self._opened.sequence
        if not sequence.tokens:
            raise UsageError("there is nothing to save yet: no token has been read")
        started = time.perf_counter()
        record = self._record(chat=chat, text=text, sampling=sampling, name=name, note=note, path=path)
        same_file = self._stored is not None and path == self._stored.path
        asked = None
        n_before = self._stored.n_file_bytes if self._stored is not None and same_file else 0
        try:
            if self._stored is not None and same_file:
                info = self._extend(self._stored, record, reporter)
            else:
                info = self._create(path, record, reporter, overwrite=overwrite)
        except (ConflictError, ExistsError, LockedError, NotFoundError, FormatError) as error:
            if not aside_on_conflict:
                raise
            info = self._save_aside(path, record, error, reporter)
            asked, n_before = (None if info.path == path else path), 0
        sequence.settle()
        self._stored = info
        n_written = info.n_file_bytes - n_before if info.n_file_bytes > n_before else info.n_file_bytes
        return Saved(info=info, n_written=n_written, elapsed_s=time.perf_counter() - started, asked=asked)

    def _create(self, path: Path, record: SessionRecord, reporter: Reporter, *, overwrite: bool) -> SessionInfo:
        sections = _counted(self._opened.sequence, 0, reporter)
        return create_session(path, record, sections, compress=self._compress, overwrite=overwrite)

    def _extend(self, base: SessionInfo, record: SessionRecord, reporter: Reporter) -> SessionInfo:
        sequence = self._opened.sequence
        keep = sections_to_keep(base.sections, sequence.n_settled)
        n_cells = sequence.n_cells
        keep = tuple(s for s in keep if s.kind is not SectionKind.WHOLE or s.p1 == n_cells)
        there = {s.kind for s in keep if s.kind is not SectionKind.CELLS and s.p1 == n_cells}
        sections = _counted(sequence, sequence.n_settled, reporter) if SectionKind.WHOLE not in there else iter(())
        new = (section for section in sections if section.kind not in there)
        return extend_session(base, record, keep=keep, new=new, compress=self._compress)

    def _save_aside(self, path: Path, record: SessionRecord, error: LlamakvError, reporter: Reporter) -> SessionInfo:
        """Save to a new file, since the one asked for was changed, taken away or spoilt by somebody else."""
        if self._stored is not None:
            record = replace(record, lineage=replace(self._branch(record.lineage), n_saves=1, name=record.lineage.name))
        for place in _places_beside(path, path_first=isinstance(error, NotFoundError)):
            try:
                info = self._create(place, record, reporter, overwrite=False)
            except ExistsError:
                continue
            reporter.warning(f"{error.message}; saved to {place} instead")
            return info
        raise error

    def _record(
        self,
        *,
        chat: Chat | None,
        text: str | None,
        sampling: Sampling,
        name: str | None,
        note: str | None,
        path: Path,
    ) -> SessionRecord:
        opened = self._opened
        now = time.time()
        if self._stored is None:
            lineage = Lineage(session_id=uuid.uuid4().hex, created_s=now, updated_s=now, llamakv_version=__version__)
        elif path == self._stored.path:
            lineage = self._stored.record.lineage
        else:
            lineage = self._branch(self._stored.record.lineage)
        lineage = replace(
            lineage,
            name=name if name is not None else lineage.name,
            note=note if note is not None else lineage.note,
            updated_s=now,
            n_saves=lineage.n_saves + 1,
            llamakv_version=__version__,
        )
        return SessionRecord(
            identity=opened.identity,
            kind=opened.info.kind,
            settings=opened.model.settings,
            versions=opened.model.versions,
            tokens=tuple(opened.sequence.tokens),
            sampling=sampling,
            lineage=lineage,
            chat=chat,
            n_ctx=opened.sequence.n_ctx,
            text=text,
        )

    def _branch(self, parent: Lineage) -> Lineage:
        assert self._stored is not None
        return Lineage(
            session_id=uuid.uuid4().hex,
            parent_id=parent.session_id,
            parent_position=n_common(self._stored.record.tokens, self._opened.sequence.tokens),
            tags=parent.tags,
            created_s=time.time(),
            updated_s=time.time(),
            llamakv_version=__version__,
        )


class BranchKeeper:
    """Keeps branches of one session as sessions of their own; what they share with it is copied from its file as it is.

    ``n_stored`` leading cells in memory are what that file holds. The file is only read.
    """

    def __init__(
        self, opened: OpenModel, parent: SessionInfo, *, compress: Compress, n_stored: int, template: str | None
    ) -> None:
        self._opened = opened
        self._parent = parent
        self._compress = store_codec.Compress(compress)
        self._n_stored = n_stored
        self._template = template

    def save(
        self,
        path: Path,
        scheduler: Scheduler,
        run: Run,
        *,
        messages: Sequence[Message],
        sampling: Sampling,
        name: str | None,
        overwrite: bool,
    ) -> SessionInfo:
        """Write the session of a run that is over and kept its cells; ``messages`` are those it replied to.

        Raises:
            ExistsError, WriteError, LockedError: nothing was changed.
        """
        record = self._record(run, messages, sampling, name)
        n_shared = min(self._n_stored, run.n_reused)
        with contextlib.ExitStack() as stack:
            keep: tuple[StoredSection, ...] = ()
            source = None
            with contextlib.suppress(StoreError, NotFoundError):
                source = stack.enter_context(SessionReader(self._parent.path))
                if source.info.commit == self._parent.commit:
                    keep = _without_whole(sections_to_keep(self._parent.sections, n_shared))
            n_kept = n_shared if keep else 0
            sections = scheduler.export(run, n_kept)
            return create_session(
                path, record, sections, compress=self._compress, overwrite=overwrite, source=source, keep=keep
            )

    def holds(self, path: Path, request: RunRequest) -> bool:
        """Whether a file is what an earlier run of the same batch kept of this branch, and nobody went on with it."""
        try:
            record = read_session(path).record
        except (StoreError, NotFoundError):
            return False
        return (
            is_untouched_branch(record, self._parent)
            and record.tokens[: len(request.tokens)] == request.tokens
            and record.sampling == request.sampling
        )

    def _record(self, run: Run, messages: Sequence[Message], sampling: Sampling, name: str | None) -> SessionRecord:
        opened, parent, now = self._opened, self._parent.record, time.time()
        tokens = tuple(run.tokens)
        n_prompt = len(tokens) - run.n_generated
        chat, text = None, None
        if self._template is not None:
            reply = Message(role="assistant", content=run.text, p0=n_prompt, p1=len(tokens), finish=run.finish_reason)
            chat = Chat(
                template=self._template,
                template_digest=template_digest(self._template),
                messages=(*messages, reply) if run.n_generated else tuple(messages),
            )
        else:
            text = join(opened.model.token_bytes(token) for token in tokens)
        lineage = Lineage(
            session_id=uuid.uuid4().hex,
            parent_id=parent.lineage.session_id,
            parent_position=n_common(parent.tokens, tokens),
            tags=parent.lineage.tags,
            name=name,
            created_s=now,
            updated_s=now,
            n_saves=1,
            llamakv_version=__version__,
        )
        return SessionRecord(
            identity=opened.identity,
            kind=opened.info.kind,
            settings=opened.model.settings,
            versions=opened.model.versions,
            tokens=tokens,
            sampling=sampling,
            lineage=lineage,
            chat=chat,
            n_ctx=opened.sequence.n_ctx,
            text=text,
        )


def is_untouched_branch(record: SessionRecord, parent: SessionInfo) -> bool:
    """Whether a session is a branch of another as it was kept at first."""
    lineage = record.lineage
    return lineage.parent_id == parent.record.lineage.session_id and lineage.n_saves == 1


def _without_whole(sections: tuple[StoredSection, ...]) -> tuple[StoredSection, ...]:
    """Sections that others can follow; none, if they do not begin at the first cell."""
    kept = tuple(section for section in sections if section.kind is not SectionKind.WHOLE)
    return kept if any(section.kind is SectionKind.CELLS for section in kept) else ()


def sections_to_keep(sections: tuple[StoredSection, ...], n_settled: int) -> tuple[StoredSection, ...]:
    """The stored sections that are still true when the first ``n_settled`` cells are; of tails the latest few."""
    kept = truncate_sections(sections, n_settled)
    tails = sorted(s.p1 for s in kept if s.kind is SectionKind.TAIL)[-_N_TAILS + 1 :]
    return tuple(s for s in kept if s.kind is not SectionKind.TAIL or s.p1 in tails)


def _counted(sequence: LiveSequence, from_position: int, reporter: Reporter) -> Iterator[StateSection]:
    for section in sequence.export(from_position):
        reporter.progress("save", section.p1, sequence.n_cells)
        yield section


def _places_beside(path: Path, *, path_first: bool) -> Iterator[Path]:
    """Names to save under where ``path`` cannot be had: itself, if it is only gone, then numbered ones."""
    if path_first:
        yield path
    for number in range(2, 10_000):
        ending = f"-{number}{path.suffix}"
        stem = os.fsencode(path.stem)[: _MAX_NAME_BYTES - len(os.fsencode(ending))]
        yield path.with_name(stem.decode("utf-8", "ignore") + ending)
