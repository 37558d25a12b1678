"""What a model takes, as text for people: the facts, the tables, and the comparison with a live context."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from llamakv.cli.output import Output

if TYPE_CHECKING:
    from llamakv.engine.memory import LayerFacts, ModelFacts
    from llamakv.ops.inspect_live import LiveReport
    from llamakv.ops.inspect_model import Fit, Limit, ModelReport

_PARTS = {"full": "KV, full attention", "windowed": "KV, windowed"}
_REPACKED = "CPU_REPACK"  # ggml's buffer for weights that it lays out anew
_KINDS = {"full": "full attention", "windowed": "windowed", "recurrent": "recurrent"}


def write_report(output: Output, report: ModelReport, *, with_layers: bool, is_live: bool = False) -> None:
    """Print the facts, the table of contexts, and what fits; ``is_live`` where what was allocated is told as well."""
    from llamakv.cli import render

    facts = report.facts
    output.write_styled(render.report([*_facts(report), *_layer_facts(facts.layers, facts.n_window), *_each(report)]))
    if with_layers and facts.layers:
        headings = ("LAYER", "KEEPS", "HEADS", "OF KEYS AND VALUES")
        rows = [
            (str(layer.index), _kinds_text(layer), _number(layer.n_head), _number(layer.n_head_kv))
            for layer in facts.layers
        ]
        output.write_styled("\n" + render.table(headings, rows, right=(2, 3)))
    if report.types:
        _write_contexts(output, report)
        if report.may_repack and not is_live:
            weights = render.size(report.facts.weights_bytes or 0)
            output.write(f"weights: at least {weights}; some may be kept repacked as well: --live tells\n")
        _write_fits(output, report)


def _facts(report: ModelReport) -> Iterable[tuple[str, str]]:
    from llamakv.cli import render

    facts = report.facts
    yield "model", " · ".join(part for part in (facts.name, facts.architecture, facts.quantisation) if part)
    yield "file", f"{report.path} · {render.size(report.file_bytes)}"
    if facts.unknown is not None:
        yield "memory", f"unknown: {facts.unknown}"
    parts = [
        None if facts.weights_bytes is None else render.size(facts.weights_bytes),
        None if facts.n_params is None else f"{facts.n_params:,} parameters",
    ]
    yield "weights", _joined(parts)
    yield "trained", _joined([None if not facts.n_ctx_train else f"contexts of {facts.n_ctx_train:,} tokens"])
    yield "vocabulary", _joined([None if facts.n_vocab is None else f"{facts.n_vocab:,} tokens"])
    layers = [
        None if facts.n_layer is None else render.count(facts.n_layer, "layer"),
        None if facts.n_embd is None else f"embeddings of {facts.n_embd:,} numbers",
    ]
    yield "layers", _joined(layers)
    yield from _head_facts(facts)


def _joined(parts: Sequence[str | None]) -> str:
    return " · ".join(part for part in parts if part is not None) or "unknown"


def _head_facts(facts: ModelFacts) -> Iterable[tuple[str, str]]:
    groups: dict[tuple[int, int], list[int]] = {}
    for layer in facts.layers:
        if layer.n_head and layer.n_head_kv is not None and layer.n_head_kv > 0:
            groups.setdefault((layer.n_head, layer.n_head_kv), []).append(layer.index)
    parts = []
    for (n_head, n_head_kv), layers in groups.items():
        shared = f" share {n_head_kv} of keys and values" if n_head_kv != n_head else ""
        parts.append(f"{n_head}{shared}" + (f" in {ranges(layers)}" if len(groups) > 1 else ""))
    if parts:
        yield "heads", " · ".join(parts)
    if groups and facts.key_length is not None:
        value = "" if facts.value_length in (None, facts.key_length) else f", of values {facts.value_length}"
        yield "head size", f"{facts.key_length} numbers{value}"
    if facts.latent_length is not None:
        yield "latent", f"attention (MLA) of rank {facts.latent_length}"


def _layer_facts(layers: Sequence[LayerFacts], n_window: int | None) -> Iterable[tuple[str, str]]:
    """Which layers keep what."""
    for kind, label in _KINDS.items():
        found = [layer.index for layer in layers if any(str(own) == kind for own in layer.kinds)]
        if found:
            window = f" · a window of {n_window:,} tokens" if kind == "windowed" and n_window else ""
            yield label, f"{len(found)} of {len(layers)}: {ranges(found)}{window}"
    nothing = [layer.index for layer in layers if not layer.kinds]
    if nothing:
        yield "keep nothing", f"{len(nothing)} of {len(layers)}: {ranges(nothing)} · they use the cells of others"


def _each(report: ModelReport) -> Iterable[tuple[str, str]]:
    """What a token and a sequence take."""
    told = [(found.label, found.per_token) for found in report.types if found.per_token is not None]
    if any(each.kv_bytes_per_token for _, each in told):
        yield "a token", " · ".join(f"{label} {each.kv_bytes_per_token:,} bytes" for label, each in told)
    sequences = {each.recurrent_bytes_per_sequence for _, each in told} - {0}
    if sequences:
        yield "a sequence", " · ".join(f"{n:,} bytes of recurrent state" for n in sorted(sequences))


def ranges(indices: Sequence[int]) -> str:
    """Growing whole numbers, written compactly: ``0-4, 6-10``."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _kinds_text(layer: LayerFacts) -> str:
    return ", ".join(_KINDS[str(kind)] for kind in layer.kinds) or "nothing"


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def sharing_of(n_parallel: int) -> str:
    from llamakv.cli.render import count

    if n_parallel == 0:
        return "one sequence"
    return f"a prefix and {count(n_parallel, 'branch', 'branches')}"


def _write_contexts(output: Output, report: ModelReport) -> None:
    from llamakv.cli import render

    output.write_styled("\n" + render.heading(f"what a context takes, for {sharing_of(report.n_parallel)}"))
    has_state = any(memory.recurrent_bytes for found in report.types for memory in found.contexts)
    state = ("RECURRENT",) if has_state else ()
    headings = ("CONTEXT", "TYPE", "KV", *state, "COMPUTE", "IN ALL", "WITH WEIGHTS")
    weights = report.facts.weights_bytes or 0
    rows: list[tuple[str, ...]] = []
    for index, n_ctx in enumerate(report.n_ctx):
        for found in report.types:
            if found.refused is None:
                memory = found.contexts[index]
                sizes = [memory.kv_bytes, *([memory.recurrent_bytes] if has_state else [])]
                sizes += [memory.compute_bytes + memory.output_bytes, memory.n_bytes, weights + memory.n_bytes]
                rows.append((f"{n_ctx:,}", found.label, *map(render.size, sizes)))
    refused = [found for found in report.types if found.refused is not None]
    rows += [("", found.label, "refused", *[""] * (len(headings) - 3)) for found in refused]
    output.write_styled(render.table(headings, rows, right=(0, *range(2, len(headings)))))
    for found in refused:
        output.write(f"{found.label} is refused: {found.refused}\n")
    trained = report.facts.n_ctx_train
    if trained and max(report.n_ctx) > trained * max(1, report.n_parallel):
        output.write(f"it was trained with contexts of {trained:,} tokens; beyond that it may answer badly\n")


def _write_fits(output: Output, report: ModelReport) -> None:
    from llamakv.cli import render

    if all(found.refused is not None for found in report.types):
        output.write("what fits is not told: the engine refuses all these types, see above\n")
        return
    output.write_styled("\n" + render.heading("what fits: the program, weights and the largest context"))
    rows = [
        (limit_text(fit.limit), found.label, *_fit_cells(fit, report))
        for index in range(len(report.limits))
        for found in report.types
        if found.refused is None
        for fit in (found.fits[index],)
    ]
    output.write_styled(render.table(("MEMORY", "TYPE", "CONTEXT", "TAKES", ""), rows, right=(2, 3)))
    own, is_live = render.size(report.limits[0].n_own), report.limits[0].is_live
    if is_live:
        output.write(
            f"the program as measured with --live: {own} beside the estimates, with\n"
            "vocabulary, graph and copies of weights\n"
        )
    else:
        output.write(
            f"at least: the program takes {own} here, measured without a model;\n"
            "the vocabulary and the like come on top once it is loaded: --live measures them\n"
        )


def limit_text(limit: Limit) -> str:
    """An amount of memory, and whose it is."""
    from llamakv.cli import render

    size = render.size(limit.n_bytes)
    return f"{size} available now" if limit.name == "available" else f"{size} (--memory)"


def _fit_cells(fit: Fit, report: ModelReport) -> tuple[str, str, str]:
    from llamakv.cli import render

    takes = render.size(fit.n_bytes)
    if fit.n_ctx is None:
        return "none", takes, "already the smallest"
    n = report.n_parallel
    notes = ["as trained"] if fit.is_all else []
    if n > 1:
        notes = [f"{fit.n_ctx // n:,} each", *notes]
    return f"{fit.n_ctx:,}", takes, ", ".join(notes)


def write_live(output: Output, live: LiveReport) -> None:
    """Print what a context really took, beside the estimate."""
    from llamakv.cli import render

    context, memory = live.context, live.memory
    types = memory.type_k if memory.type_k == memory.type_v else f"{memory.type_k}/{memory.type_v}"
    about = f"{context.n_ctx:,} cells, {types}, flash attention {'on' if context.flash_attn else 'off'}"
    output.write_styled("\n" + render.heading(f"a context that was opened: {about}"))
    rows = [
        (_PARTS.get(part.name, part.name), render.size(part.estimated), render.size(part.allocated),
         _difference(part.difference), _devices_text(live, part.name))
        for part in live.compared
    ]  # fmt: skip
    output.write_styled(render.table(("PART", "ESTIMATED", "ALLOCATED", "DIFFERENCE", "DEVICE"), rows, right=(1, 2, 3)))
    differing = [part for part in live.compared[:-1] if not part.agrees]
    if live.agrees:
        output.write("estimate and allocation agree (within 2 %)\n")
    else:
        names = ", ".join(_PARTS.get(part.name, part.name) for part in differing) or "all together"
        output.write(f"estimate and allocation do not agree (within 2 %): {names}\n")
    for buffer in live.weights:
        if buffer.device == _REPACKED:
            output.write(
                f"{_REPACKED}: {render.size(buffer.n_bytes)} of weights once more, in a layout for this processor; "
                "only loading them tells\n"
            )
    _write_resident(output, live)


def _write_resident(output: Output, live: LiveReport) -> None:
    from llamakv.cli import render

    rss = live.rss
    steps = [
        ("before", rss.before, None),
        ("with the weights", rss.weights, rss.before),
        ("with the context", rss.context, rss.weights),
        (f"after {render.count(live.n_batch, 'token')}", rss.batch, rss.context),
    ]
    output.write_styled("\n" + render.heading("what the process has in memory"))
    rows = [(name, render.size(n), "" if was is None else _more(n - was)) for name, n, was in steps]
    output.write_styled(render.table(("WHEN", "RESIDENT", "MORE"), rows, right=(1, 2)))
    mapped = live.mapped
    text = "unknown"
    if mapped is not None:
        text = f"{render.size(mapped.mapped_bytes)} mapped, {render.size(mapped.resident_bytes)} of it resident"
    output.write(f"model file: {text}\n")


def _devices_text(live: LiveReport, part: str) -> str:
    context = live.context
    buffers = {
        "weights": live.weights,
        "compute": context.compute,
        "output": context.output,
        "recurrent": context.recurrent_by_device,
        "full": context.kv_by_device,
        "windowed": context.kv_by_device,
    }.get(part, ())
    return ", ".join(buffer.device for buffer in buffers)


def _more(n_bytes: int) -> str:
    from llamakv.cli import render

    return f"{'-' if n_bytes < 0 else '+'}{render.size(abs(n_bytes))}"


def _difference(part: float) -> str:
    if part == 0:
        return "none"
    return "under 0.1%" if abs(part) < 0.0005 else f"{part:+.1%}"
