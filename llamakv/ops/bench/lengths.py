"""How long the texts are, and what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llamakv.engine.contract import Model
from llamakv.errors import NoRoomError, UsageError
from llamakv.ops.bench.requests import TypesRequest
from llamakv.ops.bench.text import end_of_tale, tale

_SHORTEST = 2
_FINE = 128

_N_BATCH = 256  # tokens the engine reads at once

N_A_STEP = 16
"""Tokens decoded one by one that make a step of progress, as a batch that is read does."""


def n_steps(lengths: Sequence[int], *, n_repeats: int, n_positions: int) -> int:
    """Steps of progress that measuring one pair of cache types has, its warm-up included (see ``types``)."""
    each_repeat = sum(_n_batches(n) + 1 for n in lengths) + 1
    warm_up = _n_batches(min(lengths[-1], _N_BATCH)) + 2
    return n_repeats * each_repeat + warm_up + 1 + n_steps_along(lengths, n_positions=n_positions)


def n_steps_along(lengths: Sequence[int], *, n_positions: int) -> int:
    """Steps of reading the longest text and what comes behind it, for the output to be compared."""
    return _n_batches(lengths[-1]) + n_positions // N_A_STEP if n_positions else 0


def _n_batches(n_tokens: int) -> int:
    return -(-(n_tokens - 1) // _N_BATCH)


def lengths_up_to(n_tokens: int) -> tuple[int, ...]:
    """Lengths to measure, in tokens; ``n_tokens`` is the last.

    Resuming usually begins to pay within the first hundred tokens, so these are looked at closely: each length there is
    twice the one before. Beyond, where reading is what takes long, it is four times the one before, so that all of them
    together take little longer than the longest.
    """
    lengths = []
    n = _SHORTEST
    while n <= 0.75 * n_tokens:
        lengths.append(n)
        n *= 2 if n < _FINE else 4
    return (*lengths, n_tokens)


def n_cells_needed(asked: TypesRequest) -> int:
    """Cells that the longest text and what comes behind it take."""
    n_behind = max(asked.n_decoded + 1, asked.n_positions if asked.compares_output else 0)
    return asked.n_tokens + n_behind + 1


def check_fits(n_cells: int, n_ctx_max: int, asked: TypesRequest) -> None:
    """Refuse texts that a context cannot hold.

    Raises:
        NoRoomError: names both values.
    """
    if n_cells > n_ctx_max:
        raise NoRoomError(
            f"{asked.n_tokens:,} tokens and what comes behind them need {n_cells:,} cells, a context of this model "
            f"may have {n_ctx_max:,}",
            hint=f"--tokens {n_most}" if (n_most := n_ctx_max - (n_cells - asked.n_tokens)) >= _SHORTEST else None,
            needed=n_cells,
            limit=n_ctx_max,
        )


def tokens_to_read(model: Model, text: str | None, n_tokens: int, n_behind: int) -> tuple[int, ...]:
    """``n_tokens`` tokens to read and ``n_behind`` to follow them: of the text, repeated if it is too short for
    that. Of our own where there is none: then what follows, some hundred tokens of it, has not been read before.

    Raises:
        UsageError: the text gives no tokens.
    """
    if text is not None:
        return _tokens_of(model, lambda n: "\n\n".join([text] * n), n_tokens + n_behind)
    first = _tokens_of(model, tale, n_tokens)
    last = model.tokenize(f"\n\n{end_of_tale()}\n\n", add_special=False, parse_special=False)
    last += _tokens_of(model, lambda n: tale(n, seed=1), max(0, n_behind - len(last)), is_start=False)
    return (*first, *last[:n_behind])


def _tokens_of(model: Model, text_of: Callable[[int], str], n_tokens: int, *, is_start: bool = True) -> tuple[int, ...]:
    """The first tokens of a text that is as long as it has to be."""
    if not model.tokenize(text_of(1), add_special=False, parse_special=False):
        raise UsageError("the text is empty: there is nothing to read")
    n_parts = 1
    while True:
        tokens = model.tokenize(text_of(n_parts), add_special=is_start, parse_special=False)
        if len(tokens) >= n_tokens:
            return tuple(tokens[:n_tokens])
        n_parts = max(n_parts + 1, n_parts * n_tokens // len(tokens) + 1)
