"""A conversation in memory, as what a ``Keeper`` saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamakv.engine.contract import Model, ModelInfo, Run, Scheduler
from llamakv.ops.opening import OpenModel
from llamakv.records import ModelIdentity, StateSection
from llamakv.server.conversations import Conversation


@dataclass(slots=True, kw_only=True)
class LiveCells:
    """``KeptSequence`` of a conversation that has the cells of ``run``."""

    scheduler: Scheduler
    conversation: Conversation
    run: Run
    n_ctx: int
    n_bytes_per_cell: float

    @property
    def tokens(self) -> Sequence[int]:
        return self.conversation.tokens

    @property
    def n_cells(self) -> int:
        return len(self.conversation.tokens) - 1

    @property
    def n_settled(self) -> int:
        return self.conversation.n_settled

    @property
    def n_state_bytes(self) -> int:
        return int(self.n_bytes_per_cell * self.n_cells)

    def settle(self) -> None:
        self.conversation.n_settled = self.n_cells

    def export(self, from_position: int = 0) -> Iterator[StateSection]:
        return self.scheduler.export(self.run, from_position)


@dataclass(slots=True, kw_only=True)
class LiveModel:
    """``KeptModel`` of it."""

    opened: OpenModel
    sequence: LiveCells

    @property
    def model(self) -> Model:
        return self.opened.model

    @property
    def info(self) -> ModelInfo:
        return self.opened.info

    @property
    def identity(self) -> ModelIdentity:
        return self.opened.identity

    def use(self, path: Path) -> None:
        """Nothing: a saved conversation may go when the store's budget says so."""
