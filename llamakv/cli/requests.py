"""From options to what an op is asked for: names made out, files read, nothing decided."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from llamakv.cli import config
from llamakv.cli.commands.options import (
    BudgetGroup,
    MemoryGroup,
    ModelGroup,
    SamplingGroup,
)
from llamakv.cli.commands.values import of_variable, size_limit, split_bias, split_lora, time_limit
from llamakv.cli.output import Output
from llamakv.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from llamakv.ops.budget import Budget
    from llamakv.ops.requests import Compress, MemoryOptions, ModelRequest, ResumeOptions, SamplingOptions

In = TypeVar("In")
Out = TypeVar("Out")


def model_request(output: Output, model: ModelGroup, memory: MemoryGroup) -> ModelRequest:
    """Which model the user wants; the environment fills in what was not given. The engine may be imported after."""
    from llamakv.ops.requests import ModelRequest

    config.prepare_engine()
    return ModelRequest(
        path=model.model,
        default=config.default_model(),
        demo=config.demo_model(),
        folders=config.model_folders(model.model_dir or ()),
        adapters=_each(model.lora, split_lora),
        n_gpu_layers=0 if model.gpu_layers is None else model.gpu_layers,
        n_threads=model.threads,
        n_ctx=memory.n_ctx,
        on_log=output.log if output.verbose else None,
        cache_dir=config.cache_dir(),
    )


def memory_options(memory: MemoryGroup) -> MemoryOptions:
    """The memory settings that were given."""
    from llamakv.ops.requests import MemoryOptions

    return MemoryOptions(
        type_k=memory.type_k,
        type_v=memory.type_v,
        flash_attn=memory.flash_attn,
        swa=memory.swa,
        rope_freq_base=memory.rope_freq_base,
        rope_freq_scale=memory.rope_freq_scale,
    )


def resume_options(memory: MemoryGroup) -> ResumeOptions:
    """How to deal with a state that may not fit."""
    from llamakv.ops.requests import ResumeOptions

    return ResumeOptions(recompute=memory.recompute, trust_state=memory.trust_state)


def sampling_options(sampling: SamplingGroup) -> SamplingOptions:
    """The sampling parameters that were given; reads the grammar's file."""
    from llamakv.ops.requests import SamplingOptions

    return SamplingOptions(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repeat_penalty=sampling.repeat_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        penalty_last_n=sampling.penalty_last_n,
        seed=sampling.seed,
        logit_bias=_each(sampling.logit_bias, split_bias),
        grammar=None if sampling.grammar is None else _read_grammar(str(sampling.grammar)),
        max_tokens=sampling.max_tokens,
        stop=_each(sampling.stop, str),
    )


def _read_grammar(file: str) -> str:
    text = read_text(file)
    if not text.strip():  # the engine takes an empty grammar for none
        raise UsageError(f"the grammar {input_name(file)} is empty", path=file)
    return text


def compress(memory: MemoryGroup) -> Compress:
    """Whether saved state is compressed."""
    return cast("Compress", memory.compress or "auto")


def budget(options: BudgetGroup) -> Budget:
    """What a command that saves must keep to; the environment fills in what was not given.

    Raises:
        UsageError: a variable is not a size, or not a time.
    """
    from llamakv.ops.budget import Budget

    max_bytes = options.max_bytes if options.max_bytes is not None else max_bytes_variable()
    return Budget(max_bytes=max_bytes, ttl_s=options.ttl, store_ttl_s=ttl_variable())


def max_bytes_variable() -> float | None:
    """What the environment says a store may take. Raises UsageError."""
    return of_variable(config.MAX_BYTES_VARIABLE, size_limit)


def ttl_variable() -> float | None:
    """What the environment says how long sessions stay unused. Raises UsageError."""
    return of_variable(config.TTL_VARIABLE, time_limit)


def _each(values: list[In] | None, convert: Callable[[In], Out]) -> tuple[Out, ...] | None:
    return tuple(convert(value) for value in values) if values else None


def input_name(file: str | None) -> str:
    """An input for people."""
    return "standard input" if file in (None, "-") else str(file)


def read_text(file: str) -> str:
    """All of a UTF-8 file, or of standard input for ``-``, with its line ends as they are.

    Raises:
        NotFoundError: there is no such file.
        UsageError: it cannot be read, or is not UTF-8.
    """
    return decode(read_bytes(file), input_name(file))


def read_bytes(file: str) -> bytes:
    """All of a file, or of standard input for ``-``.

    Raises:
        NotFoundError: there is no such file.
        UsageError: it cannot be read.
    """
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except FileNotFoundError as error:
        raise NotFoundError(f"file {file!r} does not exist", path=file) from error
    except IsADirectoryError as error:
        raise UsageError(f"{file!r} is a directory, expected a text file", path=file) from error
    except OSError as error:
        raise UsageError(f"{input_name(file)} cannot be read: {error.strerror}", path=file) from error


def argument(text: str) -> str:
    """An argument of the command line as UTF-8, whatever the locale took its bytes for."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        return text


def decode(data: bytes, name: str) -> str:
    """UTF-8 bytes as text.

    Raises:
        UsageError: they are not UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8 text: byte {data[error.start]:#04x} at offset {error.start}", path=name
        ) from error
