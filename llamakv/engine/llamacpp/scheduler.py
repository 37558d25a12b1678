"""Continuous batching: many sequences in one context, a decode call at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from llamakv.engine.contract import AbortCheck, Counts, ModelInfo, Run, RunRequest, Shortage
from llamakv.engine.llamacpp.admission import Admission
from llamakv.engine.llamacpp.calls import Part, RefusedError, StoppedError, compose, decode, state_before, undo
from llamakv.engine.llamacpp.keeping import RunsKept
from llamakv.engine.llamacpp.kept import KeptRuns
from llamakv.engine.llamacpp.native import Pointer
from llamakv.engine.llamacpp.places import Places
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.sequence import LlamaSequence
from llamakv.engine.llamacpp.shared import N_EXPECTED, SharedContext
from llamakv.engine.llamacpp.turns import piece_by_piece
from llamakv.engine.memory import ContextMemory
from llamakv.errors import AbortedError, LlamakvError, NoRoomError
from llamakv.records import Sampling, StateSection

_N_READ = 64
"""Tokens read at most in a call in which others write, which does not stand still meanwhile. Calls of 64 took as long
for each token as calls of 256 (one thread: SmolLM2 8.0 and 8.2 ms, Gemma 3 4.9 and 5.4 ms); those of 16 took a fifth
longer."""


class LlamaScheduler(RunsKept):
    """``Scheduler`` of the contract. A call that also decodes reads ``n_read_max`` tokens at most; ``fills_memory``:
    free memory limits the cells too. ``admission``, ``lock`` and ``turn`` are for its sequences."""

    def __init__(
        self,
        shared: SharedContext,
        *,
        info: ModelInfo,
        vocab: Pointer,
        is_end: Callable[[int], bool],
        token_bytes: Callable[[int], bytes],
        n_parallel: int,
        n_ctx_max: int,
        fills_memory: bool,
        is_for_many: bool = False,
        later_share: float = 0.0,
        n_read_max: int = _N_READ,
    ) -> None:
        self._shared = shared
        self._info = info
        self._vocab = vocab
        self._is_end = is_end
        self._token_bytes = token_bytes
        self._n_parallel = n_parallel
        self._n_ctx_max = n_ctx_max
        self._n_read_max = n_read_max
        self._is_for_many = is_for_many
        self._active: list[LlamaRun] = []
        self._over: list[LlamaRun] = []
        self._n_submitted = self._n_steps = self._n_decoded = 0
        self._is_closed = False
        self.flash_attn = shared.native.flash_attn
        kept = KeptRuns(shared, self._active, shares_runs=is_for_many, later_share=later_share)
        self._places = Places(shared, kept, self._active, drop=self._free, is_for_many=is_for_many)
        admission = Admission(
            shared,
            self._active,
            kept,
            drop=self._free,
            info=info,
            n_parallel=n_parallel,
            n_ctx_max=n_ctx_max,
            fills_memory=fills_memory,
            promises_part=is_for_many and shared.decodes_together,
        )
        super().__init__(kept, admission)
        self._root = LlamaSequence(self, shared, info=info, n_ctx_max=n_ctx_max)
        self._counts = self._count()

    @property
    def root(self) -> LlamaSequence:
        """The sequence that is always there."""
        return self._root

    @property
    def n_parallel(self) -> int:
        """Runs under way at the same time, at most."""
        return self._n_parallel

    @property
    def decodes_together(self) -> bool:
        """Whether one call decodes several sequences."""
        return self._shared.decodes_together

    @property
    def counts(self) -> Counts:
        """Where things stand, or stood before the call under way."""
        if self.lock.acquire(blocking=False):
            try:
                self._counts = self._count()
            finally:
                self.lock.release()
        return self._counts

    def _count(self) -> Counts:
        return Counts(
            n_waiting=len(self.admission.waiting),
            n_active=len(self._active),
            n_cells=self._shared.n_used,
            n_cells_peak=self._shared.n_peak,
            n_reserved=min(self._shared.n_used + self.admission.promised, self.admission.limit),
            n_cells_max=self.admission.limit,
            n_steps=self._n_steps,
            n_decoded=self._n_decoded,
            n_kept=len(self._kept),
        )

    @property
    def memory(self) -> ContextMemory:
        """What the present context took; see the contract."""
        return self._shared.allocated

    # ------------------------------------------------------------ runs in and out

    def submit(self, request: RunRequest) -> LlamaRun:
        """Queue a run; see the contract.

        Raises:
            ValueError: what is no token or no number of likely tokens, or a scheduler for no runs or that was closed.
        """
        with self.lock:
            if self._is_closed or not self._n_parallel:
                raise ValueError("the scheduler was closed" if self._is_closed else "the scheduler is for no runs")
            if request.n_top_logprobs is not None and request.n_top_logprobs < 0:
                raise ValueError(f"{request.n_top_logprobs} likely tokens cannot be told")
            tokens = list(request.tokens)
            self.check_tokens(tokens)
            if not tokens:
                raise ValueError("a run has at least one token")
            number = self._n_submitted
            run = LlamaRun(tokens, owner=self, request=request, n_ctx_max=self._n_ctx_max, number=number)
            run.places = self._places.of(request)
            self._n_submitted += 1
            self.admission.waiting.append(run)
            return run

    def guest(self, sequence: LlamaSequence, tokens: list[int], request: RunRequest | None) -> LlamaRun:
        """A run on a sequence of its own, which it does not wait for; without a request it only reads. It may have the
        cells that nobody else was promised."""
        n_ctx_max = min(self._n_ctx_max, max(sequence.n_cells + self.admission.free + 1, len(tokens)))
        run = LlamaRun(tokens, owner=self, request=request, n_ctx_max=n_ctx_max, number=-1, cells=sequence.cells)
        run.begin(self._vocab, self._info.n_vocab, self._token_bytes)
        self._active.insert(0, run)
        return run

    def cancel(self, run: Run) -> None:
        """End a run as interrupted, and free its cells unless they are a guest's."""
        own = self.own(run)
        with self.lock:
            own.end("interrupted")
            if own in self.admission.waiting:
                self.admission.waiting.remove(own)
            if own in self._active:
                self._active.remove(own)
            self._free(own)

    def end(self, run: Run) -> None:
        """End a run as interrupted, and keep what it has written; see the contract."""
        own = self.own(run)
        with self.lock:
            if own.n_generated and own in self._active and own.request is not None and own.request.keeps_cells:
                own.end("interrupted")  # the next step takes it away
            else:
                self.cancel(own)

    def release(self, run: Run) -> None:
        """Free the cells of a run that kept them.

        Raises:
            ValueError: it is another scheduler's run, or is not over.
        """
        own = self.own(run)
        if not own.is_over:
            raise ValueError("the run is not over: cancel it")
        with self.lock:
            self._free(own)
            self._places.release_unneeded(self.admission.waiting, idle_s=0.0, space=own.space)

    def release_copies(self, idle_s: float) -> None:
        """Free the copies that nobody needs; see the contract."""
        if self._kept.has_copies:  # else it need not wait for a step
            with self.lock:
                self._places.release_unneeded(self.admission.waiting, idle_s=idle_s)

    def _free(self, run: LlamaRun) -> None:
        if run.cells is not None and not run.is_guest:
            if not self._is_closed:
                self._shared.drop(run.cells)
            run.cells = None
        self._kept.remove(run)

    def adopt(
        self, tokens: Sequence[int], sections: Callable[[int], Iterable[StateSection]], *, space: str = ""
    ) -> LlamaRun:
        """A kept run made of stored state; see the contract.

        Raises:
            ValueError: no tokens, one that does not exist, or a scheduler that was closed.
        """
        if self._is_closed or not tokens:
            raise ValueError("the scheduler was closed" if self._is_closed else "a session has at least one token")
        self.check_tokens(tokens)
        request = RunRequest(tokens=(), sampling=Sampling(max_tokens=0), keeps_cells=True, space=space)
        run = LlamaRun(list(tokens), owner=self, request=request, n_ctx_max=self._n_ctx_max, number=-1)
        run.end("restored")
        self.admission.adopt(run, self._root, sections, self.lock)
        return run

    def export(self, run: Run, from_position: int = 0) -> Iterator[StateSection]:
        """State of a run that kept its cells, in sections.

        Raises:
            ValueError: it is another scheduler's run, or has no cells.
            EngineError: while this was taken piece by piece, its cells were freed.
        """
        own = self.own(run)
        cells = own.cells
        if cells is None:
            raise ValueError("the run kept no cells")
        return piece_by_piece(self._places.export(own, cells, from_position), self.lock, lambda: own.cells is cells)

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Refuse what is no token.

        Raises:
            ValueError: one is not in the vocabulary.
        """
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._info.n_vocab):
            wrong = next(token for token in tokens if not 0 <= token < self._info.n_vocab)
            raise ValueError(f"token {wrong} is not one of 0 ... {self._info.n_vocab - 1}")

    def close(self) -> None:
        """Free the context, and all sequences with it."""
        with self.lock:
            self._is_closed = True
            for run in [*self._active, *self.admission.waiting, *self._kept]:
                run.end("interrupted")
                run.cells = None
                self._kept.remove(run)
            self._active.clear()
            self.admission.waiting.clear()
            self._shared.close()

    # ------------------------------------------------------------ a step

    def step(self, should_abort: AbortCheck | None = None) -> list[Run]:
        """One decode call for all that are under way; see the contract."""
        with self.lock:
            self.turn(should_abort)
            over, self._over = self._over, []
            return list(over)

    def turn(self, should_abort: AbortCheck | None = None) -> None:
        """A step whose finished runs the next ``step`` returns."""
        with self.lock:
            if self._is_closed:
                raise ValueError("the scheduler was closed")
            self._over += self.admission.admit(self._root, self._begin)
            for run in self._active:
                run.check_limits()
            self._collect()
            part = self._compose()
            if part:
                self._advance(part, should_abort)
                for run, _ in part:
                    run.check_limits()
                self._collect()
            self._counts = self._count()

    def _begin(self, run: LlamaRun) -> None:
        try:
            run.begin(self._vocab, self._info.n_vocab, self._token_bytes)
            self._places.keep(run)  # it may have begun at a place with what goes soon
        except LlamakvError:
            self._free(run)
            raise

    def _fail(self, run: LlamaRun, error: LlamakvError) -> None:
        run.fail(error)
        if run in self._active:
            self._active.remove(run)
        self._free(run)
        self._over.append(run)

    def _collect(self) -> None:
        """Take away the runs that are over. Cells are kept of those that have all of theirs: one that ends while it is
        read again has not."""
        for run in [run for run in self._active if run.is_over or (run.request is None and run.n_unread == 0)]:
            self._active.remove(run)
            keeps = run.request is not None and run.request.keeps_cells and run.error is None
            if not run.is_guest and keeps and run.n_unread == 0:
                self._kept.add(run)
            elif not run.is_guest:
                self._free(run)
            if not run.is_guest:
                self._over.append(run)

    def _compose(self) -> Part:
        """Who takes part in the next call, with how many tokens."""
        runs = [run for run in self._active if not run.is_paused]
        others_write = False
        if not self._shared.decodes_together and runs:
            others_write = self._is_for_many and any(run.n_unread == 0 for run in runs)
            runs = runs[:1]
            self._active.remove(runs[0])
            self._active.append(runs[0])  # each in its turn
        return compose(runs, n_read_max=self._n_read_max, is_fair=self._is_for_many, others_write=others_write)

    def _advance(self, part: Part, should_abort: AbortCheck | None) -> None:
        if should_abort is not None and should_abort():
            raise AbortedError("stopped", n_done=0)
        part = self._with_room(part)
        if not part:
            return
        if all(run.n_unread == 0 for run, _ in part):
            should_abort = None  # one token each: not worth being asked in the middle
        before = state_before(self._shared, part, should_abort)
        try:
            part = decode(self._shared, part, should_abort)
        except RefusedError as refused:
            if refused.run.is_guest:
                raise refused.reason from None
            self._fail(refused.run, refused.reason)
            return
        except StoppedError:
            for run in undo(self._shared, part, before):
                self._send_back(run)
            raise AbortedError("stopped", n_done=0) from None
        self._n_steps += 1
        index = -1
        native = self._shared.native.pointer
        for run, n in part:
            index += n
            assert run.cells is not None
            writes = run.n_unread == 0
            run.cells.n_cells += n
            run.n_evaluated += 0 if run.n_generated and writes else n
            self._n_decoded += n
            if writes:
                run.add_token(index, native, self._is_end)
        for run, _ in part:
            self._places.keep(run)  # for which a context with more sequences may take this one's place
        self._shared.note_peak()

    # ------------------------------------------------------------ when memory is short

    def _with_room(self, part: Part) -> Part:
        """Have cells for a call, if need be by having those that came last wait: they became longer than was promised,
        or the machine's memory has gone to others."""
        while part:
            expected = sum(min(run.n_to_come, run.n_unread + N_EXPECTED) for run in self._active)
            try:
                self.admission.leave_some(part)
                self._shared.ensure(sum(n for _, n in part), expected=expected)
            except NoRoomError as error:
                if not self.admission.drop_one():
                    part = self._have_wait(part, error)
            else:
                return part
        return part

    def _have_wait(self, part: Part, error: NoRoomError) -> Part:
        """Who takes part without the last one, which is sent back to wait only when the first could not go on."""
        if self.admission.promises_part:
            newest = max((run for run, _ in part), key=lambda run: (run.n_to_come, run.number))
            n_cells = sum(n for _, n in part)
            if self.admission.awaits_others:
                self.admission.shortage = Shortage(n_cells=n_cells, n_sequences=0)
            if len(part) > 1 or (self.admission.awaits_others and not newest.is_guest):
                return [(run, n) for run, n in part if run is not newest]
        candidates = [run for run in self._active if not run.is_guest] or [run for run, _ in part]
        last = max(candidates, key=lambda run: (run.is_paused, run.n_to_come * self._is_for_many, run.number))
        if len(candidates) > 1 or (self.admission.awaits_others and not last.is_guest):
            self.admission.note_shortage()
            self._send_back(last)
        elif last.n_generated:  # what it has written stands
            last.end("context")
        elif last.is_guest:
            raise error
        else:
            self._fail(last, error)
        return [(run, n) for run, n in part if run is not last]

    def send_back(self, run: Run) -> bool:
        """Take its cells from a run that stands still; see the contract."""
        own = self.own(run)
        with self.lock:
            stands_still = own.is_paused and own in self._active and not own.is_over
            if stands_still:
                self._send_back(own)
            return stands_still

    def _send_back(self, run: LlamaRun) -> None:
        """Let a run wait again, with what it has written; it is read again when its turn comes."""
        run.n_sent_back += 1
        self._active.remove(run)
        self._free(run)
        self.admission.waiting.appendleft(run)
