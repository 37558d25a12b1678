"""What ``bench`` found, as panels of a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llamakv.cli import render
from llamakv.cli.bench.rows import break_even_texts
from llamakv.cli.plots import Bars, Chart, Panel, Series
from llamakv.ops.bench.results import BenchResult, LengthTimes, Spread, StrategiesResult, TypeResult


def result_title(result: BenchResult) -> str:
    """What a plot of a result is of."""
    return f"What keeping costs and gives: {result.model.name}"


def result_note(result: BenchResult) -> str:
    """Where it was measured, from how many tokens on it pays, and what is not in the picture."""
    machine = result.machine
    times = "once" if result.n_repeats == 1 else f"{result.n_repeats} times (medians)"
    threads, cores = render.count(result.n_threads, "thread"), render.count(machine.n_cores, "core")
    missing = " Interrupted: some of it is missing." if result.interrupted else ""
    return (
        f"Measured {times} on {machine.processor}, {threads} on {cores}, with llamakv {machine.llamakv} and "
        f"llama-cpp-python {machine.llama_cpp}.{missing}{_break_evens(result)}{_left_out(result)}"
    )


def _break_evens(result: BenchResult) -> str:
    texts = [f"{row.label} {break_even_texts(row)[0]}" for row in result.types if row.is_measured]
    return f" Resuming (warm) is faster from this many tokens on: {'; '.join(texts)}." if texts else ""


def _left_out(result: BenchResult) -> str:
    refused = [f"{row.label} is not supported" for row in result.types if row.refused is not None]
    failed = [f"{row.label} failed" for row in result.types if row.failed is not None and not row.is_measured]
    cut_short = [row.label for row in result.types if row.failed is not None and row.is_measured]
    strategies = [f"{name} could not be run" for name, _ in (result.strategies.failed if result.strategies else ())]
    texts = [*refused, *failed, *strategies]
    missing = f" Failed before the end: {', '.join(cut_short)}." if cut_short else ""
    return missing + (f" Left out: {', '.join(texts)}." if texts else "")


def result_panels(result: BenchResult) -> list[Panel]:
    """All panels there are numbers for."""
    types = [row for row in result.types if row.is_measured]
    panels: list[Panel] = []
    if types:
        panels += [_times_chart(types), *_type_bars(types)]
    if result.strategies is not None and result.strategies.rows:
        panels += _strategy_bars(result.strategies)
    return [panel for panel in panels if isinstance(panel, Chart) or _has_values(panel)]


def _has_values(panel: Bars) -> bool:
    return any(value is not None for _, values in panel.series for value in values)


def _times_chart(types: Sequence[TypeResult]) -> Chart:
    series = [
        Series(
            label=f"{row.label}: {what}",
            xs=[length.n_tokens for length in row.lengths],
            ys=[of(length).median for length in row.lengths],
        )
        for what, of in (("read again", _prefill), ("resume, warm", _resume))
        for row in types
    ]
    return Chart(
        title="Time to the first token of an answer (both axes logarithmic)",
        x_label="length of the text (tokens)",
        y_label="time to the first token",
        series=series,
        x_scale="log2",
        y_scale="log2",
        y_unit="s",
    )


def _prefill(length: LengthTimes) -> Spread:
    return length.prefill_s


def _resume(length: LengthTimes) -> Spread:
    return length.resume_warm_s


def _type_bars(types: Sequence[TypeResult]) -> list[Panel]:
    labels = [row.label for row in types]

    def median(of: Callable[[TypeResult], Spread | None]) -> list[float | None]:
        return [None if spread is None else spread.median for spread in map(of, types)]

    return [
        Bars(
            title="Memory that a token takes, by cache type",
            value_label="keys and values of one token",
            labels=labels,
            series=[("", [row.state_bytes_per_token for row in types])],
            unit="bytes",
        ),
        Bars(
            title="Speed, by cache type",
            value_label="tokens per second",
            labels=labels,
            series=[
                ("reading a prompt", median(lambda row: row.prompt_tokens_per_s)),
                ("writing an answer", median(lambda row: row.decode_tokens_per_s)),
            ],
        ),
        *_output_bars(types),
    ]


def _output_bars(types: Sequence[TypeResult]) -> list[Panel]:
    compared = [(row.label, row.output.mean_kl) for row in types if row.output is not None]
    if all(label == "f16" for label, _ in compared):
        return []  # it is what others are compared with
    return [
        Bars(
            title="What a cache type does to the output (0: nothing)",
            value_label="mean KL divergence to f16 (nats)",
            labels=[label for label, _ in compared],
            series=[("", [kl for _, kl in compared])],
        )
    ]


def _strategy_bars(found: StrategiesResult) -> list[Panel]:
    labels = [row.name for row in found.rows]
    users = f"{found.n_users} users, prefix of {found.n_prefix:,} tokens"
    return [
        Bars(
            title=f"Memory of all processes: {users}",
            value_label="memory at its largest",
            labels=labels,
            series=[("", [row.peak_bytes for row in found.rows])],
            unit="bytes",
        ),
        Bars(
            title="Wait for the first token, by strategy",
            value_label="time to the first token",
            labels=labels,
            series=[
                ("median user", [row.first_token_s.median for row in found.rows]),
                ("last user", [row.first_token_s.most for row in found.rows]),
            ],
            unit="s",
        ),
    ]
