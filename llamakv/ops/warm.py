"""Reading prefixes that are needed often before they are needed, and keeping them for good: one session per prefix."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from llamakv.errors import (
    AbortedError,
    ExistsError,
    FormatError,
    InterruptedByUser,
    LlamakvError,
    NotFoundError,
)
from llamakv.ops.keeping import Keeper
from llamakv.ops.lineage import split_note
from llamakv.ops.matching import find_model, merge_memory
from llamakv.ops.opening import OpenModel
from llamakv.ops.requests import Reporter, SaveRequest
from llamakv.ops.save import SaveResult, read_and_keep, tokens_of
from llamakv.records import Lineage, SessionRecord
from llamakv.store.session_file import SessionInfo, change_lineage, check_writable, mark_used, read_session

TAG = "warm"
"""What marks a session as one that ``warm`` made, and may make again when its text has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    """One prefix: what was read of it (None: the session was there already), or why it could not be; ``info`` is its
    session. ``is_replaced``: it took the place of one that was read of another text."""

    request: SaveRequest
    info: SessionInfo | None = None
    result: SaveResult | None = None
    error: LlamakvError | None = None
    is_replaced: bool = False


def warm_prefixes(requests: Sequence[SaveRequest], reporter: Reporter, *, on_result: Callable[[Warmed], None]) -> bool:
    """Read each text with the same model, save it and pin it. What is there already stays; what ``warm`` made of a text
    that has changed since is made again. ``on_result`` gets each as soon as it is done; what goes wrong with one is its
    error. Returns False if it was interrupted.

    Raises:
        LlamakvError: the model cannot be used.
    """
    first = requests[0]
    found = find_model(first.model, None, reporter)
    memory = merge_memory(first.memory, None, None, may_change=True)
    with OpenModel(found, first.model, memory, reporter=reporter) as opened:
        opened.open_sequence()
        for request in requests:
            if reporter.should_abort():
                return False
            try:
                warmed = _warm(opened, request, reporter)
            except (AbortedError, InterruptedByUser):
                return False
            except LlamakvError as error:
                warmed = Warmed(request=request, error=error)
            on_result(warmed)
            if warmed.result is not None and not warmed.result.complete:
                return False
    return True


def _warm(opened: OpenModel, request: SaveRequest, reporter: Reporter) -> Warmed:
    started = time.perf_counter()
    before, is_it = _there(opened, request)
    if before is not None and is_it:
        mark_used(before.path)
        return Warmed(request=request, info=_pinned(before))
    check_writable(request.path, overwrite=request.overwrite or before is not None)
    keeper = Keeper(
        opened,
        None,
        compress=request.compress,
        budget=request.budget,
        replaces=before,
        labels=_labels(before.record.lineage if before is not None else None),
    )
    result = read_and_keep(opened, keeper, request, None, reporter, started=started)
    return Warmed(request=request, info=result.saved.info, result=result, is_replaced=before is not None)


def _labels(before: Lineage | None) -> Lineage:
    """What is said of a new session: what was said of the one before it, and that it is pinned."""
    tags = {TAG, *(before.tags if before is not None else ())}
    note = split_note(before.note)[1] if before is not None else ""
    return Lineage(session_id="", tags=tuple(sorted(tags)), pinned=True, note=note)


def _there(opened: OpenModel, request: SaveRequest) -> tuple[SessionInfo | None, bool]:
    """The session that is there, and whether it holds all of the prefix (somebody may have gone on with it); else it
    may be replaced. None where there is none, or one that cannot be read and may be overwritten.

    Raises:
        ExistsError: there is another session, which ``warm`` did not make.
    """
    try:
        info = read_session(request.path)
    except NotFoundError:
        return None, False
    except FormatError:
        if not request.overwrite:
            raise
        return None, False
    record = info.record
    is_own = TAG in record.lineage.tags and record.lineage.parent_id is None and not _has_reply(record)
    wanted = tokens_of(opened, request)
    if record.tokens[: len(wanted)] == wanted and info.n_cells_held >= len(wanted) - 1:
        same = (record.identity, record.settings, record.versions) == (
            opened.identity,
            opened.model.settings,
            opened.model.versions,
        )
        if same:
            return info, True
    if not is_own and not request.overwrite:
        raise ExistsError(
            f"{request.path} holds another session ({len(record.tokens):,} tokens): warm did not make it, or somebody "
            "went on with it",
            hint="add --force to replace it, or rename the file",
            path=str(request.path),
        )
    return info, False


def _has_reply(record: SessionRecord) -> bool:
    return record.chat is not None and any(message.role == "assistant" for message in record.chat.messages)


def _pinned(info: SessionInfo) -> SessionInfo:
    def change(lineage: Lineage) -> Lineage:
        return replace(lineage, pinned=True, tags=tuple(sorted({*lineage.tags, TAG})))

    return change_lineage(info.path, change)
