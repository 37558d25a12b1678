"""A request under way: what is to be run for it, and what was written and is not read yet."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llamakv.engine.contract import Run, RunRequest
from llamakv.engine.contract import TokenLogprob as EngineLogprob
from llamakv.errors import LlamakvError, NoRoomError
from llamakv.server.contract import AnswerPiece, TokenLogprob, Usage

if TYPE_CHECKING:
    from llamakv.server.turns import Turn

WAITING_BYTES_MAX = 8 << 20
"""What may wait for a client that reads more slowly than is written: about two thousand tokens, each told with 20
others and their probabilities."""

_LOGPROB_BYTES = 175
"""What a token with its probability takes, as measured (CPython 3.11)."""


class UnreadError(LlamakvError):
    """More was written than a client reads."""

    code = "unread"


def for_space(error: LlamakvError, space: str) -> LlamakvError:
    """What a space of its own is told: not how many cells others have."""
    if not space or not isinstance(error, NoRoomError):
        return error
    needed, limit = error.fields.get("needed"), error.fields.get("limit")
    what = f"{needed:,} tokens do" if isinstance(needed, int) else "it does"
    return NoRoomError(f"{what} not fit beside what is in memory", hint=error.hint, needed=needed, limit=limit)


@dataclass(slots=True)
class _Unread:
    """What waits of one choice."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


class Outbox:
    """What was written of an answer's choices and is not read yet. Filled by the engine thread, emptied by the event
    loop it was made in; pieces that wait are joined, so they are never more than one for each choice.

    No more than ``WAITING_BYTES_MAX`` waits: beyond that the answer has failed, what waited is forgotten, and
    ``on_unread`` is called, once, on the thread that filled it.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._lock = threading.Lock()
        self._waiting: dict[int, _Unread] = {}
        self._n_bytes = 0
        self._error: LlamakvError | None = None
        self._is_told = False
        self.on_unread: Callable[[], None] = lambda: None

    def put(
        self, index: int, text: str, logprobs: Sequence[EngineLogprob] = (), *, finish_reason: str | None = None
    ) -> None:
        """Add to a choice; nothing happens if the answer has failed. From any thread."""
        told = [self._logprob(one) for one in logprobs]
        with self._lock:
            if self._error is not None:
                return
            waiting = self._waiting.setdefault(index, _Unread())
            waiting.texts.append(text)
            waiting.logprobs += told
            waiting.finish_reason = finish_reason
            self._n_bytes += len(text) + _LOGPROB_BYTES * sum(1 + len(one.top) for one in told)
            is_too_much = self._n_bytes > WAITING_BYTES_MAX
            if is_too_much:
                self._waiting.clear()
                self._error = UnreadError(
                    f"about {self._n_bytes} bytes of the answer were not read, {WAITING_BYTES_MAX} may wait"
                )
        self._tell()
        if is_too_much:
            self.on_unread()

    def fail(self, error: LlamakvError) -> None:
        """The answer has failed. From any thread."""
        with self._lock:
            self._error = self._error or error
        self._tell()

    async def take(self) -> list[AnswerPiece]:
        """All that waits, as soon as there is something.

        Raises:
            LlamakvError: the answer has failed, and what came before was taken.
        """
        while True:
            await self._event.wait()
            with self._lock:
                self._event.clear()
                self._is_told = False
                waiting, self._waiting, self._n_bytes = self._waiting, {}, 0
                error = self._error
            found = [
                AnswerPiece(
                    index=index,
                    text="".join(one.texts),
                    logprobs=tuple(one.logprobs),
                    finish_reason=one.finish_reason,
                )
                for index, one in waiting.items()
            ]
            if found:
                if error is not None:
                    self._event.set()
                return found
            if error is not None:
                raise error

    def _tell(self) -> None:
        with self._lock:
            if self._is_told:
                return
            self._is_told = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._event.set)

    def _logprob(self, one: EngineLogprob) -> TokenLogprob:
        top = tuple(
            TokenLogprob(token=token, text=self._token_bytes(token), logprob=logprob) for token, logprob in one.top
        )
        return TokenLogprob(token=one.token, text=self._token_bytes(one.token), logprob=one.logprob, top=top)


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """A run to be done for choice ``index`` of an answer; without an ``outbox`` nobody wants what is written.
    ``deadline_s`` is a ``time.perf_counter`` value.

    ``on_over`` is called once, on the engine thread, before its end is told, with whether the run has its cells; if it
    never began, on any. ``finish_reason`` is why it ended, empty before and where it failed. ``source`` is where cells
    were that it begins with; ``held`` is a kept run that is held until it has begun with that. ``turn`` is the answer
    that it is a choice of. With ``keeps_when_left`` what was written stays also where nobody waits for the rest.
    """

    request: RunRequest
    index: int
    outbox: Outbox | None
    on_over: Callable[[Job, bool], None]
    deadline_s: float | None = None
    run: Run | None = None
    finish_reason: str = ""
    is_over: bool = False
    is_cancelled: bool = False
    source: str = "memory"
    held: Run | None = None
    turn: Turn | None = None
    keeps_when_left: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether its turn is yet to come."""
        return not self.is_over and (self.run is None or self.run.started_s == 0.0)


class LlamaAnswer:
    """``Answer`` of the contract: ``jobs`` are its choices."""

    def __init__(self, jobs: Sequence[Job], outbox: Outbox, cancel: Callable[[Sequence[Job]], None]) -> None:
        self._jobs = jobs
        self._outbox = outbox
        self._cancel = cancel
        self._queued_at_s = time.perf_counter()
        outbox.on_unread = self.cancel

    async def pieces(self) -> AsyncIterator[AnswerPiece]:
        """What is written, as it comes; see the contract."""
        n_open = len(self._jobs)
        try:
            while n_open:
                for piece in await self._outbox.take():
                    n_open -= piece.finish_reason is not None
                    yield piece
        finally:
            self.cancel()

    @property
    def usage(self) -> Usage:
        """What it took so far."""
        runs = [job.run for job in self._jobs if job.run is not None]
        n_cached = runs[0].n_reused if runs else 0
        return Usage(
            n_prompt=len(self._jobs[0].request.tokens),
            n_cached=n_cached,
            n_generated=sum(run.n_generated for run in runs),
            source=self._jobs[0].source if n_cached else "none",
            queued_s=self._turn_s(runs) - self._queued_at_s,
        )

    def _turn_s(self, runs: Sequence[Run]) -> float:
        """When the first of its runs had its turn; now if none had."""
        return min((run.started_s for run in runs if run.started_s), default=time.perf_counter())

    def cancel(self) -> None:
        """End it; nothing happens if it is over."""
        left = [job for job in self._jobs if not job.is_over]
        if left:
            self._cancel(left)
