"""Putting a live sequence on disk: only what is new, into the file it came from, or all of it into a new one."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from llamakv import __version__
from llamakv.engine.contract import Model, ModelInfo
from llamakv.engine.prefix import n_common
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
from llamakv.ops.budget import Budget
from llamakv.ops.lineage import relabelled, with_labels
from llamakv.ops.requests import Compress, Reporter, Saved
from llamakv.records import Chat, Lineage, MemoryKind, ModelIdentity, Sampling, SectionKind, SessionRecord, StateSection
from llamakv.store import codec as store_codec
from llamakv.store.collector import collect, digests_of
from llamakv.store.session_file import (
    SessionInfo,
    SessionReader,
    StoredSection,
    create_session,
    extend_session,
    truncate_sections,
)
from llamakv.store.store_folder import is_in_store, is_store

_MAX_NAME_BYTES = 255  # NAME_MAX of the usual file systems

_LEAST_STORED = 0.8
"""Of the bytes of a state, what is stored of them at least: f16 keys and values take 0.85, all others more."""

_N_TAILS = 3
"""Recurrent tails kept in a file: the present one, and the ends of the two turns before it to go back to."""


class KeptSequence(Protocol):
    """What a save needs of a live sequence; see ``LiveSequence``."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def n_cells(self) -> int: ...
    @property
    def n_ctx(self) -> int: ...
    @property
    def n_settled(self) -> int: ...
    @property
    def n_state_bytes(self) -> int: ...
    def settle(self) -> None: ...
    def export(self, from_position: int = 0) -> Iterator[StateSection]: ...


class KeptModel(Protocol):
    """What a save needs of a model and the sequence in its memory; see ``OpenModel``."""

    @property
    def model(self) -> Model: ...
    @property
    def info(self) -> ModelInfo: ...
    @property
    def identity(self) -> ModelIdentity: ...
    @property
    def sequence(self) -> KeptSequence: ...
    def use(self, path: Path) -> None: ...


class Keeper:
    """Knows the file a live sequence was last saved to or restored from, and saves the difference.

    ``stored`` is the session as it is in that file; sections of it up to the sequence's ``n_settled`` are still true.
    Where there is none yet, ``prefix`` may be a session whose first cells the sequence began with. ``budget`` is what
    a store that is saved to must keep to. ``replaces`` is a session that a first save may take the place of, as long as
    it is what it was; ``labels`` has the note, tags and pin of a new session, ``created_s`` is when it was begun (None:
    now).
    """

    def __init__(
        self,
        opened: KeptModel,
        stored: SessionInfo | None,
        *,
        compress: Compress,
        budget: Budget | None = None,
        replaces: SessionInfo | None = None,
        labels: Lineage | None = None,
        created_s: float | None = None,
    ) -> None:
        self._opened = opened
        self._created_s = created_s
        self._replaces = replaces
        self._labels = labels
        self._budget = budget or Budget()
        self._stored = stored
        self._prefix: SessionInfo | None = None
        self._compress = store_codec.Compress(compress)

    def begins_with(self, prefix: SessionInfo) -> None:
        """The live sequence, not saved yet, was begun with cells of another session: they need not be written again."""
        self._prefix = prefix

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
        is_taken: Callable[[str], bool] = lambda name: False,
    ) -> Saved:
        """Save the live sequence to ``path``. Writes new sections only if that is the file it came from.

        With ``aside_on_conflict`` a file that somebody else saved, removed, spoilt or keeps locked meanwhile is left
        alone, and the session goes to a new file beside it, of a name that is not taken.

        Raises:
            ConflictError, LockedError, ExistsError, WriteError, NoRoomError (the store's budget): nothing is lost; the
                file is as it was.
        """
        sequence = self._opened.sequence
        if not sequence.tokens:
            raise UsageError("there is nothing to save yet: no token has been read")
        started = time.perf_counter()
        record = self._record(chat=chat, text=text, sampling=sampling, name=name, note=note, path=path)
        same_file = self._stored is not None and path == self._stored.path
        asked = None
        try:
            self.make_room(path, reporter=reporter, overwrite=overwrite)
            if self._stored is not None and same_file:
                info = self._extend(self._stored, record, reporter)
            else:
                info = self._create(path, record, reporter, overwrite=overwrite)
        except (ConflictError, ExistsError, LockedError, NotFoundError, FormatError) as error:
            if not aside_on_conflict:
                raise
            info = self._save_aside(path, record, error, reporter, is_taken)
            asked = None if info.path == path else path
        sequence.settle()
        self._stored = info
        self._opened.use(info.path)
        self._budget.after_save(info.path.parent, keep=[info.path.stem], reporter=reporter)
        return Saved(info=info, n_written=info.n_written, elapsed_s=time.perf_counter() - started, asked=asked)

    def make_room(self, path: Path, *, reporter: Reporter, overwrite: bool, n_cells: int | None = None) -> None:
        """Make sure that the store which ``path`` may be in has room for the session, or for ``n_cells`` of it.

        Raises:
            NoRoomError: it has not, whatever else is removed; nothing was.
        """
        if not is_store(path.parent):
            return
        sequence, base = self._opened.sequence, self._stored or self._prefix
        is_shared = base is not None and base.path.parent == path.parent
        n_new = (n_cells or sequence.n_cells) - (sequence.n_settled if is_shared else 0)
        n_bytes = bytes_of_cells(sequence, n_new)
        is_own = self._stored is not None and self._stored.path == path
        replaces = path.stem if overwrite and not is_own else None
        keep = [path.stem, *([base.path.stem] if base is not None and is_shared else [])]
        self._budget.before_save(path.parent, n_bytes, keep=keep, replaces=replaces, reporter=reporter)

    def _create(self, path: Path, record: SessionRecord, reporter: Reporter, *, overwrite: bool) -> SessionInfo:
        """Write a new file: what came from another session's sections is taken from there, as it is."""
        with contextlib.ExitStack() as stack:
            source = self._source(stack)
            if source is None:
                keep: tuple[StoredSection, ...] = ()
                new = _counted(self._opened.sequence, 0, reporter)
            else:
                keep, new = self._parts(source.info, reporter, is_new=True)
            replaced = self._replaces if self._replaces is not None and self._replaces.path == path else None
            left = _objects_of(path) if overwrite or replaced is not None else frozenset()
            info = create_session(
                path,
                record,
                new,
                compress=self._compress,
                overwrite=overwrite or replaced is not None,
                replaces=None if overwrite or replaced is None else replaced.commit,
                source=source,
                keep=keep,
            )
            _collect_dropped(info, left)
            return info

    def _source(self, stack: contextlib.ExitStack) -> SessionReader | None:
        """The session that the first cells in memory came from, held open; None if there is none, or no longer."""
        base = self._stored if self._stored is not None else self._prefix
        if base is not None:
            with contextlib.suppress(StoreError, NotFoundError):
                source = stack.enter_context(SessionReader(base.path))
                if source.info.commit == base.commit:
                    source.hold(source.info.sections)
                    return source
        return None

    def _extend(self, base: SessionInfo, record: SessionRecord, reporter: Reporter) -> SessionInfo:
        keep, new = self._parts(base, reporter, is_new=False)
        try:
            info = extend_session(base, record, keep=keep, new=new, compress=self._compress)
        except ConflictError:
            now = relabelled(base)
            if now is None:
                raise
        else:
            _collect_dropped(info, {section.digest for section in base.sections if section.in_store})
            return info
        lineage = with_labels(record.lineage, before=base.record.lineage, now=now.record.lineage)
        keep, new = self._parts(now, reporter, is_new=False)
        return extend_session(now, replace(record, lineage=lineage), keep=keep, new=new, compress=self._compress)

    def _parts(
        self, base: SessionInfo, reporter: Reporter, *, is_new: bool
    ) -> tuple[tuple[StoredSection, ...], Iterator[StateSection]]:
        """The live state in two parts: stored sections that are still true, and the rest, to be written."""
        sequence = self._opened.sequence
        n_cells, stored = sequence.n_cells, base.sections
        n_kept = min(sequence.n_settled, n_common(base.record.tokens, sequence.tokens))
        if is_new and self._opened.info.kind in (MemoryKind.DENSE, MemoryKind.WINDOWED):
            n_kept = without_scraps(stored, n_kept)
        keep = sections_to_keep(stored, n_kept)
        keep = tuple(s for s in keep if s.kind is not SectionKind.WHOLE or s.p1 == n_cells)
        there = {s.kind for s in keep if s.kind is not SectionKind.CELLS and s.p1 == n_cells}
        sections = _counted(sequence, n_kept, reporter) if SectionKind.WHOLE not in there else iter(())
        return keep, (section for section in sections if section.kind not in there)

    def _save_aside(
        self,
        path: Path,
        record: SessionRecord,
        error: LlamakvError,
        reporter: Reporter,
        is_taken: Callable[[str], bool],
    ) -> SessionInfo:
        """Save to a new file, since the one asked for was changed, taken away or spoilt by somebody else."""
        if self._stored is not None:
            record = replace(record, lineage=replace(self._branch(record.lineage), n_saves=1, name=record.lineage.name))
        for place in places_beside(path, path_first=isinstance(error, NotFoundError)):
            if is_taken(place.stem):
                continue
            try:
                info = self._create(place, record, reporter, overwrite=False)
            except ExistsError:
                continue
            if isinstance(error, NotFoundError) and place == path:
                reporter.warning(f"{path} was moved or removed meanwhile: it is saved there again, whole")
            else:
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
        created_s = now if self._created_s is None else self._created_s
        if self._stored is None:
            lineage = Lineage(
                session_id=uuid.uuid4().hex, created_s=created_s, updated_s=now, llamakv_version=__version__
            )
            if (labels := self._labels) is not None:
                lineage = replace(lineage, tags=labels.tags, pinned=labels.pinned, note=labels.note)
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
            lineage=self._budget.apply_to(lineage),
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
            created_s=time.time() if self._created_s is None else self._created_s,
            updated_s=time.time(),
            llamakv_version=__version__,
        )


def _collect_dropped(info: SessionInfo, before: Collection[str]) -> None:
    """Remove the objects that a session referred to ``before`` and no session does now, as far as that can be done."""
    left = set(before) - {section.digest for section in info.sections}
    if left:
        with contextlib.suppress(StoreError):  # what is left is for gc
            collect(info.path.parent, left)


def _objects_of(path: Path) -> frozenset[str]:
    """The objects of the session that is about to be replaced; none that anybody could name if it cannot be read."""
    try:
        return digests_of(path) if is_in_store(path) else frozenset()
    except StoreError:
        return frozenset()


def bytes_of_cells(sequence: KeptSequence, n_cells: int) -> int:
    """At least so many bytes ``n_cells`` more cells take on disk, going by those a sequence has; 0 if it has none."""
    n_each = sequence.n_state_bytes / sequence.n_cells if sequence.n_cells else 0.0
    return int(_LEAST_STORED * n_each * max(n_cells, 0))


def without_scraps(stored: tuple[StoredSection, ...], n_cells: int) -> int:
    """Where what is taken from another session should end, of its first ``n_cells`` cells: a section of which less than
    half is wanted would keep the rest of it alive."""
    for section in stored:
        if section.kind is SectionKind.CELLS and section.p0 < n_cells < section.p1:
            return n_cells if 2 * (n_cells - section.p0) >= section.p1 - section.p0 else section.p0
    return n_cells


def sections_to_keep(sections: tuple[StoredSection, ...], n_settled: int) -> tuple[StoredSection, ...]:
    """The stored sections that are still true when the first ``n_settled`` cells are; of tails the latest few."""
    kept = truncate_sections(sections, n_settled)
    tails = sorted(s.p1 for s in kept if s.kind is SectionKind.TAIL)[-_N_TAILS + 1 :]
    return tuple(s for s in kept if s.kind is not SectionKind.TAIL or s.p1 in tails)


def _counted(sequence: KeptSequence, from_position: int, reporter: Reporter) -> Iterator[StateSection]:
    for section in sequence.export(from_position):
        reporter.progress("save", section.p1, sequence.n_cells)
        yield section


def places_beside(path: Path, *, path_first: bool = False) -> Iterator[Path]:
    """Names to save under where ``path`` cannot be had: itself, if it is only gone, then numbered ones."""
    if path_first:
        yield path
    for number in range(2, 10_000):
        ending = f"-{number}{path.suffix}"
        stem = os.fsencode(path.stem)[: _MAX_NAME_BYTES - len(os.fsencode(ending))]
        yield path.with_name(stem.decode("utf-8", "ignore") + ending)
