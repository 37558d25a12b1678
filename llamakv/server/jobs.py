"""A request under way: what is to be run for it, and what was written and is not read yet."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llamakv.engine.contract import Run, RunRequest
from llamakv.engine.contract import TokenLogprob as EngineLogprob
from llamakv.errors import LlamakvError
from llamakv.server.contract import AnswerPiece, TokenLogprob, Usage

if TYPE_CHECKING:
    from llamakv.server.turns import Turn


class Outbox:
    """What was written of an answer's choices and is not read yet. Filled by the engine thread, emptied by the event
    loop it was made in; pieces that wait are joined, so they are never more than one for each choice."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._lock = threading.Lock()
        self._waiting: dict[int, AnswerPiece] = {}
        self._error: LlamakvError | None = None
        self._is_told = False

    def put(
        self, index: int, text: str, logprobs: Sequence[EngineLogprob] = (), *, finish_reason: str | None = None
    ) -> None:
        """Add to a choice. From any thread."""
        told = tuple(self._logprob(one) for one in logprobs)
        with self._lock:
            before = self._waiting.get(index)
            if before is None:
                piece = AnswerPiece(index=index, text=text, logprobs=told, finish_reason=finish_reason)
            else:
                piece = replace(
                    before, text=before.text + text, logprobs=before.logprobs + told, finish_reason=finish_reason
                )
            self._waiting[index] = piece
        self._tell()

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
                found, error = list(self._waiting.values()), self._error
                self._waiting.clear()
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
    that it is a choice of.
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
    n_logprobs: int = 0
    source: str = "memory"
    held: Run | None = None
    turn: Turn | None = None

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
        )

    def cancel(self) -> None:
        """End it; nothing happens if it is over."""
        left = [job for job in self._jobs if not job.is_over]
        if left:
            self._cancel(left)
