"""What a save would come to: tokens, bytes and memory, told without loading weights and without writing anything."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llamakv import __version__
from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp.dry_run import LlamaEstimator
from llamakv.engine.llamacpp.native import attention_rotation
from llamakv.engine.llamacpp.unloaded import UnloadedModel
from llamakv.engine.memory import ContextMemory, MemoryEstimator
from llamakv.engine.prefix import n_common
from llamakv.engine.room import no_room
from llamakv.engine.state_sizes import sum_bytes
from llamakv.errors import LlamakvError, NotFoundError, StoreError, UsageError, WriteError
from llamakv.ops.budget import Budget
from llamakv.ops.matching import (
    FoundModel,
    check_identity,
    check_layout,
    find_model,
    merge_memory,
    reasons_to_recompute,
)
from llamakv.ops.opening import OpenModel
from llamakv.ops.planned_save import (
    Begun,
    Measured,
    budget_error,
    index_bytes,
    measure_session,
    measure_stored,
    plan_save,
    stored_sizes,
)
from llamakv.ops.prefixes import N_WORTH, usable_cells
from llamakv.ops.process_memory import resident_bytes
from llamakv.ops.reading import tokenise
from llamakv.ops.requests import ModelRequest, Reporter, SaveRequest
from llamakv.ops.save import TextToRead as Text
from llamakv.ops.save import check_tokens_continue, earlier_session, is_incomplete, sampling_of, text_of
from llamakv.ops.sizes import size
from llamakv.records import Chat, Lineage, MemorySettings, SessionRecord
from llamakv.store import format
from llamakv.store.reuse import reusable_cells, space_of
from llamakv.store.session_file import SessionInfo, check_writable, read_session
from llamakv.store.store_folder import is_in_store, is_store
from llamakv.store.survey import n_bytes_on_disk

_MIN_CTX = 512  # cells of the smallest context that is opened, as in engine.llamacpp.shared


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEstimate:
    """What a save would come to.

    ``n_tokens`` are all tokens of the text, ``reused`` the cells that a saved session (``reused_from``) would give, and
    ``evaluated`` the tokens to be read. ``raw_bytes`` is the state of the whole session, as the engine would give it,
    ``new_raw_bytes`` what the save would take of it; None where that cannot be told for the architecture. A save that
    takes longer than half a minute keeps up to two more tails of a recurrent state. ``is_compressed``: it was not asked
    to be stored as it is.

    ``stored_bytes`` and ``new_stored_bytes`` are that on disk: as ``measured`` sessions were, or (None) as most of it
    can take. ``index_bytes`` is the index, but for the numbers in it that are not known yet. ``context`` is the memory
    that reading takes beside the weights, ``own_bytes`` what this program takes without a model. ``budget_bytes`` is
    what the store may take (None: no limit, or not in a store), ``store_bytes`` what it takes now. ``shortage`` is the
    error that the save would end with if it wrote ``written_bytes``; None where there is room.
    """

    path: Path
    n_tokens: int
    reused: int
    reused_from: Path | None
    raw_bytes: int | None
    new_raw_bytes: int | None
    n_sections: int | None
    index_bytes: int | None
    stored_bytes: int | None
    new_stored_bytes: int | None
    measured: Measured | None
    is_compressed: bool
    in_store: bool
    context: ContextMemory
    weights_bytes: int
    own_bytes: int
    free_bytes: int
    budget_bytes: int | None
    store_bytes: int | None
    shortage: LlamakvError | None = None

    @property
    def evaluated(self) -> int:
        """Tokens to be read: all but those whose cells are there, and the pending one."""
        return self.n_tokens - 1 - self.reused

    @property
    def memory_bytes(self) -> int:
        """Memory that the save takes at least: program, weights and context."""
        return self.own_bytes + self.weights_bytes + self.context.n_bytes

    @property
    def written_bytes(self) -> int | None:
        """Bytes that would be written: new state, index and header."""
        if self.new_stored_bytes is None or self.index_bytes is None:
            return None
        return self.new_stored_bytes + self.index_bytes + format.N_HEADER

    @property
    def total_bytes(self) -> int | None:
        """Bytes that the whole session takes: what it shares with others counted too."""
        if self.stored_bytes is None or self.index_bytes is None:
            return None
        return self.stored_bytes + self.index_bytes + format.N_HEADER


class _Opened(OpenModel):
    """A model whose weights stay on disk: enough to tokenise, and to say what its sessions must match."""

    def __init__(self, found: FoundModel, request: ModelRequest, memory: MemoryRequest) -> None:
        self.found = found
        self.request = request
        self.memory = memory
        self.model = UnloadedModel(found.path, on_log=request.on_log)
        self._identity = None
        self._sequence = None

    def close(self) -> None:
        """Close the file."""
        self.model.close()


def estimate_save(request: SaveRequest, reporter: Reporter, *, store: Path | None = None) -> SaveEstimate:
    """Tell what ``save_prefix`` with the same request would come to. Refuses what that would refuse, as far as it can
    be known before the weights are loaded. The sessions of ``store`` say how far the state can be compressed.

    Raises:
        UsageError, ExistsError, NotFoundError, MismatchError: as ``save_prefix``.
        WriteError: the folder is missing or cannot be written to.
        ModelFileError: the engine cannot run the model.
        NoRoomError: the text has more tokens than the context may.
    """
    own_bytes = resident_bytes()
    if not (request.text or "").strip() and not request.system:
        raise UsageError("the text is empty: there is nothing to save")
    earlier = earlier_session(request)
    _check_folder(request, earlier)
    found = find_model(request.model, None if earlier is None else earlier.record.identity, reporter)
    if earlier is not None and not request.options.recompute:
        check_identity(earlier.record, found)
    stored = None if earlier is None else earlier.record
    memory = merge_memory(
        request.memory,
        None if stored is None else stored.settings,
        None if stored is None else stored.kind,
        may_change=stored is None or request.options.recompute,
    )
    with (
        _Opened(found, request.model, memory) as opened,
        LlamaEstimator(found.path, on_log=request.model.on_log) as dry,
    ):
        return _estimate(opened, dry, request, earlier, store, own_bytes)


def _estimate(
    opened: OpenModel,
    dry: MemoryEstimator,
    request: SaveRequest,
    earlier: SessionInfo | None,
    store: Path | None,
    own_bytes: int,
) -> SaveEstimate:
    text = text_of(request, opened, earlier)
    pieces = tokenise(opened, text.pieces, at_start=True)
    tokens = tuple(token for _, piece in pieces for token in piece)
    if earlier is not None and is_incomplete(earlier.record):
        check_tokens_continue(earlier, tokens)
    n_ctx_max = opened.n_ctx_max()
    if len(tokens) > n_ctx_max:
        raise no_room(needed=len(tokens), used=0, limit=n_ctx_max, n_ctx_train=opened.info.n_ctx_train)
    context = dry.estimate(opened.memory, n_ctx=_n_ctx_of(len(tokens), n_ctx_max), n_parallel=0)
    settings = _settings(opened.memory, context)
    begun = _begun(opened, request, earlier, settings, tokens)
    plan = plan_save(opened.info, context, begun, swa_full=opened.memory.swa_full, n_cells=len(tokens) - 1)
    in_store = request.name is not None or is_in_store(request.path)
    measured = None
    if request.compress != "none":
        measured = measure_stored(store, opened.identity, settings) or measure_session(begun.base)
    sizes = stored_sizes(plan, measured, in_store=in_store)
    record = _record(opened, request, earlier, settings, text, pieces)
    folder = request.path.parent
    limits = (request.budget or Budget()).limits(folder) if in_store else None
    told = SaveEstimate(
        path=request.path,
        n_tokens=len(tokens),
        reused=begun.n_cells,
        reused_from=None if begun.base is None else begun.base.path,
        raw_bytes=None if plan.new is None else sum(s.n_raw for s in plan.keep) + sum_bytes(plan.new),
        new_raw_bytes=None if plan.new is None else sum_bytes(plan.new),
        n_sections=None if plan.new is None else len(plan.keep) + len(plan.new),
        index_bytes=index_bytes(record, plan, sizes, in_store=in_store),
        stored_bytes=None if sizes is None else sum(s.n_stored for s in plan.keep) + sum(sizes),
        new_stored_bytes=None if sizes is None else sum(sizes),
        measured=measured,
        is_compressed=request.compress != "none",
        in_store=in_store,
        context=context,
        weights_bytes=dry.facts.weights_bytes or 0,
        own_bytes=own_bytes,
        free_bytes=_free_bytes(folder),
        budget_bytes=None if limits is None else limits.max_bytes,
        store_bytes=n_bytes_on_disk(folder) if in_store and is_store(folder) else None,
    )
    return replace(told, shortage=_shortage(told, request))


def _n_ctx_of(n_tokens: int, n_ctx_max: int) -> int:
    """Cells of the context that a save opens: a power of two that holds the text, within the limit."""
    return min(1 << (max(_MIN_CTX, n_tokens) - 1).bit_length(), max(n_ctx_max, n_tokens))


def _settings(memory: MemoryRequest, context: ContextMemory) -> MemorySettings:
    return MemorySettings(
        type_k=memory.type_k,
        type_v=memory.type_v,
        flash_attn=context.flash_attn,
        swa_full=memory.swa_full,
        rope_freq_base=memory.rope_freq_base,
        rope_freq_scale=memory.rope_freq_scale,
        attn_rot=attention_rotation(),
    )


# ---------------------------------------------------------------- what is there already


def _begun(
    opened: OpenModel,
    request: SaveRequest,
    earlier: SessionInfo | None,
    settings: MemorySettings,
    tokens: Sequence[int],
) -> Begun:
    if earlier is not None:
        if request.options.recompute:
            return Begun(base=earlier, is_own=True)
        check_layout(earlier.record, settings)
        if reasons_to_recompute(earlier.record, opened.model.versions, request.options):
            return Begun(base=earlier, is_own=True)
        return Begun(base=earlier, n_cells=_cells_left(earlier, tokens), is_own=True)
    if request.reuse_from is None or len(tokens) <= N_WORTH:
        return Begun()
    return _prefix(opened, request.reuse_from, settings, tokens)


def _cells_left(info: SessionInfo, tokens: Sequence[int]) -> int:
    """Cells of a session that stay when it becomes ``tokens``: all, or those before the last token in common, which
    becomes the pending one, as far as the memory can go back."""
    stored, held = info.record.tokens, info.n_cells_held
    same = n_common(stored, tokens)
    if same == len(stored):
        return held
    cells = reusable_cells(info)
    points = (point for point in (0, *cells.points) if point < same)
    return max(min(cells.n_cuttable, same - 1), *points)


def _prefix(opened: OpenModel, root: Path, settings: MemorySettings, tokens: Sequence[int]) -> Begun:
    """As ``prefixes.begin_with_prefix`` finds it; nothing is restored."""
    from llamakv.store.cache import StoreCache  # late: SQLite is not needed by most commands

    space = space_of(opened.identity, settings, opened.model.versions)
    try:
        with StoreCache(root) as cache:
            hint = cache.longest_prefix(space, tokens)
        if hint is None or hint.n_cells < N_WORTH:
            return Begun()
        info = read_session(hint.path)
    except (StoreError, NotFoundError):
        return Begun()
    if space_of(info.record.identity, info.record.settings, info.record.versions) != space:
        return Begun()
    n_cells = usable_cells(info, tokens)
    return Begun(base=info, n_cells=n_cells) if n_cells >= N_WORTH else Begun()


# ---------------------------------------------------------------- what goes with it


def _record(
    opened: OpenModel,
    request: SaveRequest,
    earlier: SessionInfo | None,
    settings: MemorySettings,
    text: Text,
    pieces: Sequence[tuple[int, list[int]]],
) -> SessionRecord:
    """The record that a save would write, but for what only time will tell."""
    messages = list(text.messages)
    position = 0
    for index, piece in pieces if messages else ():
        end = position + len(piece)
        messages[index] = replace(messages[index], p0=position, p1=end, time_s=time.time())
        position = end
    template = text.template
    chat = None
    if template is not None:
        chat = Chat(template=template.source, template_digest=template.digest, messages=tuple(messages))
    lineage = Lineage(session_id=uuid.uuid4().hex, name=request.name, llamakv_version=__version__, n_saves=1)
    now_s = time.time()
    return SessionRecord(
        identity=opened.identity,
        kind=opened.info.kind,
        settings=settings,
        versions=opened.model.versions,
        tokens=tuple(token for _, piece in pieces for token in piece),
        sampling=sampling_of(request, earlier),
        lineage=replace(lineage if earlier is None else earlier.record.lineage, created_s=now_s, updated_s=now_s),
        chat=chat,
        n_ctx=_MIN_CTX,
        text=text.raw,
    )


def _check_folder(request: SaveRequest, earlier: SessionInfo | None) -> None:
    """Refuse a folder that a save could not write to, as that does; a store's, which it would make, may be missing."""
    folder = request.path.parent
    if request.name is not None and not folder.exists():
        return
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        check_writable(request.path, overwrite=request.overwrite or earlier is not None)


def _shortage(told: SaveEstimate, request: SaveRequest) -> LlamakvError | None:
    """The error of a save for which there is not enough room; one in the store removes other sessions first."""
    n_new = told.written_bytes
    if n_new is None:
        return None
    if n_new > told.free_bytes:
        most = "" if told.measured is not None or not told.is_compressed else "at most "
        return WriteError(
            f"not enough room for '{told.path}': it needs {most}{size(n_new)}, {size(told.free_bytes)} are free",
            path=str(told.path),
            needed_bytes=n_new,
            free_bytes=told.free_bytes,
        )
    n_state = told.new_raw_bytes or 0  # what a save goes by: what it will come to compressed it does not know
    if told.budget_bytes is None or told.store_bytes is None or told.store_bytes + n_state <= told.budget_bytes:
        return None
    return budget_error(
        told.path, told.budget_bytes, n_state, reused_from=told.reused_from, overwrite=request.overwrite
    )


def _free_bytes(folder: Path) -> int:
    """Free space where a folder is, or will be."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
    return shutil.disk_usage(there).free
