"""``save``: read a text once and keep what the model has read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llamakv.cli import config, describe, requests
from llamakv.cli.commands.grouping import takes_options
from llamakv.cli.commands.options import (
    BudgetGroup,
    Force,
    MemoryGroup,
    ModelGroup,
    NoReuse,
    Ref,
    SamplingGroup,
    StoreGroup,
)
from llamakv.cli.output import Json, Output
from llamakv.errors import InterruptedByUser, UsageError

if TYPE_CHECKING:
    from llamakv.ops.estimate import SaveEstimate
    from llamakv.ops.save import SaveResult

File = Annotated[
    str | None,
    typer.Option("--file", "-f", metavar="FILE", help="Text to read (UTF-8); - is standard input."),
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System prompt.")]
Raw = Annotated[
    bool, typer.Option("--raw", metavar="", help="Read the text as it is, without the model's chat template.")
]
Estimate = Annotated[
    bool,
    typer.Option("--estimate", metavar="",
                 help="Only tell what it would come to: tokens, bytes, memory. Nothing is read or written."),
]  # fmt: skip


@takes_options
def save(
    output: Output,
    ref: Ref,
    model: ModelGroup,
    memory: MemoryGroup,
    sampling: SamplingGroup,
    store: StoreGroup,
    budget: BudgetGroup,
    file: File = None,
    system: System = None,
    raw: Raw = False,
    estimate: Estimate = False,
    no_reuse: NoReuse = False,
    force: Force = False,
) -> None:
    """Read a text once and save what the model has read, for many questions later.

    Example: llamakv save -f report.txt report.bin
    """
    from llamakv.cli import refs
    from llamakv.cli.reporting import running
    from llamakv.ops import sessions
    from llamakv.ops.requests import SaveRequest

    if raw and system is not None:
        raise UsageError("--raw has no system prompt: text is read as it is", hint="leave out --system or --raw")
    if file is None and not system:
        raise UsageError("nothing to read: give a text or a system prompt", hint=f"llamakv save -f FILE {ref}")
    root = config.store_dir(store.store)
    if estimate:  # as refs.target, which makes the store's folder
        target = refs.Target(ref=ref, path=sessions.resolve(root, ref), name=sessions.session_name(root, ref))
    else:
        target = refs.target(root, ref)
    text = None if file is None else requests.read_text(file)
    if text == "" and not system:
        raise UsageError(f"{requests.input_name(file)} is empty", hint=f"llamakv save -f FILE {ref}")
    request = SaveRequest(
        model=requests.model_request(output, model, memory),
        memory=requests.memory_options(memory),
        sampling=requests.sampling_options(sampling),
        options=requests.resume_options(memory),
        path=target.path,
        name=target.name,
        text=text,
        system=system,
        raw=raw,
        overwrite=force,
        compress=requests.compress(memory),
        reuse_from=None if no_reuse else root,
        budget=requests.budget(budget),
    )
    if estimate:
        from llamakv.ops.estimate import estimate_save

        with running(output) as reporter:
            told = estimate_save(request, reporter, store=root)
        _tell_estimate(output, refs.shown(target), told)
        if told.shortage is not None:
            raise typer.Exit(told.shortage.exit_status)
        return
    from llamakv.ops.save import save_prefix

    with running(output) as reporter:
        result = save_prefix(request, reporter)
    _tell(output, refs.shown(target), result)


def _tell(output: Output, shown: str, result: SaveResult) -> None:
    from llamakv.cli.render import rate, seconds, size

    ended = InterruptedByUser("interrupted", hint="run the same command again to go on from there", status=130)
    if output.interrupts.ending is not None:
        ended.fields["status"] = 128 + output.interrupts.ending
    if output.json:
        data: dict[str, Json] = {
            "session": shown,
            "reused": result.reused,
            "evaluated": result.evaluated,
            "elapsed_s": result.elapsed_s,
            "complete": result.complete,
            "saved": describe.saved_json(result.saved),
            **describe.summary_json(result.saved.info),
        }
        if result.complete:
            output.document(data)
        else:
            output.failure(ended, data=data)
    else:
        info = result.saved.info
        wanted = "" if result.complete else f" of {result.n_tokens_wanted:,}"
        n_tokens = len(info.record.tokens)
        parts = [
            f"saved {shown}: {n_tokens:,}{wanted} {'token' if n_tokens == 1 else 'tokens'}",
            f"{result.reused:,} reused, {result.evaluated:,} evaluated",
            seconds(result.elapsed_s),
            rate(result.evaluated, result.elapsed_s),
            f"{size(info.n_stored_bytes)} for {size(info.n_raw_bytes)} of state",
            f"{size(result.saved.n_written)} written" if result.saved.n_written < info.n_stored_bytes else "",
        ]
        if not output.quiet:
            output.write(" · ".join(part for part in parts if part) + "\n")
        if not result.complete:
            output.show(ended)
    if not result.complete:
        raise typer.Exit(int(ended.fields["status"] or 130))


def _tell_estimate(output: Output, shown: str, told: SaveEstimate) -> None:
    if output.json:
        if told.shortage is None:
            output.document(_estimate_json(shown, told))
        else:
            output.failure(told.shortage, data=_estimate_json(shown, told))
        return
    from llamakv.cli import render

    output.write_styled(render.report(_estimate_rows(shown, told)))
    if told.shortage is not None:
        output.show(told.shortage)


def _estimate_rows(shown: str, told: SaveEstimate) -> list[tuple[str, str]]:
    from llamakv.cli.render import count, size

    reused = f"{told.reused:,} reused" + (f" from {told.reused_from}" if told.reused and told.reused_from else "")
    rows = [("estimate", f"{shown} · nothing was written"),
            ("tokens", f"{told.n_tokens:,} · {reused} · {told.evaluated:,} to be read")]  # fmt: skip
    if told.raw_bytes is None or told.new_raw_bytes is None or told.n_sections is None:
        rows.append(("state", "unknown: this architecture's state is cut in a way that cannot be told beforehand"))
    else:
        new = "" if told.new_raw_bytes == told.raw_bytes else f", {size(told.new_raw_bytes)} of it new"
        rows.append(("state", f"{size(told.raw_bytes)} in {count(told.n_sections, 'section')}{new}"))
    if told.written_bytes is not None and told.index_bytes is not None:
        rows.append(("to write", _written_text(told, told.written_bytes, told.index_bytes)))
    memory, context = told.memory_bytes, told.context
    rows += [
        ("memory", f"at least {size(memory)}: program {size(told.own_bytes)}, weights {size(told.weights_bytes)}, "
                   f"a context of {context.n_ctx:,} cells {size(context.n_bytes)} · vocabulary and graph come on top"),
        ("room", _room_text(told)),
    ]  # fmt: skip
    return rows


def _written_text(told: SaveEstimate, written: int, index: int) -> str:
    from llamakv.cli.render import count, size

    if told.measured is None and not told.is_compressed:
        return f"at most {size(written)}, {size(index)} of it index (the state is not compressed)"
    if told.measured is None:
        return f"at most {size(written)}, {size(index)} of it index (no session of this model and settings to go by)"
    measured = told.measured
    return (
        f"about {size(written)}, {size(index)} of it index ({measured.raw_over_stored:.2f} raw over stored, as in "
        f"{count(measured.n_sessions, 'session')} of this model and settings)"
    )


def _room_text(told: SaveEstimate) -> str:
    from llamakv.cli.render import size

    written = told.written_bytes
    text = f"{size(told.free_bytes)} free on the disk"
    if written is not None and written > told.free_bytes:
        is_most = told.measured is None and told.is_compressed
        enough = "may not be enough: needs at most" if is_most else "not enough: needs"
        text = f"{enough} {size(written)}, {text}"
    elif told.shortage is not None:
        text = f"{text} · not enough in the store: {told.shortage.message}"
    if told.budget_bytes is not None:
        text += f" · the store has {size(told.store_bytes or 0)} of its budget of {size(told.budget_bytes)}"
    return text


def _estimate_json(shown: str, told: SaveEstimate) -> Json:
    measured = told.measured
    return {
        "session": shown,
        "estimate": True,
        "tokens": told.n_tokens,
        "cells": told.n_tokens - 1,
        "reused": told.reused,
        "reused_from": None if told.reused_from is None else str(told.reused_from),
        "evaluated": told.evaluated,
        "sections": told.n_sections,
        "raw_bytes": told.raw_bytes,
        "new_raw_bytes": told.new_raw_bytes,
        "index_bytes": told.index_bytes,
        "stored_bytes": told.stored_bytes,
        "new_stored_bytes": told.new_stored_bytes,
        "written_bytes": told.written_bytes,
        "total_bytes": told.total_bytes,
        "is_upper_bound": measured is None,
        "measured_sessions": 0 if measured is None else measured.n_sessions,
        "raw_over_stored": None if measured is None else measured.raw_over_stored,
        "is_enough_room": told.shortage is None,
        "n_ctx": told.context.n_ctx,
        "memory_bytes": told.memory_bytes,
        "context_bytes": told.context.n_bytes,
        "weights_bytes": told.weights_bytes,
        "own_bytes": told.own_bytes,
        "free_bytes": told.free_bytes,
        "budget_bytes": told.budget_bytes,
        "store_bytes": told.store_bytes,
    }
