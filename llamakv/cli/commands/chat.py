"""``chat``: a conversation, in a terminal or line by line."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from llamakv.cli import config, describe, requests, streams
from llamakv.cli.commands.grouping import takes_options
from llamakv.cli.commands.options import (
    SESSIONS,
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
from llamakv.errors import InterruptedByUser, UsageError

if TYPE_CHECKING:
    from llamakv.ops.chat import Conversation
    from llamakv.ops.requests import ChatRequest

Resume = Annotated[
    str | None,
    typer.Option("--resume", metavar="REF", rich_help_panel=SESSIONS, autocompletion=complete_session,
                 help="Session to go on with; saved to after every turn (with --save: the other one is)."),
]  # fmt: skip
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System prompt.")]
Messages = Annotated[
    list[str] | None,
    typer.Option("--message", metavar="TEXT", help="Send this, print the answer and leave; repeatable."),
]


@takes_options
def chat(
    output: Output,
    model: ModelGroup,
    memory: MemoryGroup,
    sampling: SamplingGroup,
    store: StoreGroup,
    budget: BudgetGroup,
    message: Messages = None,
    system: System = None,
    resume: Resume = None,
    save: SaveRef = None,
    no_reuse: NoReuse = False,
    force: Force = False,
) -> None:
    """Talk to a model, and keep what it has read; without a terminal, answer each line of standard input.

    Example: llamakv chat --save session.bin
    """
    from llamakv.cli import refs
    from llamakv.ops.requests import ChatRequest

    if any(not text.strip() for text in message or ()):
        raise UsageError("a message is empty", hint="give --message a text")
    root = config.store_dir(store.store)
    hint = f"begin it: llamakv chat --save {resume}"
    found, at = (None, None) if resume is None else refs.existing_at(root, resume, hint=hint)
    if found is not None and at is not None and save is None:
        raise UsageError(
            f"going on from {resume} would give up what comes after it in {refs.shown(found)}",
            hint=f"name a session for the other way on: --save {refs.shown(found)}-2",
        )
    kept = None
    if save is not None:
        hint = f"go on with it: llamakv chat --resume {save} (or replace it: --force)"
        kept = refs.fresh(root, save, overwrite=force, hint=hint)
    interactive = not (output.json or message) and all(map(streams.is_terminal, (sys.stdin, sys.stdout)))
    texts = None if interactive else _first_known(message if message else _lines())
    request = ChatRequest(
        model=requests.model_request(output, model, memory),
        memory=requests.memory_options(memory),
        sampling=requests.sampling_options(sampling),
        options=requests.resume_options(memory),
        resume=None if found is None else found.path,
        at=at,
        save=None if kept is None else kept.path,
        name=None if kept is None else kept.name,
        system=system,
        overwrite=force,
        compress=requests.compress(memory),
        reuse_from=None if no_reuse else root,
        budget=requests.budget(budget),
    )
    with _opened(output, request) as conversation:
        shown = None if found is None else refs.shown(found, at)
        saved_as = shown if kept is None else refs.shown(kept)
        if texts is not None:
            _answer_all(output, conversation, texts, resumed=shown)
        else:
            from llamakv.cli.repl import Repl

            if Repl(output, conversation, root).run(resumed=shown, saved_as=saved_as):
                raise typer.Exit(InterruptedByUser.exit_status)


@contextlib.contextmanager
def _opened(output: Output, request: ChatRequest) -> Iterator[Conversation]:
    from llamakv.cli.reporting import running
    from llamakv.ops.chat import open_chat

    with running(output) as reporter:
        conversation = open_chat(request, reporter)
    with conversation:
        output.interrupts.check()
        yield conversation


def _lines() -> Iterator[str]:
    """Messages on standard input, one a line; empty lines are none."""
    for number in itertools.count(1):
        data = sys.stdin.buffer.readline()
        if not data:
            return
        text = requests.decode(data, f"line {number} of standard input").rstrip("\r\n")
        if text.strip():
            yield text


def _first_known(texts: Iterable[str]) -> Iterator[str]:
    """The same messages, once it is certain that there is one: before a model is loaded for nothing.

    Raises:
        UsageError: there is none.
    """
    rest = iter(texts)
    for first in rest:
        return itertools.chain([first], rest)
    raise UsageError(
        "no message on standard input", hint="llamakv chat --message TEXT, or run it in a terminal to type"
    )


def _answer_all(output: Output, conversation: Conversation, texts: Iterator[str], *, resumed: str | None) -> None:
    from llamakv.cli.reporting import running

    if resumed is not None:
        if output.json:
            output.line("opened", describe.opened_json(resumed, conversation.opened))
        else:
            output.note(describe.opened_line(resumed, conversation.opened))
    n_answers = 0
    for text in texts:
        with running(output, text=None if output.json else output.stream) as reporter:
            answer = conversation.send(text, reporter)
        output.check()
        n_answers += 1
        if output.json:
            output.line("answer", {"message": text, **describe.answer_json(answer)})
        else:
            output.write("\n")
            output.note(describe.answer_line(answer))
        output.interrupts.check()
    path = conversation.path
    output.document(
        {
            "session": None if path is None else str(path),
            "answers": n_answers,
            "stats": describe.stats_json(conversation.stats()),
        }
    )
