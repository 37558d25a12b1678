"""Branches to run, what each writes alone, and how they are compared."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from llama_cpp import llama_cpp as api

from llamakv.engine.contract import MemoryRequest, RunRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.context import N_UBATCH
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.scheduler import LlamaScheduler
from llamakv.records import Sampling, StateSection
from tests.engine.test_sequence import KINDS, open_sequence, saved, tokens_of
from tests.models.vocabulary import N_TOKENS

NOISE = 0.015
"""How far a logit of a branch decoded with others may be from the one of the branch alone, in standard deviations of
its logits (about 12 on the tiny models): twice what was seen in 40,000 choices of M, MS, ME, MH and MH2, which is
0.0073 with f16 cells and 0.0140 with q8_0 ones, where a small difference may tip a rounding over. Two logits that each
move by half of it change places only if they are closer than that: ids have to be equal where the two likeliest are
not."""
NOISE_Q8_0 = 0.03

SUFFIXES = (0, 1, 255, 3, 17, 40, 2, 90, 256, 5, 8, 30, 1, 60, 12, 21, 257, 0, 4, 33, 70, 9, 2, 50)
assert N_UBATCH in SUFFIXES
N_STEPS_MAX = 50_000

Logits = list[np.ndarray]
Seen = dict[LlamaRun, Logits]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a run wrote, and the logits it chose from."""

    ids: list[int]
    logits: Logits
    finish_reason: str


@contextmanager
def watching(n_vocab: int = N_TOKENS) -> Iterator[Seen]:
    """The logits of each choice of each run, as they come."""
    seen: Seen = {}
    original = LlamaRun.add_token

    def add_token(run: LlamaRun, index: int, context: object, is_end: object) -> None:
        pointer = api.llama_get_logits_ith(context, index)
        seen.setdefault(run, []).append(np.ctypeslib.as_array(pointer, (n_vocab,)).copy())
        original(run, index, context, is_end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaRun, "add_token", add_token)
        yield seen


def open_scheduler(
    model: LlamaModel,
    n_parallel: int,
    *,
    n_ctx: int = 512,
    n_ctx_max: int = 4096,
    n_cells_max: int | None = None,
    **memory,
) -> LlamaScheduler:
    return model.open_scheduler(
        MemoryRequest(**memory),
        n_parallel=n_parallel,
        n_ctx_min=min(n_ctx, n_ctx_max),
        n_ctx_max=n_ctx_max,
        n_cells_max=n_cells_max,
        n_threads=1,
    )


def request(tokens: Sequence[int], n: int | None = None, **settings) -> RunRequest:
    """A run of ``n`` tokens; other settings are ``Sampling``'s or the request's."""
    own = {name: settings.pop(name) for name in ("timeout_s", "keeps_cells") if name in settings}
    return RunRequest(tokens=tuple(tokens), sampling=Sampling(max_tokens=n, **settings), **own)


def drive(scheduler: LlamaScheduler, runs: Iterable[LlamaRun]) -> None:
    """Step until these are over."""
    runs = list(runs)
    for _ in range(N_STEPS_MAX):
        if all(run.is_over for run in runs):
            return
        scheduler.step()
    pytest.fail(f"still not over: {[run.number for run in runs if not run.is_over]}, {scheduler.counts}")


def run_all(scheduler: LlamaScheduler, requests: Iterable[RunRequest]) -> tuple[list[LlamaRun], list[Written]]:
    with watching() as seen:
        runs = [scheduler.submit(one) for one in requests]
        drive(scheduler, runs)
    return runs, [written(run, seen) for run in runs]


def written(run: LlamaRun, seen: Seen) -> Written:
    assert run.error is None
    return Written(ids=run.tokens[run.n_prompt :], logits=seen.get(run, []), finish_reason=run.finish_reason)


def alone(
    model: LlamaModel,
    prefix: Sequence[int],
    sections: Iterable[StateSection],
    branches: Iterable[tuple[Sequence[int], Sampling]],
    *,
    n_ctx_max: int = 4096,
    **memory,
) -> list[Written]:
    """Each branch by itself, the only one in its context: restore the prefix, append the suffix, write."""
    sequence = open_sequence(model, n_ctx=min(1024, n_ctx_max), n_ctx_max=n_ctx_max, **memory)
    results = []
    for suffix, sampling in branches:
        sequence.restore(prefix, sections)
        if suffix:
            sequence.extend(suffix)
        with watching() as seen:
            run = sequence.write(sampling)
            drive(sequence.scheduler, [run])
            results.append(written(run, seen))
        sequence.stop()
    sequence.close()
    return results


def cold(model: LlamaModel, *parts: Sequence[int], n: int = 8) -> Written:
    """What is written after these tokens, which are read part by part, in a context without anything else."""
    sequence = open_sequence(model)
    for part in parts:
        sequence.extend(part)
    with watching() as seen:
        run = sequence.write(Sampling(max_tokens=n))
        drive(sequence.scheduler, [run])
    sequence.close()
    return written(run, seen)


def prefilled(model: LlamaModel, prefix: Sequence[int], **memory) -> list[StateSection]:
    """The state of a prefix, as a file keeps it."""
    sequence = open_sequence(model, **memory)
    sequence.extend(prefix)
    sections = saved(sequence)
    sequence.close()
    return sections


def is_same(actual: Written, expected: Written) -> bool:
    """Whether all is equal, to the bit."""
    return (actual.ids, actual.finish_reason) == (expected.ids, expected.finish_reason) and all(
        np.array_equal(a, b) for a, b in zip(actual.logits, expected.logits, strict=True)
    )


def check_close(actual: Written, expected: Written, noise: float = NOISE) -> bool:
    """Check that one equals the other within the noise, up to a tie that fell the other way; whether all ids are
    equal."""
    for i, (a, b) in enumerate(zip(actual.logits, expected.logits, strict=False)):
        allowed = noise * float(b.std())
        assert float(np.abs(a - b).max()) <= allowed, f"choice {i}"
        if actual.ids[i] != expected.ids[i]:
            second, first = np.sort(b)[-2:]
            assert float(first - second) <= allowed, f"choice {i} is another one, and was no tie"
            return False
    assert (actual.ids, actual.finish_reason) == (expected.ids, expected.finish_reason)
    return True


def check_all_close(
    actual: Sequence[Written], expected: Sequence[Written], *, noise: float = NOISE, n_ties_max: int | None = None
) -> None:
    """Check that each equals the other within the noise, and that ties fell the other way in few of them (None: in
    half of them, where there are not many)."""
    n_ties = sum(not check_close(a, b, noise) for a, b in zip(actual, expected, strict=True))
    assert n_ties <= (len(expected) // 2 if n_ties_max is None else n_ties_max)


# ---------------------------------------------------------------- cases


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A prefix, branches of it, and what each of them writes alone."""

    model: LlamaModel
    memory: dict[str, object]
    prefix: list[int]
    branches: list[tuple[list[int], Sampling]]
    expected: list[Written]

    @property
    def noise(self) -> float:
        return NOISE_Q8_0 if "type_k" in self.memory else NOISE

    def scheduler(self, n_parallel: int, **room: int) -> LlamaScheduler:
        scheduler = open_scheduler(self.model, n_parallel, **room, **self.memory)
        scheduler.root.extend(self.prefix)
        return scheduler

    def run(self, n_parallel: int, **room: int) -> tuple[LlamaScheduler, list[Written]]:
        scheduler = self.scheduler(n_parallel, **room)
        requests = [RunRequest(tokens=(*self.prefix, *suffix), sampling=s) for suffix, s in self.branches]
        return scheduler, run_all(scheduler, requests)[1]


def make_case(model: LlamaModel, lengths: Sequence[tuple[int, int]], n_prefix: int = 300, **memory) -> Case:
    """Branches of these lengths: tokens in the suffix, tokens to write."""
    prefix = tokens_of(model, n_prefix, seed=97)
    branches = [(tokens_of(model, n_suffix, seed=i), Sampling(max_tokens=n)) for i, (n_suffix, n) in enumerate(lengths)]
    expected = alone(model, prefix, prefilled(model, prefix, **memory), branches, **memory)
    return Case(model=model, memory=memory, prefix=prefix, branches=branches, expected=expected)


def mixed(n: int, *, seed: int = 1) -> list[tuple[int, int]]:
    """Lengths of ``n`` branches, the ones around a call's size among them, with 1 to 9 tokens to write."""
    numbers = random.Random(seed)
    return [(SUFFIXES[i % len(SUFFIXES)], numbers.randint(1, 9)) for i in range(n)]


Q8_0 = {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": True}
NO_FLASH = {"flash_attn": False}
MOST_KINDS = [*KINDS[:-2], *(pytest.param(name, marks=pytest.mark.slow) for name in KINDS[-2:])]
"""Every kind of memory; of the two windowed and of the two hybrid models one by default."""

CASES = [
    *((name, {}) for name in ("M", "MS", "MH")),
    ("M", Q8_0),
    *(pytest.param((name, {}), marks=pytest.mark.slow) for name in ("MR", "MH2", "ML", "MG", "ME")),
    *(pytest.param((name, Q8_0), marks=pytest.mark.slow) for name in (*KINDS[1:], "ME")),
    *(pytest.param((name, NO_FLASH), marks=pytest.mark.slow) for name in (*KINDS, "ME")),
]


def submit_all(scheduler: LlamaScheduler, case: Case, **own) -> list[LlamaRun]:
    return [
        scheduler.submit(RunRequest(tokens=(*case.prefix, *suffix), sampling=sampling, **own))
        for suffix, sampling in case.branches
    ]
