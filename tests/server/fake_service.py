"""A service without an engine: it writes what a test tells it to, and notes what was asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from llamakv.errors import LlamakvError, NotFoundError
from llamakv.server.contract import AnswerPiece, Ask, ServedModel, ServiceCounts, SessionLine, Usage

Step = AnswerPiece | LlamakvError | Exception | asyncio.Event | float
"""What an answer does next: say a piece, fail, wait for an event, or wait for so many seconds."""

FOREVER = 3600.0
MODEL = ServedModel(
    name="tiny", digest="d" * 64, n_ctx_max=4096, n_vocab=1000, created_s=1700000000.0, settings={"type_k": "f16"}
)
COUNTS = ServiceCounts(
    n_active=1, n_waiting=2, n_live=3, n_cells=100, n_cells_pinned=10, n_cells_max=400, n_ctx=512, n_sequences_max=8,
    n_prompt_tokens=1000, n_reused_memory=600, n_reused_store=150, n_evaluated=250, n_generated=77, n_sent_back=2,
    n_saves=5, n_save_failures=1, n_dropped=4,
)  # fmt: skip
LINE = SessionLine(
    name="notes", n_tokens=40, n_turns=2, n_cells_live=39, n_cells_shared=20, is_saved=True, is_pinned=False,
    is_active=False, used_s=1700000100.0, stored_bytes=12345, first_text="hello",
)  # fmt: skip


def say(*texts: str, index: int = 0, finish: str = "stop") -> list[AnswerPiece]:
    """The pieces of one choice."""
    return [
        *(AnswerPiece(index=index, text=text) for text in texts),
        AnswerPiece(index=index, text="", finish_reason=finish),
    ]


class FakeAnswer:
    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self.usage = Usage(n_prompt=12, n_cached=8, n_generated=0, source="memory", queued_s=1.23456)
        self.n_said = 0
        self.was_cancelled = False
        self.was_left = False

    async def pieces(self) -> AsyncIterator[AnswerPiece]:
        try:
            for step in self._steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    self.n_said += 1
                    self.usage = replace(self.usage, n_generated=self.usage.n_generated + bool(step.text))
                    yield step
        except BaseException:
            self.was_left = True
            raise

    def cancel(self) -> None:
        self.was_cancelled = True


class FakeService:
    """``script`` tells what to answer; ``refuse_with`` is raised by ``ask`` and by all that is done with sessions."""

    def __init__(self) -> None:
        self.model = MODEL
        self.counts = COUNTS
        self.is_ready = True
        self.failure: LlamakvError | None = None
        self.script: Callable[[Ask], Sequence[Step]] = lambda ask: [
            piece for index in range(ask.n_choices) for piece in say("Hel", "lo", index=index)
        ]
        self.refuse_with: Exception | None = None
        self.asks: list[Ask] = []
        self.answers: list[FakeAnswer] = []
        self.done: list[tuple[object, ...]] = []

    async def ask(self, ask: Ask) -> FakeAnswer:
        self._may_refuse()
        self.asks.append(ask)
        self.answers.append(FakeAnswer(self.script(ask)))
        return self.answers[-1]

    async def counts_of(self, space: str) -> ServiceCounts:
        return replace(self.counts, n_generated=len(space)) if space else self.counts

    async def sessions(self, space: str) -> Sequence[SessionLine]:
        self.done.append(("sessions", space))
        return [LINE]

    async def save(self, name: str, new_name: str | None, space: str) -> SessionLine:
        return self._do("save", name, new_name, space)

    async def resume(self, name: str, space: str) -> SessionLine:
        return self._do("resume", name, space)

    async def fork(self, name: str, new_name: str, space: str, at: str | None) -> SessionLine:
        return self._do("fork", name, new_name, space, at)

    async def delete(self, name: str, space: str) -> None:
        self._do("delete", name, space)

    async def inspect(self, name: str, space: str) -> dict[str, object]:
        self._do("inspect", name, space)
        return {"name": name, "tokens": 40, "sampling": {"logit_bias": ((3, float("-inf")),)}}

    async def pin(self, name: str, space: str, *, pinned: bool) -> SessionLine:
        return self._do("pin", name, space, pinned)

    async def stop(self, timeout_s: float) -> None:
        self.is_ready = False

    def _do(self, *what: object) -> SessionLine:
        self._may_refuse()
        if what[1] != LINE.name:
            raise NotFoundError(f"no session is called '{what[1]}'", hint="llamakv ls --store /home/me/store")
        self.done.append(what)
        return LINE

    def _may_refuse(self) -> None:
        if self.refuse_with is not None:
            raise self.refuse_with
