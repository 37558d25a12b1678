"""``fork``: many prompts from one saved prefix."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from llamakv.cli import config, describe, requests, streams
from llamakv.cli.commands.grouping import takes_options
from llamakv.cli.commands.options import (
    OUTPUT,
    SESSIONS,
    BudgetGroup,
    Force,
    MemoryGroup,
    ModelGroup,
    Ref,
    SamplingGroup,
    StoreGroup,
)
from llamakv.cli.commands.values import offers, one_of, real, whole
from llamakv.cli.output import Json, Output, error_json
from llamakv.errors import InterruptedByUser, UsageError

if TYPE_CHECKING:
    from llamakv.ops.branches import Branch
    from llamakv.ops.fork import BranchResult, ForkProgress, ForkSummary, SaveTarget
    from llamakv.ops.prompts import Prompt, PromptFormat
    from llamakv.ops.templates import TextTemplate

PARTLY_DONE = 3
N_PARALLEL_MAX = 254
"""llama.cpp's 256 sequences, less the prefix and the scratch sequence."""

_MAX_ID_BYTES = 200
"""Of an id in a file's name, which may have 255 (NAME_MAX) with what is put around it."""

PROMPTS = "Prompts"
_FORMATS = ("auto", "text", "jsonl", "csv")

Texts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PROMPT]...",
        show_default=False,
        help="What to ask, each in a branch of its own; - reads prompts from standard input.",
    ),
]
PromptsFile = Annotated[
    str | None,
    typer.Option("--prompts", metavar="FILE", rich_help_panel=PROMPTS,
                 help="Prompts from a file (- is standard input): lines, JSON lines, or a CSV table."),
]  # fmt: skip
InputFormat = Annotated[
    str,
    typer.Option("--input", metavar="FORMAT", parser=one_of(*_FORMATS), autocompletion=offers(*_FORMATS),
                 rich_help_panel=PROMPTS,
                 help="How prompts are written: text, jsonl or csv (default: auto, by name and first line)."),
]  # fmt: skip
Template = Annotated[
    str | None,
    typer.Option("--template", metavar="TEXT", rich_help_panel=PROMPTS,
                 help="Makes each prompt: {column} of a table, {key} of a JSON line, {prompt} the line itself."),
]  # fmt: skip
Samples = Annotated[
    int,
    typer.Option("--samples", "-n", metavar="N", parser=whole(1, 1_000_000), rich_help_panel=PROMPTS,
                 help="Answers to each prompt, with seeds counted up from --seed (default: 1). Without a prompt they "
                      "go on from where the session stopped."),
]  # fmt: skip
At = Annotated[
    str | None,
    typer.Option("--at", metavar="PLACE", rich_help_panel=SESSIONS,
                 help="Fork inside the session: turn3 is after the third reply, 1200 a position."),
]  # fmt: skip
Parallel = Annotated[
    int | None,
    typer.Option("--parallel", metavar="N", parser=whole(1, 1_000_000), rich_help_panel="Memory",
                 help=f"Branches at the same time, up to {N_PARALLEL_MAX} (default: 16); with 1 each answer is bit "
                      "for bit what load gives."),
]  # fmt: skip
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", metavar="SECONDS", parser=real(0.0), rich_help_panel=PROMPTS,
                 help="Longest time for an answer, from when its turn comes (default: none)."),
]  # fmt: skip
Format = Annotated[
    str,
    typer.Option("--format", metavar="FORMAT", autocompletion=offers("jsonl", "text"), rich_help_panel=OUTPUT,
                 help="jsonl, a JSON line per answer; text; or a text with names in braces, such as '{id}: {text}' "
                      "(default: jsonl)."),
]  # fmt: skip
Unordered = Annotated[
    bool,
    typer.Option("--unordered", metavar="", rich_help_panel=OUTPUT,
                 help="Print answers as they are finished, not in the order of the prompts."),
]  # fmt: skip
SkipDone = Annotated[
    str | None,
    typer.Option("--skip-done", metavar="FILE", rich_help_panel=PROMPTS,
                 help="Leave out what is answered in FILE, an earlier output: continues a batch with >> FILE."),
]  # fmt: skip
SaveAs = Annotated[
    str | None,
    typer.Option("--save-as", metavar="PATTERN", rich_help_panel=SESSIONS,
                 help="Keep each branch as a session: 'answer-{id}', 'runs/{index}.bin'."),
]  # fmt: skip


@takes_options
def fork(
    output: Output,
    ref: Ref,
    model: ModelGroup,
    memory: MemoryGroup,
    sampling: SamplingGroup,
    store: StoreGroup,
    budget: BudgetGroup,
    texts: Texts = None,
    prompts: PromptsFile = None,
    kind: InputFormat = "auto",
    template: Template = None,
    samples: Samples = 1,
    skip_done: SkipDone = None,
    timeout: Timeout = None,
    at: At = None,
    save_as: SaveAs = None,
    force: Force = False,
    parallel: Parallel = None,
    form: Format = "jsonl",
    unordered: Unordered = False,
) -> None:
    """Answer many prompts from one saved session, which is read once and never changed.

    Example: llamakv fork report.bin --prompts questions.txt > answers.jsonl
    """
    from llamakv.cli import refs
    from llamakv.cli.reporting import running
    from llamakv.ops.fork import N_PARALLEL, ForkRequest, fork_session

    layout = _layout(form)
    if layout is not None and (output.json or skip_done is not None):
        option = "--json" if output.json else "--skip-done"
        raise UsageError(f"{option} needs JSON lines", hint="leave out --format")
    root = config.store_dir(store.store)
    found, place = refs.existing_at(root, ref)
    if place is not None and at is not None:
        raise UsageError(f"{ref} names a place already, beside --at {at}", hint="leave out one of them")
    asked = _prompts(ref, texts or [], prompts, cast("PromptFormat", kind), template, samples)
    if parallel is not None and parallel > N_PARALLEL_MAX:
        output.notice(f"--parallel {parallel} is more than the engine can: {N_PARALLEL_MAX} at the same time")
    with running(output) as reporter:
        done = {} if skip_done is None else _done(output, skip_done)
        request = ForkRequest(
            model=requests.model_request(output, model, memory),
            memory=requests.memory_options(memory),
            sampling=requests.sampling_options(sampling),
            options=requests.resume_options(memory),
            path=found.path,
            prompts=asked,
            at=at or place,
            n_samples=samples,
            n_parallel=min(parallel or N_PARALLEL, N_PARALLEL_MAX),
            unordered=unordered,
            timeout_s=timeout,
            done=done,
            save_as=None if save_as is None else _naming(root, save_as),
            overwrite=force,
            compress=requests.compress(memory),
            budget=requests.budget(budget),
        )

        def on_result(result: BranchResult) -> None:
            if not streams.is_file(sys.stdout):  # a terminal, or a pipe to something that writes to it
                reporter.pause()
            _tell(output, layout, result)

        def on_progress(progress: ForkProgress) -> None:
            reporter.rate(progress.n_generated / progress.elapsed_s if progress.elapsed_s > 0 else 0.0)
            reporter.progress("answers", progress.n_done, progress.n_total)

        summary = fork_session(request, reporter, on_result=on_result, on_progress=on_progress)
    output.check()
    _conclude(output, refs.shown(found), summary, skip_done, is_lines=layout is None)


# ---------------------------------------------------------------- in


def _prompts(
    ref: str, texts: list[str], file: str | None, kind: PromptFormat, template: str | None, samples: int
) -> list[Prompt]:
    """What is asked: given as arguments, in a file, or nothing but to go on."""
    from llamakv.ops.prompts import Prompt, given_prompts, read_prompts

    if texts == ["-"] and file is None:
        texts, file = [], "-"
    if "-" in texts:
        raise UsageError("- stands for standard input, and cannot go together with other prompts")
    if texts and file is not None:
        raise UsageError("prompts are given twice: as arguments and with --prompts")
    if file is None and not texts:
        if template is None and samples > 1:
            return [Prompt(id=0, where="the prompt")]  # goes on from where the session stopped
        hint = f"llamakv fork {ref} --prompts questions.txt, or: llamakv fork {ref} 'One question' 'Another one'"
        raise UsageError("there are no prompts", hint=hint)
    if file is None:
        return given_prompts([requests.argument(text) for text in texts], template=template)
    text = requests.read_text(file)
    found = read_prompts(text, name=requests.input_name(file), kind=kind, template=template)
    if not found:
        raise UsageError(f"{requests.input_name(file)} holds no prompt")
    return found


def _naming(root: Path, pattern: str) -> Callable[[Branch], SaveTarget]:
    """Where a branch is kept. An id from a file of prompts never leads to another folder."""
    from llamakv.cli import refs
    from llamakv.ops.fork import SaveTarget
    from llamakv.ops.templates import TextTemplate

    is_path = os.sep in pattern or pattern.endswith(".bin")
    form = TextTemplate(pattern) if "{" in pattern or "}" in pattern else None
    unknown = next(iter(sorted(form.names - {"id", "index"})), None) if form is not None else None
    if unknown is not None:
        raise UsageError(f"--save-as has no {{{unknown}}}", hint="the names are {id} and {index}")

    def target(branch: Branch) -> SaveTarget:
        text = str(branch.id)
        is_long = len(os.fsencode(text)) > _MAX_ID_BYTES
        if os.sep in text or "\0" in text or text in (".", "..") or is_long:
            raise UsageError(f"id {branch.id!r} cannot be a part of a session's name", hint="give it another id")
        name = pattern if form is None else form.fill({"id": text, "index": str(branch.index)}, "--save-as")
        found = refs.target(root, name)
        if found.name is None and not is_path:
            raise UsageError(
                f"id {branch.id!r} makes {str(found.path)!r} a path instead of a session's name",
                hint="give it another id, or a path to --save-as: 'runs/{id}.bin'",
            )
        return SaveTarget(path=found.path, name=found.name)

    return target


def _done(output: Output, file: str) -> dict[str, str]:
    """Keys of what an earlier output holds; one that is not there yet holds nothing. If standard output goes on in that
    file, half a line at its end is cut off, so that what comes now stands on lines of its own."""
    from llamakv.ops.fork import read_done

    if file == "-":
        raise UsageError("--skip-done needs a file", hint="--skip-done answers.jsonl >> answers.jsonl")
    if not os.path.exists(file):
        return {}
    found = read_done(requests.read_bytes(file), file)
    n_half = os.stat(file).st_size - found.n_whole_bytes
    is_output = _is_output(file)
    if found.ends_openly:
        if is_output:
            output.write("\n")
    elif n_half:
        output.notice(f"the last line of {file} was not finished: its prompt is answered again")
        if is_output:
            os.truncate(file, found.n_whole_bytes)
    return found.keys


def _is_output(file: str) -> bool:
    try:
        there, out = os.stat(file), os.fstat(sys.stdout.fileno())
    except (OSError, ValueError):
        return False
    return (there.st_dev, there.st_ino) == (out.st_dev, out.st_ino)


# ---------------------------------------------------------------- out


_NAMES = ("id", "index", "sample", "prompt", "text", "finish_reason", "seed", "reused", "evaluated", "generated")
"""What ``--format`` may name."""


def _layout(form: str) -> TextTemplate | None:
    """How an answer is written; None for JSON lines."""
    from llamakv.ops.templates import TextTemplate

    if form == "jsonl":
        return None
    if form != "text" and "{" not in form:
        raise UsageError(
            f"{form!r} is not a format", hint="jsonl, text, or names in braces: --format '{prompt}: {text}'"
        )
    layout = TextTemplate("{text}" if form == "text" else form)
    unknown = next(iter(sorted(layout.names - set(_NAMES))), None)
    if unknown is not None:
        raise UsageError(f"--format has no {{{unknown}}}", hint=f"the names are {', '.join(_NAMES)}")
    return layout


def _tell(output: Output, layout: TextTemplate | None, result: BranchResult) -> None:
    """One branch's result."""
    if result.error is not None and layout is not None:
        result.error.message = f"{result.branch.prompt.where}: {result.error.message}"
        output.show(result.error)
    elif layout is not None:
        prompt = result.branch.prompt
        asked = prompt.messages[-1][1] if prompt.messages else prompt.text or ""
        facts = {"id": result.branch.id, "sample": result.branch.sample or 0, "prompt": asked, **_facts(result)}
        output.stream(layout.fill({name: str(facts[name]) for name in layout.names}, "--format") + "\n")
    elif result.error is not None:
        output.stream_line("error", {**_facts(result), **error_json(result.error)})
    else:
        output.stream_line("answer", _facts(result))


def _facts(result: BranchResult) -> dict[str, Json]:
    branch = result.branch
    facts: dict[str, Json] = {"id": branch.id, "index": branch.index}
    if branch.sample is not None:
        facts |= {"prompt_id": branch.prompt.id, "sample": branch.sample}
    if result.finish_reason:
        facts |= {
            "text": result.text,
            "finish_reason": result.finish_reason,
            "reused": result.reused,
            "evaluated": result.evaluated,
            "generated": result.generated,
            "seed": result.seed,
            "elapsed_s": round(result.elapsed_s, 6),
            "first_token_s": round(result.first_token_s, 6),
        }
    if result.saved is not None:
        facts["saved"] = str(result.saved)
    if result.key is not None:
        facts["key"] = result.key
    return facts


def _conclude(output: Output, shown: str, summary: ForkSummary, skip_done: str | None, *, is_lines: bool) -> None:
    ended: InterruptedByUser | None = None
    if summary.interrupted:
        output.interrupts.check_ending()
        where = skip_done or "FILE"
        what = "" if skip_done else ", where FILE holds what is out"
        hint = f"go on with the same command and --skip-done {where} >> {where}{what}" if is_lines else None
        ended = InterruptedByUser("interrupted; what was finished is out", hint=hint, status=130)
    if not output.json:
        output.note(describe.fork_line(summary))
    data = {"session": shown, **describe.fork_json(summary)}
    if ended is not None:
        output.failure(ended, data=data)
        raise typer.Exit(InterruptedByUser.exit_status)
    output.document(data, status="partial" if summary.n_errors else "ok")
    if summary.n_errors:
        raise typer.Exit(PARTLY_DONE)
