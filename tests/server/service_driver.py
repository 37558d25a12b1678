"""What tests of the service need: one over a tiny model, and all of an answer at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from llamakv.engine.contract import MemoryRequest
from llamakv.ops.requests import Reporter
from llamakv.records import Sampling
from llamakv.server.contract import AnswerPiece, Ask, ChatMessage, Usage
from llamakv.server.run import ServeRequest
from llamakv.server.service import LlamaAnswer, LlamaService, open_service
from llamakv.store.digests import digest_bytes

GREEDY = Sampling(temperature=0.0, max_tokens=8)
ENDLESS = Sampling(temperature=0.0, max_tokens=3000)
LONG = " ".join(f"word {n} of a long text that all have in common" for n in range(12))
NEVER_S, AT_ONCE_S = 3600.0, 0.0

_T = TypeVar("_T")


@dataclass(frozen=True)
class Said:
    """An answer that is over, by choice."""

    texts: dict[int, str]
    finishes: dict[int, str]
    pieces: Sequence[AnswerPiece]
    usage: Usage

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def finish(self) -> str:
        return self.finishes[0]


@dataclass
class Heard:
    warnings: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def reporter(self) -> Reporter:
        return Reporter(warning=self.warnings.append, notice=self.notices.append)


def request_for(model: Path, store: Path | None, **more: object) -> ServeRequest:
    data = model.read_bytes()
    known: dict[str, object] = {"n_threads": 1, "n_cells": 4096, "n_sequences": 16}
    return ServeRequest(
        model_path=model,
        model_digest=digest_bytes(data).hex(),
        model_bytes=len(data),
        memory=MemoryRequest(),
        store=store,
        **{**known, **more},  # type: ignore[arg-type]
    )


@contextmanager
def open_for(
    model: Path, store: Path | None, heard: Heard | None = None, *, save_delay_s: float = NEVER_S, **more: object
) -> Iterator[LlamaService]:
    service = open_service(request_for(model, store, **more), (heard or Heard()).reporter, save_delay_s=save_delay_s)
    try:
        yield service
    finally:
        service.close()


def chat(*contents: str, system: str | None = LONG, **more: object) -> Ask:
    """A request of messages that the user and the assistant said in turn."""
    roles = ("user", "assistant")
    messages = [ChatMessage(role=roles[n % 2], content=content) for n, content in enumerate(contents)]
    if system is not None:
        messages.insert(0, ChatMessage(role="system", content=system))
    more.setdefault("sampling", GREEDY)
    return Ask(prompt=tuple(messages), **more)  # type: ignore[arg-type]


async def said(answer: LlamaAnswer) -> Said:
    """Wait for all of an answer."""
    pieces = [piece async for piece in answer.pieces()]
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    for piece in pieces:
        texts[piece.index] = texts.get(piece.index, "") + piece.text
        if piece.finish_reason is not None:
            finishes[piece.index] = piece.finish_reason
    return Said(texts=texts, finishes=finishes, pieces=pieces, usage=answer.usage)


async def answer_to(service: LlamaService, ask: Ask) -> Said:
    return await said(await service.ask(ask))
