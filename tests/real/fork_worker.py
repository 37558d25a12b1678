"""Steps of a real fork, each in a process of its own: `python -m tests.real.fork_worker`, a job as JSON on stdin.

Actions: ``throughput`` (the scheduler against a bare loop over the same decode calls), ``fork_time`` (many sequences
from one prefix), ``batch`` (prompts over a prefix against reading each from scratch), ``agreement`` (branches decoded
together against each alone: logits and ids).
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import llama_cpp.llama_cpp as api
import numpy as np

from llamakv.cli.config import prepare_engine
from llamakv.engine.contract import MemoryRequest, RunRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.context import NativeContext, Rows
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.sampler import TokenChooser
from llamakv.engine.llamacpp.scheduler import LlamaScheduler
from llamakv.records import Sampling, StateSection
from tests.real.text import story

PROMPTS = [
    "Who is the person?",
    "What was painted?",
    "Where does it happen?",
    "What is the harbour master doing, in one word?",
    "Is there a market?",
    "How many letters were there?",
    "Name one place.",
    "What colour is it?",
]


@contextmanager
def timed(owner: object, name: str) -> Iterator[list[float]]:
    """Seconds of every call of a method or a module's function, added up in a list of one."""
    real: Callable = getattr(owner, name)
    total = [0.0]

    def method(*args, **more):
        started = time.perf_counter()
        try:
            return real(*args, **more)
        finally:
            total[0] += time.perf_counter() - started

    setattr(owner, name, method)
    try:
        yield total
    finally:
        setattr(owner, name, real)


def prefix_of(model: LlamaModel, n: int) -> list[int]:
    return model.tokenize(story(n // 10 + 20), add_special=True, parse_special=False)[:n]


def memory_of(job: dict) -> MemoryRequest:
    return MemoryRequest(**job.get("memory", {}))


def scheduler_of(model: LlamaModel, job: dict, n_parallel: int, n_ctx_min: int) -> LlamaScheduler:
    return model.open_scheduler(
        memory_of(job), n_parallel=n_parallel, n_ctx_min=n_ctx_min, n_ctx_max=8192, n_threads=job.get("threads", 2)
    )


class Bare:
    """The plain calls: a context like the scheduler's, and llama_decode over batches that were recorded."""

    def __init__(self, context: NativeContext) -> None:
        self.context = context
        self.batch = api.llama_batch_init(256, 0, 1)

    def decode(self, rows: list[Rows]) -> float:
        batch, n = self.batch, 0
        for part in rows:
            for i, token in enumerate(part.tokens):
                batch.token[n], batch.pos[n] = token, part.p0 + i
                batch.n_seq_id[n], batch.seq_id[n][0] = 1, part.seq_id
                batch.logits[n] = part.want_logits and i == len(part.tokens) - 1
                n += 1
        batch.n_tokens = n
        started = time.perf_counter()
        assert api.llama_decode(self.context.pointer, batch) == 0
        return time.perf_counter() - started


def throughput(job: dict) -> dict:
    """Decode calls of the scheduler and, after each, the same call in a bare loop, with every other thing equal."""
    rows = []
    with LlamaModel(Path(job["model"])) as model:
        prefix = prefix_of(model, job["n"])
        root = scheduler_of(model, job, 0, len(prefix) + 1).root
        root.extend(prefix)
        sections = list(root.export())
        root.close()
        for n_parallel in job["parallel"]:
            rows.append(_throughput(model, job, prefix, sections, n_parallel))
    return {"rows": rows}


def _throughput(model: LlamaModel, job: dict, prefix: list[int], sections: list[StateSection], n_parallel: int) -> dict:
    n_steps = job["steps"]
    room = len(prefix) + n_parallel * (n_steps + 40)
    ours = scheduler_of(model, job, n_parallel, room)
    theirs = scheduler_of(model, job, n_parallel, room)
    for scheduler in (ours, theirs):
        scheduler.root.restore(prefix, iter(sections))
    shared = theirs._shared
    for _ in range(n_parallel):
        shared.fork(theirs.root.cells, theirs.root.n_cells)
    bare, calls = Bare(shared.native), []
    real = NativeContext.decode

    def decode(self, rows, **more):
        calls.append(list(rows))
        return real(self, rows, **more)

    sampling = Sampling(temperature=0.8, seed=1, max_tokens=None)
    ours._is_end = lambda _: False
    for i in range(n_parallel):
        asked = model.tokenize(f" {PROMPTS[i % len(PROMPTS)]}", add_special=False, parse_special=False)
        ours.submit(RunRequest(tokens=(*prefix, *asked), sampling=sampling))
    NativeContext.decode = decode
    step_s: list[float] = []
    bare_s: list[float] = []
    try:
        n_writing = 0
        while n_writing < n_parallel:  # the prompts are read, and one call more to warm up
            ours.step()
            bare.decode(calls[-1])
            n_writing = sum(part.want_logits for part in calls[-1])
        native_s = 0.0
        with timed(api, "llama_decode") as decode_s, timed(TokenChooser, "choose") as choose_s:
            for _ in range(n_steps):
                before, started = decode_s[0], time.perf_counter()
                ours.step()
                step_s.append(time.perf_counter() - started)
                native_s += decode_s[0] - before
                assert len(calls[-1]) == n_parallel
                bare_s.append(bare.decode(calls[-1]))
    finally:
        NativeContext.decode = real
        ours.close()
        theirs.close()
    total_s = sum(step_s)
    return {
        "parallel": n_parallel,
        "tokens_per_s": n_parallel / float(np.median(step_s)),
        "bare_tokens_per_s": n_parallel / float(np.median(bare_s)),
        "ratio": float(np.median(bare_s) / np.median(step_s)),
        "decode": native_s / total_s,
        "sampling": choose_s[0] / total_s,
        "python": 1 - (native_s + choose_s[0]) / total_s,
        "step_ms": 1000 * float(np.median(step_s)),
    }


def fork_time(job: dict) -> dict:
    with LlamaModel(Path(job["model"])) as model:
        prefix = prefix_of(model, job["n"])
        scheduler = scheduler_of(model, job, job["parallel"], len(prefix) + 1)
        scheduler.root.extend(prefix)
        shared, root = scheduler._shared, scheduler.root.cells
        before = shared.n_used
        times = []
        for _ in range(5):
            started = time.process_time()  # it waits for nothing; other programs do not lengthen this
            branches = [shared.fork(root, root.n_cells) for _ in range(job["parallel"])]
            times.append(time.process_time() - started)
            used = shared.n_used
            for branch in branches:
                shared.drop(branch)
        return {"fork_s": min(times), "cells_before": before, "cells_after": used}


def batch(job: dict) -> dict:
    """All prompts over a prefix that is read once, and a few of them read from scratch."""
    sampling = Sampling(temperature=0.0, max_tokens=job["max_tokens"])
    with LlamaModel(Path(job["model"])) as model:
        prefix = prefix_of(model, job["n"])
        asked = [
            model.tokenize(f"\n{i}. {PROMPTS[i % len(PROMPTS)]}\n", add_special=False, parse_special=False)
            for i in range(job["prompts"])
        ]
        started = time.perf_counter()
        scheduler = scheduler_of(model, job, job["parallel"], len(prefix) + 1)
        scheduler.root.extend(prefix)
        prefill_s = time.perf_counter() - started
        runs = [scheduler.submit(RunRequest(tokens=(*prefix, *tokens), sampling=sampling)) for tokens in asked]
        n_over = 0
        while n_over < len(runs):
            n_over += len(scheduler.step())
        fork_s = time.perf_counter() - started
        counts = scheduler.counts
        scheduler.close()
        started = time.perf_counter()
        for tokens in asked[: job["scratch"]]:
            alone = scheduler_of(model, job, 0, len(prefix) + 64).root
            alone.extend([*prefix, *tokens])
            for _ in alone.generate(sampling, n_max=job["max_tokens"]):
                pass
            alone.close()
        scratch_s = (time.perf_counter() - started) / job["scratch"] * len(asked)
        return {
            "prefill_s": prefill_s,
            "fork_s": fork_s,
            "scratch_s": scratch_s,
            "generated": sum(run.n_generated for run in runs),
            "cells_peak": counts.n_cells_peak,
        }


def agreement(job: dict) -> dict:
    """How far branches that are decoded together are from each alone: largest difference of logits, and where the
    chosen token differs, by how much the likeliest was ahead of the next. With one at a time nothing may differ."""
    n_write = job["max_tokens"]
    with LlamaModel(Path(job["model"])) as model:
        prefix = prefix_of(model, job["n"])
        choice = random.Random(1)
        lengths = [0, 1, 255, 256, 257, *(choice.randrange(2, 40) for _ in range(job["branches"] - 5))]
        text = model.tokenize(story(400, seed=3), add_special=False, parse_special=False)
        branches = [text[i * 7 : i * 7 + n] for i, n in enumerate(lengths)]
        root = scheduler_of(model, job, 0, len(prefix) + 1).root
        root.extend(prefix)
        sections = list(root.export())
        root.close()
        alone = [_alone(model, job, prefix, sections, branch, n_write) for branch in branches]
        rows = [_together(model, job, prefix, sections, branches, alone, n) for n in job["parallel"]]
    return {"rows": rows}


Words = tuple[list[int], list[np.ndarray]]


def _alone(model, job: dict, prefix: list[int], sections, branch: list[int], n_write: int) -> Words:
    live = scheduler_of(model, job, 0, len(prefix) + 1).root
    live.restore(prefix, iter(sections))
    if branch:
        live.extend(branch)
    ids, logits = [], []
    while len(ids) < n_write:  # ends of replies are gone through
        for token in live.generate(Sampling(), n_max=n_write - len(ids)):
            ids.append(token)
            logits.append(np.array(live.logits()))
    live.close()
    return ids, logits


def _together(model, job: dict, prefix, sections, branches, alone: list[Words], n_parallel: int) -> dict:
    scheduler = scheduler_of(model, job, n_parallel, len(prefix) + 1)
    scheduler.root.restore(prefix, iter(sections))
    scheduler._is_end = lambda _: False
    found: dict[int, list[np.ndarray]] = {}
    real = LlamaRun.add_token

    def add_token(self, index, context, is_end):
        logits = scheduler._shared.native.logits(model.info.n_vocab, index)
        found.setdefault(id(self), []).append(np.array(logits))
        return real(self, index, context, is_end)

    LlamaRun.add_token = add_token
    try:
        sampling = Sampling(max_tokens=job["max_tokens"])
        runs = [scheduler.submit(RunRequest(tokens=(*prefix, *new), sampling=sampling)) for new in branches]
        n_over = 0
        while n_over < len(runs):
            n_over += len(scheduler.step())
    finally:
        LlamaRun.add_token = real
        scheduler.close()
    worst, flips, n_compared, std = 0.0, [], 0, 0.0
    for (ids, before), run in zip(alone, runs, strict=True):
        written = run.tokens[run.n_prompt :]
        for i, (a, b) in enumerate(zip(before, found[id(run)], strict=True)):
            worst, std, n_compared = max(worst, float(np.abs(a - b).max())), float(a.std()), n_compared + 1
            if ids[i] != written[i]:
                top = np.sort(a)[-2:]
                flips.append(float(top[1] - top[0]))
                break
    return {"parallel": n_parallel, "worst": worst, "std": std, "flips": flips, "compared": n_compared}


ACTIONS = {action.__name__: action for action in (throughput, fork_time, batch, agreement)}

if __name__ == "__main__":
    prepare_engine()
    task = json.loads(sys.stdin.read())
    print(json.dumps(ACTIONS[task.pop("do")](task)))
