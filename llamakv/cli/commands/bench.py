"""``bench``: what it costs and gives to keep what was read, measured here; and two such results set side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamakv.cli import config, requests
from llamakv.cli.commands.grouping import takes_options
from llamakv.cli.commands.options import CACHE_TYPES, MEMORY, MODEL, OUTPUT, MemoryGroup, ModelGroup, memory_size
from llamakv.cli.commands.values import lora, offers, one_of, whole
from llamakv.cli.output import Output
from llamakv.errors import NotFoundError, UsageError, WriteError

if TYPE_CHECKING:
    from llamakv.cli.bench import output as bench_output
    from llamakv.ops.bench.requests import BenchRequest, CachePair, StrategiesRequest, TypesRequest
    from llamakv.ops.bench.results import BenchResult
    from llamakv.ops.requests import Reporter

TYPES, STRATEGIES, RUN = "Cache types", "Strategies", "Run"
TYPES_BY_DEFAULT = "f16,q8_0,q4_0,q8_0/q4_0"
STRATEGY_NAMES = ("none", "in-process", "cross-process", "hybrid")
N_TOKENS, N_DECODED, N_BRANCHES, N_POSITIONS = 1000, 32, 64, 64
N_PREFIX, N_QUESTION, N_ANSWER = 1000, 32, 32
N_REPEATS = 3


def cache_pair(text: str) -> CachePair:
    """``q8_0``, or ``q8_0/q4_0`` for keys and values of different types."""
    type_k, slash, type_v = text.partition("/")
    for name in (type_k, type_v) if slash else (type_k,):
        if name not in CACHE_TYPES:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(CACHE_TYPES)}")
    return type_k, type_v if slash else type_k


def _pairs(text: str) -> str:
    _check_list([cache_pair(part) for part in text.split(",")], text)
    return text


def _strategies(text: str) -> str:
    _check_list([one_of(*STRATEGY_NAMES)(part) for part in text.split(",")], text)
    return text


def _check_list(values: list[CachePair] | list[str], text: str) -> None:
    if len(set(values)) < len(values):
        raise typer.BadParameter(f"{text!r} names one of them twice")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchModelGroup:
    """Which model is measured, and on what it runs."""

    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", metavar="FILE", rich_help_panel=MODEL,
                     help=f"Model file (GGUF). Default: ${config.MODEL_VARIABLE}, or the demo model."),
    ] = None  # fmt: skip
    lora: Annotated[
        list[str] | None,
        typer.Option("--lora", metavar="FILE=SCALE", parser=lora, rich_help_panel=MODEL,
                     help="LoRA adapter; =SCALE may be left out (1.0); repeatable."),
    ] = None  # fmt: skip
    gpu_layers: Annotated[
        int | None,
        typer.Option("--gpu-layers", "-ngl", metavar="N", parser=whole(-1, 100_000), rich_help_panel=MODEL,
                     help="Layers on the GPU; -1 is all (default: 0)."),
    ] = None  # fmt: skip
    threads: Annotated[
        int | None,
        typer.Option("--threads", "-t", metavar="N", parser=whole(1, 1024), rich_help_panel=MODEL,
                     help="CPU threads (default: one per core)."),
    ] = None  # fmt: skip
    file: Annotated[
        str | None,
        typer.Option("--file", "-f", metavar="FILE", rich_help_panel=MODEL,
                     help="Text to read (UTF-8), cut or repeated to length; - is standard input "
                          "(default: one of our own)."),
    ] = None  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchMemoryGroup:
    """Memory settings of all that does not say otherwise."""

    type_k: Annotated[
        str | None,
        typer.Option("--type-k", "-ctk", metavar="TYPE", parser=one_of(*CACHE_TYPES),
                     autocompletion=offers(*CACHE_TYPES), rich_help_panel=MEMORY,
                     help="Type of stored keys where --types says nothing (default: f16), one of "
                          f"{', '.join(CACHE_TYPES)}."),
    ] = None  # fmt: skip
    type_v: Annotated[
        str | None,
        typer.Option("--type-v", "-ctv", metavar="TYPE", parser=one_of(*CACHE_TYPES),
                     autocompletion=offers(*CACHE_TYPES), rich_help_panel=MEMORY,
                     help="Type of stored values where --types says nothing: the same words (default: f16)."),
    ] = None  # fmt: skip
    flash_attn: Annotated[
        str | None,
        typer.Option("--flash-attn", metavar="WHEN", parser=one_of("auto", "on", "off"),
                     autocompletion=offers("auto", "on", "off"), rich_help_panel=MEMORY,
                     help="Flash attention: auto, on or off (default: auto)."),
    ] = None  # fmt: skip
    swa: Annotated[
        str | None,
        typer.Option("--swa", metavar="HOW", parser=one_of("full", "window"), autocompletion=offers("full", "window"),
                     rich_help_panel=MEMORY,
                     help="Sliding-window layers keep all cells (full) or only the window (default: full)."),
    ] = None  # fmt: skip


def _number(panel: str, name: str, low: int, high: int, help: str) -> object:
    return typer.Option(name, metavar="N", parser=whole(low, high), rich_help_panel=panel, help=help)


@dataclass(frozen=True, slots=True, kw_only=True)
class TypesGroup:
    """What is measured for each cache type."""

    types: Annotated[
        str | None,
        typer.Option("--types", metavar="TYPES", parser=_pairs, rich_help_panel=TYPES,
                     help="Cache types to measure, with commas; KEYS/VALUES for two different ones "
                          f"(default: {TYPES_BY_DEFAULT}, with --users none)."),
    ] = None  # fmt: skip
    tokens: Annotated[
        int | None,
        _number(TYPES, "--tokens", 2, 2**31 - 1, f"Longest text to read, in tokens (default: {N_TOKENS})."),
    ] = None
    decode: Annotated[
        int | None,
        _number(TYPES, "--decode", 1, 1_000_000, f"Tokens to write behind it (default: {N_DECODED})."),
    ] = None
    branches: Annotated[
        int | None,
        _number(TYPES, "--branches", 1, 254, f"Branches to fork it to (default: {N_BRANCHES})."),
    ] = None
    positions: Annotated[
        int | None,
        _number(TYPES, "--positions", 1, 1_000_000,
                f"Positions to compare the output at, with that of f16 (default: {N_POSITIONS})."),
    ] = None  # fmt: skip
    no_output_change: Annotated[
        bool,
        typer.Option("--no-output-change", metavar="", rich_help_panel=TYPES,
                     help="Do not measure what the types do to the output."),
    ] = False  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategiesGroup:
    """What all users ask, and how they are answered."""

    users: Annotated[
        int | None,
        _number(STRATEGIES, "--users", 1, 100_000, "Compare strategies to answer so many users at once."),
    ] = None
    prefix: Annotated[
        int | None,
        _number(STRATEGIES, "--prefix", 1, 2**31 - 1, f"Tokens each prompt begins with (default: {N_PREFIX})."),
    ] = None
    question: Annotated[
        int | None,
        _number(STRATEGIES, "--question", 1, 2**31 - 1, f"Tokens of a question behind it (default: {N_QUESTION})."),
    ] = None
    answer: Annotated[
        int | None,
        _number(STRATEGIES, "--answer", 1, 2**31 - 1, f"Tokens of an answer (default: {N_ANSWER})."),
    ] = None
    strategies: Annotated[
        str | None,
        typer.Option("--strategies", metavar="NAMES", parser=_strategies, rich_help_panel=STRATEGIES,
                     help=f"Which ones, with commas: {', '.join(STRATEGY_NAMES)} (default: all)."),
    ] = None  # fmt: skip
    memory: Annotated[
        int | None,
        typer.Option("--memory", metavar="SIZE", parser=memory_size, rich_help_panel=STRATEGIES,
                     help="Memory to say how many users fit in: 16GB, 24GiB (default: what is available now)."),
    ] = None  # fmt: skip
    shared_prefix: Annotated[
        bool | None,
        typer.Option("--shared-prefix/--no-shared-prefix", metavar="", rich_help_panel=STRATEGIES, show_default=False,
                     help="All users have the same prefix, or each one of their own (default: the same)."),
    ] = None  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultGroup:
    """How it is run, and what becomes of the result."""

    repeats: Annotated[
        int | None,
        _number(RUN, "--repeats", 1, 1000, f"Times to measure, after one that does not count (default: {N_REPEATS})."),
    ] = None
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", rich_help_panel=RUN,
                     help="Folder for session files while they are measured; its disk decides what cold means "
                          "(default: the cache folder)."),
    ] = None  # fmt: skip
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option("--compare", metavar="A B", rich_help_panel=RUN, show_default=False,
                     help="Set two results side by side instead, files of --output or --json; no model is needed."),
    ] = None  # fmt: skip
    output_file: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", rich_help_panel=OUTPUT,
                     help="Keep the result in FILE (JSON), after each row what there is so far."),
    ] = None  # fmt: skip
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", rich_help_panel=OUTPUT,
                     help="Draw the result, as .svg or .png; - is the terminal."),
    ] = None  # fmt: skip
    force: Annotated[
        bool, typer.Option("--force", metavar="", rich_help_panel=OUTPUT, help="Replace files that are there.")
    ] = False
    markdown: Annotated[
        bool, typer.Option("--markdown", metavar="", rich_help_panel=OUTPUT, help="Print tables as Markdown.")
    ] = False
    csv: Annotated[
        bool,
        typer.Option("--csv", metavar="", rich_help_panel=OUTPUT, help="Print a line of values for each number."),
    ] = False


@takes_options
def bench(
    output: Output,
    model: BenchModelGroup,
    memory: BenchMemoryGroup,
    types: TypesGroup,
    strategies: StrategiesGroup,
    result: ResultGroup,
) -> None:
    """Measure what reading, saving, resuming and forking cost here, for cache types or for many users.

    Example: llamakv bench --tokens 256 --types f16,q8_0 --repeats 1
    """
    from llamakv.cli.bench import output as bench_output

    form = bench_output.form_of(output, markdown=result.markdown, csv=result.csv)
    if result.compare is not None:
        _check_comparison(model, memory, types, strategies, result)
        bench_output.compare(output, Path(result.compare[0]), Path(result.compare[1]), form)
        return
    _check_options(types, strategies)
    target = bench_output.Target(output, form, result_file=result.output_file, plot=result.plot, overwrite=result.force)
    target.check()
    work_dir, text = _work_dir(result.folder), _text(model.file)

    def measure(reporter: Reporter) -> BenchResult:
        from llamakv.ops.bench.run import run_bench

        return run_bench(_request(output, model, memory, types, strategies, result, work_dir, text, reporter, target))

    status = target.deliver(measure)
    if status:
        raise typer.Exit(status)


# ---------------------------------------------------------------- checks


def _check_comparison(
    model: BenchModelGroup,
    memory: BenchMemoryGroup,
    types: TypesGroup,
    strategies: StrategiesGroup,
    result: ResultGroup,
) -> None:
    groups = (model == BenchModelGroup(), memory == BenchMemoryGroup(), types == TypesGroup())
    others = (result.repeats, result.folder, result.output_file, result.plot)
    if not all(groups) or strategies != StrategiesGroup() or any(value is not None for value in others):
        raise UsageError(
            "--compare reads two results and measures nothing: it goes with --json, --markdown and --csv only",
            hint="llamakv bench --compare A.json B.json",
        )


def _check_options(types: TypesGroup, strategies: StrategiesGroup) -> None:
    """Refuse options that would mean nothing."""
    if strategies.users is None and strategies != StrategiesGroup():
        raise UsageError("options of strategies need a number of users", hint="llamakv bench --users 8 --prefix 1000")
    if strategies.users is not None and types.types is None and types != TypesGroup():
        raise UsageError(
            "with --users, cache types are measured only if --types names them", hint=f"--types {TYPES_BY_DEFAULT}"
        )
    if types.no_output_change and types.positions is not None:
        raise UsageError("--positions and --no-output-change exclude each other", hint="leave out one of them")


def _text(file: str | None) -> str | None:
    if file is None:
        return None
    text = requests.read_text(file)
    if not text.strip():
        raise UsageError(f"{requests.input_name(file)} is empty: there is nothing to read", path=file)
    return text


# ---------------------------------------------------------------- what is asked


def _request(
    output: Output,
    model: BenchModelGroup,
    memory: BenchMemoryGroup,
    types: TypesGroup,
    strategies: StrategiesGroup,
    result: ResultGroup,
    work_dir: Path,
    text: str | None,
    reporter: Reporter,
    target: bench_output.Target,
) -> BenchRequest:
    from llamakv.ops.bench.requests import BenchRequest

    given = MemoryGroup(
        type_k=memory.type_k, type_v=memory.type_v, flash_attn=memory.flash_attn, swa=memory.swa
    )  # fmt: skip
    runs_on = ModelGroup(
        model=model.model, lora=model.lora, gpu_layers=model.gpu_layers, threads=model.threads
    )  # fmt: skip
    return BenchRequest(
        model=requests.model_request(output, runs_on, given),
        memory=requests.memory_options(given),
        n_repeats=result.repeats or N_REPEATS,
        types=None if strategies.users is not None and types.types is None else _types_request(types, memory),
        strategies=None if strategies.users is None else _strategies_request(strategies, strategies.users),
        text=text,
        work_dir=work_dir,
        reporter=reporter,
        on_result=target.keep,
        on_failure=target.fail,
    )


def _types_request(types: TypesGroup, memory: BenchMemoryGroup) -> TypesRequest:
    from llamakv.ops.bench.requests import TypesRequest

    by_default = TYPES_BY_DEFAULT
    if memory.type_k is not None or memory.type_v is not None:
        by_default = f"{memory.type_k or 'f16'}/{memory.type_v or 'f16'}"

    return TypesRequest(
        pairs=tuple(cache_pair(part) for part in (types.types or by_default).split(",")),
        n_tokens=types.tokens or N_TOKENS,
        n_decoded=types.decode or N_DECODED,
        n_branches=types.branches or N_BRANCHES,
        compares_output=not types.no_output_change,
        n_positions=types.positions or N_POSITIONS,
    )


def _strategies_request(strategies: StrategiesGroup, n_users: int) -> StrategiesRequest:
    from llamakv.ops.bench.requests import STRATEGIES as NAMES
    from llamakv.ops.bench.requests import StrategiesRequest

    return StrategiesRequest(
        n_users=n_users,
        n_prefix=strategies.prefix or N_PREFIX,
        n_question=strategies.question or N_QUESTION,
        n_answer=strategies.answer or N_ANSWER,
        shares_prefix=strategies.shared_prefix is not False,
        names=NAMES if strategies.strategies is None else tuple(strategies.strategies.split(",")),
        memory_limit_bytes=strategies.memory,
    )


def _work_dir(asked: Path | None) -> Path:
    """Where session files lie while they are measured: on the disk that sessions are kept on, as a rule."""
    if asked is not None:
        if not asked.exists():
            raise NotFoundError(f"folder '{asked}' does not exist", path=str(asked))
        if not asked.is_dir():
            raise UsageError(f"'{asked}' is not a folder", path=str(asked))
        return asked
    folder = config.cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"cannot make the folder '{folder}': {error.strerror}", path=str(folder)) from error
    return folder
