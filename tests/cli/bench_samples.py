"""Results of ``bench`` as they come from a small model on two cores, without measuring anything."""

from __future__ import annotations

import dataclasses

from llamakv.ops.bench.results import (
    BenchedModel,
    BenchResult,
    BreakEven,
    LengthTimes,
    Machine,
    OutputChange,
    Spread,
    StrategiesResult,
    StrategyResult,
    TypeResult,
)

LENGTHS = (62, 125, 250, 500, 1000)

MACHINE = Machine(
    processor="Example CPU 3000 @ 2.60GHz",
    n_cores=2,
    memory_bytes=8_334_000_000,
    system="Linux 6.1",
    python="3.11.9",
    llamakv="0.1.0",
    llama_cpp="0.3.36",
)
MODEL = BenchedModel(
    name="SmolLM2 135M Instruct",
    architecture="llama",
    quantisation="Q4_1",
    kind="dense",
    digest="ab" * 32,
    n_bytes=98_362_432,
    n_ctx_train=8192,
)


def spread(value: float, share: float = 0.05) -> Spread:
    """A value measured three times."""
    return Spread.of([value * (1 - share), value, value * (1 + 2 * share)])


def length(n_tokens: int, *, bytes_per_token: float = 23_040.0, cold: bool = True) -> LengthTimes:
    """Times of one length."""
    raw = round(n_tokens * bytes_per_token)
    return LengthTimes(
        n_tokens=n_tokens,
        prefill_s=spread(0.02 + n_tokens / 152),
        save_s=spread(0.012 + n_tokens / 30_000),
        resume_cold_s=spread(0.034 + n_tokens / 18_000) if cold else None,
        resume_warm_s=spread(0.021 + n_tokens / 24_000),
        cold_resident_bytes=0 if cold else None,
        raw_bytes=raw,
        file_bytes=round(raw * 0.85) + 9_000,
    )


def type_result(type_k: str = "f16", type_v: str | None = None, *, scale: float = 1.0, **changes: object) -> TypeResult:
    """One cache type; ``scale`` is its size over that of f16."""
    result = TypeResult(
        type_k=type_k,
        type_v=type_v or type_k,
        refused=None,
        flash_attn=True,
        n_ctx=2048,
        state_bytes_per_token=23_040.0 * scale,
        context_bytes=round(47_185_920 * scale) + 12_000_000,
        peak_rss_bytes=310_000_000 + round(94_000_000 * scale),
        lengths=tuple(length(n, bytes_per_token=23_040 * scale) for n in LENGTHS),
        prompt_tokens_per_s=spread(152.0 - 20 * (1 - scale)),
        decode_tokens_per_s=spread(46.0 - 9 * (1 - scale)),
        n_branches=64,
        fork_s=spread(0.0041),
        break_even_warm=BreakEven(n_tokens=62, at_most=True),
        break_even_cold=BreakEven(n_tokens=71, at_most=False),
        output=OutputChange(
            n_positions=64, mean_kl=0.02 * (1 - scale), most_kl=0.3 * (1 - scale), top_agreement=0.9 + 0.1 * scale
        ),
    )
    return dataclasses.replace(result, **changes)  # type: ignore[arg-type]


def refused(type_k: str = "q5_1", reason: str = "quantised values need flash attention, which is off") -> TypeResult:
    """A cache type the engine does not take."""
    return type_result(
        type_k, refused=reason, flash_attn=None, n_ctx=None, state_bytes_per_token=None, context_bytes=None,
        peak_rss_bytes=None, lengths=(), prompt_tokens_per_s=None, decode_tokens_per_s=None, n_branches=None,
        fork_s=None, break_even_warm=None, break_even_cold=None, output=None,
    )  # fmt: skip


def cut_short(type_k: str = "q8_0", **changes: object) -> TypeResult:
    """A cache type of which only the two shortest lengths were measured, once."""
    lengths = tuple(
        dataclasses.replace(
            length(n), prefill_s=Spread.of([0.1 * n]), save_s=Spread.of([0.1]), resume_warm_s=Spread.of([0.1]),
            resume_cold_s=None,
        )
        for n in LENGTHS[:2]
    )  # fmt: skip
    values: dict[str, object] = {
        "lengths": lengths, "peak_rss_bytes": None, "prompt_tokens_per_s": None, "decode_tokens_per_s": None,
        "n_branches": None, "fork_s": None, "break_even_cold": None, **changes,
    }  # fmt: skip
    return dataclasses.replace(type_result(type_k), **values)  # type: ignore[arg-type]


def strategy(name: str, **changes: object) -> StrategyResult:
    """One strategy for 8 users."""
    reused = 0 if name == "none" else 7000 if name == "in-process" else 8000
    is_apart = name == "cross-process"
    result = StrategyResult(
        name=name,
        n_processes=8 if is_apart else 1,
        peak_bytes=1_780_000_000 if is_apart else 571_000_000 if name == "none" else 382_000_000,
        counts_shared_once=True,
        weights_bytes=786_899_456 if is_apart else 98_362_432,
        context_bytes=473_000_000 if is_apart else 96_000_000,
        n_cells_peak=1512 if name in ("in-process", "hybrid") else 8512,
        cell_bytes=34_836_480 if name in ("in-process", "hybrid") else 196_116_480,
        first_token_s=spread(52.0 if name == "none" else 7.2 if name == "in-process" else 0.31),
        elapsed_s=58.1 if name == "none" else 11.0,
        preparation_s=0.0 if name in ("none", "in-process") else 6.9,
        n_generated=256,
        tokens_per_s=256 / (58.1 if name == "none" else 11.0),
        n_prompt_tokens=8256,
        n_reused=reused,
        n_evaluated=8256 - reused,
        hit_rate=reused / 8256,
        bytes_read=0 if name in ("none", "in-process") else 156_800_000 if is_apart else 19_600_000,
        bytes_written=0 if name in ("none", "in-process") else 19_600_000,
        n_users_that_fit=36 if is_apart else 252,
        limited_by="memory" if is_apart else "sequences",
    )
    return dataclasses.replace(result, **changes)  # type: ignore[arg-type]


def strategies(**changes: object) -> StrategiesResult:
    """All four strategies."""
    result = StrategiesResult(
        n_users=8,
        n_prefix=1000,
        n_question=32,
        n_answer=32,
        shares_prefix=True,
        type_k="f16",
        type_v="f16",
        flash_attn=True,
        memory_limit_bytes=8_000_000_000,
        rows=tuple(map(strategy, ("none", "in-process", "cross-process", "hybrid"))),
    )
    return dataclasses.replace(result, **changes)  # type: ignore[arg-type]


def result(**changes: object) -> BenchResult:
    """A whole run: four cache types, of which one is refused, and four strategies."""
    made = BenchResult(
        started_s=1_750_000_000.0,
        elapsed_s=431.5,
        interrupted=False,
        machine=MACHINE,
        model=MODEL,
        n_threads=2,
        n_repeats=3,
        types=(
            type_result(),
            type_result("q8_0", scale=0.531),
            type_result("q8_0", "q4_0", scale=0.406),
            refused(),
        ),
        strategies=strategies(),
        work_dir="/home/user/.cache/llamakv",
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]
