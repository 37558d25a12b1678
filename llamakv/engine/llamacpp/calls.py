"""One decode call: who takes part in it, and what to do when the engine does not take it."""

from __future__ import annotations

from collections.abc import Sequence

from llamakv.engine.contract import AbortCheck
from llamakv.engine.llamacpp.context import N_UBATCH, Rows
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.shared import SharedContext
from llamakv.errors import EngineError, NoRoomError

Part = list[tuple[LlamaRun, int]]
"""Runs that take part in a call, each with a number of tokens."""


class StoppedError(Exception):
    """The abort check stopped a decode call."""


class RefusedError(Exception):
    """The engine refused a token of this run, for this reason."""

    def __init__(self, run: LlamaRun, reason: EngineError) -> None:
        super().__init__(reason)
        self.run = run
        self.reason = reason


def compose(runs: Sequence[LlamaRun], *, n_read_max: int, is_fair: bool, others_write: bool = False) -> Part:
    """Who takes part: all that write, with a token each, and those that read, with what is left of the call (of
    ``n_read_max`` tokens if somebody writes, here or in calls of their own). ``is_fair``: the first that reads gets
    half of it at least, and those that have least to read come next, so that a long text does not keep short ones
    waiting; else one reads after the other. Nobody reads beyond the next of his places."""
    part = [(run, 1) for run in runs if run.n_unread == 0]
    left = N_UBATCH - len(part)
    if part or others_write:
        left = min(left, n_read_max)
    readers = [run for run in runs if run.n_unread > 0]
    if is_fair and len(readers) > 1:
        first, *others = readers
        shares = {first: min(first.n_readable, (left + 1) // 2)}
        rest = left - shares[first]
        for run in sorted(others, key=lambda run: run.n_unread):
            shares[run] = min(run.n_readable, rest)
            rest -= shares[run]
        shares[first] += min(rest, first.n_readable - shares[first])
        return part + [(run, shares[run]) for run in readers if shares[run]]
    for run in readers:
        n = min(run.n_readable, left)
        if n > 0:
            part.append((run, n))
            left -= n
    return part


def decode(shared: SharedContext, part: Part, should_abort: AbortCheck | None) -> Part:
    """Make the call; returns who took part. Where the engine finds no place for cells that are free by our count, it is
    given a larger context, or less to do at once; so it is where it refuses what is asked.

    Raises:
        StoppedError: ``should_abort`` said so.
        RefusedError: the engine refuses a single token.
    """
    while True:
        rows = [_rows(run, n) for run, n in part]
        try:
            if not shared.native.decode(rows, should_abort=should_abort):
                raise StoppedError
        except EngineError as error:
            if isinstance(error, NoRoomError) and _enlarge(shared):
                continue
            if len(part) > 1:
                part = part[: len(part) // 2]
            elif part[0][1] > 1:
                part = [(part[0][0], part[0][1] // 2)]
            else:
                raise RefusedError(part[0][0], error) from error
        else:
            return part


def state_before(shared: SharedContext, part: Part, should_abort: AbortCheck | None) -> memoryview | None:
    """What recurrent memory has to be put back to after a call that was stopped."""
    if should_abort is None or not shared.is_recurrent:
        return None
    run = part[0][0]
    assert run.cells is not None
    return shared.tail(run.cells) if run.is_guest and run.cells.n_cells else None


def undo(shared: SharedContext, part: Part, before: memoryview | None) -> list[LlamaRun]:
    """Make the memory what it was before a call that was stopped; returns the runs that have to be read again."""
    lost = []
    for run, _ in part:
        assert run.cells is not None
        if not shared.is_recurrent:
            shared.undo(run.cells)
        elif run.is_guest:
            shared.go_back_to_tail(run.cells, run.cells.n_cells, before)
        else:
            lost.append(run)
    return lost


def _enlarge(shared: SharedContext) -> bool:
    if not shared.can_grow:
        return False
    try:
        shared.enlarge()
    except NoRoomError:
        return False
    return True


def _rows(run: LlamaRun, n: int) -> Rows:
    assert run.cells is not None
    p0 = run.cells.n_cells
    is_pending = p0 == len(run.tokens) - 1
    return Rows(seq_id=run.cells.seq_id, tokens=run.tokens[p0 : p0 + n], p0=p0, want_logits=is_pending)
