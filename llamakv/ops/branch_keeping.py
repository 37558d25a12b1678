"""Putting branches of a session on disk as sessions of their own, with what they share with it."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from llamakv import __version__
from llamakv.engine.contract import Run, RunRequest, Scheduler
from llamakv.engine.prefix import n_common
from llamakv.engine.prompt import template_digest
from llamakv.engine.text import join
from llamakv.errors import NotFoundError, StoreError
from llamakv.ops.budget import Budget
from llamakv.ops.keeping import bytes_of_cells, sections_to_keep
from llamakv.ops.opening import OpenModel
from llamakv.ops.requests import Compress, Reporter
from llamakv.records import Chat, Lineage, Message, Sampling, SectionKind, SessionRecord
from llamakv.store import codec as store_codec
from llamakv.store.session_file import SessionInfo, SessionReader, StoredSection, create_session, read_session


class BranchKeeper:
    """Keeps branches of one session as sessions of their own; what they share with it is copied from its file as it is.

    ``n_stored`` leading cells in memory are what that file holds. The file is only read.
    """

    def __init__(
        self,
        opened: OpenModel,
        parent: SessionInfo,
        *,
        compress: Compress,
        n_stored: int,
        template: str | None,
        budget: Budget | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        self._opened = opened
        self._budget = budget or Budget()
        self._reporter = reporter or Reporter()
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
            ExistsError, WriteError, LockedError, NoRoomError: nothing was changed.
        """
        record = self._record(run, messages, sampling, name)
        n_shared = min(self._n_stored, run.n_reused)
        keep_names = [path.stem, *([self._parent.path.stem] if self._parent.path.parent == path.parent else [])]
        n_bytes = bytes_of_cells(self._opened.sequence, len(record.tokens) - 1 - n_shared)
        replaces = path.stem if overwrite else None
        self._budget.before_save(path.parent, n_bytes, keep=keep_names, replaces=replaces, reporter=self._reporter)
        info = self._write(path, scheduler, run, record, n_shared, overwrite=overwrite)
        self._budget.after_save(path.parent, keep=keep_names, reporter=self._reporter)
        return info

    def _write(
        self, path: Path, scheduler: Scheduler, run: Run, record: SessionRecord, n_shared: int, *, overwrite: bool
    ) -> SessionInfo:
        with contextlib.ExitStack() as stack:
            keep: tuple[StoredSection, ...] = ()
            source = None
            with contextlib.suppress(StoreError, NotFoundError):
                source = stack.enter_context(SessionReader(self._parent.path))
                if source.info.commit == self._parent.commit:
                    wanted = _without_whole(sections_to_keep(self._parent.sections, n_shared))
                    source.hold(wanted)
                    keep = wanted
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
            reply = Message(
                role="assistant",
                content=run.text,
                p0=n_prompt,
                p1=len(tokens),
                finish=run.finish_reason,
                time_s=now,
            )
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
            lineage=self._budget.apply_to(lineage),
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
