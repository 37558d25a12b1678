"""One pair of cache types, measured from inside a process of its own.

All goes through the code that ``save``, ``load`` and ``fork`` run: a text is read into an empty sequence, saved to a
session file, and brought back from it, section by section, digests checked. A context is open before and after, so that
opening it is in none of the times; the weights are in memory throughout, cold or not.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from llamakv.engine.contract import RunRequest, decodes_together
from llamakv.engine.memory import CacheKind, ContextMemory
from llamakv.engine.text import join
from llamakv.errors import AbortedError, NoRoomError
from llamakv.ops.bench.break_even import break_even_cold, break_even_warm
from llamakv.ops.bench.lengths import N_A_STEP
from llamakv.ops.bench.output_change import Logits, compare, logits_along, read_logits, write_logits
from llamakv.ops.bench.processes import Link, own_peak_bytes
from llamakv.ops.bench.requests import CachePair
from llamakv.ops.bench.results import LengthTimes, OutputChange, Spread, TypeResult
from llamakv.ops.keeping import Keeper
from llamakv.ops.matching import FoundModel, merge_memory
from llamakv.ops.opening import OpenModel, restore_from_file
from llamakv.ops.requests import MemoryOptions, ModelRequest, Reporter
from llamakv.records import Sampling
from llamakv.store.page_cache import drop_from_memory, n_resident_bytes
from llamakv.store.session_file import read_session

_N_WARM_UP = 256  # one whole batch


@dataclass(frozen=True, slots=True, kw_only=True)
class PairJob:
    """What to measure. ``tokens`` are the longest text and what comes behind it; ``lengths`` rise to the longest.
    ``n_positions`` 0: the output is not compared; else ``reference`` has the logits to compare with. Files go to
    ``folder``; ``wants_log``: the engine's log is told."""

    found: FoundModel
    model: ModelRequest
    memory: MemoryOptions
    pair: CachePair
    tokens: tuple[int, ...]
    lengths: tuple[int, ...]
    n_cells: int
    n_repeats: int
    n_decoded: int
    n_branches: int
    n_positions: int
    reference: Path
    folder: Path
    wants_log: bool

    @property
    def n_tokens(self) -> int:
        """Tokens of the longest text."""
        return self.lengths[-1]


def measure_pair(link: Link, job: PairJob) -> TypeResult:
    """Measure all of it. That the context is there is told, then a row of what there is so far after each measurement.

    Before anything counts, a text of one batch goes through all of it, and, where the output is compared, the longest
    one is read.

    Raises:
        UsageError, EngineError: the engine does not take such a context.
    """
    with open_for(link, job) as opened:
        link.tell(("opened",))
        meter = _Meter(link, job, opened)
        meter.warm_up()
        for number in range(job.n_repeats):
            meter.repeat(backwards=number % 2 == 1)
        try:
            meter.fork()
        except NoRoomError as error:
            link.tell(("notice", f"{job.n_branches} sequences were not forked to: {error.message}"))
        return meter.result()


def write_reference(link: Link, job: PairJob) -> None:
    """Read the longest text and keep the logits along what comes behind it.

    Raises:
        UsageError, EngineError: as ``measure_pair``.
    """
    with open_for(link, job) as opened:
        meter = _Meter(link, job, opened)
        write_logits(job.reference, meter.read_along())


def open_for(link: Link, job: PairJob) -> OpenModel:
    """The model, with a context that has room for all there is to do."""
    on_log: Callable[[str], None] | None = (lambda line: link.tell(("log", line))) if job.wants_log else None
    memory = merge_memory(replace(job.memory, type_k=job.pair[0], type_v=job.pair[1]), None, None, may_change=True)
    opened = OpenModel(job.found, replace(job.model, on_log=on_log), memory, reporter=Reporter())
    try:
        opened.open_sequence(job.n_cells)
    except BaseException:
        opened.close()
        raise
    return opened


class _Meter:
    """Takes the times of one pair, and puts them together."""

    def __init__(self, link: Link, job: PairJob, opened: OpenModel) -> None:
        self._link = link
        self._job = job
        self._opened = opened
        self._path = job.folder / "session.bin"
        self._settings = opened.model.settings
        self._n_ctx = opened.sequence.n_ctx
        self._memory = opened.sequence.scheduler.memory
        self._peak_bytes = 0
        self._times: dict[int, _Times] = defaultdict(_Times)
        self._decode_s: list[float] = []
        self._fork_s: list[float] = []
        self._n_branches = 0
        self._output: OutputChange | None = None

    # ------------------------------------------------------------ what counts

    def warm_up(self) -> None:
        """Have everything used once: weights, code, file system. The output is compared on the way."""
        self._measure(min(self._job.n_tokens, _N_WARM_UP))
        self._decode()
        self._times.clear()
        self._decode_s.clear()
        if self._job.n_positions:
            reference = read_logits(self._job.reference, self._job.n_positions)
            self._output = compare(reference, self.read_along())

    def repeat(self, *, backwards: bool) -> None:
        """Each length once, in turn, so that a busy moment of the machine does not hit all repeats of one."""
        for n_tokens in reversed(self._job.lengths) if backwards else self._job.lengths:
            self._measure(n_tokens)
            self._link.tell(("row", self.result()))
            if n_tokens == self._job.n_tokens:
                self._decode()
                self._peak_bytes = own_peak_bytes()
                self._link.tell(("row", self.result()))

    def read_along(self) -> Iterator[Logits]:
        """The logits behind the longest text, which is read for that."""
        n, n_positions = self._job.n_tokens, self._job.n_positions
        self._read(n)
        behind = self._job.tokens[n : n + n_positions]
        for index, logits in enumerate(logits_along(self._opened.sequence, behind, n_positions), 1):
            yield logits
            if index % N_A_STEP == 0:
                self._tell_step()

    def fork(self) -> None:
        """Let many sequences have the longest text's cells, as a batch of ``fork`` does when it begins; nothing is
        decoded. Memory that ``fork`` decodes one branch at a time has one."""
        job, opened = self._job, self._opened
        opened.sequence.close()  # two contexts may be more than there is memory for
        together = decodes_together(opened.info.kind, swa_full=opened.memory.swa_full)
        scheduler = opened.model.open_scheduler(
            opened.memory,
            n_parallel=job.n_branches if together else 1,
            n_ctx_min=job.n_cells,
            n_ctx_max=opened.n_ctx_max(),
            n_cells_max=opened.n_ctx_max() if job.model.n_ctx is not None else None,
            n_threads=opened.n_threads,
        )
        restore_from_file(scheduler.root, read_session(self._path), Reporter())
        request = RunRequest(tokens=job.tokens[: job.n_tokens], sampling=Sampling(max_tokens=1))
        for number in range(job.n_repeats + 1):
            runs = [scheduler.submit(request) for _ in range(scheduler.n_parallel)]
            started = time.perf_counter()
            with contextlib.suppress(AbortedError):
                scheduler.step(lambda: True)  # each gets its sequence, then the step is stopped
            begun = [run.started_s for run in runs if run.started_s]
            for run in runs:
                scheduler.cancel(run)
            if number and begun:
                self._n_branches = len(begun)
                self._fork_s.append(max(begun) - started)
        self._tell_step()

    # ------------------------------------------------------------ taking times

    def _measure(self, n_tokens: int) -> None:
        """Read, save, bring back twice. The save comes before the first token, as in ``save``, and takes no part in the
        time to it."""
        times = self._times[n_tokens]
        text = join(self._opened.model.token_bytes(token) for token in self._job.tokens[:n_tokens])
        self._path.unlink(missing_ok=True)
        read_s = self._read(n_tokens)
        keeper = Keeper(self._opened, None, compress="auto")
        saved = keeper.save(self._path, chat=None, text=text, sampling=Sampling(), reporter=Reporter())
        write_s, token = self._first_token()
        times.read_s.append(read_s + write_s)
        times.save_s.append(saved.elapsed_s)
        times.raw_bytes, times.file_bytes = saved.info.n_raw_bytes, saved.info.n_file_bytes
        answers = {token}
        is_dropped = drop_from_memory(self._path)
        n_resident = n_resident_bytes(self._path)
        if is_dropped and n_resident != saved.info.n_file_bytes:
            resume_s, token = self._resume()
            times.resume_cold_s.append(resume_s)
            times.resident_bytes.append(n_resident)
            answers.add(token)
        resume_s, token = self._resume()
        times.resume_warm_s.append(resume_s)
        if len(answers | {token}) > 1:
            self._link.tell(
                ("notice", f"{n_tokens:,} tokens, resumed, were gone on with by another token than when read")
            )
        self._tell_step()

    def _read(self, n_tokens: int) -> float:
        """Read a text into an empty sequence, up to its pending token."""
        sequence = self._opened.sequence
        sequence.rewind(0)
        started = time.perf_counter()
        sequence.extend(
            self._job.tokens[:n_tokens],
            on_progress=lambda _, __: self._tell_step(),
            should_abort=Reporter().should_abort,  # the engine asks, as it does in a save
        )
        return time.perf_counter() - started

    def _resume(self) -> tuple[float, int]:
        """Bring the session back into an empty sequence, to its first token."""
        sequence = self._opened.sequence
        sequence.rewind(0)
        started = time.perf_counter()
        restore_from_file(sequence, read_session(self._path), Reporter())
        restore_s = time.perf_counter() - started
        write_s, token = self._first_token()
        return restore_s + write_s, token

    def _first_token(self) -> tuple[float, int]:
        started = time.perf_counter()
        (token,) = self._opened.sequence.generate(Sampling(), n_max=1)
        return time.perf_counter() - started, token

    def _decode(self) -> None:
        """Write behind the text that was brought back last; the ends of replies are gone through."""
        n_left = self._job.n_decoded
        if not n_left:
            return
        started = time.perf_counter()
        while n_left:
            n_left -= sum(1 for _ in self._opened.sequence.generate(Sampling(), n_max=n_left))
        self._decode_s.append(time.perf_counter() - started)
        self._tell_step()

    def _tell_step(self) -> None:
        self._link.tell(("steps", 1))

    # ------------------------------------------------------------ the row

    def result(self) -> TypeResult:
        """What has been measured so far."""
        job, memory = self._job, self._memory
        lengths = tuple(self._times[n].row(n) for n in job.lengths if n in self._times)
        longest_s = self._times[job.n_tokens].read_s if job.n_tokens in self._times else []
        return TypeResult(
            type_k=job.pair[0],
            type_v=job.pair[1],
            refused=None,
            flash_attn=self._settings.flash_attn,
            n_ctx=self._n_ctx,
            state_bytes_per_token=_bytes_per_token(memory, swa_full=self._settings.swa_full),
            context_bytes=memory.n_bytes,
            peak_rss_bytes=self._peak_bytes or None,
            lengths=lengths,
            prompt_tokens_per_s=Spread.of([job.n_tokens / s for s in longest_s]) if longest_s else None,
            decode_tokens_per_s=Spread.of([job.n_decoded / s for s in self._decode_s]) if self._decode_s else None,
            n_branches=self._n_branches or None,
            fork_s=Spread.of(self._fork_s) if self._fork_s else None,
            break_even_warm=break_even_warm(lengths) if lengths else None,
            break_even_cold=break_even_cold(lengths),
            output=self._output,
        )


@dataclass(slots=True)
class _Times:
    """What was measured with one length."""

    read_s: list[float] = field(default_factory=list)
    save_s: list[float] = field(default_factory=list)
    resume_cold_s: list[float] = field(default_factory=list)
    resume_warm_s: list[float] = field(default_factory=list)
    resident_bytes: list[int | None] = field(default_factory=list)
    raw_bytes: int = 0
    file_bytes: int = 0

    def row(self, n_tokens: int) -> LengthTimes:
        """All of it, as it is told."""
        is_cold = len(self.resume_cold_s) == len(self.read_s)  # each time, or it says nothing
        resident = [n for n in self.resident_bytes if n is not None]
        return LengthTimes(
            n_tokens=n_tokens,
            prefill_s=Spread.of(self.read_s),
            save_s=Spread.of(self.save_s),
            resume_cold_s=Spread.of(self.resume_cold_s) if is_cold else None,
            resume_warm_s=Spread.of(self.resume_warm_s),
            cold_resident_bytes=max(resident) if is_cold and resident else None,
            raw_bytes=self.raw_bytes,
            file_bytes=self.file_bytes,
        )


def _bytes_per_token(memory: ContextMemory, *, swa_full: bool) -> float:
    """What each token more takes, for good: windows that keep only themselves take no more once they are full."""
    grows = {CacheKind.FULL, CacheKind.WINDOWED} if swa_full else {CacheKind.FULL}
    return sum((part.n_bytes / part.n_cells for part in memory.parts if part.kind in grows), 0.0)
