"""``inspect MODEL.gguf``: what a model is, what it takes in memory and what of it fits, as text, JSON and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llamakv.cli.commands import model_report
from llamakv.cli.commands.options import ModelInspectGroup
from llamakv.cli.output import Json, Output, to_json
from llamakv.errors import ModelFileError, NotFoundError, UsageError

if TYPE_CHECKING:
    from llamakv.cli.plots import Chart
    from llamakv.engine.memory import CachePart, ContextMemory
    from llamakv.ops.inspect_live import LiveQuestion, LiveReport
    from llamakv.ops.inspect_model import Fit, Limit, ModelQuestion, ModelReport, TypeReport

_IN_TERMINAL = "-"
_LEAST_MEMORY = 1_000_000  # less is a number without its unit
_ON_PLOT = 1.5
"""How far above the largest context a limit may be to be drawn: further up it would flatten all the lines."""


def inspect_model(output: Output, path: Path, ask: ModelInspectGroup) -> None:
    """Show what a model file holds and what contexts over it take; with ``ask.live`` what one really takes.

    Raises:
        NotFoundError: there is no such file.
        ModelFileError: it is no GGUF file, or cannot be opened where that was asked for.
        UsageError: a context larger than any can be, or options that exclude each other.
    """
    _check_memory(ask)
    _check_plot(output, ask)
    if not path.exists():
        raise NotFoundError(f"the model file {path} does not exist", path=str(path))
    from llamakv.cli import config

    config.prepare_engine()
    from llamakv.cli.reporting import running
    from llamakv.ops.inspect_live import ask_about

    question = _question(path, ask)
    live = _live_question(output, ask, question) if ask.live else None
    with running(output) as reporter:
        report, lived = ask_about(question, reporter, live=live, on_log=output.log if output.verbose else None)
    if ask.plot is not None:
        _check_can_be_drawn(report)
    if ask.plot not in (None, _IN_TERMINAL):
        _write_plot(report, ask)
    if output.json:
        output.document(_report_json(report, lived, plot=ask.plot))
        return
    model_report.write_report(output, report, with_layers=ask.layers, is_live=lived is not None)
    if lived is not None:
        model_report.write_live(output, lived)
    if ask.plot == _IN_TERMINAL:
        _show_plot(output, report)
    elif ask.plot is not None:
        output.note(f"drawn: {ask.plot}")


def _check_memory(ask: ModelInspectGroup) -> None:
    if ask.memory is not None and ask.memory < _LEAST_MEMORY:
        raise UsageError(
            f"--memory {ask.memory:,} bytes are too few for any model: at least {_LEAST_MEMORY:,} (1MB)",
            hint=f"--memory {ask.memory}GB",
            memory=ask.memory,
            limit=_LEAST_MEMORY,
        )


def _question(path: Path, ask: ModelInspectGroup) -> ModelQuestion:
    from llamakv.ops.inspect_model import TYPES, ModelQuestion

    types = TYPES
    if ask.type_k or ask.type_v:  # what is not given is f16, as everywhere
        pairs = [(k, v) for k in ask.type_k or ("f16",) for v in ask.type_v or ("f16",)]
        types = tuple(dict.fromkeys(pairs))
    return ModelQuestion(
        path=path,
        n_ctx=tuple(sorted(set(ask.n_ctx or ()))),
        n_parallel=ask.parallel or 0,
        types=types,
        flash_attn=None if ask.flash_attn in (None, "auto") else ask.flash_attn == "on",
        swa_full=ask.swa != "window",
        memory_bytes=ask.memory,
        with_curve=ask.plot is not None,
    )


def _live_question(output: Output, ask: ModelInspectGroup, question: ModelQuestion) -> LiveQuestion:
    from llamakv.ops.inspect_live import LiveQuestion

    return LiveQuestion(
        path=question.path,
        memory=question.memory(question.types[0]),
        n_ctx=question.n_ctx[0] if question.n_ctx else None,
        n_parallel=question.n_parallel,
        n_threads=ask.threads,
        n_gpu_layers=ask.gpu_layers or 0,
        on_log=output.log if output.verbose else None,
    )


# ---------------------------------------------------------------- the plot


def _check_plot(output: Output, ask: ModelInspectGroup) -> None:
    """Find out whether the plot can be had before anything else is done."""
    if ask.plot is None:
        return
    if ask.plot != _IN_TERMINAL:
        from llamakv.cli.plots import check_plot_file

        check_plot_file(Path(ask.plot), overwrite=ask.force)
    elif output.json:
        raise UsageError("--json and --plot - exclude each other: stdout takes one of them", hint="--plot plot.svg")


def _check_can_be_drawn(report: ModelReport) -> None:
    if not any(found.curve for found in report.types):
        reason = report.facts.unknown or next((found.refused for found in report.types if found.refused), "")
        raise ModelFileError(f"nothing can be drawn of {report.path}: {reason}", path=str(report.path))


def _chart(report: ModelReport) -> Chart:
    """What contexts take, weights included, against their length; the weights alone; and the limits, less what the
    process itself takes, where they are near enough."""
    from llamakv.cli.commands.model_report import limit_text
    from llamakv.cli.plots import Chart, Series

    drawn = [found for found in report.types if found.curve]
    weights = report.facts.weights_bytes or 0
    lines = [
        Series(
            label=found.label,
            xs=[memory.n_ctx for memory in found.curve],
            ys=[weights + memory.n_bytes for memory in found.curve],
        )
        for found in drawn
    ]
    xs = lines[0].xs
    top = max(y for line in lines for y in line.ys)
    shown = [limit for limit in report.limits if 0 < limit.n_room <= _ON_PLOT * top]
    beyond = [limit for limit in report.limits if limit.n_room > _ON_PLOT * top]
    flat = [("weights alone", weights), *((f"{limit_text(limit)}, less the program", limit.n_room) for limit in shown)]
    sequences = f", {model_report.sharing_of(report.n_parallel)}" if report.n_parallel else ""
    return Chart(
        title=f"{report.facts.name}: memory by context length and cache type{sequences}",
        x_label="context, tokens (logarithmic)",
        y_label="memory" + "".join(f" · beyond the top: {limit_text(limit)}" for limit in beyond),
        series=[*lines, *(Series(label=label, xs=xs, ys=[y] * len(xs)) for label, y in flat)],
        x_scale="log2",
        y_unit="bytes",
    )


def _write_plot(report: ModelReport, ask: ModelInspectGroup) -> None:
    from llamakv.cli.plots import write_plot

    write_plot(_chart(report), Path(str(ask.plot)), overwrite=ask.force)


def _show_plot(output: Output, report: ModelReport) -> None:
    from llamakv.cli import render
    from llamakv.cli.plots import terminal_plot

    output.write_styled("\n" + terminal_plot(_chart(report), min(render.width(), 120)))


# ---------------------------------------------------------------- JSON


def _report_json(report: ModelReport, live: LiveReport | None, *, plot: str | None) -> Json:
    facts = report.facts
    known = facts.unknown is None
    return {
        "model": str(report.path),
        "file_bytes": report.file_bytes,
        "architecture": facts.architecture,
        "name": facts.name,
        "quantisation": facts.quantisation,
        "unknown": facts.unknown,
        "kind": to_json(facts.kind),
        "parameters": facts.n_params,
        "weights_bytes": facts.weights_bytes,
        "n_ctx_train": facts.n_ctx_train,
        "n_vocab": facts.n_vocab,
        "n_embd": facts.n_embd,
        "n_layer": facts.n_layer,
        "n_window": facts.n_window,
        "key_length": facts.key_length,
        "value_length": facts.value_length,
        "latent_length": facts.latent_length,
        "layers": to_json(facts.layers) if known else None,
        "n_parallel": report.n_parallel,
        "n_ctx": list(report.n_ctx),
        "limits": [_limit_json(limit) for limit in report.limits],
        "may_repack": report.may_repack,
        "types": [_type_json(found, report) for found in report.types] if known else None,
        "live": None if live is None else _live_json(live),
        "plot": plot,
    }


def _limit_json(limit: Limit) -> Json:
    return {"name": limit.name, "bytes": limit.n_bytes, "own_bytes": limit.n_own, "held_bytes": limit.n_held,
            "is_live": limit.is_live}  # fmt: skip


def _type_json(found: TypeReport, report: ModelReport) -> Json:
    weights = report.facts.weights_bytes
    per_token = found.per_token
    return {
        "type_k": found.type_k,
        "type_v": found.type_v,
        "refused": found.refused,
        "kv_bytes_per_token": None if per_token is None else per_token.kv_bytes_per_token,
        "recurrent_bytes_per_sequence": None if per_token is None else per_token.recurrent_bytes_per_sequence,
        "contexts": [
            {"asked": n_ctx, **_context_json(memory, weights)}
            for n_ctx, memory in zip(report.n_ctx, found.contexts, strict=False)
        ],
        "fits": [_fit_json(fit) for fit in found.fits],
        "curve": [_context_json(memory, weights) for memory in found.curve],
    }


def _fit_json(fit: Fit) -> Json:
    return {
        "limit": fit.limit.name,
        "limit_bytes": fit.limit.n_bytes,
        "n_ctx": fit.n_ctx,
        "bytes": fit.n_bytes,
        "is_all_trained": fit.is_all,
    }


def _context_json(memory: ContextMemory, weights: int | None) -> dict[str, Json]:
    return {
        "n_ctx": memory.n_ctx,
        "n_seq_max": memory.n_seq_max,
        "flash_attn": memory.flash_attn,
        "kv_bytes": memory.kv_bytes,
        "recurrent_bytes": memory.recurrent_bytes,
        "compute_bytes": memory.compute_bytes,
        "output_bytes": memory.output_bytes,
        "bytes": memory.n_bytes,
        "with_weights_bytes": None if weights is None else weights + memory.n_bytes,
        "parts": [{**_fields(part), "bytes": part.n_bytes} for part in memory.parts],
        "compute": to_json(memory.compute),
        "output": to_json(memory.output),
        "kv_by_device": to_json(memory.kv_by_device),
        "recurrent_by_device": to_json(memory.recurrent_by_device),
    }


def _fields(part: CachePart) -> dict[str, Json]:
    return {
        "kind": part.kind.value,
        "layers": list(part.layers),
        "n_cells": part.n_cells,
        "type_k": part.type_k,
        "type_v": part.type_v,
        "k_bytes": part.k_bytes,
        "v_bytes": part.v_bytes,
    }


def _live_json(live: LiveReport) -> Json:
    return {
        "beside_bytes": live.n_beside,
        "type_k": live.memory.type_k,
        "type_v": live.memory.type_v,
        "gpu_layers": live.n_gpu_layers,
        "weights": to_json(live.weights),
        "context": _context_json(live.context, sum(buffer.n_bytes for buffer in live.weights)),
        "estimate": _context_json(live.estimate, live.weights_estimate),
        "compared": [
            {
                "part": part.name,
                "estimated_bytes": part.estimated,
                "allocated_bytes": part.allocated,
                "difference": to_json(part.difference),
                "agrees": part.agrees,
            }
            for part in live.compared
        ],
        "agrees": live.agrees,
        "rss_bytes": to_json(live.rss),
        "batch_tokens": live.n_batch,
        "mapped_file": to_json(live.mapped),
    }
