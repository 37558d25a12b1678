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
    from llamakv.ops.save import SaveResult

File = Annotated[
    str | None,
    typer.Option("--file", "-f", metavar="FILE", help="Text to read (UTF-8); - is standard input."),
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System prompt.")]
Raw = Annotated[
    bool, typer.Option("--raw", metavar="", help="Read the text as it is, without the model's chat template.")
]


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
    no_reuse: NoReuse = False,
    force: Force = False,
) -> None:
    """Read a text once and save what the model has read, for many questions later.

    Example: llamakv save -f report.txt report.bin
    """
    from llamakv.cli import refs
    from llamakv.cli.reporting import running
    from llamakv.ops.requests import SaveRequest

    if raw and system is not None:
        raise UsageError("--raw has no system prompt: text is read as it is", hint="leave out --system or --raw")
    if file is None and not system:
        raise UsageError("nothing to read: give a text or a system prompt", hint=f"llamakv save -f FILE {ref}")
    root = config.store_dir(store.store)
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
