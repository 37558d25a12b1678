"""What to say when tokens do not fit."""

from __future__ import annotations

from llamakv.errors import NoRoomError

_STEP = 256  # a context's size is a multiple of this (llama.cpp), and a reply wants some room too

GROWTH_SHARE = 0.62
"""Of the memory that is free with no cells, what cells may take. A context grows by opening one of twice the size
beside it, which must fit into nine tenths of what is free then: with N cells at last, N/2 are there already, and so
N <= 0.9 (free - N/2)."""


def n_cells_to_grow_to(*, bytes_per_cell: int, free_bytes: int, n_ctx: int = 0) -> int:
    """Cells that a context of ``n_ctx`` may grow to in the memory that is free beside it."""
    return max(n_ctx, int(GROWTH_SHARE * (free_bytes // bytes_per_cell + n_ctx)))


def no_room(*, needed: int, used: int, limit: int, n_ctx_train: int) -> NoRoomError:
    """The error for ``needed`` tokens where ``limit`` cells are allowed and ``used`` are in use. A context beyond the
    ``n_ctx_train`` tokens a model was trained with (0: unknown) is not advised."""
    if 0 < n_ctx_train < needed:
        hint = f"the model was trained with contexts of {n_ctx_train:,} tokens: shorten the text, or use another model"
    else:
        hint = f"allow more with --n-ctx {-(-(needed + _STEP) // _STEP) * _STEP}"
    return NoRoomError(
        f"{needed:,} tokens do not fit: {used:,} cells are in use and the context may have {limit:,}",
        hint=hint,
        needed=needed,
        used=used,
        limit=limit,
    )
