"""Files that are no models, or damaged ones, asked about their memory; and what the engine's log is read as."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp import dry_run
from llamakv.engine.llamacpp.dry_model import layer_facts
from llamakv.engine.llamacpp.dry_run import LlamaEstimator
from llamakv.engine.llamacpp.gguf_header import GgufHeader
from llamakv.engine.llamacpp.memory_log import ModelSizes, logged_buffers, read_context, read_sizes
from llamakv.engine.memory import CacheKind, CachePart, DeviceBuffer
from llamakv.errors import EngineError, LlamakvError, ModelFileError

MIB = 1 << 20


def replaced(source: Path, target: Path, old: bytes, new: bytes) -> Path:
    data = source.read_bytes()
    assert len(old) == len(new)
    assert old in data
    target.write_bytes(data.replace(old, new, 1))
    return target


# ------------------------------------------------------------ files


def test_an_unknown_architecture_is_told_as_unknown_with_what_the_header_says(models, tmp_path: Path) -> None:
    data = models("M").read_bytes().replace(b"llama.", b"lemur.")
    path = tmp_path / "lemur.gguf"
    path.write_bytes(data.replace(b"\x05" + bytes(7) + b"llama", b"\x05" + bytes(7) + b"lemur", 1))
    with LlamaEstimator(path) as estimator, LlamaEstimator(models("M")) as known:
        facts = estimator.facts
        assert facts.unknown == "unknown model architecture: 'lemur'"
        assert (facts.kind, facts.layers) == (None, ())
        assert (facts.architecture, facts.name) == ("lemur", "tiny llama")
        for word in (
            *("quantisation", "n_params", "weights_bytes", "n_ctx_train", "n_vocab"),
            *("n_embd", "n_layer", "key_length", "value_length", "latent_length"),
        ):
            assert getattr(facts, word) == getattr(known.facts, word)
        assert facts.n_window is None
        for ask in (
            lambda: estimator.estimate(MemoryRequest(), n_ctx=512, n_parallel=1),
            lambda: estimator.per_token(MemoryRequest()),
        ):
            with pytest.raises(EngineError, match=r"cannot run .*lemur\.gguf: unknown model architecture: 'lemur'"):
                ask()


def test_an_adapter_is_no_model_the_engine_can_run(models) -> None:
    with LlamaEstimator(models.lora(1)) as estimator:
        assert estimator.facts.unknown is not None
        assert "key not found" in estimator.facts.unknown


def test_files_without_a_whole_header_are_refused_with_their_name(models, tmp_path: Path) -> None:
    text, empty, cut = tmp_path / "a.txt", tmp_path / "empty.gguf", tmp_path / "cut.gguf"
    text.write_text("hello")
    empty.write_bytes(b"")
    cut.write_bytes(models("M").read_bytes()[:5000])
    for path, words in ((text, "not a GGUF"), (empty, "not a GGUF"), (cut, "cut off"), (tmp_path / "no", "No such")):
        with pytest.raises(ModelFileError, match=words) as refused:
            LlamaEstimator(path)
        assert path.name in refused.value.message
        assert "\n" not in refused.value.message


def test_a_header_over_which_the_engine_aborts_is_told_as_unknown(
    models, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    count = b"llama.block_count\x04\x00\x00\x00"
    path = replaced(models("M"), tmp_path / "m.gguf", count + b"\x02\x00\x00\x00", count + b"\x02\x04\x00\x00")
    with LlamaEstimator(path) as estimator:
        assert estimator.facts.unknown is not None
        assert estimator.facts.unknown.startswith("the engine gave up: llama-model.cpp:")
        assert (estimator.facts.n_layer, estimator.facts.layers) == (1026, ())
    assert capfd.readouterr() == ("", "")


FUZZ = """
import random, sys
from pathlib import Path
from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp.dry_model import layer_facts
from llamakv.engine.llamacpp.dry_run import LlamaEstimator
from llamakv.errors import EngineError, ModelFileError
path, seed, n, ends = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
data, rng, outcomes = path.read_bytes(), random.Random(seed), {"known": 0, "unknown": 0, "refused": 0}
begin, end = data.index(b"tokenizer.ggml.tokens"), data.index(b"tokenizer.ggml.eos_token_id")
for _ in range(n):
    damaged = bytearray(data)
    at = rng.randrange(4, begin) if rng.random() < 0.7 else rng.randrange(end, end + 4000)
    damaged[at] = rng.choice([0, 1, 127, 128, 255, damaged[at] ^ 1 << rng.randrange(8)])
    path.write_bytes(damaged)
    try:
        with LlamaEstimator(path) as estimator:
            outcomes["known" if estimator.facts.unknown is None else "unknown"] += 1
            if estimator.facts.unknown is None:
                estimator.estimate(MemoryRequest(type_k="q8_0", type_v="q8_0"), n_ctx=512, n_parallel=1)
    except (ModelFileError, EngineError):
        outcomes["refused"] += 1
print(outcomes["known"] > 0, outcomes["unknown"] > 0, outcomes["refused"] > 0, sum(outcomes.values()))
"""


@pytest.mark.parametrize(
    ("name", "n"), [("ML", 60), *(pytest.param(name, 400, marks=pytest.mark.slow) for name in ("M", "ML", "MG", "MH"))]
)
def test_damaged_headers_end_in_facts_or_a_named_error(models, tmp_path: Path, name: str, n: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(models(name).read_bytes())
    arguments = [sys.executable, "-c", FUZZ, str(path), "1", str(n)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, f"True True True {n}", "")


# ------------------------------------------------------------ the process that asks


def test_the_process_that_asks_is_gone_after_closing(models) -> None:
    here = set(psutil.Process().children())
    with LlamaEstimator(models("M")) as estimator:
        (worker,) = set(psutil.Process().children()) - here
        estimator.per_token(MemoryRequest())
    assert not worker.is_running()
    estimator.close()


def test_a_process_that_was_killed_is_an_error_and_not_a_wait(models) -> None:
    here = set(psutil.Process().children())
    with LlamaEstimator(models("M")) as estimator:
        (worker,) = set(psutil.Process().children()) - here
        worker.kill()
        for _ in range(2):
            with pytest.raises(EngineError, match=r"the engine gave up on this file \(SIGKILL\)"):
                estimator.estimate(MemoryRequest(), n_ctx=512, n_parallel=1)


def test_a_new_process_says_the_same_as_a_copied_one(models, monkeypatch: pytest.MonkeyPatch) -> None:
    with LlamaEstimator(models("MH")) as copied:
        monkeypatch.setattr(dry_run, "_may_be_copied", lambda: False)
        with LlamaEstimator(models("MH")) as new:
            assert new.facts == copied.facts
            request = {"memory": MemoryRequest(), "n_ctx": 1024, "n_parallel": 2}
            assert new.estimate(**request) == copied.estimate(**request)


def test_the_engine_log_goes_where_it_is_sent_and_nowhere_else(models, capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    with LlamaEstimator(models("M"), on_log=lines.append) as estimator:
        estimator.per_token(MemoryRequest())
    assert any("llama_model_loader" in line for line in lines)
    assert any("llama_kv_cache: size" in line for line in lines)
    with LlamaEstimator(models("M")) as estimator, pytest.raises(LlamakvError):
        estimator.estimate(MemoryRequest(type_v="q8_0", flash_attn=False), n_ctx=512, n_parallel=1)
    assert capfd.readouterr() == ("", "")


# ------------------------------------------------------------ the header


def test_keys_of_another_type_are_as_if_they_were_not_there(models) -> None:
    with GgufHeader(models("MH")) as header:
        assert header.text("general.architecture") == "granitehybrid"
        assert header.number("granitehybrid.block_count") == 3
        assert header.numbers("granitehybrid.attention.head_count_kv") == (0, 1, 0)
        assert header.length("tokenizer.ggml.tokens") == header.length("tokenizer.ggml.scores")
        for missing in ("nothing", "granitehybrid.attention.head_count_kv", "general.architecture"):
            assert header.number(missing) is None
        for missing in ("nothing", "granitehybrid.block_count", "tokenizer.ggml.tokens"):
            assert header.numbers(missing) is None
        assert header.text("granitehybrid.block_count") is None
        assert header.length("granitehybrid.block_count") is None
        assert (header.has_tensor("output.weight"), header.has_tensor("input.weight")) == (True, False)


# ------------------------------------------------------------ the log

SIZES = ModelSizes(
    n_vocab=1000, n_head=(4, 4, 4), n_head_kv=(2, 2, 1), key_length=64, value_length=64,
    k_row=(128, 128, 64), v_row=(128, 128, 64), r_row=None, s_row=None, is_latent=False,
)  # fmt: skip


def read(*lines: str, sizes: ModelSizes = SIZES) -> tuple[CachePart, ...]:
    return read_context(lines, sizes, n_ctx=1024, n_seq_max=3, flash_attn=True, is_dry=False).parts


def size(n_cells: int, n_layer: int, type_k: str, k: str, type_v: str, v: str, streams: int = 1) -> str:
    """The line with which a cache is done."""
    return (
        f"llama_kv_cache: size = {float(k) + float(v):7.2f} MiB "
        f"({n_cells:6} cells, {n_layer:3} layers,  3/{streams} seqs), "
        f"K ({type_k}): {k:>7} MiB, V ({type_v}): {v:>7} MiB"
    )


def test_a_recurrent_layer_has_no_heads_even_where_the_file_gives_some_to_all_layers() -> None:
    part = CachePart(
        kind=CacheKind.RECURRENT, layers=(0,), n_cells=3, type_k="f32", type_v="f32", k_bytes=1, v_bytes=1
    )  # fmt: skip
    layers = [layer_facts(index, SIZES, (part,)) for index in (0, 1)]
    assert [(layer.kinds, layer.n_head, layer.n_head_kv) for layer in layers] == [
        ((CacheKind.RECURRENT,), 0, 0),
        ((), 4, 2),
    ]


def test_a_figure_that_no_known_shape_explains_stands_as_logged() -> None:
    logged = (
        "llama_kv_cache: layer   0: dev = CPU",
        size(1024, 1, "f16", "1.25", "q8_0", "0.50"),
    )
    (part,) = read(*logged)
    assert (part.layers, part.n_cells, part.type_k, part.type_v) == ((0,), 1024, "f16", "q8_0")
    assert (part.k_bytes, part.v_bytes) == (1.25 * MIB, 0.5 * MIB)


def test_values_padded_to_the_largest_layer_are_seen() -> None:
    logged = (
        "llama_kv_cache: layer   2: dev = CPU",
        size(1024, 1, "f16", "0.12", "f16", "0.25"),
    )
    (part,) = read(*logged)
    assert (part.k_bytes, part.v_bytes) == (64 * 2 * 1024, 128 * 2 * 1024)


def test_cells_on_several_devices_are_told_apart() -> None:
    lines = (
        "llama_kv_cache: layer   0: dev = CUDA0",
        "llama_kv_cache: layer   1: dev = CPU",
        "llama_kv_cache:        CPU KV buffer size =     0.50 MiB",
        "llama_kv_cache:      CUDA0 KV buffer size =     0.50 MiB",
        size(1024, 2, "f16", "0.50", "f16", "0.50"),
        "sched_reserve:      CUDA0 compute buffer size =     2.00 MiB",
        "sched_reserve:  CUDA_Host compute buffer size =     1.25 MiB",
        "llama_context:  CUDA_Host  output buffer size =     0.01 MiB",
    )
    memory = read_context(lines, SIZES, n_ctx=1024, n_seq_max=3, flash_attn=True, is_dry=False)
    assert memory.kv_by_device == (
        DeviceBuffer(device="CPU", n_bytes=MIB // 2),
        DeviceBuffer(device="CUDA0", n_bytes=MIB // 2),
    )
    assert memory.compute == (
        DeviceBuffer(device="CUDA0", n_bytes=2 * MIB),
        DeviceBuffer(device="CUDA_Host", n_bytes=5 * MIB // 4),
    )
    assert memory.output == (DeviceBuffer(device="CUDA_Host", n_bytes=4 * 1000 * 3),)
    assert memory.n_bytes == MIB + 13 * MIB // 4 + 12000


def test_caches_of_other_kinds_of_attention_are_counted() -> None:
    """Lines as llama-kv-cache-dsv4.cpp writes them: compressed caches and states beside a window, one per sequence."""
    parts = read(
        "llama_kv_cache_dsv4: creating DSV4 raw KV cache",
        "llama_kv_cache_iswa: creating non-SWA KV cache, size = 1024 cells",
        size(1024, 0, "f16", "0.00", "f16", "0.00", streams=3),
        "llama_kv_cache_iswa: creating     SWA KV cache, size = 512 cells",
        "llama_kv_cache: layer   0: dev = CPU",
        size(512, 1, "f16", "0.38", "f16", "0.00", streams=3),
        "llama_kv_cache_dsv4: creating DSV4 CSA compressed KV cache, size = 256 cells",
        "llama_kv_cache: layer   1: dev = CPU",
        size(256, 1, "f16", "0.19", "f16", "0.00", streams=3),
        "llama_kv_cache_dsv4: creating DSV4 CSA compressor state",
        "llama_dsv4_comp_state: layer   1: dev = CPU",
        "llama_dsv4_comp_state:        CPU DSV4 csa state buffer size =     0.02 MiB",
        "llama_dsv4_comp_state: csa ratio = 4, state = 8 x 128, streams = 3, rs_seq = 0, layers = 1, size = 0.02 MiB",
        sizes=ModelSizes(
            n_vocab=1000, n_head=(4, 4), n_head_kv=(1, 1), key_length=128, value_length=128,
            k_row=(128, 128), v_row=(128, 128), r_row=None, s_row=None, is_latent=True,
        ),
    )  # fmt: skip
    assert [(part.kind, part.layers, part.n_cells, part.n_bytes) for part in parts] == [
        (CacheKind.WINDOWED, (0,), 3 * 512, 128 * 2 * 3 * 512),
        (CacheKind.FULL, (1,), 3 * 256, 128 * 2 * 3 * 256),
        (CacheKind.RECURRENT, (1,), 3, 2 * 4 * 8 * 128 * 3),
    ]


def test_weights_lie_where_the_log_says() -> None:
    lines = (
        "load_tensors:   CPU_Mapped model buffer size =     1.25 MiB",
        "load_tensors:   CPU_REPACK model buffer size =     0.50 MiB",
        "load_tensors:   CPU_Mapped model buffer size =     1.00 MiB",
        "load_tensors:          CPU model buffer size =     0.00 MiB",
    )
    assert logged_buffers(lines, "model") == (
        DeviceBuffer(device="CPU_Mapped", n_bytes=9 * MIB // 4),
        DeviceBuffer(device="CPU_REPACK", n_bytes=MIB // 2),
    )


def test_a_log_that_says_something_else_is_an_error_of_the_engine() -> None:
    for lines in ((), ("print_info: n_layer_all = many",)):
        with pytest.raises(EngineError, match="does not tell the model's sizes"):
            read_sizes(lines, n_vocab=1000, meta=lambda _: None)
