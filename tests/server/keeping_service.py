"""A service without an engine that keeps conversations, and a server over it in a thread."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from llamakv.errors import BusyError, ExistsError, NotFoundError
from llamakv.server.contract import AnswerPiece, Ask, ServiceCounts, SessionLine, Usage
from llamakv.server.limits import ServeOptions
from llamakv.server.run import Ready, run_server
from tests.server.fake_service import COUNTS, FakeAnswer, FakeService, say


class KeepingAnswer(FakeAnswer):
    """Counts as active while it is written; stopping the service ends it."""

    def __init__(self, service: KeepingService, name: str, steps: Sequence[object]) -> None:
        super().__init__(steps)  # type: ignore[arg-type]
        self._service = service
        self._name = name

    async def pieces(self) -> AsyncIterator[AnswerPiece]:
        self._service.n_active += 1
        try:
            async for piece in self._uncut():
                yield piece
        finally:
            self._service.n_active -= 1
            line = self._service.lines[self._name]
            self._service.lines[self._name] = replace(line, is_active=False, is_saved=True)

    async def _uncut(self) -> AsyncIterator[AnswerPiece]:
        """The pieces until the service's time to stop is over, whatever they wait for then."""
        pieces = super().pieces().__aiter__()
        over = asyncio.ensure_future(self._service.is_over.wait())
        piece: asyncio.Future[AnswerPiece] | None = None
        try:
            while True:
                piece = asyncio.ensure_future(anext(pieces))  # type: ignore[arg-type]
                await asyncio.wait({piece, over}, return_when=asyncio.FIRST_COMPLETED)
                if not piece.done():
                    yield AnswerPiece(index=0, text="", finish_reason="interrupted")
                    return
                try:
                    yield piece.result()
                except StopAsyncIteration:
                    return
        finally:
            over.cancel()
            if piece is not None:
                piece.cancel()
                await asyncio.wait({piece})


class KeepingService(FakeService):
    """``lines`` are the conversations, ``messages`` what was said in each. ``stop`` waits while something is answered;
    ``stops`` are the times it was given."""

    def __init__(self, *lines: SessionLine) -> None:
        super().__init__()
        self.lines = {line.name: line for line in lines}
        self.messages: dict[str, list[dict[str, str]]] = {}
        self.n_active = 0
        self.n_listing = 0
        self.list_time_s = 0.0
        self.stops: list[float] = []
        self.is_over = asyncio.Event()
        self._until = math.inf
        self.script = lambda ask: say("Good ", "day.")

    @property
    def counts(self) -> ServiceCounts:  # type: ignore[override]
        return replace(COUNTS, n_active=self.n_active, n_save_failures=0)

    @counts.setter
    def counts(self, _: ServiceCounts) -> None:
        """Counted, not set."""

    async def ask(self, ask: Ask) -> FakeAnswer:
        self._may_refuse()
        assert isinstance(ask.prompt, tuple)
        first, last = (str(getattr(message, "content", "")) for message in (ask.prompt[0], ask.prompt[-1]))
        if last == "busy":
            raise BusyError("2 requests wait, which is all that may", retry_after_s=7)
        name = ask.session or "unnamed"
        self.lines[name] = line(name, n_cells_live=50, is_active=True, first_text=first)
        self.asks.append(ask)
        self.answers.append(KeepingAnswer(self, name, self.script(ask)))
        self.answers[-1].usage = Usage(n_prompt=1100, n_cached=1024, n_generated=0, source="memory", queued_s=3.2)
        return self.answers[-1]

    async def sessions(self, space: str) -> Sequence[SessionLine]:
        self.done.append(("sessions", space))
        self.n_listing += 1
        await asyncio.sleep(self.list_time_s)
        self.n_listing -= 1
        return list(self.lines.values())

    async def inspect(self, name: str, space: str) -> dict[str, object]:
        self._do("inspect", name, space)
        return {"name": name, "messages": self.messages.get(name, [])}

    async def save(self, name: str, new_name: str | None, space: str) -> SessionLine:
        found = replace(self._do("save", name, new_name, space), name=new_name or name, is_saved=True)
        self.lines[found.name] = found
        return found

    async def resume(self, name: str, space: str) -> SessionLine:
        self.lines[name] = replace(self._do("resume", name, space), n_cells_live=39)
        return self.lines[name]

    async def fork(self, name: str, new_name: str, space: str, at: str | None) -> SessionLine:
        found = self._do("fork", name, new_name, space, at)
        if new_name in self.lines:
            raise ExistsError(f"session '{new_name}' exists")
        self.lines[new_name] = replace(found, name=new_name, is_saved=False)
        return self.lines[new_name]

    async def delete(self, name: str, space: str) -> None:
        self._do("delete", name, space)
        del self.lines[name]

    async def pin(self, name: str, space: str, *, pinned: bool) -> SessionLine:
        self.lines[name] = replace(self._do("pin", name, space, pinned), is_pinned=pinned)
        return self.lines[name]

    async def stop(self, timeout_s: float) -> None:
        self.is_ready = False
        self.stops.append(timeout_s)
        now = asyncio.get_running_loop().time
        self._until = min(self._until, now() + timeout_s)
        while self.n_active:
            if now() >= self._until:
                self.is_over.set()
            await asyncio.sleep(0.01)

    def _do(self, *what: object) -> SessionLine:
        self._may_refuse()
        if what[1] not in self.lines:
            raise NotFoundError(f"session '{what[1]}' does not exist")
        self.done.append(what)
        return self.lines[str(what[1])]


def line(name: str, **changes: object) -> SessionLine:
    """A conversation in the store only, unless told otherwise."""
    common = SessionLine(
        name=name, n_tokens=1040, n_turns=2, n_cells_live=0, n_cells_shared=0, is_saved=True, is_pinned=False,
        is_active=False, used_s=1700000100.0, stored_bytes=12345, first_text="What is on?",
    )  # fmt: skip
    return replace(common, **changes)  # type: ignore[arg-type]


@contextmanager
def serving(service: FakeService, options: ServeOptions | None = None, *, port: int = 0) -> Iterator[str]:
    """A server in a thread, on a free port of this machine; yields its URL, and stops it."""
    is_ready, stop = threading.Event(), threading.Event()
    told: list[Ready] = []
    errors: list[object] = []

    def run() -> None:
        try:
            run_server(
                lambda: service,
                options or ServeOptions(),
                host="127.0.0.1",
                port=port,
                grace_s=0.0,
                should_stop=stop.is_set,
                on_ready=lambda ready: (told.append(ready), is_ready.set())[1],
                on_error=errors.append,
            )
        except BaseException as error:
            errors.append(error)
        finally:
            is_ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert is_ready.wait(60)
        assert errors == []
        yield told[0].url
    finally:
        stop.set()
        thread.join(60)
    assert errors == []
