"""Sessions to fork, and what their branches are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.ops.branches import Branch
from llamakv.ops.fork import SaveTarget
from llamakv.ops.prompts import Prompt
from llamakv.ops.requests import MemoryOptions, SamplingOptions
from llamakv.records import Sampling
from tests.engine.scheduler.cases import NOISE, NOISE_Q8_0
from tests.ops.driver import Driver, Forked, Heard

KINDS = ["M", "MS", "MR", "MH", "MH2", "ML"]
TOGETHER = ("M", "MS", "ML")
LONG = "The quick brown fox jumps over the lazy dog. " * 12
PROMPTS = ("Who jumps?", " And over whom, é 数据?", "Tell me more. " * 40)
KEPT = {"q8_0": ("M", MemoryOptions(type_k="q8_0", type_v="q8_0")), "window": ("MS", MemoryOptions(swa="window"))}


def driver_of(models, folder: Path, what: str) -> Driver:
    name, memory = KEPT.get(what, (what, None))
    return Driver(models(name), folder, memory=memory)


def begin(driver: Driver, path: Path, what: str) -> Path:
    """A session: raw text, a conversation, or a document that waits for questions."""
    if what == "chat":
        with driver.chat(save=path, system="Be brief.") as live:
            live.send("Hello there.", Heard().reporter)
            live.send(LONG, Heard().reporter)
    else:
        driver.save(path, LONG, raw=what == "raw")
    return path


def into(folder: Path) -> Callable[[Branch], SaveTarget]:
    """Keep each branch in a file called after its id."""
    return lambda branch: SaveTarget(path=folder / f"{branch.id}.bin", name=None)


def check_is_what_a_cold_start_says(driver: Driver, tokens: Sequence[int], n_generated: int) -> None:
    """The last tokens are what a context says greedily that never restored or shared anything, up to a tie that fell
    the other way: it reads in other batches, which changes rounding."""
    memory = MemoryRequest(
        type_k=driver.memory.type_k or "f16",
        type_v=driver.memory.type_v or "f16",
        swa_full=driver.memory.swa is None,
    )
    noise = NOISE if driver.memory.type_k is None else NOISE_Q8_0
    assert n_generated > 0
    with LlamaModel(driver.model) as model:
        sequence = model.open_sequence(memory, n_ctx_min=1024, n_ctx_max=8192, n_threads=1)
        sequence.extend(tokens[: len(tokens) - n_generated])
        for token in tokens[len(tokens) - n_generated :]:
            (expected,) = sequence.generate(Sampling(), n_max=1)
            if token != expected:
                logits = np.frombuffer(sequence.logits(), dtype=np.float32)
                assert float(logits[expected] - logits[token]) <= noise * float(logits.std())
                return


def text_of(driver: Driver, tokens: Sequence[int]) -> str:
    with LlamaModel(driver.model) as model:
        return b"".join(model.token_bytes(token, special=True) for token in tokens).decode()


def check_says_what_load_says(driver: Driver, path: Path, forked: Forked, sampling: SamplingOptions, **more) -> None:
    for result in forked.results:
        alone = driver.load(path, result.branch.prompt.text, sampling=sampling, **more)
        assert result.error is None
        assert (result.text, result.finish_reason, result.generated) == (
            alone.text,
            alone.finish_reason,
            alone.generated,
        )
        assert (result.reused, result.evaluated, result.seed) == (alone.reused, alone.evaluated, alone.seed)


def of_lengths(*lengths: int) -> list[Prompt]:
    return [
        Prompt(id=number, text="So?", sampling=SamplingOptions(max_tokens=length))
        for number, length in enumerate(lengths)
    ]


def keys(results: Forked) -> dict[str, str]:
    return {str(result.branch.id): str(result.key) for result in results.results if result.error is None}
