"""Answers on their way to a client: whole or in chunks, never longer than the client stays and the time allows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Send

from llamakv.errors import LlamakvError
from llamakv.server.contract import Answer, AnswerPiece, Usage
from llamakv.server.errors_http import HttpError, http_error, json_bytes
from llamakv.server.openai_answers import Wording
from llamakv.server.openai_requests import TextRequest

HEADERS_AFTER_S = 5.0
"""A stream's headers are sent with its first piece, so that a failure before it has a status, but no later than this:
clients give up on servers that say nothing."""

KEEP_ALIVE_S = 15.0
_SEND_TIME_S = 60.0
"""How long a client may take to read one piece before its request is ended, however slowly it reads; one that reads
nothing is dropped earlier (``connections``)."""

_GRACE_S = 10.0
"""How much later than the service, which tells ``timeout`` itself, a request is given up here."""

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # else nginx keeps events until it has a few
    (b"x-content-type-options", b"nosniff"),
]

_T = TypeVar("_T")
Asking = Callable[[], Awaitable[Answer]]


@dataclass(slots=True, kw_only=True)
class Pace:
    """When things came, in ``perf_counter`` seconds, and what the answer took; None before."""

    began_s: float
    first_s: float | None = None
    ended_s: float | None = None
    usage: Usage | None = None

    def piece_came(self) -> None:
        self.ended_s = perf_counter()
        if self.first_s is None:
            self.first_s = self.ended_s


async def while_connected(receive: Receive, work: Awaitable[_T]) -> _T:
    """Do the work unless the client goes away before it is done; then it is cancelled. The body must have been read.

    Raises:
        ClientDisconnect: it went away.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        await _end(watching)
        await _end(working)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[_T]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # told already, or nobody is left to be told


async def gather(ask: Asking, timeout_s: float, pace: Pace) -> tuple[list[AnswerPiece], Usage]:
    """All pieces of an answer, and what it took. However this ends, the request is over then.

    Raises:
        HttpError: 408, the time was up before anything was written.
        LlamakvError: the service's.
    """
    pieces: list[AnswerPiece] = []
    try:
        async with asyncio.timeout(timeout_s + _GRACE_S), _pieces_of(await ask(), pace) as coming:
            async for piece in coming:
                pace.piece_came()
                pieces.append(piece)
    except TimeoutError as error:
        raise _too_late() from error
    if not any(piece.text for piece in pieces) and any(piece.finish_reason == "timeout" for piece in pieces):
        raise _too_late()
    assert pace.usage is not None
    return pieces, pace.usage


async def stream(ask: Asking, request: TextRequest, wording: Wording, send: Send, pace: Pace) -> None:
    """Send the pieces of an answer as server-sent events. However this ends, the request is over then.

    What fails once the headers are sent is told in an event, as OpenAI does.

    Raises:
        HttpError: 408, the time was up before the headers were sent.
        LlamakvError: the service's, before the headers were sent.
        ClientDisconnect: the client does not read any more.
    """
    events = _Events(send)
    opening = wording.opening(request.ask.n_choices)
    timeout_s = request.ask.timeout_s or 0.0
    try:
        async with asyncio.timeout(timeout_s + _GRACE_S), _pieces_of(await ask(), pace) as coming:
            async for piece in _paced(coming):
                if piece is None:
                    await events.send(opening, comment="still at work")
                else:
                    pace.piece_came()
                    await events.send([*opening, *wording.chunks(piece)])
                opening = []
        await events.send(opening)
        assert pace.usage is not None
        await events.end([wording.usage_chunk(pace.usage)] if request.includes_usage else [])
    except (LlamakvError, TimeoutError) as error:
        told = http_error(error) if isinstance(error, LlamakvError) else _too_late()
        if not events.is_begun:
            raise told from error
        await events.break_off(told)


def _too_late() -> HttpError:
    return HttpError(408, "the time for the request was up before it was answered", code="timeout")


@asynccontextmanager
async def _pieces_of(answer: Answer, pace: Pace) -> AsyncIterator[AsyncIterator[AnswerPiece]]:
    """The pieces; leaving before their end ends the request."""
    pieces = answer.pieces()
    try:
        yield pieces
    except BaseException:
        answer.cancel()
        raise
    finally:
        pace.usage = answer.usage
        if isinstance(pieces, AsyncGenerator):
            await pieces.aclose()


async def _paced(pieces: AsyncIterator[AnswerPiece]) -> AsyncGenerator[AnswerPiece | None]:
    """The pieces, and None whenever none came for a time."""
    wait_s = HEADERS_AFTER_S
    while True:
        coming = asyncio.ensure_future(_next(pieces))
        try:
            while not (await asyncio.wait((coming,), timeout=wait_s))[0]:
                yield None
                wait_s = KEEP_ALIVE_S
            wait_s = KEEP_ALIVE_S
            piece = coming.result()
        finally:
            await _end(coming)
        if piece is None:
            return
        yield piece


async def _next(pieces: AsyncIterator[AnswerPiece]) -> AnswerPiece | None:
    return await anext(pieces, None)


class _Events:
    """Server-sent events; the headers go with the first of them."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_begun = False

    async def send(self, events: Sequence[object], *, comment: str = "") -> None:
        """Send events, each as JSON, and a comment, which clients skip."""
        told = [b"data: " + json_bytes(event) + b"\n\n" for event in events]
        if comment:
            told.append(f": {comment}\n\n".encode())
        if told:
            await self._put(b"".join(told))

    async def end(self, events: Sequence[object]) -> None:
        """Send the last events and close."""
        await self.send(events)
        await self._put(b"data: [DONE]\n\n", more_body=False)

    async def break_off(self, error: HttpError) -> None:
        """Tell of an error and close."""
        await self._put(b"data: " + json_bytes(error.body) + b"\n\n", more_body=False)

    async def _put(self, body: bytes, *, more_body: bool = True) -> None:
        try:
            async with asyncio.timeout(_SEND_TIME_S):
                if not self.is_begun:
                    self.is_begun = True
                    await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
                await self._send({"type": "http.response.body", "body": body, "more_body": more_body})
        except (TimeoutError, OSError) as error:
            raise ClientDisconnect from error
