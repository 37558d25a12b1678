"""Estimates of memory against what the engine allocates, by its log and by its own count (B81)."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from gguf import GGUFWriter

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.context import NativeContext
from llamakv.engine.llamacpp.dry_run import LlamaEstimator
from llamakv.engine.memory import CacheKind, ContextMemory, LayerFacts, TokenMemory
from llamakv.errors import UsageError
from llamakv.records import MemoryKind
from tests.engine.breakdown import memory_breakdown
from tests.models import writer

KINDS = ["M", "MS", "MR", "MH", "ML", "MG", "MH2"]
TYPES = [("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "q4_0"), ("f32", "f16")]
SIZES = [(300, 0), (1500, 1), (4096, 14)]
STEP = 5300  # bytes: the engine's log gives MiB with two decimals

F, W, R = CacheKind.FULL, CacheKind.WINDOWED, CacheKind.RECURRENT


@pytest.fixture(scope="module", params=KINDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def estimator(models, name: str) -> Iterator[LlamaEstimator]:
    with LlamaEstimator(models(name)) as estimator:
        yield estimator


@pytest.fixture(scope="module")
def model(models, name: str) -> Iterator[LlamaModel]:
    with LlamaModel(models(name)) as model:
        yield model


@contextmanager
def opened(model: LlamaModel, memory: MemoryRequest, n_ctx: int, n_parallel: int) -> Iterator[NativeContext]:
    context = NativeContext(model._pointer, memory, n_ctx=n_ctx, n_seq_max=n_parallel + 2, n_threads=1)
    try:
        yield context
    finally:
        context.close()


def requests(name: str) -> Iterator[MemoryRequest]:
    """All that is legal: latent attention has one type for both, values of a quantised type need flash attention."""
    for type_k, type_v in TYPES:
        if name != "ML" or type_k == type_v:
            yield MemoryRequest(type_k=type_k, type_v=type_v)
            yield MemoryRequest(type_k=type_k, type_v=type_v, swa_full=False)
    yield MemoryRequest(flash_attn=False)
    if name != "ML":
        yield MemoryRequest(type_k="q8_0", flash_attn=False, swa_full=False)


def without_devices(memory: ContextMemory) -> ContextMemory:
    return replace(memory, kv_by_device=(), recurrent_by_device=())


@pytest.mark.parametrize(("n_ctx", "n_parallel"), SIZES)
def test_an_estimate_is_what_a_context_takes_to_the_byte(
    estimator: LlamaEstimator, model: LlamaModel, name: str, n_ctx: int, n_parallel: int
) -> None:
    for memory in requests(name):
        estimate = estimator.estimate(memory, n_ctx=n_ctx, n_parallel=n_parallel)
        with opened(model, memory, n_ctx, n_parallel) as context:
            live = context.allocated(model._sizes())
            assert without_devices(live) == estimate, memory
            breakdown = memory_breakdown(context.pointer)
        _, cells, compute = (sum(sizes) for sizes in zip(*breakdown.values(), strict=True))
        assert estimate.kv_bytes + estimate.recurrent_bytes == cells, memory
        assert abs(estimate.compute_bytes - compute) <= STEP, memory
        assert sum(buffer.n_bytes for buffer in (*live.kv_by_device, *live.recurrent_by_device)) == cells, memory
        assert abs(estimate.n_bytes - estimate.output_bytes - cells - compute) <= 0.02 * (cells + compute), memory


def test_a_scheduler_tells_what_its_context_took_as_it_grows(estimator: LlamaEstimator, model: LlamaModel) -> None:
    memory = MemoryRequest()
    scheduler = model.open_scheduler(memory, n_parallel=3, n_ctx_min=512, n_ctx_max=4096, n_threads=1)
    before = scheduler.memory
    assert without_devices(before) == estimator.estimate(memory, n_ctx=512, n_parallel=3)
    scheduler.root.extend([300] * 600)
    after = scheduler.memory
    if model.info.kind is not MemoryKind.RECURRENT:
        assert (before.n_ctx, after.n_ctx) == (512, 1024)
        assert after.kv_bytes == 2 * before.kv_bytes
        assert after.recurrent_bytes == before.recurrent_bytes
    scheduler.close()


@pytest.mark.parametrize("swa_full", [True, False])
def test_a_token_takes_what_longer_contexts_take_more(estimator: LlamaEstimator, swa_full: bool) -> None:
    memory = MemoryRequest(type_k="q8_0", type_v="q8_0", swa_full=swa_full)
    small, large = (estimator.estimate(memory, n_ctx=n_ctx, n_parallel=1) for n_ctx in (2048, 4096))
    wide = estimator.estimate(memory, n_ctx=2048, n_parallel=5)
    token = estimator.per_token(memory)
    assert token.kv_bytes_per_token * 2048 == large.kv_bytes - small.kv_bytes
    assert token.recurrent_bytes_per_sequence * 4 == wide.recurrent_bytes - small.recurrent_bytes


def test_known_models_take_what_their_shapes_say(models) -> None:
    """By hand: layers x heads x length x bytes, for keys and values."""
    expected = {
        "M": (2 * 2 * 64 * 2 * 2, 0),
        "MS": (4 * 1 * 64 * 2 * 2, 0),
        "MG": ((2 * 2 * 64 + 1 * 128) * 2 * 2, 0),
        "MR": (0, 2 * 4 * (3 * 256 + 16 * 256)),
        "MH": (1 * 64 * 2 * 2, 2 * 4 * (3 * (256 + 2 * 16) + 16 * 256)),
        "MH2": (1 * 64 * 2 * 2, 2 * 4 * 2 * 128),
        "ML": (2 * (96 + 32) * 2, 0),
    }
    for name, (per_token, per_sequence) in expected.items():
        with LlamaEstimator(models(name)) as estimator:
            assert estimator.per_token(MemoryRequest()) == TokenMemory(
                kv_bytes_per_token=per_token, recurrent_bytes_per_sequence=per_sequence
            ), name


def test_window_sized_caches_have_the_cells_their_sequences_need(models) -> None:
    with LlamaEstimator(models("MS")) as estimator:
        parts = estimator.estimate(MemoryRequest(swa_full=False), n_ctx=4096, n_parallel=8).parts
    assert [(part.kind, part.layers, part.n_cells) for part in parts] == [
        (F, (3,), 4096),
        (W, (0, 1, 2), 768),  # 32 tokens for each of 10 sequences and 256 of a batch, in steps of 256
    ]


# ------------------------------------------------------------ facts

LAYERS = {
    "M": [((F,), 4, 2)] * 2,
    "MS": [((W,), 2, 1)] * 3 + [((F,), 2, 1)],
    "MG": [((W,), 2, 2), ((W,), 2, 2), ((F,), 1, 1), ((), 2, 2), ((), 1, 1)],
    "MR": [((R,), 0, 0)] * 2,
    "MH": [((R,), 0, 0), ((F,), 2, 1), ((R,), 0, 0)],
    "MH2": [((R,), 0, 0), ((F,), 2, 1), ((R,), 0, 0)],
    "ML": [((F,), 4, 1)] * 2,
}
LENGTHS = {
    "M": (64, 64, None), "MS": (64, 64, None), "MG": (128, 128, None), "MR": (None, None, None),
    "MH": (64, 64, None), "MH2": (64, 64, None), "ML": (128, 96, 96),
}  # fmt: skip


def test_each_layer_is_told_for_what_it_keeps(estimator: LlamaEstimator, name: str) -> None:
    expected = [
        LayerFacts(index=i, kinds=kinds, n_head=n_head, n_head_kv=n_head_kv)
        for i, (kinds, n_head, n_head_kv) in enumerate(LAYERS[name])
    ]
    facts = estimator.facts
    assert list(facts.layers) == expected
    assert (facts.key_length, facts.value_length, facts.latent_length) == LENGTHS[name]


def test_facts_agree_with_the_loaded_model(estimator: LlamaEstimator, model: LlamaModel) -> None:
    facts, info = estimator.facts, model.info
    assert facts.unknown is None
    for word in ("architecture", "name", "quantisation", "kind", "n_ctx_train", "n_vocab", "n_layer", "n_window"):
        assert getattr(facts, word) == getattr(info, word)
    assert (facts.weights_bytes, facts.n_embd) == (info.n_bytes, writer.N_EMBD)
    assert facts.n_params is not None
    assert facts.n_params < info.n_bytes < 2.2 * facts.n_params  # most are f16
    weights = sum(buffer.n_bytes for buffer in model.weights_by_device)
    assert abs(weights - info.n_bytes) < 0.02 * info.n_bytes


def test_a_model_in_several_files_counts_all_of_them(models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "GGUFWriter", functools.partial(GGUFWriter, split_max_tensors=8))
    writer.write("M", tmp_path / "M.gguf")
    first, *others = sorted(tmp_path.glob("*.gguf"))
    assert len(others) == 2
    with LlamaEstimator(models("M")) as whole, LlamaEstimator(first) as split:
        assert split.facts == whole.facts
        request = {"memory": MemoryRequest(), "n_ctx": 1024, "n_parallel": 2}
        assert split.estimate(**request) == whole.estimate(**request)


# ------------------------------------------------------------ refusals


def test_what_the_engine_cannot_do_is_refused_with_its_reason(models, tmp_path: Path) -> None:
    refused = [
        ("M", MemoryRequest(type_v="q8_0", flash_attn=False), "cache type q8_0 for V needs flash attention"),
        ("M", MemoryRequest(type_k="q3_k"), "unknown cache type 'q3_k'"),
        ("ML", MemoryRequest(type_v="q8_0", flash_attn=False, type_k="q8_0"), "needs flash attention"),
        ("ML", MemoryRequest(type_k="q8_0"), "does not support different K"),
    ]
    for name, memory, words in refused:
        with LlamaEstimator(models(name)) as estimator, LlamaModel(models(name)) as model:
            with pytest.raises(UsageError, match=words):
                estimator.estimate(memory, n_ctx=512, n_parallel=1)
            with pytest.raises(UsageError, match=words):
                model.open_sequence(memory, n_ctx_min=64, n_ctx_max=512, n_threads=1)


def test_heads_that_do_not_fill_blocks_are_refused_not_aborted_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "HEAD_SIZE", 40)
    path = writer.write("M", tmp_path / "odd.gguf")
    memory = MemoryRequest(type_k="q8_0", flash_attn=False)
    words = "cache type q8_0 needs heads of a multiple of 32 numbers, those of this model have 40"
    with LlamaEstimator(path) as estimator, LlamaModel(path) as model:
        with pytest.raises(UsageError, match=words):
            estimator.estimate(memory, n_ctx=512, n_parallel=1)
        with pytest.raises(UsageError, match=words):
            model.open_sequence(memory, n_ctx_min=64, n_ctx_max=512, n_threads=1)
        assert estimator.per_token(MemoryRequest()).kv_bytes_per_token == 2 * 2 * 40 * 2 * 2


def test_numbers_that_make_no_context_are_refused(models) -> None:
    with LlamaEstimator(models("M")) as estimator:
        for n_ctx, n_parallel in ((0, 1), (-5, 1), (1 << 31, 1), (512, -1), (512, 255)):
            with pytest.raises(ValueError, match="cannot be"):
                estimator.estimate(MemoryRequest(), n_ctx=n_ctx, n_parallel=n_parallel)


# ------------------------------------------------------------ real models


@pytest.mark.real
@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma_path"])
def test_real_models_take_what_was_estimated(fixture: str, request: pytest.FixtureRequest) -> None:
    path, process = request.getfixturevalue(fixture), psutil.Process()
    before, started = process.memory_info().rss, time.perf_counter()
    with LlamaEstimator(path) as estimator:
        requests = [MemoryRequest(), MemoryRequest(type_k="q8_0", type_v="q8_0", swa_full=False)]
        estimates = [estimator.estimate(memory, n_ctx=4096, n_parallel=2) for memory in requests]
        elapsed = time.perf_counter() - started
        inside = sum(child.memory_info().rss for child in process.children())
        print(
            f"\n{path.name}: two estimates in {elapsed:.2f} s, {(process.memory_info().rss - before) >> 20} MiB more "
            f"here, {inside >> 20} MiB in the process that asks"
        )
        facts = estimator.facts
    with LlamaModel(path) as model:
        assert (facts.weights_bytes, facts.n_layer) == (model.info.n_bytes, len(facts.layers))
        for memory, estimate in zip(requests, estimates, strict=True):
            with opened(model, memory, 4096, 2) as context:
                assert without_devices(context.allocated(model._sizes())) == estimate
                breakdown = memory_breakdown(context.pointer)
            _, cells, compute = (sum(sizes) for sizes in zip(*breakdown.values(), strict=True))
            assert estimate.kv_bytes == cells
            assert abs(estimate.compute_bytes - compute) <= STEP
