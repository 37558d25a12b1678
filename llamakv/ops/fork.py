"""Many prompts from one saved prefix: its cells are shared, branches are decoded together."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llamakv.engine.contract import decodes_together
from llamakv.errors import (
    ExistsError,
    InterruptedByUser,
    NotFoundError,
    StoreError,
    UsageError,
)
from llamakv.ops.batch import (
    N_PARALLEL,
    Batch,
    BranchResult,
    ForkProgress,
    ForkRequest,
    ForkSummary,
    SaveTarget,
)
from llamakv.ops.branch_keeping import BranchKeeper, is_untouched_branch
from llamakv.ops.branches import Branch, BranchPlanner, branches_of
from llamakv.ops.matching import merge_sampling
from llamakv.ops.opening import resume
from llamakv.ops.places import check_place, cut_at, whole
from llamakv.ops.reading import template_of
from llamakv.ops.requests import Reporter
from llamakv.records import MemoryKind, SessionRecord
from llamakv.store.session_file import SessionInfo, check_writable, read_session

__all__ = [
    "N_PARALLEL",
    "BranchResult",
    "Done",
    "ForkProgress",
    "ForkRequest",
    "ForkSummary",
    "SaveTarget",
    "fork_session",
    "read_done",
]


def fork_session(
    request: ForkRequest,
    reporter: Reporter,
    *,
    on_result: Callable[[BranchResult], None],
    on_progress: Callable[[ForkProgress], None],
) -> ForkSummary:
    """Answer every prompt in a branch of its own. ``on_result`` gets each as soon as its turn to be told has come.

    What is wrong with a single prompt is its result's error. Stopped by ``should_abort``, what is finished is told, and
    the summary says so.

    Raises:
        LlamakvError: the session or the model cannot be used; no prompt was answered, nothing was changed on disk.
    """
    if request.at is not None:
        check_place(request.at)
    branches = branches_of(request.prompts, request.n_samples)
    info = read_session(request.path)
    targets = _targets(request, branches, info)
    _check_can_go_on(request, info.record)
    sampling = merge_sampling(request.sampling, info.record.sampling)
    model = replace(request.model, n_parallel=_n_parallel(request, info.record, len(branches)))
    opened, info, back = resume(request.path, model, request.memory, request.options, reporter, info, at=request.at)
    with opened:
        opened.model.check_sampling(sampling)
        record = info.record
        template = (
            None if record.chat is None else template_of(opened, record.chat.template, now_s=record.lineage.created_s)
        )
        base = whole(record) if request.at is None else cut_at(record, request.at, opened.model, template)
        reused = back.reused
        planner = BranchPlanner(
            opened,
            base,
            template,
            sampling=sampling,
            timeout_s=request.timeout_s,
            keeps_cells=request.save_as is not None,
            is_random=request.sampling.seed == -1,
        )
        done = _check_done(request, planner, branches, reporter)
        if sampling.temperature <= 0 and request.n_samples > 1:
            reporter.notice("temperature is 0: all samples of a prompt will be the same")
        scheduler = opened.sequence.scheduler
        if not scheduler.decodes_together and len(branches) > 1:
            what = "window-only" if opened.info.kind is MemoryKind.WINDOWED else opened.info.kind
            reporter.notice(f"{what} memory is not decoded together: one branch at a time")
        keeper = BranchKeeper(
            opened,
            info,
            compress=request.compress,
            n_stored=reused,
            template=None if template is None else template.source,
            budget=request.budget,
            reporter=reporter,
        )
        batch = Batch(request, scheduler, planner, keeper, targets, branches, done, on_result, on_progress)
        interrupted = batch.run(reporter.should_abort)
        return batch.summary(
            reused=reused,
            evaluated=opened.sequence.n_cells - reused,
            restore_s=back.restore_s,
            model_load_s=back.model_load_s,
            interrupted=interrupted,
        )


def _check_can_go_on(request: ForkRequest, record: SessionRecord) -> None:
    """Refuse at once to go on without a prompt where there is nothing to go on with.

    Raises:
        UsageError: the conversation ends with a reply.
    """
    nothing_asked = all(prompt.text is None and not prompt.messages for prompt in request.prompts)
    messages = record.chat.messages if record.chat is not None else ()
    if nothing_asked and request.at is None and messages and messages[-1].role == "assistant":
        raise UsageError(
            "the conversation ends with a reply, and there is no prompt",
            hint=f"llamakv fork {request.path} 'a question'",
        )


def _targets(request: ForkRequest, branches: Sequence[Branch], info: SessionInfo) -> dict[int, SaveTarget]:
    """Where branches are kept, by index; refused before anything is run.

    Raises:
        UsageError: two would be the same file, or one the session itself.
        ExistsError: one is there already, may not be overwritten, and is no branch of this session.
    """
    if request.save_as is None:
        return {}
    targets: dict[int, SaveTarget] = {}
    taken = {os.path.realpath(request.path): "the session itself"}
    for branch in branches:
        target = request.save_as(branch)
        before = taken.setdefault(os.path.realpath(target.path), f"id {branch.id!r}")
        if before != f"id {branch.id!r}":
            raise UsageError(
                f"id {branch.id!r} would be saved to {target.path}, which is {before}",
                hint="use {id} in --save-as: --save-as 'answer-{id}'",
            )
        if str(branch.id) not in request.done:
            is_branch = _is_branch(target.path, info)
            try:
                check_writable(target.path, overwrite=request.overwrite or is_branch)
            except ExistsError as error:
                error.hint = error.hint or "add --force to replace it, or choose another name"
                raise
        targets[branch.index] = target
    return targets


def _is_branch(path: Path, parent: SessionInfo) -> bool:
    """Whether a file is a branch of a session; one that was kept before a batch was killed may be made again."""
    if not path.is_file():
        return False
    try:
        return is_untouched_branch(read_session(path).record, parent)
    except (StoreError, NotFoundError):
        return False


def _n_parallel(request: ForkRequest, record: SessionRecord, n_branches: int) -> int:
    """Branches at the same time: not more than there are, and one where they cannot share calls anyway."""
    swa_full = record.settings.swa_full if request.memory.swa is None else request.memory.swa == "full"
    together = decodes_together(record.kind, swa_full=swa_full)
    return max(1, min(request.n_parallel, n_branches)) if together else 1


def _check_done(
    request: ForkRequest, planner: BranchPlanner, branches: Sequence[Branch], reporter: Reporter
) -> frozenset[int]:
    """Which branches were answered before, by index.

    Raises:
        UsageError: one was answered for another prompt, or with other options.
    """
    done = set()
    for branch in branches:
        before = request.done.get(str(branch.id))
        if before is None:
            continue
        if reporter.should_abort():
            raise InterruptedByUser("interrupted; no prompt was answered")
        now = planner.plan(branch).key
        if before != now:
            raise UsageError(
                f"{branch.prompt.where}: id {branch.id!r} was answered before for another prompt, session, model or "
                f"options (key {before}, now {now})",
                hint="give prompts ids of their own, so that they keep them, or write to another file",
                expected=before,
                actual=now,
            )
        done.add(branch.index)
    return frozenset(done)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What an earlier output of ``fork`` holds: keys of answers by id, and its length in bytes up to the end of the
    last whole line. ``ends_openly``: a whole line without its line end follows."""

    keys: dict[str, str]
    n_whole_bytes: int
    ends_openly: bool = False


_LINE_BEGINS = b'{"type": "'


def read_done(data: bytes, name: str) -> Done:
    """Make out an earlier output of ``fork``. Errors in it count as not done; so do answers that took too long, and
    half a line at its end.

    Raises:
        UsageError: a line is not what ``fork`` writes.
    """
    keys: dict[str, str] = {}
    whole, line_end, rest = data.rpartition(b"\n")
    for number, line in enumerate(whole.split(b"\n"), 1):
        if line.strip() and not _take_line(line, keys):
            raise _foreign(name, number)
    n_whole = len(whole) + len(line_end)
    if not rest.strip() or _take_line(rest, keys):
        return Done(keys=keys, n_whole_bytes=n_whole, ends_openly=bool(rest.strip()))
    if not rest.startswith(_LINE_BEGINS[: len(rest)]) or _is_json(rest):
        raise _foreign(name, data.count(b"\n") + 1)
    return Done(keys=keys, n_whole_bytes=n_whole)


def _take_line(line: bytes, keys: dict[str, str]) -> bool:
    """Take the key of a line, if it has one; False if it is no line of ours."""
    try:
        values = json.loads(line)
        kind = values["type"]
        if kind == "answer" and values.get("finish_reason") != "timeout":
            keys[str(values["id"])] = str(values["key"])
        elif kind in ("answer", "error"):
            keys.pop(str(values["id"]), None)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return kind in ("answer", "error", "done")


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _foreign(name: str, number: int) -> UsageError:
    return UsageError(
        f"{name} line {number} is not a line of answers as fork writes them",
        hint="name the JSON lines of an earlier run: --skip-done answers.jsonl",
    )
