"""The options that commands share: declared once, so that a name means the same everywhere.

Options come in groups, frozen data with one field per option; ``grouping`` lets commands ask for whole groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llamakv.cli import config
from llamakv.cli.commands.values import (
    bias,
    lora,
    n_tokens,
    not_empty,
    offers,
    one_of,
    real,
    size_limit,
    time_limit,
    whole,
)
from llamakv.errors import LlamakvError

CACHE_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")

MODEL, MEMORY, SAMPLING, SESSIONS, OUTPUT = "Model", "Memory", "Sampling", "Sessions", "Output"


def complete_session(incomplete: str) -> list[str]:
    """Names in the default store that begin so, for the shell."""
    return [name for name in session_names(config.store_dir(None)) if name.startswith(incomplete)]


def session_names(root: Path) -> list[str]:
    """Names in a store; none if it cannot be listed: who completes a word must never see an error."""
    from llamakv.ops import listing

    try:
        return list(listing.session_names(root))
    except LlamakvError:
        return []


def memory_size(text: str) -> int:
    """A number of bytes, as ``size_limit`` reads it; ``none`` is none."""
    try:
        n_bytes = size_limit(text)
    except typer.BadParameter as error:
        raise typer.BadParameter(error.message.removesuffix(" or none")) from error
    if math.isinf(n_bytes):
        raise typer.BadParameter("'none' is not a size (such as 16GB or 24GiB)")
    return int(n_bytes)


# ---------------------------------------------------------------- groups

TypeK = Annotated[
    str | None,
    typer.Option(
        "--type-k", "-ctk", metavar="TYPE", parser=one_of(*CACHE_TYPES), autocompletion=offers(*CACHE_TYPES),
        help=f"Type of stored keys: {', '.join(CACHE_TYPES)} (default: as stored, else f16).",
        rich_help_panel=MEMORY,
    ),
]  # fmt: skip
TypeV = Annotated[
    str | None,
    typer.Option(
        "--type-v", "-ctv", metavar="TYPE", parser=one_of(*CACHE_TYPES), autocompletion=offers(*CACHE_TYPES),
        help="Type of stored values: the same words (default: as stored, else f16).",
        rich_help_panel=MEMORY,
    ),
]  # fmt: skip
FlashAttn = Annotated[
    str | None,
    typer.Option(
        "--flash-attn", metavar="WHEN", parser=one_of("auto", "on", "off"),
        autocompletion=offers("auto", "on", "off"), rich_help_panel=MEMORY,
        help="Flash attention: auto, on or off (default: as stored, else auto).",
    ),
]  # fmt: skip
Swa = Annotated[
    str | None,
    typer.Option(
        "--swa", metavar="HOW", parser=one_of("full", "window"), autocompletion=offers("full", "window"),
        rich_help_panel=MEMORY,
        help="Sliding-window layers keep all cells (full) or only the window (default: as stored, else full).",
    ),
]  # fmt: skip


def _option(panel: str, *names: str, metavar: str, parser: Callable[[str], object], help: str) -> object:
    return typer.Option(*names, metavar=metavar, parser=parser, help=help, rich_help_panel=panel)


GpuLayers = Annotated[
    int | None,
    _option(MODEL, "--gpu-layers", "-ngl", metavar="N", parser=whole(-1, 100_000),
            help="Layers on the GPU; -1 is all (default: 0)."),
]  # fmt: skip
Threads = Annotated[
    int | None,
    _option(MODEL, "--threads", "-t", metavar="N", parser=whole(1, 1024),
            help="CPU threads (default: one per core)."),
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGroup:
    """Which model, and on what it runs."""

    model: Annotated[
        Path | None,
        typer.Option(
            "--model", "-m", metavar="FILE", rich_help_panel=MODEL,
            help=f"Model file (GGUF). Default: the session's own, ${config.MODEL_VARIABLE}, or the demo model.",
        ),
    ] = None  # fmt: skip
    model_dir: Annotated[
        list[Path] | None,
        typer.Option(
            "--model-dir", metavar="DIR", rich_help_panel=MODEL,
            help=f"Folder to look for a session's model in; repeatable (also ${config.MODEL_FOLDERS_VARIABLE}).",
        ),
    ] = None  # fmt: skip
    lora: Annotated[
        list[str] | None,
        typer.Option(
            "--lora", metavar="FILE=SCALE", parser=lora, rich_help_panel=MODEL,
            help="LoRA adapter; =SCALE may be left out (1.0); repeatable.",
        ),
    ] = None  # fmt: skip
    gpu_layers: GpuLayers = None
    threads: Threads = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGroup:
    """How the KV memory is laid out; what is not given is as stored in the session."""

    n_ctx: Annotated[
        int | None,
        _option(MEMORY, "--n-ctx", "-c", metavar="N", parser=whole(1, 2**31 - 1),
                help="Largest context, in tokens; it grows as needed (default: the model's own)."),
    ] = None  # fmt: skip
    type_k: TypeK = None
    type_v: TypeV = None
    flash_attn: FlashAttn = None
    swa: Swa = None
    rope_freq_base: Annotated[
        float | None,
        _option(MEMORY, "--rope-freq-base", metavar="X", parser=real(0.0),
                help="RoPE base frequency (default: the model's)."),
    ] = None  # fmt: skip
    rope_freq_scale: Annotated[
        float | None,
        _option(MEMORY, "--rope-freq-scale", metavar="X", parser=real(0.0),
                help="RoPE frequency scale (default: the model's)."),
    ] = None  # fmt: skip
    recompute: Annotated[
        bool,
        typer.Option("--recompute", metavar="", rich_help_panel=MEMORY,
                     help="Read the stored tokens again, under the settings given now."),
    ] = False  # fmt: skip
    trust_state: Annotated[
        bool,
        typer.Option("--trust-state", metavar="", rich_help_panel=MEMORY,
                     help="Take the stored state although another engine build made it."),
    ] = False  # fmt: skip
    compress: Annotated[
        str | None,
        typer.Option(
            "--compress", metavar="HOW", parser=one_of("auto", "none"), autocompletion=offers("auto", "none"),
            rich_help_panel=MEMORY, help="Compress saved state: auto or none (default: auto).",
        ),
    ] = None  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingGroup:
    """How the next token is chosen; what is not given is as stored in the session."""

    temperature: Annotated[
        float | None,
        _option(SAMPLING, "--temperature", metavar="X", parser=real(0.0, 100.0),
                help="0 always takes the likeliest token (default: the session's, else 0.3)."),
    ] = None  # fmt: skip
    seed: Annotated[
        int | None,
        _option(SAMPLING, "--seed", metavar="N", parser=whole(-1, 2**32 - 1),
                help="Random stream, 0 to 4294967295; -1 is a new one (default: the session's, else new)."),
    ] = None  # fmt: skip
    max_tokens: Annotated[
        int | None,
        _option(SAMPLING, "--max-tokens", metavar="N", parser=n_tokens,
                help="Longest reply, in tokens; -1 is no limit (default: the session's, else 1024)."),
    ] = None  # fmt: skip
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", parser=not_empty, rich_help_panel=SAMPLING,
                     help="Text that ends a reply and is left out of it; repeatable."),
    ] = None  # fmt: skip
    top_k: Annotated[
        int | None,
        _option(SAMPLING, "--top-k", metavar="N", parser=whole(0, 2**31 - 1),
                help="Choose among the N likeliest; 0 is off (default: the session's, else 40)."),
    ] = None  # fmt: skip
    top_p: Annotated[
        float | None,
        _option(SAMPLING, "--top-p", metavar="P", parser=real(0.0, 1.0),
                help="Choose among the likeliest that add up to P; 1 is off (default: the session's, else 0.95)."),
    ] = None  # fmt: skip
    min_p: Annotated[
        float | None,
        _option(SAMPLING, "--min-p", metavar="P", parser=real(0.0, 1.0),
                help="Leave out those under P times the likeliest; 0 is off (default: the session's, else 0.05)."),
    ] = None  # fmt: skip
    repeat_penalty: Annotated[
        float | None,
        _option(SAMPLING, "--repeat-penalty", metavar="X", parser=real(0.01, 100.0),
                help="Make repeated tokens less likely; 1 is off (default: 1)."),
    ] = None  # fmt: skip
    frequency_penalty: Annotated[
        float | None,
        _option(SAMPLING, "--frequency-penalty", metavar="X", parser=real(-100.0, 100.0),
                help="Taken off per earlier use of a token (default: 0)."),
    ] = None  # fmt: skip
    presence_penalty: Annotated[
        float | None,
        _option(SAMPLING, "--presence-penalty", metavar="X", parser=real(-100.0, 100.0),
                help="Taken off once if a token was used (default: 0)."),
    ] = None  # fmt: skip
    penalty_last_n: Annotated[
        int | None,
        _option(SAMPLING, "--penalty-last-n", metavar="N", parser=whole(0, 2**31 - 1),
                help="Tokens the penalties look back at (default: 64)."),
    ] = None  # fmt: skip
    logit_bias: Annotated[
        list[str] | None,
        typer.Option("--logit-bias", metavar="ID=BIAS", parser=bias, rich_help_panel=SAMPLING,
                     help="Added to a token's logit; -inf forbids it; repeatable."),
    ] = None  # fmt: skip
    grammar: Annotated[
        Path | None,
        typer.Option("--grammar", metavar="FILE", rich_help_panel=SAMPLING,
                     help="GBNF grammar the reply must follow; 'root' is its first rule."),
    ] = None  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreGroup:
    """Where sessions with a name live."""

    store: Annotated[
        Path | None,
        typer.Option("--store", metavar="DIR", rich_help_panel=SESSIONS,
                     help=f"Folder of named sessions (default: ${config.STORE_VARIABLE} or your data folder)."),
    ] = None  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInspectGroup:
    """What ``inspect`` asks of a model file. ``layers``, ``plot`` and ``force`` mean something for a session too."""

    n_ctx: Annotated[
        list[int] | None,
        _option(MEMORY, "--n-ctx", "-c", metavar="N", parser=whole(1, 2**31 - 1),
                help="Context sizes to tell of, in tokens; repeatable (default: some up to the model's own)."),
    ] = None  # fmt: skip
    parallel: Annotated[
        int | None,
        _option(MEMORY, "--parallel", metavar="N", parser=whole(1, 254),
                help="Branches that share the context, as fork has them (default: none, one sequence)."),
    ] = None  # fmt: skip
    type_k: Annotated[
        list[str] | None,
        typer.Option(
            "--type-k", "-ctk", metavar="TYPE", parser=one_of(*CACHE_TYPES), autocompletion=offers(*CACHE_TYPES),
            rich_help_panel=MEMORY,
            help="Types of keys to tell of; repeatable (default: f16, q8_0 and q4_0 for both).",
        ),
    ] = None  # fmt: skip
    type_v: Annotated[
        list[str] | None,
        typer.Option(
            "--type-v", "-ctv", metavar="TYPE", parser=one_of(*CACHE_TYPES), autocompletion=offers(*CACHE_TYPES),
            rich_help_panel=MEMORY, help="Types of values, with each type of keys; repeatable.",
        ),
    ] = None  # fmt: skip
    flash_attn: FlashAttn = None
    swa: Swa = None
    memory: Annotated[
        int | None,
        _option(MEMORY, "--memory", metavar="SIZE", parser=memory_size,
                help="Say what fits in so much memory too: 16GB, 24GiB."),
    ] = None  # fmt: skip
    live: Annotated[
        bool,
        typer.Option("--live", metavar="", rich_help_panel=MODEL,
                     help="Load the model, open a context, and set what it really takes against the estimate."),
    ] = False  # fmt: skip
    layers: Annotated[bool, typer.Option("--layers", metavar="", help="Add a row for each layer.")] = False
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE", help="Draw a plot: a .svg or .png file; - draws in the terminal."),
    ] = None  # fmt: skip
    force: Annotated[bool, typer.Option("--force", metavar="", help="Replace the plot's file that is there.")] = False
    gpu_layers: GpuLayers = None
    threads: Threads = None


MaxBytes = Annotated[
    float | None,
    typer.Option("--max-bytes", metavar="SIZE", parser=size_limit, rich_help_panel=SESSIONS,
                 help=f"Most the store may take: 100MB, 20GiB, none (default: ${config.MAX_BYTES_VARIABLE} or its "
                      "own budget)."),
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetGroup:
    """What the store may take while this is saved, and how long what is saved stays."""

    max_bytes: MaxBytes = None
    ttl: Annotated[
        float | None,
        typer.Option("--ttl", metavar="TIME", parser=time_limit, rich_help_panel=SESSIONS,
                     help="Let what is saved expire when unused for so long: 12h, 7d, none (default: as it says, "
                          "or its store)."),
    ] = None  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputGroup:
    """What is shown; every command has these."""

    json: Annotated[
        bool, typer.Option("--json", metavar="", rich_help_panel=OUTPUT, help="Print the result as JSON.")
    ] = False
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", metavar="", rich_help_panel=OUTPUT,
                     help="Show the engine's own log, and tracebacks of internal errors."),
    ] = False  # fmt: skip
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", metavar="", rich_help_panel=OUTPUT, help="Print only the result and errors."),
    ] = False


Ref = Annotated[
    str,
    typer.Argument(metavar="REF", autocompletion=complete_session,
                   help="Session: a name in the store, or a path to a session file.", show_default=False),
]  # fmt: skip
Force = Annotated[
    bool, typer.Option("--force", metavar="", rich_help_panel=SESSIONS, help="Replace the session that is there.")
]
NoReuse = Annotated[
    bool,
    typer.Option("--no-reuse", metavar="", rich_help_panel=SESSIONS,
                 help="Read all of the text, also what a session in the store begins with."),
]  # fmt: skip
SaveRef = Annotated[
    str | None,
    typer.Option("--save", metavar="REF", rich_help_panel=SESSIONS, autocompletion=complete_session,
                 help="Session to save to: a name or a path. It must be new."),
]  # fmt: skip
