"""What ``bench`` found, as rows of tables that can be read without knowing how it was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from llamakv.cli import render
from llamakv.cli.bench.tables import Table
from llamakv.cli.plots.scales import value_text
from llamakv.ops.bench.break_even import Noise, noise_cold, noise_warm
from llamakv.ops.bench.results import BenchResult, BreakEven, LengthTimes, Spread, StrategiesResult, TypeResult

NOTHING = "–"
"""A cell of something that was not measured."""

_STRATEGIES = {
    "none": "every prompt is read whole, in one context, all users together",
    "in-process": "one context: the prefix is read once, and all users share its cells",
    "cross-process": "a process for each user resumes the prefix from the store they share",
    "hybrid": "one process resumes the prefix from the store, and all users share its cells",
}
_STRATEGIES_APART = {
    "in-process": "one context: as none, since no two users have a prefix in common",
    "cross-process": "a process for each user resumes the user's own prefix from the store",
    "hybrid": "one process resumes each user's own prefix from the store",
}


def result_tables(result: BenchResult) -> list[Table]:
    """All tables of a result, the most important first."""
    tables = []
    if result.types:
        tables.append(_break_even_table(result.types))
    measured = [row for row in result.types if row.is_measured]
    if measured:
        tables += [_types_table(measured), _lengths_table(measured)]
    if result.strategies is not None and (result.strategies.rows or result.strategies.failed):
        tables.append(_strategies_table(result.strategies))
    return tables


# ---------------------------------------------------------------- how it was measured


def result_facts(result: BenchResult) -> list[tuple[str, str]]:
    """What was measured, where and how."""
    model, machine = result.model, result.machine
    window = f"{model.n_ctx_train:,} tokens of context" if model.n_ctx_train else ""
    parts = (model.name, model.architecture, model.quantisation, model.kind, render.size(model.n_bytes), window)
    n_cores = render.count(machine.n_cores, "core")
    times = "each once" if result.n_repeats == 1 else f"each {result.n_repeats} times, medians shown,"
    memory = f"{render.size(machine.memory_bytes)} of memory"
    facts = [
        ("model", _joined(*parts)),
        ("machine", _joined(machine.processor, n_cores, memory, machine.system)),
        ("versions", f"llamakv {machine.llamakv} · llama-cpp-python {machine.llama_cpp} · Python {machine.python}"),
        ("measured", f"{times} after a warm-up that does not count · {render.count(result.n_threads, 'thread')} · took "
                     f"{render.seconds(result.elapsed_s)}"),
    ]  # fmt: skip
    if result.work_dir is not None:
        facts.append(("files in", result.work_dir))
    if any(row.is_measured for row in result.types):
        facts.append(("page cache", _page_cache([length for row in result.types for length in row.lengths])))
    if result.interrupted:
        facts.append(("interrupted", "some of it is missing"))
    return facts


def _joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)


def _page_cache(lengths: Sequence[LengthTimes]) -> str:
    warm = "warm: the session file was read just before"
    cold = [length for length in lengths if length.resume_cold_s is not None]
    if not cold:
        return f"{warm} · cold: not measured, the file could not be put out of it"
    known = [length.cold_resident_bytes for length in cold if length.cold_resident_bytes is not None]
    left = f"at most {render.size(max(known))} of it stayed" if known else "the system does not tell what of it stayed"
    return f"{warm} · cold: it was put out before each resume ({left})"


# ---------------------------------------------------------------- cache types


def _break_even_table(types: Sequence[TypeResult]) -> Table:
    rows = tuple((row.label, *break_even_texts(row)) for row in types)
    has_range = any("(" in cell for row in rows for cell in row[1:])
    ranges = (
        " In brackets: between which the fastest and the slowest of the repeats would have it." if has_range else ""
    )
    return Table(
        title="Does it pay? Resuming is faster than reading again from this many tokens on",
        sentence="Warm: the session file is in the page cache, as when it was saved or used a short while ago. Cold: "
        f"it has to come from the disk.{ranges}",
        headings=("CACHE TYPE", "WARM", "COLD"),
        rows=rows,
        notes=tuple(note for row in types for note in _missing(row)),
    )


def break_even_texts(row: TypeResult) -> tuple[str, str]:
    """From how many tokens on resuming pays, warm and cold, and how certain that is."""
    if row.refused is not None:
        return ("not supported",) * 2
    if row.failed is not None and not row.is_measured:
        return ("failed",) * 2
    longest = row.lengths[-1].n_tokens if row.lengths else 0
    is_once = all(length.prefill_s.n_runs == 1 for length in row.lengths)
    return (
        _break_even(row.break_even_warm, noise_warm(row.lengths), longest, is_once=is_once),
        _break_even(row.break_even_cold, noise_cold(row.lengths), longest, is_once=is_once),
    )


def _break_even(found: BreakEven | None, noise: Noise | None, longest: int, *, is_once: bool) -> str:
    if found is None:
        return "not measured"
    text = f"never, up to {longest:,}" if found.n_tokens is None else _tokens(found)
    if noise is None or noise.least == noise.most:
        return f"{text}, measured once" if is_once else text
    if found.n_tokens is None:
        return f"{text} (perhaps from {_tokens(noise.least)})"
    if found.at_most:
        return f"{text} (perhaps {_tokens(noise.most)})"
    return f"about {text} ({_tokens(noise.least)} – {_tokens(noise.most)})"


def _tokens(found: BreakEven) -> str:
    if found.n_tokens is None:
        return "never"
    return f"{found.n_tokens:,} or fewer" if found.at_most else f"{found.n_tokens:,}"


def _missing(row: TypeResult) -> Iterator[str]:
    if row.refused is not None:
        yield f"{row.label} is not supported: {row.refused}"
    if row.failed is not None:
        rest = "; what was measured before is shown" if row.is_measured else ""
        yield f"{row.label} failed: {row.failed}{rest}"


def _types_table(types: Sequence[TypeResult]) -> Table:
    longest = max((row.lengths[-1].n_tokens for row in types if row.lengths), default=0)
    text = f"{longest:,} tokens"
    sizes = {row.n_ctx for row in types}
    n_cells = next(iter(sizes)) if len(sizes) == 1 else None
    branches = {row.n_branches for row in types} - {None}
    n_branches = f"{next(iter(branches))} branches" if len(branches) == 1 else "branches"
    metrics: tuple[tuple[str, Callable[[TypeResult], str]], ...] = (
        ("keys and values of a token", lambda row: _size(row.state_bytes_per_token)),
        ("context" if n_cells is None else f"context of {n_cells:,} cells", lambda row: _size(row.context_bytes)),
        ("whole process at its largest", lambda row: _size(row.peak_rss_bytes)),
        ("prompt speed, tokens/s", lambda row: _speed(row.prompt_tokens_per_s)),
        ("generation speed, tokens/s", lambda row: _speed(row.decode_tokens_per_s)),
        (f"fork to {n_branches}", lambda row: _time(row.fork_s)),
        (f"save {text}", lambda row: _of_last(row, longest, lambda length: _time(length.save_s))),
        ("session file", lambda row: _of_last(row, longest, lambda length: _size(length.file_bytes))),
        (f"read {text} again", lambda row: _of_last(row, longest, lambda length: _time(length.prefill_s))),
        ("resume instead, warm", lambda row: _of_last(row, longest, lambda length: _time(length.resume_warm_s))),
        ("resume instead, cold", lambda row: _of_last(row, longest, lambda length: _time(length.resume_cold_s))),
        ("output: mean KL to f16, nats", lambda row: NOTHING if row.output is None else f"{row.output.mean_kl:.4f}"),
        ("output: largest KL, nats", lambda row: NOTHING if row.output is None else f"{row.output.most_kl:.3f}"),
        (
            "output: same top token as f16",
            lambda row: NOTHING if row.output is None else _part(row.output.top_agreement),
        ),
    )
    rows = [(name, *map(of, types)) for name, of in metrics]
    n_positions = max((row.output.n_positions for row in types if row.output is not None), default=0)
    change = (
        f" The output was compared at {render.count(n_positions, 'position')} of the same text: KL 0 and 100 % mean "
        "that nothing changed."
        if n_positions
        else ""
    )
    return Table(
        title="What a cache type takes and gives",
        sentence="Keys and values are stored in a cache type, or in two (keys/values): smaller ones take less memory "
        f"and disk, and may cost speed and change what the model says.{change}",
        headings=("CACHE TYPE", *(row.label for row in types)),
        rows=tuple(row for row in rows if any(cell != NOTHING for cell in row[1:])),
        may_split=True,
    )


def _of_last(row: TypeResult, longest: int, tell: Callable[[LengthTimes], str]) -> str:
    """Of the longest text, where this type came to it."""
    return next((tell(length) for length in row.lengths if length.n_tokens == longest), NOTHING)


def _lengths_table(types: Sequence[TypeResult]) -> Table:
    lengths = [(row, length) for row in types for length in row.lengths]
    columns = (
        _spreads("READ AGAIN", [length.prefill_s for _, length in lengths]),
        _spreads("RESUME WARM", [length.resume_warm_s for _, length in lengths]),
        _spreads("RESUME COLD", [length.resume_cold_s for _, length in lengths]),
    )
    shown = [column for column in columns if any(cell != NOTHING for cell in column[1:])]
    faster = [_times(length) for _, length in lengths]
    cells = zip(lengths, zip(*(column[1:] for column in shown), strict=True), faster, strict=True)
    rows = tuple((row.label, f"{length.n_tokens:,}", *spreads, gain) for (row, length), spreads, gain in cells)
    is_repeated = any(length.prefill_s.n_runs > 1 for _, length in lengths)
    cell = "Each cell is the median (least–most). " if is_repeated else ""
    return Table(
        title="Time to the first token of an answer, by length",
        sentence=f"{cell}Reading again takes the longer the more there is to read; resuming reads a file instead. "
        "FASTER: how many times faster resuming is, warm.",
        headings=("TYPE", "TOKENS", *(column[0] for column in shown), "FASTER"),
        rows=rows,
    )


def _times(length: LengthTimes) -> str:
    if length.resume_warm_s.median <= 0:
        return NOTHING
    ratio = length.prefill_s.median / length.resume_warm_s.median
    return f"{ratio:,.0f}×" if ratio >= 9.95 else f"{ratio:.1f}×"


def _spreads(name: str, spreads: Sequence[Spread | None]) -> list[str]:
    """A column of times in one unit, under a heading that names it."""
    known = [spread.median for spread in spreads if spread is not None]
    is_short = not known or max(known) < 1
    factor = 1000 if is_short else 1

    def digits(value: float) -> str:
        scaled = value * factor
        return f"{scaled:,.{0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2}f}"

    cells = [
        NOTHING if spread is None
        else digits(spread.median) if spread.n_runs == 1
        else f"{digits(spread.median)} ({digits(spread.least)}–{digits(spread.most)})"
        for spread in spreads
    ]  # fmt: skip
    return [f"{name}, {'ms' if is_short else 's'}", *cells]


# ---------------------------------------------------------------- strategies


def _strategies_table(found: StrategiesResult) -> Table:
    rows = found.rows
    cells: tuple[tuple[str, list[str]], ...] = (
        ("processes", [f"{row.n_processes:,}" for row in rows]),
        ("memory, all at their largest", [render.size(row.peak_bytes) for row in rows]),
        ("weights", [render.size(row.weights_bytes) for row in rows]),
        ("contexts, all together", [render.size(row.context_bytes) for row in rows]),
        ("cells in use at most", [f"{row.n_cells_peak:,}" for row in rows]),
        ("first token, median user", [value_text(row.first_token_s.median, "s") for row in rows]),
        ("first token, last user", [value_text(row.first_token_s.most, "s") for row in rows]),
        ("answers, tokens/s in all", [_digits(row.tokens_per_s) for row in rows]),
        ("hit rate: prompt tokens not read", [_part(row.hit_rate) for row in rows]),
        ("answers unlike the first column's", [f"{row.n_other_answers:,}" for row in rows]),
        ("read from session files", [render.size(row.bytes_read) for row in rows]),
        ("written to session files", [render.size(row.bytes_written) for row in rows]),
        ("before, once: fill the store", [_or_nothing(row.preparation_s) for row in rows]),
        (f"users in {render.size(found.memory_limit_bytes)}", [
            f"{row.n_users_that_fit:,}{'*' if row.limited_by != 'memory' else ''}" for row in rows
        ]),
    )  # fmt: skip
    types = found.type_k if found.type_k == found.type_v else f"{found.type_k}/{found.type_v}"
    shared = "the same for all" if found.shares_prefix else "each with one of their own"
    limited = " *: no more sequences in a context; more users wait for others." if any(
        row.limited_by != "memory" for row in rows
    ) else ""  # fmt: skip
    once = "" if all(row.counts_shared_once for row in rows) else (
        " Pages that processes share are counted in each, since this system tells no more."
    )  # fmt: skip
    return Table(
        title=f"Strategies side by side: {render.count(found.n_users, 'user')}, each answered with "
        f"{render.count(found.n_answer, 'token')}",
        sentence=f"All ask at once: {render.count(found.n_question, 'token')} behind a prefix of {found.n_prefix:,} "
        f"({shared}), cache type {types}, flash attention {'on' if found.flash_attn else 'off'}.{limited}{once}",
        headings=("STRATEGY", *(row.name for row in rows)),
        rows=tuple((name, *values) for name, values in cells),
        may_split=True,
        notes=(
            *(f"{row.name}: {_strategy_words(row.name, found)}" for row in rows),
            *(f"{name} could not be run: {reason}" for name, reason in found.failed),
        ),
    )


def _strategy_words(name: str, found: StrategiesResult) -> str:
    words = _STRATEGIES if found.shares_prefix else {**_STRATEGIES, **_STRATEGIES_APART}
    return words.get(name, "")


# ---------------------------------------------------------------- cells


def _size(n_bytes: float | None) -> str:
    return NOTHING if n_bytes is None else render.size(round(n_bytes))


def _time(spread: Spread | None) -> str:
    return NOTHING if spread is None else value_text(spread.median, "s")


def _speed(spread: Spread | None) -> str:
    return NOTHING if spread is None else _digits(spread.median)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"


def _part(value: float) -> str:
    return f"{100 * value:.1f} %"


def _or_nothing(elapsed_s: float) -> str:
    return value_text(elapsed_s, "s") if elapsed_s else NOTHING
