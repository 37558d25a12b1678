"""What is told of a model without its weights, and that a live context takes just that."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp.dry_run import LlamaEstimator
from llamakv.engine.memory import (
    CacheKind,
    CachePart,
    ContextMemory,
    DeviceBuffer,
    LayerFacts,
    ModelFacts,
    TokenMemory,
)
from llamakv.errors import EngineError, InterruptedByUser, ModelFileError, NoRoomError, UsageError
from llamakv.ops import inspect_live, inspect_model
from llamakv.ops.inspect_live import Compared, LiveQuestion, ask_about, may_repack, measure_live
from llamakv.ops.inspect_model import ModelQuestion, default_sizes, largest_that_fits, limits_of, report_model
from llamakv.ops.process_memory import resident_bytes
from llamakv.ops.requests import Reporter
from tests.models import writer

KINDS = ["M", "MS", "MR", "MH", "MH2", "ML", "MG"]
FACTS = ModelFacts(
    architecture="llama", name="fake", quantisation="F16", unknown=None, kind=None, n_params=10, weights_bytes=1000,
    n_ctx_train=4096, n_vocab=7, n_embd=8, n_layer=1, n_window=0, key_length=4, value_length=4, latent_length=None,
    layers=(LayerFacts(index=0, kinds=(CacheKind.FULL,), n_head=2, n_head_kv=1),),
)  # fmt: skip


@dataclass
class FakeEstimator:
    """A cell takes ``per_cell[type]`` bytes, compute 100 and output 10."""

    facts: ModelFacts = FACTS
    per_cell: dict[str, int] = field(default_factory=lambda: {"f16": 4, "q8_0": 2})
    asked: list[tuple[str, int, int]] = field(default_factory=list)

    def estimate(self, memory: MemoryRequest, *, n_ctx: int, n_parallel: int) -> ContextMemory:
        self.asked.append((memory.type_k, n_ctx, n_parallel))
        if memory.type_k not in self.per_cell:
            raise UsageError(f"cache type {memory.type_k} is not taken")
        part = CachePart(
            kind=CacheKind.FULL, layers=(0,), n_cells=n_ctx, type_k=memory.type_k, type_v=memory.type_v,
            k_bytes=self.per_cell[memory.type_k] * n_ctx, v_bytes=0,
        )  # fmt: skip
        return ContextMemory(
            n_ctx=n_ctx, n_seq_max=n_parallel + 2, flash_attn=True, parts=(part,),
            compute=(DeviceBuffer(device="CPU", n_bytes=100),), output=(DeviceBuffer(device="CPU", n_bytes=10),),
        )  # fmt: skip

    def per_token(self, memory: MemoryRequest) -> TokenMemory:
        return TokenMemory(kv_bytes_per_token=self.per_cell.get(memory.type_k, 0), recurrent_bytes_per_sequence=0)

    def close(self) -> None: ...

    def __enter__(self) -> FakeEstimator:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fake.gguf"
    path.write_bytes(b"GGUF" + bytes(96))
    return path


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_model, "available_bytes", lambda: 9_301)  # 1000 + 110 + 4 bytes for 2047.75 cells
    monkeypatch.setattr(inspect_model, "resident_bytes", lambda: 500)


class TestReport:
    def test_each_type_has_a_context_of_each_size(self, file: Path) -> None:
        question = ModelQuestion(path=file, n_ctx=(256, 512), types=(("f16", "f16"), ("q8_0", "q8_0")))
        report = report_model(FakeEstimator(), question, Reporter())
        assert report.file_bytes == 100
        assert [(found.label, [context.kv_bytes for context in found.contexts]) for found in report.types] == [
            ("f16", [1024, 2048]),
            ("q8_0", [512, 1024]),
        ]
        assert [found.per_token.kv_bytes_per_token for found in report.types if found.per_token] == [4, 2]

    def test_what_fits_counts_program_and_weights_and_stops_at_what_was_trained(self, file: Path) -> None:
        question = ModelQuestion(path=file, n_ctx=(256,), types=(("f16", "f16"), ("q8_0", "q8_0")))
        wide, narrow = (found.fits[0] for found in report_model(FakeEstimator(), question, Reporter()).types)
        assert (wide.n_ctx, wide.n_bytes, wide.is_all) == (1792, 500 + 1000 + 110 + 4 * 1792, False)
        assert (narrow.n_ctx, narrow.n_bytes, narrow.is_all) == (3840, 500 + 1000 + 110 + 2 * 3840, False)
        roomy = replace(FACTS, n_ctx_train=1000)
        report = report_model(FakeEstimator(roomy), replace(question, types=(("f16", "f16"),)), Reporter())
        assert (report.types[0].fits[0].n_ctx, report.types[0].fits[0].is_all) == (1000, True)

    def test_a_size_that_was_asked_about_counts_the_program_too(self, file: Path) -> None:
        question = ModelQuestion(path=file, n_ctx=(256,), types=(("f16", "f16"),), memory_bytes=2_700)
        here, asked = report_model(FakeEstimator(), question, Reporter()).types[0].fits
        assert (here.limit.name, here.limit.n_own, here.limit.n_held) == ("available", 500, 500)
        assert (asked.limit.name, asked.limit.n_own, asked.limit.n_held) == ("asked", 500, 0)
        assert (here.limit.n_room, asked.limit.n_room) == (9_301, 2_200)
        assert (asked.n_ctx, asked.n_bytes) == (256, 500 + 1000 + 110 + 1024)

    def test_where_nothing_fits_it_says_what_the_smallest_takes(self, file: Path) -> None:
        question = ModelQuestion(path=file, types=(("f16", "f16"),), memory_bytes=1_000)
        fit = report_model(FakeEstimator(), question, Reporter()).types[0].fits[1]
        assert (fit.n_ctx, fit.n_bytes, fit.is_all) == (None, 500 + 1000 + 110 + 1024, False)

    def test_branches_may_have_what_was_trained_each(self, file: Path) -> None:
        question = ModelQuestion(path=file, n_parallel=3, n_ctx=(256,), types=(("f16", "f16"),), memory_bytes=10**6)
        estimator = FakeEstimator()
        fit = report_model(estimator, question, Reporter()).types[0].fits[1]
        assert (fit.n_ctx, fit.is_all) == (3 * 4096, True)
        assert {n_parallel for _, _, n_parallel in estimator.asked} == {3}

    def test_a_refused_type_is_told_with_its_reason_and_the_others_stay(self, file: Path) -> None:
        question = ModelQuestion(path=file, n_ctx=(256,), types=(("q4_0", "q4_0"), ("f16", "f16")))
        refused, found = report_model(FakeEstimator(), question, Reporter()).types
        assert (refused.refused, refused.contexts, refused.fits) == ("cache type q4_0 is not taken", (), ())
        assert found.refused is None

    def test_an_unknown_model_has_no_figures(self, file: Path) -> None:
        facts = replace(FACTS, unknown="unknown model architecture: 'new'", layers=())
        report = report_model(FakeEstimator(facts), ModelQuestion(path=file), Reporter())
        assert (report.types, report.facts.unknown) == ((), "unknown model architecture: 'new'")

    def test_a_context_larger_than_any_can_be_is_refused_before_it_is_asked_about(self, file: Path) -> None:
        estimator = FakeEstimator()
        with pytest.raises(UsageError, match=r"16,777,217 cells is larger than any can be: at most 16,777,216"):
            report_model(estimator, ModelQuestion(path=file, n_ctx=(2**24 + 1,)), Reporter())
        assert estimator.asked == []

    @pytest.mark.parametrize(
        ("n_ctx", "drawn"),
        [
            ((256, 3000), [512, 1024, 2048, 3000]),
            ((512,), [512, 1024, 2048, 4096]),
            ((3000,), [512, 1024, 2048, 3000, 4096]),
            ((6000,), [512, 1024, 2048, 4096, 6000]),
        ],
    )
    def test_the_curve_ends_with_the_largest_size_and_one_size_alone_is_no_curve(
        self, file: Path, n_ctx: tuple[int, ...], drawn: list[int]
    ) -> None:
        question = ModelQuestion(path=file, n_ctx=n_ctx, types=(("f16", "f16"),), with_curve=True)
        curve = report_model(FakeEstimator(), question, Reporter()).types[0].curve
        assert [context.n_ctx for context in curve] == drawn

    def test_what_a_live_process_took_counts_instead_of_the_program_alone(self, file: Path) -> None:
        question = ModelQuestion(path=file, n_ctx=(256,), types=(("f16", "f16"),))
        here, asked = limits_of(9_500)
        limits = tuple(replace(limit, n_own=1_500, is_live=True) for limit in (here, asked))
        fits = report_model(FakeEstimator(), question, Reporter(), limits=limits).types[0].fits
        # 9,301 available and 500 that are held already; 9,500 in all
        assert [(fit.n_ctx, fit.n_bytes) for fit in fits] == [(1792, 9778), (1536, 8754)]

    def test_it_can_be_interrupted(self, file: Path) -> None:
        with pytest.raises(InterruptedByUser):
            report_model(FakeEstimator(), ModelQuestion(path=file), Reporter(should_abort=lambda: True))


@pytest.mark.parametrize(
    ("trained", "sizes"),
    [(131072, (8192, 32768, 131072)), (1024, (256, 1024)), (100, (100,)), (None, (8192, 32768, 131072))],
)
def test_sizes_where_none_is_named(trained: int | None, sizes: tuple[int, ...]) -> None:
    assert default_sizes(trained) == sizes


class TestLargestThatFits:
    @given(
        most=st.integers(1, 600), base=st.integers(0, 1000), slope=st.integers(0, 50), step=st.integers(1, 40),
        bend=st.integers(0, 300), limit=st.integers(0, 40_000),
    )  # fmt: skip
    def test_it_is_the_one_that_trying_all_finds(
        self, most: int, base: int, slope: int, step: int, bend: int, limit: int
    ) -> None:
        def takes(n: int) -> int:
            return base + slope * (n // step) + 3 * slope * max(0, n - bend)

        expected = max((n for n in range(1, most + 1) if takes(n) <= limit), default=0)
        assert largest_that_fits(takes, limit, most=most) == expected

    def test_along_a_line_it_asks_few_times_and_not_far_beyond(self) -> None:
        asked: list[int] = []

        def takes(n: int) -> int:
            asked.append(n)
            return 1_000_000 + 65_536 * n

        assert largest_that_fits(takes, 1_000_000 + 65_536 * 7_777 + 1, most=10**6) == 7_777
        assert len(asked) <= 5
        assert max(asked) == 7_778


def test_what_is_no_model_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"GGUX")
    with pytest.raises(ModelFileError, match="is not a GGUF model file"):
        ask_about(ModelQuestion(path=tmp_path / "no.gguf"), Reporter())
    with pytest.raises(ModelFileError, match="cannot read the model file"):
        ask_about(ModelQuestion(path=tmp_path), Reporter())


# ---------------------------------------------------------------- live


@pytest.mark.parametrize("name", KINDS)
def test_a_live_context_takes_what_was_estimated(models: Callable[[str], Path], name: str) -> None:
    memory = MemoryRequest(type_k="q8_0", type_v="q8_0") if name == "M" else MemoryRequest()
    question = LiveQuestion(path=models(name), memory=memory, n_ctx=1000, n_parallel=2, n_threads=1)
    with LlamaEstimator(models(name)) as estimator:
        live = measure_live(estimator, question, Reporter())
    compared = {part.name: part for part in live.compared}
    for kind in set(compared) & {"full", "windowed", "recurrent"}:
        assert compared[kind].allocated == compared[kind].estimated > 0
    assert live.agrees, live.compared
    n_guards = name in ("MS", "MG")  # a sequence that keeps what windows of others lose
    assert live.context.n_seq_max == live.estimate.n_seq_max == 4 + n_guards
    assert compared["total"].allocated == sum(part.allocated for part in live.compared[:-1])
    assert live.n_batch == 256


GROWING = """
import json, sys
from pathlib import Path
from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp.dry_run import LlamaEstimator
from llamakv.ops.inspect_live import LiveQuestion, measure_live
from llamakv.ops.process_memory import mapped_file
from llamakv.ops.requests import Reporter
path = Path(sys.argv[1])
with LlamaEstimator(path) as estimator:
    question = LiveQuestion(path=path, memory=MemoryRequest(), n_ctx=65536, n_threads=1)
    live = measure_live(estimator, question, Reporter())
mapped = None if live.mapped is None else [live.mapped.resident_bytes, live.mapped.mapped_bytes]
grown = live.rss.context - live.rss.weights
print(json.dumps({"n_kv": live.context.kv_bytes, "grown": grown, "mapped": mapped, "after": str(mapped_file([path]))}))
"""


def test_the_process_is_seen_to_grow_by_the_weights_and_the_context(models: Callable[[str], Path]) -> None:
    """In a process of its own: this one may give memory of other tests back meanwhile."""
    done = subprocess.run([sys.executable, "-c", GROWING, models("M")], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["n_kv"] == 1 << 26  # 64 MiB: too much for memory that was freed before to be taken again
    assert found["grown"] >= 0.9 * found["n_kv"]
    if sys.platform == "linux":
        n_resident, n_mapped = found["mapped"]
        assert 0 < n_resident <= n_mapped
        assert abs(n_mapped - models("M").stat().st_size) < 1 << 16  # whole pages of it
        assert found["after"] == "None"  # not any more


def test_the_files_of_a_model_in_parts_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts = functools.partial(GGUFWriter, split_max_tensors=8)
    monkeypatch.setattr(writer, "GGUFWriter", in_parts)
    writer.write("M", tmp_path / "m.gguf")
    first, *others = sorted(tmp_path.iterdir())
    question = ModelQuestion(path=first, n_ctx=(512,), types=(("f16", "f16"),))
    live = LiveQuestion(path=first, memory=MemoryRequest(), n_ctx=512, n_threads=1)
    report, told = ask_about(question, Reporter(), live=live)
    n_bytes = sum(path.stat().st_size for path in (first, *others))
    assert len(others) > 0
    assert report.file_bytes == n_bytes
    assert report.facts.weights_bytes is not None
    assert report.facts.weights_bytes < n_bytes
    assert told is not None
    assert told.agrees
    assert told.mapped is None or abs(told.mapped.mapped_bytes - n_bytes) < len(others) << 16


def test_a_live_context_of_an_unknown_model_is_refused(file: Path) -> None:
    facts = replace(FACTS, unknown="no such architecture")
    with pytest.raises(EngineError, match="no such architecture"):
        measure_live(FakeEstimator(facts), LiveQuestion(path=file, memory=MemoryRequest()), Reporter())


def test_what_does_not_fit_into_memory_is_not_opened(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect_live, "available_bytes", lambda: 4_000_000)
    question = LiveQuestion(path=models("M"), memory=MemoryRequest(), n_ctx=8192, n_threads=1)
    with (
        LlamaEstimator(models("M")) as estimator,
        pytest.raises(NoRoomError, match=r"8,192 cells, 1[345]\.\d MB, do not"),
    ):
        measure_live(estimator, question, Reporter())


def test_loading_can_be_interrupted(models: Callable[[str], Path]) -> None:
    question = LiveQuestion(path=models("M"), memory=MemoryRequest(), n_threads=1)
    with LlamaEstimator(models("M")) as estimator, pytest.raises(InterruptedByUser):
        measure_live(estimator, question, Reporter(should_abort=lambda: True))


@pytest.mark.parametrize(
    ("estimated", "allocated", "difference", "agrees"),
    [(100, 102, 0.02, True), (100, 97, -0.03, False), (0, 0, 0.0, True), (0, 1, float("inf"), False)],
)
def test_two_percent_are_the_limit(estimated: int, allocated: int, difference: float, agrees: bool) -> None:
    part = Compared(name="compute", estimated=estimated, allocated=allocated)
    assert (part.difference, part.agrees) == (pytest.approx(difference), agrees)


def test_live_figures_correct_what_fits_and_the_context_that_was_opened_is_a_row(models: Callable[[str], Path]) -> None:
    question = ModelQuestion(path=models("M"), types=(("f16", "f16"),))
    live = LiveQuestion(path=models("M"), memory=MemoryRequest(), n_threads=1)
    report, lived = ask_about(question, Reporter(), live=live)
    assert lived is not None
    assert report.n_ctx == (512, 2048, 4096, 8192)
    assert report.types[0].contexts[2] == lived.estimate
    (limit,) = report.limits
    beside = lived.rss.batch - lived.weights_estimate - lived.estimate.n_bytes
    if beside >= lived.rss.before:
        assert (lived.n_beside, limit.n_own, limit.is_live) == (beside, beside, True)
    else:
        assert (lived.n_beside, limit.is_live) == (None, False)
    assert replace(lived, n_gpu_layers=1).n_beside is None


@pytest.mark.parametrize(
    ("built", "quantisation", "may"),
    [
        (b"CPU : AVX2 = 1 | REPACK = 1 | ", "Q4_K - Medium", True),
        (b"CPU : AVX2 = 1 | REPACK = 1 | ", None, True),
        (b"CPU : AVX2 = 1 | REPACK = 1 | ", "F16", False),
        (b"CPU : AVX2 = 1 | ", "Q4_0", False),
    ],
)
def test_weights_may_be_repacked_where_the_engine_can_and_they_are_quantised(
    monkeypatch: pytest.MonkeyPatch, built: bytes, quantisation: str | None, may: bool
) -> None:
    monkeypatch.setattr(inspect_live.api, "llama_print_system_info", lambda: built)
    assert may_repack(quantisation) is may


@pytest.mark.parametrize("n_missing", [1, 100_000])
def test_a_file_that_is_shorter_than_its_tensors_is_refused(
    models: Callable[[str], Path], tmp_path: Path, n_missing: int
) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(models("M").read_bytes().rstrip(b"\0")[:-n_missing])
    with pytest.raises(ModelFileError, match=r"cut\.gguf is damaged or cut off: .* not within the file bounds"):
        ask_about(ModelQuestion(path=path), Reporter())


def test_resident_memory_is_that_of_this_process() -> None:
    assert 1 << 20 < resident_bytes() < 1 << 40
