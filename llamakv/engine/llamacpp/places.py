"""Copies of recurrent states at places where others may begin: such a state is what it is at one place only."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from llamakv.engine.contract import RunRequest
from llamakv.engine.llamacpp.cells import SequenceCells
from llamakv.engine.llamacpp.kept import KeptRuns, begins_with
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.shared import SharedContext
from llamakv.errors import LlamakvError
from llamakv.records import Sampling, SectionKind, StateSection

_SHARE = 4
"""One sequence in so many may be a copy: they are not to crowd out the conversations that they are for."""

_NOTHING = (False, False)


class Places:
    """Keeps copies of sequences at the places that requests tell, as kept runs that may go. They share all their cells
    with the run they are made of, as long as that is there.

    ``active`` and ``waiting`` are the runs under way and those to come; ``drop`` frees the cells of a kept one. Where
    memory is shared at any place, or with the root only (``is_for_many`` False), there is nothing to do.
    """

    def __init__(
        self,
        shared: SharedContext,
        kept: KeptRuns,
        active: Sequence[LlamaRun],
        *,
        drop: Callable[[LlamaRun], None],
        is_for_many: bool,
    ) -> None:
        self._shared = shared
        self._kept = kept
        self._active = active
        self._drop = drop
        self._has_any = is_for_many and shared.is_recurrent
        self._n_max = max(shared.n_seq // _SHARE, 1)

    def of(self, request: RunRequest) -> tuple[int, ...]:
        """Where reading a request is to stop for a copy.

        Raises:
            ValueError: these are no places of its tokens, or not in order.
        """
        places = request.places
        if any(a >= b for a, b in zip((0, *places), (*places, len(request.tokens)), strict=True)):
            raise ValueError(f"{places} are no ascending places of {len(request.tokens)} tokens")
        return places if self._has_any else ()

    def keep(self, run: LlamaRun) -> None:
        """Keep a copy of a run that has come to one of its places. Without a sequence for it nothing is kept, and so it
        is where sequences share no cells any more once the context grows: each would take its own then. It is no
        error either where the engine fails to make room for one: nobody needs it."""
        with contextlib.suppress(LlamakvError):
            self._keep(run)

    def _keep(self, run: LlamaRun) -> None:
        cells = run.cells
        if cells is None or cells.n_cells not in run.places:
            return
        there = next(self._copies_of(run, cells.n_cells), None)
        if there is not None:
            self._kept.note_begun(run, there)  # it could have
            return
        is_last = cells.n_cells == run.n_prompt - 1
        if self._shared.moves_whole or not self._make_way(is_last=is_last):
            return
        request = RunRequest(tokens=(), sampling=Sampling(max_tokens=0), keeps_cells=True, space=run.space)
        tokens = run.tokens[: cells.n_cells + 1]
        copy = LlamaRun(tokens, owner=run.owner, request=request, n_ctx_max=run.n_ctx_max, number=-1)
        copy.end("copied")
        copy.is_copy = copy.may_go = True
        copy.places = () if is_last else run.places
        copy.cells = self._shared.fork(cells, cells.n_cells)
        self._kept.add(copy)

    def _copies_of(self, run: LlamaRun, n_cells: int) -> Iterator[LlamaRun]:
        """Copies of the first cells of a run."""
        for kept in self._kept:
            is_here = kept.is_copy and kept.cells is not None and kept.cells.n_cells == n_cells
            if is_here and begins_with(run, kept, n_cells):
                yield kept

    def _make_way(self, *, is_last: bool) -> bool:
        """Have a sequence for one more. Where a prompt ends only the same prompt would begin: its copy takes no other's
        place but that of another one like it. Else that of a copy that nobody has begun with, those of prompts' ends
        before others; then that of what was used longest ago."""
        copies = [kept for kept in self._kept if kept.is_copy and not kept.is_pinned]
        is_full = len(copies) >= self._n_max
        if not is_full and self._shared.has_sequence():
            return True
        going = min(copies, key=_worth, default=None)
        if is_last:
            going = going if going is not None and _worth(going) == _NOTHING else None
        elif not is_full and (going is None or going.begun_s):
            going = next(iter(self._kept.that_may_go()), None)
        if going is None:
            return False
        self._drop(going)
        return True

    def export(self, run: LlamaRun, cells: SequenceCells, p0: int) -> Iterator[StateSection]:
        """State of a run beyond ``p0``, and that at its first place, if that is beyond ``p0`` too and there is a copy:
        others can begin with it in a saved session. It is the same for all that begin there, so that a store has it
        once; of later places there would be one for each session."""
        place = min(run.places, default=0)
        if p0 < place < run.n_prompt - 1:
            copy = next(self._copies_of(run, place), None)
            if copy is not None and copy.cells is not None:
                data = self._shared.tail(copy.cells)
                yield StateSection(kind=SectionKind.TAIL, p0=place, p1=place, p_used=place, data=data)
        yield from self._shared.export(cells, p0)

    # ------------------------------------------------------------ those that nobody needs

    def release_unneeded(self, waiting: Sequence[LlamaRun], *, idle_s: float, space: str | None = None) -> None:
        """Free the copies (of one space, or of all) that nobody has begun with for so long, and that no other run in
        memory or to come begins with."""
        until_s = time.perf_counter() - idle_s
        copies = [kept for kept in self._kept if kept.is_copy and space in (None, kept.space)]
        idle = [copy for copy in copies if max(copy.begun_s, copy.ended_s) <= until_s and not copy.is_pinned]
        if not idle:
            return
        others = [run for run in (*self._kept, *self._active, *waiting) if not run.is_copy]
        for copy in idle:
            n_cells = copy.cells.n_cells if copy.cells is not None else 0
            if not any(begins_with(run, copy, n_cells) for run in others):
                self._drop(copy)


def _worth(copy: LlamaRun) -> tuple[bool, bool]:
    """What copies are compared by: whether anybody began with it, and whether others are likely to."""
    return bool(copy.begun_s), bool(copy.places)
