"""Two results of ``bench`` side by side, as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llamakv.cli import render
from llamakv.cli.bench.tables import Table
from llamakv.cli.output import Json, to_json
from llamakv.cli.plots.scales import value_text
from llamakv.ops.bench.compare import Comparison, Pair, Verdict
from llamakv.ops.bench.measures import Measure, Unit

_METRICS = {
    "break_even_warm": "resuming pays from, warm",
    "break_even_cold": "resuming pays from, cold",
    "state_bytes_per_token": "keys and values of a token",
    "context_bytes": "contexts",
    "peak_rss_bytes": "whole process at its largest",
    "prompt_tokens_per_s": "prompt speed",
    "decode_tokens_per_s": "generation speed",
    "fork_s": "fork",
    "mean_kl": "output: mean KL to f16",
    "most_kl": "output: largest KL",
    "top_agreement": "output: same top token",
    "prefill_s": "read again",
    "save_s": "save",
    "resume_warm_s": "resume, warm",
    "resume_cold_s": "resume, cold",
    "raw_bytes": "state",
    "file_bytes": "session file",
    "peak_bytes": "memory, all at their largest",
    "weights_bytes": "weights",
    "cell_bytes": "cells",
    "first_token_s": "first token, median user",
    "elapsed_s": "all answers",
    "preparation_s": "before, once: fill the store",
    "tokens_per_s": "answers, in all",
    "hit_rate": "hit rate",
    "bytes_read": "read from session files",
    "bytes_written": "written to session files",
    "n_users_that_fit": "users that fit",
    "n_processes": "processes",
}
_WORDS: dict[Unit, tuple[str, str]] = {
    "s": ("faster", "slower"),
    "tokens/s": ("faster", "slower"),
    "bytes": ("smaller", "larger"),
}
"""What better and worse are called; for other units just that."""


def comparison_tables(found: Comparison) -> list[Table]:
    """What differs in how they were made, then a table for each cache type and strategy that both have."""
    tables = [_differences_table(found)]
    groups: dict[tuple[str, str], list[Pair]] = {}
    for pair in found.pairs:
        groups.setdefault((pair.a.of, pair.a.name), []).append(pair)
    tables += [_group_table(of, name, pairs) for (of, name), pairs in groups.items()]
    return tables


def _differences_table(found: Comparison) -> Table:
    rows = tuple((each.field, _shown(each.a), _shown(each.b)) for each in found.differences)
    notes = [f"take care: {doubt}" for doubt in found.doubts]
    notes += [f"only {letter} has {row}" for letter, only in (("A", found.only_a), ("B", found.only_b)) for row in only]
    sentence = (
        "The numbers below differ for these reasons, too." if rows else "Machine, model and settings are the same."
    )
    return Table(
        title="How A and B were measured",
        sentence=sentence,
        headings=("WHAT DIFFERS", "A", "B"),
        rows=rows,
        n_names=3,
        notes=tuple(notes),
    )


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if value is None:
        return "not known"
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value))
    return str(value)


def _group_table(of: str, name: str, pairs: Sequence[Pair]) -> Table:
    longest = max((pair.a.n_tokens for pair in pairs if pair.a.n_tokens is not None), default=None)
    shown = [pair for pair in pairs if pair.a.n_tokens in (None, longest)]
    return Table(
        title=f"{'Cache type' if of == 'type' else 'Strategy'} {name}",
        sentence="Medians. B / A: 2.00 means that B has twice as much, or takes twice as long. Unclear: the ranges of "
        "the repeats overlap, or there are too few of them. The same: also memory and files that differ by less than "
        "1 %.",
        headings=("METRIC", "A", "B", "B / A", "B IS"),
        rows=tuple(_row(pair) for pair in shown),
    )


def _row(pair: Pair) -> tuple[str, ...]:
    a, b = pair.a, pair.b
    length = "" if a.n_tokens is None else f", {a.n_tokens:,} tokens"
    ratio = pair.b_over_a
    return (
        _METRICS.get(a.metric, a.metric) + length,
        _value(a),
        _value(b),
        "" if ratio is None else f"{ratio:.2f}",
        _verdict(pair),
    )


def _value(measure: Measure) -> str:
    text = _number(measure.median, measure.unit)
    return f"{text} or fewer" if measure.is_at_most else text


def _number(value: float, unit: Unit) -> str:
    if not math.isfinite(value):
        return "never" if unit == "tokens" and value > 0 else str(value)
    if unit == "bytes":
        return render.size(round(value))
    if unit == "s":
        return value_text(value, "s")
    if unit == "ratio":
        return f"{100 * value:.1f} %"
    text = f"{value:.4f}" if unit == "nats" else f"{value:,.0f}" if value >= 99.95 or value == round(value) else (
        f"{value:.1f}"
    )  # fmt: skip
    return text if unit in ("users", "processes") else f"{text} {unit}"


def _verdict(pair: Pair) -> str:
    if pair.verdict is Verdict.BETTER:
        return _WORDS.get(pair.a.unit, ("better", "worse"))[0]
    if pair.verdict is Verdict.WORSE:
        return _WORDS.get(pair.a.unit, ("better", "worse"))[1]
    if pair.verdict is Verdict.SAME:
        return "the same"
    return "" if pair.a.better == "neither" else "unclear"


def comparison_json(found: Comparison) -> dict[str, Json]:
    """All of a comparison as data."""
    pairs: list[Json] = []
    for pair in found.pairs:
        a, b = pair.a, pair.b
        sides = {
            side: {
                "runs": each.n_runs, "least": each.least, "median": each.median, "most": each.most,
                **({"at_most": each.is_at_most} if each.unit == "tokens" else {}),
            }
            for side, each in (("a", a), ("b", b))
        }  # fmt: skip
        pairs.append(
            {
                "of": a.of, "name": a.name, "n_tokens": a.n_tokens, "metric": a.metric, "unit": a.unit,
                "better": a.better, "b_over_a": pair.b_over_a, "verdict": str(pair.verdict), **_plain(sides),
            }
        )  # fmt: skip
    return {
        "differences": to_json(found.differences),
        "doubts": list(found.doubts),
        "only_a": list(found.only_a),
        "only_b": list(found.only_b),
        "pairs": pairs,
    }


def _plain(sides: dict[str, dict[str, float]]) -> dict[str, Json]:
    return {side: to_json(values) for side, values in sides.items()}
