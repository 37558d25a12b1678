"""What ``bench`` found as lines of comma-separated values, one for each number."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from llamakv.ops.bench.compare import Comparison
from llamakv.ops.bench.measures import measures
from llamakv.ops.bench.results import BenchResult

RESULT_COLUMNS = ("of", "name", "n_tokens", "metric", "unit", "runs", "least", "median", "most", "note")
COMPARISON_COLUMNS = ("of", "name", "n_tokens", "metric", "unit", "a", "b", "b_over_a", "verdict")


def result_csv(result: BenchResult) -> str:
    """Return all numbers of a result; what was refused or failed is a line with the reason in ``note``."""
    rows: list[Sequence[object]] = [
        (m.of, m.name, m.n_tokens, m.metric, m.unit, m.n_runs, m.least, m.median, m.most, "") for m in measures(result)
    ]
    rows += [("type", row.label, *_refused(row.refused)) for row in result.types if row.refused is not None]
    failed = result.strategies.failed if result.strategies is not None else ()
    rows += [("strategy", name, *_refused(reason)) for name, reason in failed]
    return _text(RESULT_COLUMNS, rows)


def _refused(reason: str) -> tuple[object, ...]:
    return (None, "refused", *[None] * 5, reason)


def comparison_csv(found: Comparison) -> str:
    """Return all pairs of a comparison."""
    return _text(
        COMPARISON_COLUMNS,
        [
            (
                pair.a.of, pair.a.name, pair.a.n_tokens, pair.a.metric, pair.a.unit, pair.a.median, pair.b.median,
                pair.b_over_a, str(pair.verdict),
            )
            for pair in found.pairs
        ],
    )  # fmt: skip


def _text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return target.getvalue()
