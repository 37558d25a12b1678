"""``load``: bring a session back and complete once."""

from __future__ import annotations

from typing import Annotated

import typer

from llamakv.cli import config, describe, requests
from llamakv.cli.commands.grouping import takes_options
from llamakv.cli.commands.options import (
    BudgetGroup,
    Force,
    MemoryGroup,
    ModelGroup,
    NoReuse,
    SamplingGroup,
    SaveRef,
    StoreGroup,
    complete_session,
)
from llamakv.cli.output import Output
from llamakv.errors import UsageError

OptionalRef = Annotated[
    str | None,
    typer.Argument(metavar="[REF]", autocompletion=complete_session, show_default=False,
                   help="Session: a name in the store, or a path (default: a new one, not saved without --save)."),
]  # fmt: skip
System = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="System prompt of a new conversation (no REF).")
]
Raw = Annotated[
    bool,
    typer.Option("--raw", metavar="", help="Continue the prompt as it is, without the model's chat template (no REF)."),
]
Prompt = Annotated[
    str | None,
    typer.Option("--prompt", "-p", metavar="TEXT",
                 help="What to say; - is standard input (default: go on where the session stopped)."),
]  # fmt: skip


@takes_options
def load(
    output: Output,
    model: ModelGroup,
    memory: MemoryGroup,
    sampling: SamplingGroup,
    store: StoreGroup,
    budget: BudgetGroup,
    ref: OptionalRef = None,
    prompt: Prompt = None,
    system: System = None,
    raw: Raw = False,
    save: SaveRef = None,
    no_reuse: NoReuse = False,
    force: Force = False,
) -> None:
    """Restore a session, answer once on standard output, and leave the session as it was; or answer without one.

    Example: llamakv load report.bin -p "What does it cost?"
    """
    from llamakv.cli import refs
    from llamakv.cli.reporting import running
    from llamakv.ops.requests import LoadRequest

    root = config.store_dir(store.store)
    if ref is None and prompt is None:
        raise UsageError("nothing to answer: name a session, or give a prompt", hint="llamakv load REF -p TEXT")
    if ref is not None and (system is not None or raw):
        raise UsageError(
            "--system and --raw are for a new conversation or text", hint="leave out the session, or these"
        )
    if raw and system is not None:
        raise UsageError("--raw has no system prompt: text is read as it is", hint="leave out --system or --raw")
    found, at = (None, None) if ref is None else refs.existing_at(root, ref)
    kept = None
    if save is not None:
        kept = refs.fresh(root, save, overwrite=force, hint="add --force to replace it")
    text = requests.read_text("-") if prompt == "-" else prompt
    if text is not None and not text.strip():
        raise UsageError("the prompt is empty", hint=f'llamakv load {ref or ""} -p "your question"'.replace("  ", " "))
    request = LoadRequest(
        model=requests.model_request(output, model, memory),
        memory=requests.memory_options(memory),
        sampling=requests.sampling_options(sampling),
        options=requests.resume_options(memory),
        path=None if found is None else found.path,
        at=at,
        prompt=text,
        save=None if kept is None else kept.path,
        name=None if kept is None else kept.name,
        overwrite=force,
        compress=requests.compress(memory),
        system=system,
        raw=raw,
        reuse_from=None if no_reuse else root,
        budget=requests.budget(budget),
    )
    from llamakv.ops.load import load_once

    with running(output, text=None if output.json else output.stream) as reporter:
        answer = load_once(request, reporter)
    output.check()
    if not output.json:
        output.write("" if answer.text.endswith("\n") else "\n")
        output.note(describe.answer_line(answer))
    if answer.finish_reason == "interrupted":
        output.interrupts.check()
    output.document({"session": None if found is None else refs.shown(found, at), **describe.answer_json(answer)})
