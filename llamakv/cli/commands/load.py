"""``load``: bring a session back and complete once."""

from __future__ import annotations

from typing import Annotated

import typer

from llamakv.cli import config, describe, requests
from llamakv.cli.commands.grouping import takes_options
from llamakv.cli.commands.options import (
    Force,
    MemoryGroup,
    ModelGroup,
    Ref,
    SamplingGroup,
    SaveRef,
    StoreGroup,
)
from llamakv.cli.output import Output
from llamakv.errors import UsageError

Prompt = Annotated[
    str | None,
    typer.Option("--prompt", "-p", metavar="TEXT",
                 help="What to say; - is standard input (default: go on where the session stopped)."),
]  # fmt: skip


@takes_options
def load(
    output: Output,
    ref: Ref,
    model: ModelGroup,
    memory: MemoryGroup,
    sampling: SamplingGroup,
    store: StoreGroup,
    prompt: Prompt = None,
    save: SaveRef = None,
    force: Force = False,
) -> None:
    """Restore a session, answer once on standard output, and leave the session as it was.

    Example: llamakv load report.bin -p "What does it cost?"
    """
    from llamakv.cli import refs
    from llamakv.cli.reporting import running
    from llamakv.ops.requests import LoadRequest

    root = config.store_dir(store.store)
    found = refs.existing(root, ref)
    kept = None
    if save is not None:
        kept = refs.fresh(root, save, overwrite=force, hint="add --force to replace it")
    text = requests.read_text("-") if prompt == "-" else prompt
    if text is not None and not text.strip():
        raise UsageError("the prompt is empty", hint=f'llamakv load {ref} -p "your question"')
    request = LoadRequest(
        model=requests.model_request(output, model, memory),
        memory=requests.memory_options(memory),
        sampling=requests.sampling_options(sampling),
        options=requests.resume_options(memory),
        path=found.path,
        prompt=text,
        save=None if kept is None else kept.path,
        name=None if kept is None else kept.name,
        overwrite=force,
        compress=requests.compress(memory),
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
    output.document({"session": refs.shown(found), **describe.answer_json(answer)})
