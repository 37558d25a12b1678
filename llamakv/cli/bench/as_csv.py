"""What ``bench`` found as lines of comma-separated values, one for each number."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from llamakv.ops.bench.compare import Comparison
from llamakv.ops.bench.measures import measures
from llamakv.ops.bench.results import BenchResult

OR_FEWER = "or fewer"
"""The note of a number of tokens that may be smaller."""

RESULT_COLUMNS = ("of", "name", "n_tokens", "metric", "unit", "runs", "least", "median", "most", "note",
                  "users", "prefix", "question", "answer", "shared_prefix")  # fmt: skip
COMPARISON_COLUMNS = ("of", "name", "n_tokens", "metric", "unit", "a", "b", "b_over_a", "verdict", "note")


def result_csv(result: BenchResult) -> str:
    """Return all numbers of a result; what was refused or failed is a line with the reason in ``note``. Lines of
    strategies say for how many users, and with how many tokens."""
    found = result.strategies
    work: tuple[object, ...] = (
        () if found is None
        else (found.n_users, found.n_prefix, found.n_question, found.n_answer, "yes" if found.shares_prefix else "no")
    )  # fmt: skip
    rows: list[Sequence[object]] = [
        (m.of, m.name, m.n_tokens, m.metric, m.unit, m.n_runs, m.least, m.median, m.most,
         OR_FEWER if m.is_at_most else "")
        for m in measures(result)
    ]  # fmt: skip
    rows += [("type", row.label, *_reason("refused", row.refused)) for row in result.types if row.refused is not None]
    rows += [("type", row.label, *_reason("failed", row.failed)) for row in result.types if row.failed is not None]
    rows += [("strategy", name, *_reason("refused", reason)) for name, reason in (found.failed if found else ())]
    return _text(RESULT_COLUMNS, [(*row, *(work if row[0] == "strategy" else [None] * 5)) for row in rows])


def _reason(metric: str, reason: str) -> tuple[object, ...]:
    return (None, metric, *[None] * 5, reason)


def comparison_csv(found: Comparison) -> str:
    """Return all pairs of a comparison."""
    return _text(
        COMPARISON_COLUMNS,
        [
            (
                pair.a.of, pair.a.name, pair.a.n_tokens, pair.a.metric, pair.a.unit, pair.a.median, pair.b.median,
                pair.b_over_a, str(pair.verdict),
                "; ".join(f"{side}: {OR_FEWER}" for side, m in (("a", pair.a), ("b", pair.b)) if m.is_at_most),
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
