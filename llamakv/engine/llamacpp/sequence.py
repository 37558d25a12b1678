"""One live sequence: reading, writing, going back, and its state in sections.

The context holds two sequences: the live one, and a scratch sequence through which every piece of state goes in and
out (``seq_cp`` of a range, then the state call). The scratch id is part of the bytes, so it never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import psutil

from llamakv.engine.contract import AbortCheck, ModelInfo, OnTokens, Rewound
from llamakv.engine.llamacpp.context import N_UBATCH, NativeContext
from llamakv.engine.llamacpp.native import Pointer
from llamakv.engine.llamacpp.sampler import TokenChooser
from llamakv.engine.llamacpp.state import LIVE, StateCutter
from llamakv.engine.room import no_room
from llamakv.errors import AbortedError, NoRoomError
from llamakv.records import MemoryKind, Sampling, SectionKind, StateSection

_MIN_CTX = 512
_N_MARKS = 4
_MEMORY_SHARE = 0.9  # of the available memory, that growing may take


class LlamaSequence:
    """``LiveSequence`` of the contract."""

    def __init__(
        self,
        open_context: Callable[[int], NativeContext],
        *,
        info: ModelInfo,
        vocab: Pointer,
        is_end: Callable[[int], bool],
        swa_full: bool,
        n_ctx_min: int,
        n_ctx_max: int,
    ) -> None:
        self._open_context = open_context
        self._info = info
        self._vocab = vocab
        self._is_end = is_end
        self._n_ctx_max = n_ctx_max
        self._context = open_context(_context_size(n_ctx_min, n_ctx_max))
        self._cutter = StateCutter(info.kind, n_window=info.n_window, swa_full=swa_full)
        self._tokens: list[int] = []
        self._n_cells = 0
        self._n_settled = 0
        self._marks: dict[int, memoryview] = {}
        self._finish_reason = ""
        self.flash_attn = self._context.flash_attn

    # ------------------------------------------------------------ facts

    @property
    def tokens(self) -> Sequence[int]:
        """All token ids, the last one pending; do not change it."""
        return self._tokens

    @property
    def n_cells(self) -> int:
        """Evaluated tokens."""
        return self._n_cells

    @property
    def n_ctx(self) -> int:
        """Cells the context has room for now."""
        return min(self._context.n_ctx, self._n_ctx_max)

    @property
    def n_ctx_max(self) -> int:
        """Cells the context may grow to."""
        return self._n_ctx_max

    @property
    def n_settled(self) -> int:
        """Leading cells unchanged since the last ``settle``."""
        return self._n_settled

    def settle(self) -> None:
        """Declare the present cells saved."""
        self._n_settled = self._n_cells

    @property
    def finish_reason(self) -> str:
        """Why the last ``generate`` ended."""
        return self._finish_reason

    def logits(self) -> memoryview:
        """Float32 logits of the last decoded token; valid until the next decode."""
        return self._context.logits(self._info.n_vocab)

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
        self._check_tokens(tokens)
        kept = self._tokens[:-1] if replace_pending else self._tokens
        if len(kept) < self._n_cells:
            raise ValueError("the pending token has been evaluated already")
        self._ensure_room(len(kept) + len(tokens))
        self._tokens = [*kept, *tokens]
        return self._evaluate(on_progress, should_abort)

    def _evaluate(self, on_progress: OnTokens | None, should_abort: AbortCheck | None) -> int:
        """Evaluate up to the pending token, in batches; the split depends on where it starts and nothing else."""
        start, end = self._n_cells, len(self._tokens) - 1
        fragile = should_abort is not None and self._info.kind in (MemoryKind.RECURRENT, MemoryKind.HYBRID)
        while self._n_cells < end:
            p0 = self._n_cells
            batch = self._tokens[p0 : min(p0 + N_UBATCH, end)]
            before = self._cutter.take_tail(self._context, p0) if fragile and p0 else None
            done = self._context.decode(LIVE, batch, p0, want_logits=False, should_abort=should_abort)
            if not done:
                if self._info.kind in (MemoryKind.RECURRENT, MemoryKind.HYBRID):
                    self._cutter.go_back_to_tail(self._context, p0, before)
                else:
                    self._context.remove(LIVE, p0)
                del self._tokens[p0 + 1 :]
                raise AbortedError(f"stopped after {p0 - start} of {end - start} tokens", n_done=p0 - start)
            self._n_cells += len(batch)
            if on_progress is not None:
                on_progress(self._n_cells - start, end - start)
        return end - start

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < self._info.n_vocab:
                raise ValueError(f"token {token} is not one of 0 ... {self._info.n_vocab - 1}")

    # ------------------------------------------------------------ writing

    def generate(
        self, sampling: Sampling, *, n_max: int | None = None, should_abort: AbortCheck | None = None
    ) -> Iterator[int]:
        """Choose and append tokens one by one; see the contract."""
        if not self._tokens:
            raise ValueError("an empty sequence has nothing to go on from")
        chooser = TokenChooser(self._vocab, self._info.n_vocab, sampling, self._tokens)
        n = 0
        try:
            while True:
                if n_max is not None and n >= n_max:
                    self._finish_reason = "length"
                    return
                if should_abort is not None and should_abort():
                    self._finish_reason = "interrupted"
                    return
                if len(self._tokens) >= self._n_ctx_max:
                    self._finish_reason = "context"
                    return
                token = self._next(chooser)
                n += 1
                if self._is_end(token):
                    self._finish_reason = "stop"
                    yield token
                    return
                self._finish_reason = "interrupted"  # if the caller stops asking
                yield token
        finally:
            chooser.close()

    def _next(self, chooser: TokenChooser) -> int:
        position = len(self._tokens)
        self._ensure_room(position + 1)
        self._context.decode(LIVE, self._tokens[-1:], position - 1, want_logits=True)
        self._n_cells = position
        token = chooser.choose(self._context.pointer, position)
        self._tokens.append(token)
        return token

    # ------------------------------------------------------------ going back

    def mark(self) -> None:
        """Remember this place on memory that cannot go back by itself."""
        if self._info.kind in (MemoryKind.RECURRENT, MemoryKind.HYBRID) and self._n_cells:
            self._marks[self._n_cells] = self._cutter.take_tail(self._context, self._n_cells)
            for position in sorted(self._marks)[:-_N_MARKS]:
                del self._marks[position]

    def remember(self, section: StateSection) -> None:
        """Take a stored tail section as a place that ``rewind`` can go back to."""
        if section.kind is SectionKind.TAIL and 0 < section.p1 <= self._n_cells:
            self._marks[section.p1] = section.data

    def rewind(
        self, n_tokens: int, *, on_progress: OnTokens | None = None, should_abort: AbortCheck | None = None
    ) -> Rewound:
        """Keep the first ``n_tokens`` tokens; see the contract. 0 empties the sequence."""
        if not 0 <= n_tokens <= len(self._tokens):
            raise ValueError(f"cannot keep {n_tokens} of {len(self._tokens)} tokens")
        n_cells = max(n_tokens - 1, 0)
        if n_cells < self._n_cells:
            self._cut_cells(n_cells)
        kept = self._n_cells
        self._n_settled = min(self._n_settled, kept)
        self._marks = {position: tail for position, tail in self._marks.items() if position <= kept}
        self._tokens = self._tokens[:n_tokens]
        n_evaluated = self._evaluate(on_progress, should_abort) if n_tokens else 0
        return Rewound(n_kept=kept, n_evaluated=n_evaluated)

    def _cut_cells(self, n_cells: int) -> None:
        """Drop cells beyond ``n_cells``, and as many more as the memory makes necessary."""
        context = self._context
        if n_cells > 0 and self._cutter.can_go_back(context, n_cells) and context.remove(LIVE, n_cells):
            self._n_cells = n_cells
            return
        places = [position for position in self._marks if position <= n_cells]
        place = max(places, default=0)
        self._cutter.go_back_to_tail(context, place, self._marks.get(place))
        self._n_cells = place

    # ------------------------------------------------------------ state

    def export(self, from_position: int = 0) -> Iterator[StateSection]:
        """Yield the state beyond ``from_position`` in sections; see the contract."""
        yield from self._cutter.cut(self._context, from_position, self._n_cells)

    def restore(self, tokens: Sequence[int], sections: Iterable[StateSection]) -> None:
        """Replace the sequence with a stored one; see the contract."""
        if not tokens:
            raise ValueError("a session has at least one token")
        self._check_tokens(tokens)
        if len(tokens) > self._n_ctx_max:
            self._ensure_room(len(tokens))  # raises, while the sequence is still there
        self._forget()
        self._ensure_room(len(tokens))
        n_cells = len(tokens) - 1
        try:
            self._cutter.put(self._context, sections, n_cells)
        except BaseException:
            self._forget()
            raise
        self._tokens = list(tokens)
        self._n_cells = self._n_settled = n_cells

    def _forget(self) -> None:
        self._context.remove(LIVE)
        self._tokens = []
        self._marks = {}
        self._n_cells = self._n_settled = 0

    # ------------------------------------------------------------ room

    def _ensure_room(self, n_tokens: int) -> None:
        """Have cells for ``n_tokens``, in a larger context if need be."""
        if n_tokens > self._n_ctx_max:
            raise no_room(
                needed=n_tokens,
                used=self._n_cells,
                limit=self._n_ctx_max,
                n_ctx_train=self._info.n_ctx_train,
            )
        if n_tokens <= self._context.n_ctx:
            return
        size = _context_size(n_tokens, self._n_ctx_max)
        self._check_memory(size)
        larger = self._open_context(size)
        try:
            self._cutter.put(larger, self._cutter.cut(self._context, 0, self._n_cells), self._n_cells)
        except BaseException:
            larger.close()
            raise
        self._context.close()
        self._context = larger

    def _check_memory(self, n_ctx: int) -> None:
        if self._n_cells < N_UBATCH or self._info.kind is MemoryKind.RECURRENT:
            return
        n_needed = self._context.state_size(LIVE) // self._n_cells * n_ctx
        n_free = int(psutil.virtual_memory().available * _MEMORY_SHARE)
        if n_needed > n_free:
            raise NoRoomError(
                f"a context of {n_ctx} cells needs {n_needed} bytes, {n_free} bytes of memory are free",
                hint="use a smaller cache type (--type-k q8_0 --type-v q8_0) in a new session",
                needed=n_needed,
                free=n_free,
            )

    def close(self) -> None:
        """Free the context."""
        self._context.close()


def _context_size(n_tokens: int, n_max: int) -> int:
    """The power of two that holds ``n_tokens``, within the limit; growing later costs milliseconds."""
    return min(1 << (max(_MIN_CTX, n_tokens) - 1).bit_length(), max(n_max, n_tokens))
