"""``warm``: read prefixes before they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamakv.cli import config, describe, requests
from llamakv.cli.commands.grouping import takes_options
from llamakv.cli.commands.options import BudgetGroup, Force, MemoryGroup, ModelGroup, NoReuse, StoreGroup
from llamakv.cli.output import Json, Output
from llamakv.errors import InterruptedByUser, UsageError

if TYPE_CHECKING:
    from llamakv.cli.refs import Target
    from llamakv.ops.budget import Budget
    from llamakv.ops.requests import SaveRequest
    from llamakv.ops.warm import Warmed

PARTLY_DONE_STATUS = 3

Files = Annotated[
    list[str],
    typer.Argument(metavar="FILE...", show_default=False, help="Texts to read (UTF-8), one prefix each."),
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System prompt before each text.")]
AsSystem = Annotated[
    bool, typer.Option("--as-system", metavar="", help="The texts are system prompts, not beginnings of messages.")
]
Raw = Annotated[
    bool, typer.Option("--raw", metavar="", help="Read the texts as they are, without the model's chat template.")
]


@takes_options
def warm(
    output: Output,
    files: Files,
    model: ModelGroup,
    memory: MemoryGroup,
    store: StoreGroup,
    budget: BudgetGroup,
    system: System = None,
    as_system: AsSystem = False,
    raw: Raw = False,
    no_reuse: NoReuse = False,
    force: Force = False,
) -> None:
    """Read texts that many prompts begin with, and keep them pinned in the store, each under its file's name.

    Example: llamakv warm --as-system support.txt sales.txt
    """
    from llamakv.cli import refs
    from llamakv.cli.reporting import running

    if as_system and (raw or system is not None):
        raise UsageError("--as-system goes neither with --system nor with --raw", hint="leave one of them out")
    if raw and system is not None:
        raise UsageError("--raw has no system prompt: text is read as it is", hint="leave out --system or --raw")
    root = config.store_dir(store.store)
    targets: dict[str, Target] = {}
    wanted: list[SaveRequest] = []
    allowed = requests.budget(budget)
    for file in files:
        target = refs.target(root, _name_of(file, targets))
        targets[target.ref] = target
        wanted.append(
            _request(
                output, model, memory, target, file, system=system, as_system=as_system, raw=raw, overwrite=force,
                reuse_from=None if no_reuse else root,
                budget=allowed,
            )
        )  # fmt: skip
    from llamakv.ops.warm import warm_prefixes

    told: list[Json] = []
    failed = False
    statuses: list[int] = []

    def on_result(warmed: Warmed) -> None:
        nonlocal failed
        failed = failed or warmed.error is not None
        if warmed.error is not None:
            statuses.append(warmed.error.exit_status)
        told.append(_json(warmed))
        if not output.json:
            reporter.pause()
            _tell(output, warmed)

    with running(output) as reporter:
        is_done = warm_prefixes(wanted, reporter, on_result=on_result)
    data: dict[str, Json] = {"store": str(root), "prefixes": told}
    if not is_done:
        error = InterruptedByUser("interrupted", hint="run the same command again to go on from there", status=130)
        output.failure(error, data=data)
        raise typer.Exit(output.interrupts.ending + 128 if output.interrupts.ending is not None else 130)
    output.document(data, status="error" if failed else "ok")
    if failed:
        raise typer.Exit(statuses[0] if len(statuses) == 1 == len(wanted) else PARTLY_DONE_STATUS)


def _name_of(file: str, taken: dict[str, Target]) -> str:
    if file == "-":
        raise UsageError("standard input has no name to keep it under", hint="llamakv save -f - NAME; llamakv pin NAME")
    name = Path(file).stem
    if name in taken:
        raise UsageError(f"two files would be kept as {name!r}", hint="rename one of them: its name is the session's")
    return name


def _request(
    output: Output,
    model: ModelGroup,
    memory: MemoryGroup,
    target: Target,
    file: str,
    *,
    system: str | None,
    as_system: bool,
    raw: bool,
    overwrite: bool,
    reuse_from: Path | None,
    budget: Budget,
) -> SaveRequest:
    from llamakv.ops.requests import SaveRequest

    text = requests.read_text(file)
    if not text.strip():
        raise UsageError(f"{file} is empty: there is nothing to read", path=file)
    return SaveRequest(
        model=requests.model_request(output, model, memory),
        memory=requests.memory_options(memory),
        options=requests.resume_options(memory),
        path=target.path,
        name=target.ref,
        text=None if as_system else text,
        system=text.strip() if as_system else system,
        raw=raw,
        overwrite=overwrite,
        compress=requests.compress(memory),
        reuse_from=reuse_from,
        budget=budget,
    )


def _tell(output: Output, warmed: Warmed) -> None:
    from llamakv.cli.render import rate, seconds
    from llamakv.ops.prefixes import N_WORTH

    name = str(warmed.request.name)
    if warmed.error is not None:
        output.show(warmed.error)
        return
    assert warmed.info is not None
    n_tokens = len(warmed.info.record.tokens)
    if warmed.result is None:
        output.write(f"{name}: {n_tokens:,} tokens, there already\n")
        return
    result = warmed.result
    if n_tokens <= N_WORTH:
        output.notice(f"{name} is short: fewer than {N_WORTH} tokens are read again rather than looked for")
    parts = [
        f"{name}: {n_tokens:,} tokens",
        "in the place of an earlier text" if warmed.is_replaced else "",
        f"{result.reused:,} reused, {result.evaluated:,} evaluated",
        seconds(result.elapsed_s),
        rate(result.evaluated, result.elapsed_s),
    ]
    output.write(" · ".join(part for part in parts if part) + "\n")


def _json(warmed: Warmed) -> Json:
    from llamakv.cli.output import error_json

    common: dict[str, Json] = {"session": warmed.request.name, "path": str(warmed.request.path)}
    if warmed.error is not None:
        return {**common, "error": error_json(warmed.error)}
    assert warmed.info is not None
    result = warmed.result
    return {
        **common,
        "error": None,
        "is_new": result is not None,
        "is_replaced": warmed.is_replaced,
        "reused": len(warmed.info.record.tokens) - 1 if result is None else result.reused,
        "evaluated": 0 if result is None else result.evaluated,
        "elapsed_s": 0.0 if result is None else result.elapsed_s,
        **describe.summary_json(warmed.info),
    }
