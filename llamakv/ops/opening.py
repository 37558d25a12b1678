"""A loaded model with its live sequence, and bringing a stored session back into it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from llamakv.engine.contract import LiveSequence, MemoryRequest, Model, ModelInfo
from llamakv.engine.llamacpp import LlamaModel
from llamakv.errors import (
    AbortedError,
    ConflictError,
    DamagedError,
    InterruptedByUser,
    MismatchError,
    ModelFileError,
    NotFoundError,
)
from llamakv.ops.lineage import split_note
from llamakv.ops.matching import (
    FoundModel,
    check_identity,
    check_layout,
    describe,
    find_model,
    merge_memory,
    reasons_to_recompute,
    stamp_of,
)
from llamakv.ops.places import position_of
from llamakv.ops.requests import MemoryOptions, ModelRequest, Opened, Reporter, ResumeOptions
from llamakv.ops.resume_cost import sections_restored
from llamakv.records import MemoryKind, ModelIdentity, StateSection
from llamakv.store.session_file import (
    SessionInfo,
    SessionReader,
    StoredSection,
    mark_used,
    n_cells_held,
    sections_up_to,
)
from llamakv.store.usage import using

_UNKNOWN_N_CTX = 1 << 17
"""The largest context for a model that does not say what it was trained with."""


class OpenModel:
    """A loaded model with one live sequence, and the identity and settings that go into a session's record."""

    def __init__(
        self,
        found: FoundModel,
        request: ModelRequest,
        memory: MemoryRequest,
        *,
        reporter: Reporter,
        identity: ModelIdentity | None = None,
    ) -> None:
        started = time.perf_counter()
        self.found = found
        self.request = request
        self.memory = memory
        self.n_threads = request.n_threads or default_threads()
        adapters = [(path, adapter.scale) for path, adapter in found.adapters]
        try:
            self.model: Model = LlamaModel(
                found.path,
                n_gpu_layers=request.n_gpu_layers,
                adapters=adapters,
                on_log=request.on_log,
                on_progress=_loading(reporter, found.n_bytes),
            )
        except ModelFileError as error:
            if reporter.should_abort():
                raise InterruptedByUser("interrupted while the model was loaded; nothing was changed") from error
            raise
        if stamp_of(found.path) != found.stamp:
            self.model.close()
            raise MismatchError(f"the model file {found.path} was changed while it was opened", path=str(found.path))
        self.load_s = time.perf_counter() - started
        if request.n_ctx is not None and 0 < self.info.n_ctx_train < request.n_ctx:
            reporter.notice(
                f"{self.info.name} was trained with contexts of {self.info.n_ctx_train:,} tokens; beyond that it "
                "may answer badly"
            )
        self._identity = identity
        self._sequence: LiveSequence | None = None
        self._uses = contextlib.ExitStack()
        self._used: set[Path] = set()

    @property
    def info(self) -> ModelInfo:
        """What the model says of itself."""
        return self.model.info

    @property
    def identity(self) -> ModelIdentity:
        """What a session of this model must match."""
        if self._identity is None:
            self._identity = ModelIdentity(
                digest=self.found.digest,
                n_bytes=self.found.n_bytes,
                architecture=self.info.architecture,
                name=self.info.name,
                quantisation=self.info.quantisation,
                tokenizer_digest=self.model.tokenizer_digest(),
                adapters=tuple(adapter for _, adapter in self.found.adapters),
            )
        return self._identity

    @property
    def sequence(self) -> LiveSequence:
        """The live sequence; there is none before ``open_sequence``."""
        assert self._sequence is not None
        return self._sequence

    @property
    def has_sequence(self) -> bool:
        """Whether a context was opened."""
        return self._sequence is not None

    def n_ctx_max(self) -> int:
        """Cells a context may have: what the user allows, or what the model was trained with."""
        return self.request.n_ctx or self.info.n_ctx_train or _UNKNOWN_N_CTX

    def open_sequence(self, n_tokens: int = 1) -> LiveSequence:
        """Open a context with room for ``n_tokens``; it becomes the live one and replaces the one before."""
        fresh = self._open(n_tokens)
        if self._sequence is not None:
            self._sequence.close()
        self._sequence = fresh
        return fresh

    def _open(self, n_tokens: int) -> LiveSequence:
        n_parallel, n_ctx_max = self.request.n_parallel, self.n_ctx_max()
        return self.model.open_scheduler(
            self.memory,
            n_parallel=n_parallel,
            n_ctx_min=n_tokens,
            n_ctx_max=n_ctx_max,
            # branches may have more cells than one of them has tokens, unless the user sets a limit
            n_cells_max=n_ctx_max if n_parallel == 0 or self.request.n_ctx is not None else None,
            n_threads=self.n_threads,
        ).root

    def restore_beside(
        self, info: SessionInfo, reporter: Reporter, accept: Callable[[SessionInfo], None]
    ) -> SessionInfo:
        """Restore another session of the same model into a context of its own, which becomes the live one only when
        all went well, ``accept`` of what was read included. Returns what was read, as ``restore_from_file`` does."""
        fresh = self._open(len(info.record.tokens))
        try:
            info = restore_from_file(fresh, info, reporter)
            accept(info)
            read_rest(fresh, info.record.tokens, reporter)
        except BaseException:
            fresh.close()
            raise
        self.sequence.close()
        self._sequence = fresh
        self.use(info.path)
        return info

    def use(self, path: Path) -> None:
        """Have a session open until the model is closed: nobody takes it for unused."""
        if path not in self._used:
            self._used.add(path)
            self._uses.enter_context(using(path))

    def close(self) -> None:
        """Free the context and the model."""
        self._uses.close()
        self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def default_threads() -> int:
    """One thread for each physical core this process may run on."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def _loading(reporter: Reporter, n_bytes: int) -> Callable[[float], bool]:
    def on_progress(part: float) -> bool:
        reporter.progress("load", int(part * n_bytes), n_bytes)
        return not reporter.should_abort()

    return on_progress


# ---------------------------------------------------------------- back into memory


def restore_from_file(
    sequence: LiveSequence, before: SessionInfo, reporter: Reporter, n_tokens: int | None = None
) -> SessionInfo:
    """Bring a session into a live sequence, section by section. Returns what was read, which is newer than ``before``
    if somebody saved it meanwhile. Only its first ``n_tokens`` tokens are wanted; of a session that has lost sections
    fewer come back, of one that lost them all none (see ``read_rest``). None come back either where windowed layers
    lack the window before that place: it was saved when the engine had given away what was out of the last window.

    Raises:
        NotFoundError: meanwhile it has fewer than ``n_tokens``.
        MismatchError: meanwhile another session took its place.
        ConflictError: it is saved again and again while it is read.
    """
    for last_try in (False, False, True):
        try:
            with SessionReader(before.path) as reader:
                info = reader.info
                if _made_by(info) != _made_by(before):
                    raise MismatchError(f"{before.path} was replaced by another session while it was opened")
                tokens, sections = info.record.tokens[:n_tokens], info.sections
                if n_tokens is not None:
                    if len(tokens) < n_tokens:
                        raise NotFoundError(f"{info.path} has only {len(tokens):,} tokens now, not {n_tokens:,}")
                    sections = sections_up_to(info.record.kind, sections, n_tokens - 1)
                n_cells = n_cells_held(info.record.kind, sections)
                try:
                    restore_sections(sequence, tokens, reader, sections, n_cells, reporter)
                except MismatchError:
                    if info.record.kind is not MemoryKind.WINDOWED or sequence.tokens:
                        raise
        except ConflictError:
            if last_try:
                raise
        else:
            mark_used(info.path)
            return info
    raise AssertionError


def restore_sections(
    sequence: LiveSequence,
    tokens: Sequence[int],
    reader: SessionReader,
    sections: Sequence[StoredSection],
    n_cells: int,
    reporter: Reporter,
) -> None:
    """Make a live sequence the first ``n_cells + 1`` of ``tokens``; ``sections`` of ``reader`` are their state. Nothing
    happens where there is no cell."""
    wanted = sections_restored(sections)

    def counted() -> Iterator[StateSection]:
        for section in reader.read(wanted):
            yield section
            reporter.progress("restore", section.p1, len(tokens))

    if n_cells or len(tokens) == 1:
        sequence.restore(tokens[: n_cells + 1], counted())


def read_rest(sequence: LiveSequence, tokens: Sequence[int], reporter: Reporter) -> int:
    """Read what a sequence lacks of a session's tokens, whose state was lost or never stored; return how many that
    were.

    Raises:
        InterruptedByUser: stopped; nothing was changed on disk.
    """
    missing = tokens[len(sequence.tokens) :]
    n = len(tokens) - 1 - sequence.n_cells
    if not missing:
        return 0
    reporter.notice(f"the state of {n:,} of {len(tokens) - 1:,} tokens is not stored: they are read again")
    _read(sequence, missing, reporter)
    return n


def _made_by(info: SessionInfo) -> tuple[object, ...]:
    """What a newer state of the same session must have in common with the older one, which was checked."""
    record = info.record
    return record.lineage.session_id, record.identity, record.settings, record.versions


def resume(
    path: Path,
    request: ModelRequest,
    memory: MemoryOptions,
    options: ResumeOptions,
    reporter: Reporter,
    info: SessionInfo,
    *,
    at: str | None = None,
) -> tuple[OpenModel, SessionInfo, Opened]:
    """Open the model of a stored session and bring the session back, or its tokens before the place ``at``; or read
    them again where that is asked for or necessary.

    Raises:
        UsageError, NotFoundError: there is no such place in it.
        MismatchError, NotFoundError, NoRoomError, FormatError: see their texts; nothing is changed on disk.
    """
    record = info.record
    n_tokens = len(record.tokens) if at is None else position_of(record, at)
    other_model = options.recompute and request.path is not None
    found = find_model(request, record.identity, reporter)
    changed = found.digest != record.identity.digest or (
        tuple(adapter for _, adapter in found.adapters) != record.identity.adapters
    )
    if not options.recompute:
        check_identity(record, found)
    merged = merge_memory(memory, record.settings, record.kind, may_change=options.recompute)
    opened = OpenModel(found, request, merged, reporter=reporter, identity=None if changed else record.identity)
    try:
        if other_model and changed and opened.identity.tokenizer_digest != record.identity.tokenizer_digest:
            raise MismatchError(
                f"the session's tokens mean nothing to {describe(opened.identity)}: it has another tokenizer",
                field="tokenizer digest",
                expected=record.identity.tokenizer_digest,
                actual=opened.identity.tokenizer_digest,
            )
        return _bring_back(opened, info, None if at is None else n_tokens, options, reporter)
    except BaseException:
        opened.close()
        raise


def _bring_back(
    opened: OpenModel, info: SessionInfo, n_tokens: int | None, options: ResumeOptions, reporter: Reporter
) -> tuple[OpenModel, SessionInfo, Opened]:
    record = info.record
    started = time.perf_counter()
    opened.use(info.path)
    mark_used(info.path)
    sequence = opened.open_sequence(n_tokens or len(record.tokens))
    reasons: tuple[str, ...] = ("asked for with --recompute",) if options.recompute else ()
    if not reasons:
        check_layout(record, opened.model.settings)
        reasons = reasons_to_recompute(record, opened.model.versions, options)
    if reasons:
        _read_again(sequence, record.tokens[:n_tokens], reasons, reporter)
        reused, evaluated = 0, sequence.n_cells
    else:
        try:
            info = restore_from_file(sequence, info, reporter, n_tokens)
        except DamagedError as error:
            error.hint = error.hint or "the tokens are whole: the same command with --recompute reads them again"
            raise
        record = info.record
        reused = sequence.n_cells
        evaluated = read_rest(sequence, record.tokens[:n_tokens], reporter)
    mark, _ = split_note(record.lineage.note)
    if mark:
        reporter.warning(f"{info.path} is {mark}; the command that saved it, again, reads the rest")
    return (
        opened,
        info,
        Opened(
            record=record,
            reused=reused,
            evaluated=evaluated,
            model_load_s=opened.load_s,
            restore_s=time.perf_counter() - started,
            reasons=reasons,
        ),
    )


def _read_again(sequence: LiveSequence, tokens: Sequence[int], reasons: Sequence[str], reporter: Reporter) -> None:
    n = len(tokens) - 1
    reporter.notice(f"reading {n:,} tokens again: {'; '.join(reasons)}")
    started = time.perf_counter()
    _read(sequence, tokens, reporter)
    reporter.notice(f"read {n:,} tokens again in {time.perf_counter() - started:.1f} s")


def _read(sequence: LiveSequence, tokens: Sequence[int], reporter: Reporter) -> None:
    try:
        sequence.extend(
            tokens,
            on_progress=lambda done, total: reporter.progress("prefill", done, total),
            should_abort=reporter.should_abort,
        )
    except AbortedError as error:
        raise InterruptedByUser("interrupted while reading the session again; it is unchanged on disk") from error
