"""One step of a real run in a process of its own: `python -m tests.real.worker '{"do": ...}'`, JSON on stdout.

Actions: ``prefill`` (read a text, save it, then write on without a pause), ``go_on`` (resume a file and write on),
``turns`` (a chat, from the start or resumed), ``raw_turns`` (the same without a template), ``memory`` (peak memory of a
save or a resume), ``times`` (the parts of resuming), ``save_times`` (a turn's save by the session's length).
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from llamakv.ops.chat import open_chat
from llamakv.ops.keeping import Keeper
from llamakv.ops.matching import find_model, merge_memory
from llamakv.ops.opening import OpenModel, resume
from llamakv.ops.requests import ChatRequest, MemoryOptions, ModelRequest, Reporter, ResumeOptions, SamplingOptions
from llamakv.ops.resume_cost import sections_restored
from llamakv.records import Sampling
from llamakv.store.session_file import SessionReader, read_session


def request_of(job: dict) -> ModelRequest:
    return ModelRequest(
        path=Path(job["model"]), cache_dir=Path(job["cache"]), n_threads=job.get("threads", 2), n_ctx=job.get("n_ctx")
    )


def sampling_of(job: dict) -> Sampling:
    return Sampling(**job.get("sampling", {}))


def open_fresh(job: dict) -> OpenModel:
    found = find_model(request_of(job), None, Reporter())
    memory = merge_memory(MemoryOptions(**job.get("memory", {})), None, None, may_change=True)
    return OpenModel(found, request_of(job), memory, reporter=Reporter())


def write_on(opened: OpenModel, sampling: Sampling, n: int) -> dict:
    """The next ``n`` tokens and a digest of the logits each was chosen from; ends of replies are gone through."""
    ids: list[int] = []
    digests: list[str] = []
    while len(ids) < n:
        for token in opened.sequence.generate(sampling, n_max=n - len(ids)):
            ids.append(token)
            digests.append(hashlib.sha256(opened.sequence.logits()).hexdigest())
    return {"ids": ids, "logits": digests}


def prefill(job: dict) -> dict:
    with open_fresh(job) as opened:
        tokens = opened.model.tokenize(job["text"], add_special=True, parse_special=False)[: job["n"]]
        opened.open_sequence(len(tokens)).extend(tokens)
        keeper = Keeper(opened, None, compress="auto")
        keeper.save(Path(job["path"]), chat=None, text="", sampling=sampling_of(job), reporter=Reporter())
        return {"n_tokens": len(tokens), **write_on(opened, sampling_of(job), job["write"])}


def go_on(job: dict) -> dict:
    path = Path(job["path"])
    opened, info, back = resume(path, request_of(job), MemoryOptions(), ResumeOptions(), Reporter(), read_session(path))
    with opened:
        facts = {"reused": back.reused, "evaluated": back.evaluated, "n_tokens": len(info.record.tokens)}
        return {**facts, **write_on(opened, sampling_of(job), job["write"])}


def turns(job: dict) -> dict:
    path = Path(job["path"])
    given = SamplingOptions(**job["sampling"])
    place = {"resume": path} if path.exists() else {"save": path, "system": job.get("system")}
    request = ChatRequest(model=request_of(job), sampling=given, memory=MemoryOptions(**job.get("memory", {})), **place)
    answers = []
    with open_chat(request, Reporter()) as conversation:
        for text in job["texts"]:
            answer = conversation.send(text, Reporter())
            sequence = conversation._model.sequence
            answers.append(
                {
                    "text": answer.text,
                    "reused": answer.reused,
                    "evaluated": answer.evaluated,
                    "ids": list(sequence.tokens),
                    "logits": hashlib.sha256(sequence.logits()).hexdigest(),
                }
            )
    return {"answers": answers}


def raw_turns(job: dict) -> dict:
    """Raw text in turns: read a piece, write on, save; from the start, or from where the file is."""
    path, sampling = Path(job["path"]), sampling_of(job)
    if path.exists():
        info = read_session(path)
        opened, info, _ = resume(path, request_of(job), MemoryOptions(), ResumeOptions(), Reporter(), info)
    else:
        opened, info = open_fresh(job), None
    with opened:
        keeper = Keeper(opened, info, compress="auto")
        sequence = opened.sequence if info else opened.open_sequence()
        answers = []
        for text in job["texts"]:
            sequence.extend(opened.model.tokenize(text, add_special=not sequence.tokens, parse_special=False))
            answers.append(write_on(opened, sampling, job["write"]))
            keeper.save(path, chat=None, text="", sampling=sampling, reporter=Reporter())
        return {"answers": answers}


# ---------------------------------------------------------------- memory and time


def _memory(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(name)).split()[1]) * 1024


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def memory(job: dict) -> dict:
    """Bytes that a save, or a resume, took beyond what was resident before (save) or after it (resume)."""
    path = Path(job["path"])
    if not path.exists():
        with open_fresh(job) as opened:
            tokens = opened.model.tokenize(job["text"], add_special=True, parse_special=False)[: job["n"]]
            opened.open_sequence(len(tokens)).extend(tokens)
            keeper = Keeper(opened, None, compress="auto")
            before = _memory("VmRSS")
            _reset_peak()
            saved = keeper.save(path, chat=None, text="", sampling=sampling_of(job), reporter=Reporter())
            peak = _memory("VmHWM")
            largest = max(section.n_raw for section in saved.info.sections)
            return {"extra": peak - before, "section": largest, "raw": saved.info.n_raw_bytes,
                    "stored": saved.info.n_stored_bytes, "file": saved.info.n_file_bytes}  # fmt: skip
    info = read_session(path)
    _reset_peak()
    opened, info, _ = resume(path, request_of(job), MemoryOptions(), ResumeOptions(), Reporter(), info)
    with opened:
        peak, after = _memory("VmHWM"), _memory("VmRSS")
        return {"extra": peak - after, "section": max(section.n_raw for section in info.sections)}


def _best(n: int, action) -> float:
    times = []
    for _ in range(n):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)


def times(job: dict) -> dict:
    """Seconds of each part of resuming, and of the prefill it replaces, all in this process and on this machine."""
    path, n_repeats = Path(job["path"]), job.get("repeats", 7)
    with open_fresh(job) as opened:
        tokens = opened.model.tokenize(job["text"], add_special=True, parse_special=False)[: job["n"]]
        sequence = opened.open_sequence(len(tokens))
        started = time.perf_counter()
        sequence.extend(tokens)
        next(iter(sequence.generate(Sampling(), n_max=1)))
        prefill_s = time.perf_counter() - started
        sequence.rewind(len(tokens))
        keeper = Keeper(opened, None, compress="auto")
        started = time.perf_counter()
        saved = keeper.save(path, chat=None, text="", sampling=Sampling(), reporter=Reporter())
        save_s = time.perf_counter() - started
        sections = sections_restored(saved.info.sections)
        raw = [replace(section, data=memoryview(bytes(section.data))) for section in sequence.export(0)]
        context, cutter = sequence._shared.native, sequence._shared.cutter

        def set_raw() -> None:
            context.remove(1)
            cutter.put(context, 1, raw, len(tokens) - 1)

        def read_file() -> None:
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass

        def decompress() -> None:
            with SessionReader(path) as reader:
                for _ in reader.read(sections):
                    pass

        def bring_back() -> None:
            with SessionReader(path) as reader:
                sequence.restore(reader.info.record.tokens, reader.read(sections))

        def first_token() -> None:
            bring_back()
            next(iter(sequence.generate(Sampling(), n_max=1)))

        return {
            "prefill_s": prefill_s,
            "save_s": save_s,
            "read_s": _best(n_repeats, read_file),
            "read_decompress_s": _best(n_repeats, decompress),
            "set_s": _best(n_repeats, set_raw),
            "resume_s": _best(n_repeats, bring_back),
            "first_token_s": _best(n_repeats, first_token),
            "raw": saved.info.n_raw_bytes,
            "stored": saved.info.n_stored_bytes,
            "file": saved.info.n_file_bytes,
            "n_tokens": len(tokens),
        }


def save_times(job: dict) -> dict:
    """Seconds that saving the same short turn takes after a short and after a long session."""
    rows = []
    for n in job["lengths"]:
        path = Path(job["path"]).with_suffix(f".{n}.bin")
        with open_fresh(job) as opened:
            tokens = opened.model.tokenize(job["text"], add_special=True, parse_special=False)[:n]
            sequence = opened.open_sequence(n + 600)
            sequence.extend(tokens)
            keeper = Keeper(opened, None, compress="auto")
            words = {"chat": None, "text": "", "sampling": Sampling(), "reporter": Reporter()}
            keeper.save(path, **words)
            found = []
            for _ in range(5):
                before = path.stat().st_size
                sequence.extend(tokens[:60])
                started = time.perf_counter()
                saved = keeper.save(path, **words)
                found.append((time.perf_counter() - started, path.stat().st_size - before))
            sections = saved.info.sections
            rows.append({"n": n, "save_s": min(t for t, _ in found), "grown": int(np.median([g for _, g in found])),
                         "section": sections[-1].n_stored, "n_tokens": len(saved.info.record.tokens)})  # fmt: skip
    return {"rows": rows}


ACTIONS = {action.__name__: action for action in (prefill, go_on, turns, raw_turns, memory, times, save_times)}

if __name__ == "__main__":
    task = json.loads(sys.stdin.read())
    print(json.dumps(ACTIONS[task.pop("do")](task)))
