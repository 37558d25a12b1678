"""Continuous batching: many sequences in one context, a decode call at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from llamakv.engine.contract import AbortCheck, Counts, ModelInfo, Run, RunRequest
from llamakv.engine.llamacpp.context import N_UBATCH, Rows
from llamakv.engine.llamacpp.native import Pointer
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.sequence import LlamaSequence
from llamakv.engine.llamacpp.shared import SharedContext
from llamakv.engine.room import no_room
from llamakv.errors import AbortedError, EngineError, LlamakvError, NoRoomError
from llamakv.records import MemoryKind, StateSection

_N_EXPECTED = 256
"""Tokens a run is expected to write: a context that has to grow gets room for these, where they may come."""


class _Stopped(Exception):
    """The abort check stopped a decode call."""


class LlamaScheduler:
    """``Scheduler`` of the contract. ``n_read_max`` tokens at most are read in a call that also decodes;
    ``fills_memory``: the cells are to be limited by the machine's free memory too."""

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
        decodes_together: bool,
        fills_memory: bool,
        n_read_max: int = N_UBATCH,
    ) -> None:
        self._shared = shared
        self._info = info
        self._vocab = vocab
        self._is_end = is_end
        self._token_bytes = token_bytes
        self._n_parallel = n_parallel
        self._n_ctx_max = n_ctx_max
        self._together = decodes_together
        self._fills_memory = fills_memory
        self._n_read_max = n_read_max
        self._waiting: deque[LlamaRun] = deque()
        self._active: list[LlamaRun] = []
        self._over: list[LlamaRun] = []
        self._n_submitted = self._n_steps = self._n_decoded = 0
        self.lock = threading.RLock()
        self.flash_attn = shared.native.flash_attn
        self._root = LlamaSequence(self, shared, info=info, n_ctx_max=n_ctx_max)

    # ------------------------------------------------------------ facts

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
        return self._together

    @property
    def counts(self) -> Counts:
        """Where things stand."""
        return Counts(
            n_waiting=len(self._waiting),
            n_active=len(self._active),
            n_cells=self._shared.n_used,
            n_cells_peak=self._shared.n_peak,
            n_reserved=self._shared.n_used + self._promised(),
            n_cells_max=self._shared.n_cells_max,
            n_steps=self._n_steps,
            n_decoded=self._n_decoded,
        )

    # ------------------------------------------------------------ runs in and out

    def submit(self, request: RunRequest) -> LlamaRun:
        """Queue a run; see the contract.

        Raises:
            ValueError: no tokens, or one that does not exist.
        """
        with self.lock:
            tokens = list(request.tokens)
            self.check_tokens(tokens)
            if not tokens:
                raise ValueError("a run has at least one token")
            run = LlamaRun(
                tokens,
                request=request,
                n_ctx_max=self._n_ctx_max,
                n_shareable=self._n_common(tokens),
                priority=self._n_submitted,
            )
            self._n_submitted += 1
            self._waiting.append(run)
            return run

    def guest(
        self, sequence: LlamaSequence, tokens: list[int], request: RunRequest | None, *, is_fragile: bool
    ) -> LlamaRun:
        """A run on a sequence of its own, which it does not wait for; without a request it only reads."""
        run = LlamaRun(
            tokens,
            request=request,
            n_ctx_max=self._n_ctx_max,
            n_shareable=0,
            priority=-1,
            cells=sequence.cells,
            is_fragile=is_fragile,
        )
        run.begin(self._vocab, self._info.n_vocab, self._token_bytes)
        self._active.insert(0, run)
        return run

    def cancel(self, run: Run) -> None:
        """End a run as interrupted, and free its cells unless they are a guest's."""
        assert isinstance(run, LlamaRun)
        with self.lock:
            run.end("interrupted")
            if run in self._waiting:
                self._waiting.remove(run)
            if run in self._active:
                self._active.remove(run)
            self.release(run)

    def release(self, run: Run) -> None:
        """Free the cells of a run that kept them."""
        assert isinstance(run, LlamaRun)
        with self.lock:
            if run.cells is not None and not run.is_guest:
                self._shared.drop(run.cells)
                run.cells = None

    def export(self, run: Run, from_position: int = 0) -> Iterator[StateSection]:
        """State of a run that kept its cells, in sections."""
        assert isinstance(run, LlamaRun)
        assert run.cells is not None, "the run did not keep its cells"
        yield from self._shared.export(run.cells, from_position)

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
            for run in [*self._active, *self._waiting]:
                run.end("interrupted")
            self._active.clear()
            self._waiting.clear()
            self._shared.close()

    # ------------------------------------------------------------ admission

    def _n_common(self, tokens: Sequence[int]) -> int:
        """How many of the root's cells a run with these tokens may share; its last token stays pending."""
        root = self._root
        n = min(root.n_cells, len(tokens) - 1)
        if list(root.tokens[:n]) == tokens[:n]:
            return n
        return next(i for i in range(n) if root.tokens[i] != tokens[i])

    def _n_needed(self, run: LlamaRun, n_shared: int) -> int:
        """Cells of its own that a run may come to."""
        assert run.request is not None
        n_max = run.request.sampling.max_tokens
        n_tokens = self._n_ctx_max if n_max is None else min(run.n_prompt + n_max, self._n_ctx_max)
        return max(n_tokens, len(run.tokens)) - 1 - n_shared

    def _promised(self) -> int:
        """Cells that runs under way may still take."""
        return sum(
            self._n_needed(run, run.cells.n_shared) - run.cells.n_own
            for run in self._active
            if run.cells is not None and not run.is_guest
        )

    def _admit(self) -> None:
        """Give waiting runs a sequence, in their order, as long as all that is promised fits."""
        if self._waiting and self._fills_memory:
            self._fills_memory = False
            self._shared.n_cells_max = min(self._shared.n_cells_max, self._shared.n_cells_in_memory())
        while self._waiting:
            run = self._waiting[0]
            if not self._fits_at_all(run):
                self._waiting.popleft()
                self._over.append(run)
                continue
            n_guests = sum(active.is_guest for active in self._active)
            if len(self._active) - n_guests >= self._n_parallel or self._shared.n_free_ids == 0:
                return
            n_shared = run.n_shareable if self._shared.can_share_part else self._place_to_share(run)
            free = self._shared.n_cells_max - self._shared.n_used - self._promised()
            if self._n_needed(run, n_shared) > free and len(self._active) > n_guests:
                return
            self._waiting.popleft()
            self._begin(run, n_shared, free)

    def _fits_at_all(self, run: LlamaRun) -> bool:
        if run.is_over:
            return False
        n_most = min(self._n_ctx_max, self._shared.n_cells_max)
        if len(run.tokens) < n_most or (len(run.tokens) == n_most and run.n_generated):
            return True
        run.fail(
            no_room(
                needed=len(run.tokens) + 1,
                used=run.n_shareable,
                limit=n_most,
                n_ctx_train=self._info.n_ctx_train,
            )
        )
        return False

    def _place_to_share(self, run: LlamaRun) -> int:
        """Where memory that cannot be shared in part lets a run begin: at the root's end, at a place that it
        remembers, or at the beginning."""
        if run.n_shareable == self._root.n_cells:
            return run.n_shareable
        return max((place for place in self._root.marks if place <= run.n_shareable), default=0)

    def _begin(self, run: LlamaRun, n_shared: int, free: int) -> None:
        root, shared = self._root, self._shared
        try:
            if n_shared == root.n_cells or shared.can_share_part or n_shared == 0:
                run.cells = shared.fork(root.cells, n_shared)
            else:
                run.cells = shared.fork(root.cells, root.n_cells)
                shared.go_back_to_tail(run.cells, n_shared, root.marks[n_shared])
            run.begin(self._vocab, self._info.n_vocab, self._token_bytes)
        except LlamakvError as error:
            self._fail(run, error)
            return
        if not run.n_generated:
            run.n_reused = n_shared
        # alone it may have all there is, even if that is less than it was promised
        run.n_ctx_max = min(self._n_ctx_max, n_shared + max(free, 0) + 1) if not self._others(run) else self._n_ctx_max
        if len(run.tokens) >= run.n_ctx_max and not run.n_generated:
            self._fail(
                run,
                no_room(
                    needed=len(run.tokens) + 1,
                    used=shared.n_used,
                    limit=shared.n_cells_max,
                    n_ctx_train=self._info.n_ctx_train,
                ),
            )
            return
        self._active.append(run)

    def _others(self, run: LlamaRun) -> list[LlamaRun]:
        return [active for active in self._active if active is not run and not active.is_guest]

    def _fail(self, run: LlamaRun, error: LlamakvError) -> None:
        run.fail(error)
        if run in self._active:
            self._active.remove(run)
        self.release(run)
        self._over.append(run)

    # ------------------------------------------------------------ a step

    def step(self, should_abort: AbortCheck | None = None) -> list[Run]:
        """One decode call for all that are under way; see the contract."""
        with self.lock:
            self._admit()
            for run in self._active:
                run.check_limits()
            self._collect()
            part = self._compose()
            if part:
                self._advance(part, should_abort)
                for run, _ in part:
                    run.check_limits()
                self._collect()
            over, self._over = self._over, []
            return list(over)

    def _collect(self) -> None:
        """Take away the runs that are over."""
        over = [run for run in self._active if run.is_over or (run.request is None and run.n_unread == 0)]
        for run in over:
            self._active.remove(run)
            if not run.is_guest and not (run.request is not None and run.request.keeps_cells and run.error is None):
                self.release(run)
            if not run.is_guest:
                self._over.append(run)

    def _compose(self) -> list[tuple[LlamaRun, int]]:
        """Who takes part in the next call, with how many tokens."""
        runs = self._active
        if not self._together and runs:
            self._active = [*runs[1:], runs[0]]  # each in its turn
            runs = runs[:1]
        part = [(run, 1) for run in runs if run.n_unread == 0]
        left = N_UBATCH - len(part)
        if part:
            left = min(left, self._n_read_max)
        for run in runs:
            n = min(run.n_unread, left)
            if n > 0:
                part.append((run, n))
                left -= n
        return part

    def _advance(self, part: list[tuple[LlamaRun, int]], should_abort: AbortCheck | None) -> None:
        part = self._with_room(part)
        if not part:
            return
        before = self._before(part, should_abort)
        try:
            part = self._decode(part, should_abort)
        except EngineError as error:
            if any(run.is_guest for run, _ in part):
                raise
            for run, _ in part:
                self._fail(run, error)
            return
        except _Stopped:
            self._undo(part, before)
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
        self._shared.note_peak()

    def _decode(self, part: list[tuple[LlamaRun, int]], should_abort: AbortCheck | None) -> list[tuple[LlamaRun, int]]:
        """One call; returns who took part. Where the engine finds no place for cells that are free by our count, it is
        given a larger context, or less to do at once."""
        while True:
            rows = [self._rows(run, n) for run, n in part]
            try:
                if not self._shared.native.decode(rows, should_abort=should_abort):
                    raise _Stopped
            except NoRoomError:
                if self._shared.can_grow:
                    self._shared.enlarge()
                elif len(part) > 1:
                    part = part[: len(part) // 2]
                elif part[0][1] > 1:
                    part = [(part[0][0], part[0][1] // 2)]
                else:
                    raise
            else:
                return part

    @staticmethod
    def _rows(run: LlamaRun, n: int) -> Rows:
        assert run.cells is not None
        p0 = run.cells.n_cells
        is_pending = p0 == len(run.tokens) - 1
        return Rows(seq_id=run.cells.seq_id, tokens=run.tokens[p0 : p0 + n], p0=p0, want_logits=is_pending)

    def _before(self, part: list[tuple[LlamaRun, int]], should_abort: AbortCheck | None) -> memoryview | None:
        """What recurrent memory has to be put back to after a call that was stopped."""
        if should_abort is None or self._info.kind not in (MemoryKind.RECURRENT, MemoryKind.HYBRID):
            return None
        run = part[0][0]
        assert run.cells is not None
        return self._shared.tail(run.cells) if run.is_fragile and run.cells.n_cells else None

    def _undo(self, part: list[tuple[LlamaRun, int]], before: memoryview | None) -> None:
        for run, _ in part:
            assert run.cells is not None
            if self._info.kind not in (MemoryKind.RECURRENT, MemoryKind.HYBRID):
                self._shared.undo(run.cells)
            elif run.is_fragile:
                self._shared.go_back_to_tail(run.cells, run.cells.n_cells, before)
            else:
                self._send_back(run)

    # ------------------------------------------------------------ when memory is short

    def _with_room(self, part: list[tuple[LlamaRun, int]]) -> list[tuple[LlamaRun, int]]:
        """Have cells for a call, if need be by sending the latest runs back to wait: what was promised to them was
        there by our count, but the machine's memory may have gone to others."""
        while part:
            expected = sum(
                min(self._n_needed(run, run.cells.n_shared) - run.cells.n_own, run.n_unread + _N_EXPECTED)
                for run in self._active
                if run.cells is not None and run.request is not None
            )
            try:
                self._shared.ensure(sum(n for _, n in part), expected=expected)
            except NoRoomError as error:
                candidates = [run for run in self._active if not run.is_guest]
                if not candidates:
                    raise
                last = max(candidates, key=lambda run: run.number)
                if len(candidates) == 1:
                    self._fail(last, error)
                else:
                    self._shared.n_cells_max = max(self._shared.native.n_ctx, 1)
                    self._send_back(last)
                part = [(run, n) for run, n in part if run is not last]
            else:
                return part
        return part

    def _send_back(self, run: LlamaRun) -> None:
        """Let a run wait again, with what it has written; it is read again when its turn comes."""
        self._active.remove(run)
        self.release(run)
        self._waiting.appendleft(run)
