"""One live sequence: reading, writing, going back, and its state in sections. Its scheduler does the decoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llamakv.engine.contract import AbortCheck, ModelInfo, OnTokens, Rewound, RunRequest
from llamakv.engine.llamacpp.cells import SequenceCells
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.shared import SharedContext
from llamakv.engine.llamacpp.turns import piece_by_piece
from llamakv.engine.room import no_room
from llamakv.errors import AbortedError
from llamakv.records import Sampling, SectionKind, StateSection

if TYPE_CHECKING:
    from llamakv.engine.llamacpp.scheduler import LlamaScheduler

_N_MARKS = 4


class LlamaSequence:
    """``LiveSequence`` of the contract. ``cells`` and ``marks`` (recurrent states, by the number of cells they were
    taken at) are for the scheduler."""

    def __init__(self, scheduler: LlamaScheduler, shared: SharedContext, *, info: ModelInfo, n_ctx_max: int) -> None:
        self._scheduler = scheduler
        self._shared = shared
        self._info = info
        self._n_ctx_max = n_ctx_max
        self._tokens: list[int] = []
        self._n_settled = 0
        self._finish_reason = ""
        self._run: LlamaRun | None = None
        self.cells: SequenceCells = shared.add()
        self.marks: dict[int, memoryview] = {}

    # ------------------------------------------------------------ facts

    @property
    def tokens(self) -> Sequence[int]:
        """All token ids, the last one pending; do not change it."""
        return self._tokens

    @property
    def n_cells(self) -> int:
        """Evaluated tokens."""
        return self.cells.n_cells

    @property
    def n_ctx(self) -> int:
        """Cells the context has room for now."""
        return self._shared.n_ctx

    @property
    def n_ctx_max(self) -> int:
        """Tokens it may have."""
        return self._n_ctx_max

    @property
    def n_settled(self) -> int:
        """Leading cells unchanged since the last ``settle``."""
        return self._n_settled

    def settle(self) -> None:
        """Declare the present cells saved."""
        self._n_settled = self.n_cells

    @property
    def n_state_bytes(self) -> int:
        """Bytes of its whole state; see the contract."""
        with self._scheduler.lock:
            return self._shared.native.state_size(self.cells.seq_id) if self.n_cells else 0

    @property
    def finish_reason(self) -> str:
        """Why the last writing ended."""
        return self._finish_reason if self._run is None else self._run.finish_reason

    @property
    def scheduler(self) -> LlamaScheduler:
        """Who decodes for it."""
        return self._scheduler

    def logits(self) -> memoryview:
        """Float32 logits of the last decoded token; valid until the next decode."""
        return self._shared.native.logits(self._info.n_vocab)

    # ------------------------------------------------------------ reading

    def extend(
        self,
        tokens: Sequence[int],
        *,
        replace_pending: bool = False,
        on_progress: OnTokens | None = None,
        should_abort: AbortCheck | None = None,
    ) -> int:
        """Append tokens and evaluate all but the last; see the contract."""
        if not tokens:
            raise ValueError("nothing to append")
        self._check_idle()
        self._scheduler.check_tokens(tokens)
        with self._scheduler.lock:
            kept = self._tokens[:-1] if replace_pending else self._tokens
            if len(kept) < self.n_cells:
                raise ValueError("the pending token has been evaluated already")
            self._ensure_room(len(kept) + len(tokens))
            self._tokens = [*kept, *tokens]
            return self._evaluate(on_progress, should_abort)

    def _evaluate(self, on_progress: OnTokens | None, should_abort: AbortCheck | None) -> int:
        """Evaluate up to the pending token, in batches; the split depends on where it starts and nothing else."""
        start, end = self.n_cells, len(self._tokens) - 1
        if start >= end:
            return 0
        with self._scheduler.lock:
            run = self._scheduler.guest(self, self._tokens, None)
            try:
                while run.n_unread:
                    self._scheduler.turn(should_abort)
                    if on_progress is not None:
                        on_progress(self.n_cells - start, end - start)
            except AbortedError as error:
                del self._tokens[self.n_cells + 1 :]
                n_done = self.n_cells - start
                raise AbortedError(f"stopped after {n_done} of {end - start} tokens", n_done=n_done) from error
            finally:
                self._scheduler.cancel(run)
        return end - start

    # ------------------------------------------------------------ writing

    def write(self, sampling: Sampling) -> LlamaRun:
        """Begin to write behind the pending token; see the contract."""
        if not self._tokens:
            raise ValueError("an empty sequence has nothing to go on from")
        self._check_idle()
        request = RunRequest(tokens=(), sampling=sampling, keeps_cells=True)
        with self._scheduler.lock:
            self._run = self._scheduler.guest(self, self._tokens, request)
        return self._run

    def generate(
        self, sampling: Sampling, *, n_max: int | None = None, should_abort: AbortCheck | None = None
    ) -> Iterator[int]:
        """Choose and append tokens one by one; see the contract."""
        n_before = len(self._tokens)
        run = self.write(replace(sampling, max_tokens=n_max, stop=()))
        n_given = 0
        try:
            while True:
                if should_abort is not None and should_abort():
                    return
                self._scheduler.turn()
                for token in self._tokens[n_before + n_given :]:
                    n_given += 1
                    yield token
                if run.is_over:
                    return
        finally:
            self.stop()

    def _check_idle(self) -> None:
        if self._run is not None and not self._run.is_over:
            raise ValueError("the sequence is being written")

    def stop(self) -> None:
        """End what is being written, as ``interrupted``."""
        if self._run is not None:
            self._scheduler.cancel(self._run)
            self._finish_reason = self._run.finish_reason
            self._run = None

    # ------------------------------------------------------------ going back

    def mark(self) -> None:
        """Remember this place on memory that cannot go back by itself."""
        if self._shared.is_recurrent and self.n_cells:
            with self._scheduler.lock:
                self.marks[self.n_cells] = self._shared.tail(self.cells)
            for position in sorted(self.marks)[:-_N_MARKS]:
                del self.marks[position]

    def remember(self, section: StateSection) -> None:
        """Take a stored tail section as a place that ``rewind`` can go back to."""
        if section.kind is SectionKind.TAIL and 0 < section.p1 <= self.n_cells:
            self.marks[section.p1] = section.data

    def rewind(
        self, n_tokens: int, *, on_progress: OnTokens | None = None, should_abort: AbortCheck | None = None
    ) -> Rewound:
        """Keep the first ``n_tokens`` tokens; see the contract. 0 empties the sequence."""
        if not 0 <= n_tokens <= len(self._tokens):
            raise ValueError(f"cannot keep {n_tokens} of {len(self._tokens)} tokens")
        self._check_idle()
        n_cells = max(n_tokens - 1, 0)
        with self._scheduler.lock:
            if n_cells < self.n_cells:
                self._cut_cells(n_cells)
            kept = self.n_cells
            self._n_settled = min(self._n_settled, kept)
            self.marks = {position: tail for position, tail in self.marks.items() if position <= kept}
            self._tokens = self._tokens[:n_tokens]
            n_evaluated = self._evaluate(on_progress, should_abort) if n_tokens else 0
        return Rewound(n_kept=kept, n_evaluated=n_evaluated)

    def _cut_cells(self, n_cells: int) -> None:
        """Drop cells beyond ``n_cells``, and as many more as the memory makes necessary."""
        if self._shared.cut(self.cells, n_cells):
            return
        place = max((position for position in self.marks if position <= n_cells), default=0)
        self._shared.go_back_to_tail(self.cells, place, self.marks.get(place))

    # ------------------------------------------------------------ state

    def export(self, from_position: int = 0) -> Iterator[StateSection]:
        """Yield the state beyond ``from_position`` in sections; see the contract."""
        return piece_by_piece(self._shared.export(self.cells, from_position), self._scheduler.lock)

    def restore(self, tokens: Sequence[int], sections: Iterable[StateSection]) -> None:
        """Replace the sequence with a stored one; see the contract."""
        if not tokens:
            raise ValueError("a session has at least one token")
        self._check_idle()
        self._scheduler.check_tokens(tokens)
        with self._scheduler.lock:
            if len(tokens) > self._n_ctx_max:
                self._ensure_room(len(tokens))  # raises, while the sequence is still there
            self._forget()
            self._ensure_room(len(tokens))
            self._shared.restore(self.cells, sections, len(tokens) - 1)
            self._tokens = list(tokens)
            self._n_settled = self.n_cells

    def _forget(self) -> None:
        self._shared.clear(self.cells)
        self._tokens = []
        self.marks = {}
        self._n_settled = 0

    def _ensure_room(self, n_tokens: int) -> None:
        """Have cells for ``n_tokens``, in a larger context if need be."""
        if n_tokens > self._n_ctx_max:
            raise no_room(
                needed=n_tokens,
                used=self.n_cells,
                limit=self._n_ctx_max,
                n_ctx_train=self._info.n_ctx_train,
            )
        self._scheduler.admission.check_free(n_tokens - 1 - self.n_cells)
        self._shared.ensure(max(n_tokens - self.n_cells, 0))

    def close(self) -> None:
        """Free its context, and every sequence in it."""
        self._scheduler.close()
