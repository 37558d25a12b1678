"""What a cache type does to the output: the figures, and the logits they are made of."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.errors import EngineError
from llamakv.ops.bench.output_change import compare, divergence, logits_along, read_logits, write_logits
from llamakv.records import Sampling


def logits_of(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities)).astype(np.float32)


def test_the_divergence_is_that_of_the_distributions_in_nats() -> None:
    half, skewed = logits_of(0.5, 0.5), logits_of(0.25, 0.75)
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert divergence(half, skewed) == pytest.approx(expected, rel=1e-6)
    assert divergence(skewed, half) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), rel=1e-6)


def test_adding_the_same_to_all_logits_changes_nothing() -> None:
    logits = np.array([100.0, 101.0, 90.0], np.float32)
    assert divergence(logits, logits - 99) == 0.0


def test_equal_logits_do_not_diverge_at_all() -> None:
    rows = np.random.default_rng(1).normal(0, 5, (7, 1000)).astype(np.float32)
    found = compare(rows, rows.copy())
    assert (found.n_positions, found.mean_kl, found.most_kl, found.top_agreement) == (7, 0.0, 0.0, 1.0)


def test_logits_that_are_not_numbers_are_infinitely_far_and_never_agree() -> None:
    sound, broken = logits_of(0.9, 0.1), np.array([np.nan, 1.0], np.float32)
    assert divergence(sound, broken) == math.inf
    found = compare([sound, sound], [sound, np.array([np.nan, 0.0], np.float32)])
    assert (found.mean_kl, found.most_kl, found.top_agreement) == (math.inf, math.inf, 0.5)
    assert compare([broken], [broken]).top_agreement == 0.0


def test_a_reference_that_is_not_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="not numbers"):
        write_logits(tmp_path / "logits", [logits_of(0.5, 0.5), np.array([1.0, np.inf], np.float32)])


def test_tokens_that_cannot_come_do_not_count() -> None:
    impossible = np.array([1.0, -np.inf, 2.0], np.float32)
    assert divergence(impossible, impossible) == 0.0
    assert divergence(impossible, np.array([1.0, -50.0, 2.0], np.float32)) == pytest.approx(0.0, abs=1e-12)


def test_mean_most_and_agreement_are_over_positions() -> None:
    same, other = logits_of(0.9, 0.1), logits_of(0.1, 0.9)
    found = compare([same, same, same, same], [same, same, same, other])
    most = 0.9 * math.log(9) - 0.1 * math.log(9)
    assert found.n_positions == 4
    assert found.top_agreement == 0.75
    assert found.most_kl == pytest.approx(most, rel=1e-6)
    assert found.mean_kl == pytest.approx(most / 4, rel=1e-6)


def test_both_sides_have_the_same_positions() -> None:
    with pytest.raises(ValueError, match="shorter"):
        compare([logits_of(0.5, 0.5)] * 2, [logits_of(0.5, 0.5)])


def test_logits_in_a_file_are_the_same_bits(tmp_path: Path) -> None:
    rows = np.random.default_rng(2).normal(0, 5, (3, 17)).astype(np.float32)
    write_logits(tmp_path / "logits", iter(rows))
    assert [row.tobytes() for row in read_logits(tmp_path / "logits", 3)] == [row.tobytes() for row in rows]


@pytest.mark.parametrize("name", ["M", "MR"])
def test_it_is_the_text_that_goes_on(models, name: str) -> None:
    """Each position's logits are those of the text up to there, decoded token by token, and not of the model's own
    choice."""
    with LlamaModel(models(name)) as model:
        tokens = model.tokenize(
            "the quick brown fox jumps over the lazy dog and runs", add_special=True, parse_special=False
        )
        n = len(tokens) - 6

        def begin():
            sequence = model.open_sequence(MemoryRequest(), n_ctx_min=64, n_ctx_max=64, n_threads=1)
            sequence.extend(tokens[:n])
            return sequence

        along = begin()
        rows = [row.tobytes() for row in logits_along(along, tokens[n:], 6)]
        assert list(along.tokens[: n + 5]) == tokens[: n + 5]
        slow = begin()
        expected = []
        for position in range(n, n + 6):
            token = next(iter(slow.generate(Sampling(), n_max=1)))
            expected.append(bytes(slow.logits()))
            assert token == int(np.frombuffer(slow.logits(), np.float32).argmax())
            slow.extend([tokens[position]], replace_pending=True)
        assert rows == expected
        assert len(set(rows)) == 6
