"""What a cache type does to the output: next-token distributions against those with f16 keys and values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from llamakv.engine.contract import LiveSequence
from llamakv.errors import EngineError
from llamakv.ops.bench.results import OutputChange
from llamakv.records import Sampling

Logits: TypeAlias = np.ndarray
"""Float32, one for each token of the vocabulary."""


def logits_along(sequence: LiveSequence, tokens: Sequence[int], n_positions: int) -> Iterator[Logits]:
    """The logits after each of ``n_positions`` tokens: the sequence's pending one, then the given ones. It is the text
    that goes on, whatever the model would have chosen, and each token is decoded alone, as in writing. What is yielded
    is valid until the next one is asked for."""
    for index in range(n_positions):
        if index:
            sequence.extend(tokens[index - 1 : index], replace_pending=True)
        for _ in sequence.generate(Sampling(), n_max=1):
            pass
        yield np.frombuffer(sequence.logits(), np.float32)


def write_logits(path: Path, rows: Iterable[Logits]) -> None:
    """Keep logits in a file of their own, as they are: all of them may be more than memory should hold.

    Raises:
        EngineError: some are not numbers: nothing can be compared with them.
    """
    with path.open("wb") as file:
        for row in rows:
            if not _are_numbers(row):
                raise EngineError("the model's output is not numbers")
            file.write(row.data)


def read_logits(path: Path, n_positions: int) -> Iterator[Logits]:
    """What ``write_logits`` wrote, row by row."""
    n_bytes = path.stat().st_size // n_positions
    with path.open("rb") as file:
        for _ in range(n_positions):
            yield np.frombuffer(file.read(n_bytes), np.float32)


def compare(reference: Iterable[Logits], rows: Iterable[Logits]) -> OutputChange:
    """Compare distributions with those of the reference at the same positions, one at least. Logits that are not
    numbers agree with nothing.

    Raises:
        ValueError: not as many on both sides.
    """
    divergences: list[float] = []
    n_same = 0
    for expected, found in zip(reference, rows, strict=True):
        divergences.append(divergence(expected, found))
        n_same += int(np.argmax(expected) == np.argmax(found) and _are_numbers(found))
    return OutputChange(
        n_positions=len(divergences),
        mean_kl=float(np.mean(divergences)),
        most_kl=max(divergences),
        top_agreement=n_same / len(divergences),
    )


def divergence(expected: Logits, found: Logits) -> float:
    """The Kullback-Leibler divergence D(expected ‖ found) of the two distributions, in nats: 0 for equal logits,
    infinite where some are not numbers."""
    if not (_are_numbers(expected) and _are_numbers(found)):
        return math.inf
    log_p, log_q = _log_softmax(expected), _log_softmax(found)
    possible = np.isfinite(log_p)
    p = np.exp(log_p[possible])
    return max(0.0, float(np.sum(p * (log_p[possible] - log_q[possible]))))


def _are_numbers(logits: Logits) -> bool:
    """Whether they say anything: tokens that cannot come have minus infinity, the likeliest one a number."""
    return bool(np.isfinite(logits.max()))  # NaN if any of them is


def _log_softmax(logits: Logits) -> np.ndarray:
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    return values
