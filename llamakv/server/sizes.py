"""How much a server keeps in memory: from what there is, what the model takes, and what its owner allows."""

from __future__ import annotations

from dataclasses import dataclass

from llamakv.engine.room import n_cells_to_grow_to
from llamakv.errors import UsageError

N_SEQUENCES_MAX = 254
"""llama.cpp's 256 sequences, less the scratch sequence and the scheduler's root."""

N_PARALLEL_MAX = 16
"""Answers written at the same time at most; what more of them gain is in the README, What it costs."""

RECURRENT_SHARE = 0.25
"""Of the memory that is free now, what the recurrent states of answers under way, and of as many pinned conversations,
may take. Those of others come as they are used, while memory allows."""

N_CELLS_FIRST = 4096
"""Cells a server opens with: a few conversations of a thousand tokens, which need not wait for a larger context then
(opening one took 90 ms with SmolLM2, a third of the time to the first token after a restart)."""

FIRST_SHARE = 0.05
"""Of the memory that is free now, what these may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a server may have: cells of all conversations and of one, answers at the same time, and sequences beside
    them, ``n_pinned`` of which may be pinned if all may. Memory may limit cells and sequences further as time goes."""

    n_cells_max: int
    n_ctx_max: int
    n_parallel: int
    n_kept: int
    n_pinned: int

    @property
    def n_sequences(self) -> int:
        """Conversations in memory at the same time."""
        return self.n_parallel + self.n_kept


def choose_room(
    *,
    n_ctx_max: int,
    n_cells: int | None,
    n_sequences: int | None,
    bytes_per_cell: int,
    bytes_per_sequence: int,
    free_bytes: int,
) -> Room:
    """``n_cells`` and ``n_sequences`` are what the owner allows (None: no limit), ``n_ctx_max`` is the most tokens of a
    conversation; bytes are what cells and recurrent states take (0: nothing), and the memory that is free.

    Raises:
        UsageError: a limit leaves no room for anything.
    """
    if n_cells is not None and n_cells < 2:
        raise UsageError(f"{n_cells} cells are too few for a conversation", hint="--cells 4096")
    n_allowed = max(
        min(n_sequences or N_SEQUENCES_MAX, N_SEQUENCES_MAX), 2
    )  # one is written beside what it goes on from
    n_sure = n_allowed
    if n_sequences is None and bytes_per_sequence:
        n_sure = max(min(n_allowed, int(RECURRENT_SHARE * free_bytes) // bytes_per_sequence), 2)
    n_parallel = max(1, min(N_PARALLEL_MAX, n_sure // 2))
    n_all = n_now = n_cells if n_cells is not None else n_allowed * n_ctx_max
    if n_cells is None and bytes_per_cell:
        in_memory = n_cells_to_grow_to(bytes_per_cell=bytes_per_cell, free_bytes=free_bytes)
        n_now = min(n_all, max(in_memory, min(n_ctx_max, 512)))
    return Room(
        n_cells_max=n_all,
        n_ctx_max=min(n_ctx_max, n_now),
        n_parallel=n_parallel,
        n_kept=n_allowed - n_parallel,
        n_pinned=n_sure - n_parallel,
    )


def n_cells_first(room: Room, *, bytes_per_cell: int, free_bytes: int) -> int:
    """Cells to open with; at least one, and not more than one conversation may have."""
    n_cells = min(N_CELLS_FIRST, room.n_ctx_max)
    if bytes_per_cell:
        n_cells = min(n_cells, int(FIRST_SHARE * free_bytes) // bytes_per_cell)
    return max(n_cells, 1)


def n_to_pin(limit: int, share: float) -> int:
    """How many of ``limit`` cells or sequences pinned conversations may take."""
    return int(limit * share)
