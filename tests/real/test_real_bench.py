"""``bench`` on real models: figures that can be checked are what they should be. No time is compared with a number."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from llamakv.engine.llamacpp import LlamaModel
from llamakv.ops.bench.break_even import break_even_cold, break_even_warm
from llamakv.ops.bench.lengths import lengths_up_to, tokens_to_read
from llamakv.ops.bench.requests import BenchRequest, TypesRequest
from llamakv.ops.bench.run import run_bench
from llamakv.ops.requests import MemoryOptions, ModelRequest, Reporter
from tests.ops.driver import Driver

pytestmark = pytest.mark.real

N_TOKENS = 96


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_a_bench_is_plausible(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model = request.getfixturevalue(f"{name}_path")
    notices: list[str] = []
    types = TypesRequest(
        pairs=(("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("f16", "q3")),
        n_tokens=N_TOKENS,
        n_decoded=8,
        n_branches=8,
        compares_output=True,
        n_positions=32,
    )
    result = run_bench(
        BenchRequest(
            model=ModelRequest(path=model, cache_dir=tmp_path / "cache", n_threads=2),
            memory=MemoryOptions(),
            n_repeats=2,
            types=types,
            strategies=None,
            text=None,
            work_dir=tmp_path,
            reporter=Reporter(notice=notices.append),
        )
    )
    f16, q8, q4, refused = result.types
    assert not result.interrupted
    assert notices == []  # each resumed text was gone on with by the token it was gone on with when read
    assert (refused.label, refused.refused) == ("f16/q3", "unknown cache type 'q3'")

    assert (f16.output.mean_kl, f16.output.most_kl, f16.output.top_agreement) == (0.0, 0.0, 1.0)
    assert 0 < q8.output.mean_kl < q4.output.mean_kl
    assert q8.output.top_agreement >= 0.9
    assert q8.output.mean_kl < 0.05  # nats: 8 bits are nearly as good as 16

    assert q8.state_bytes_per_token / f16.state_bytes_per_token == 34 / 64  # blocks of 32 values
    assert q4.state_bytes_per_token / f16.state_bytes_per_token == 18 / 64
    assert f16.context_bytes > q8.context_bytes > q4.context_bytes
    for row in (f16, q8, q4):
        assert tuple(length.n_tokens for length in row.lengths) == lengths_up_to(N_TOKENS)
        assert all(a.raw_bytes < b.raw_bytes and a.file_bytes < b.file_bytes for a, b in pairwise(row.lengths))
        assert row.break_even_warm == break_even_warm(row.lengths)
        assert row.break_even_cold == break_even_cold(row.lengths)
        assert row.peak_rss_bytes > result.model.n_bytes
        assert row.n_branches == 8
        assert row.fork_s.median < row.lengths[-1].prefill_s.median  # no token is read again for it

    saved = _real_save(Driver(model, tmp_path), model, tmp_path / "real.bin")
    assert f16.lengths[-1].raw_bytes == saved.n_raw_bytes
    assert abs(f16.lengths[-1].file_bytes - saved.n_file_bytes) < 1000  # names and times in the index


def _real_save(driver: Driver, path: Path, target: Path):
    """What ``save`` makes of the same tokens."""
    with LlamaModel(path) as model:
        tokens = tokens_to_read(model, None, N_TOKENS, 32)[:N_TOKENS]
        text = b"".join(model.token_bytes(token) for token in tokens).decode()
    info = driver.save(target, text, raw=True, model=driver.request(n_threads=2)).saved.info
    assert info.record.tokens == tokens
    return info
