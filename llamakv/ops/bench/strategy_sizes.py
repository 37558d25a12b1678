"""What strategies need, and for how many users there would be room: arithmetic on sizes that were measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llamakv.engine.memory import CacheKind, ContextMemory
from llamakv.ops.bench.work import Work

N_SEQUENCES_MAX = 254
"""Users of one context at most: llama.cpp has 256 sequences, llamakv keeps two of them."""

_N_CTX_STEP = 256  # the engine rounds a context's cells up to a multiple of this

PerUser = Literal["cells", "context", "process"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a strategy lays ``n_users`` out: each more of them takes more ``cells`` of one context, or a ``context`` or a
    ``process`` of its own. A context has ``n_shared`` cells that are all its users', and ``n_own`` for each."""

    per_user: PerUser
    n_users: int
    n_shared: int
    n_own: int

    @property
    def n_processes(self) -> int:
        """Processes, each with the weights open."""
        return self.n_users if self.per_user == "process" else 1

    @property
    def n_contexts(self) -> int:
        """Contexts, in all processes."""
        return 1 if self.per_user == "cells" else self.n_users

    @property
    def n_in_context(self) -> int:
        """Users of each context."""
        return self.n_users if self.per_user == "cells" else 1

    @property
    def n_ctx(self) -> int:
        """Cells that each context is opened with."""
        return n_ctx_for(self.n_shared + self.n_in_context * self.n_own)

    @property
    def n_cells(self) -> int:
        """Cells in use when all users have their answers, in all contexts."""
        return self.n_contexts * (self.n_shared + self.n_in_context * self.n_own)


def n_ctx_for(n_cells: int) -> int:
    """The smallest context for so many cells, and the last token of an answer, which gets none but is counted in."""
    return -(-(n_cells + 1) // _N_CTX_STEP) * _N_CTX_STEP


def shape_of(name: str, work: Work) -> Shape:
    """How the strategy called ``name`` does the work. The last token of an answer is never decoded: it has no cell.

    A session can be resumed into the sequence that others branch off and into no other, so where users share no prefix,
    ``hybrid`` has a context for each.
    """
    n_users = len(work.users)
    n_behind = work.n_question + work.n_answer - 1
    if name == "cross-process":
        return Shape(per_user="process", n_users=n_users, n_shared=0, n_own=work.n_prefix + n_behind)
    if name == "hybrid" and not work.shares_prefix:
        return Shape(per_user="context", n_users=n_users, n_shared=0, n_own=work.n_prefix + n_behind)
    if name == "none" or not work.shares_prefix:
        return Shape(per_user="cells", n_users=n_users, n_shared=0, n_own=work.n_prefix + n_behind)
    return Shape(per_user="cells", n_users=n_users, n_shared=work.n_prefix, n_own=n_behind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What a cell more, and a sequence more, add to a context, in bytes: its caches and the rows of its output. What
    decode calls work in is not in it."""

    per_cell: float
    per_sequence: float

    def bytes_for(self, n_cells: int, n_sequences: int) -> int:
        """What so much takes."""
        return round(self.per_cell * n_cells + self.per_sequence * n_sequences)


def growth_of(memory: ContextMemory) -> Growth:
    """How a context grows, by what it takes. Caches that do not have all its cells (recurrent states, windows that keep
    only themselves) go with the sequences."""
    grows = [part for part in memory.parts if part.kind is not CacheKind.RECURRENT and part.n_cells == memory.n_ctx]
    all_bytes = sum(part.n_bytes for part in memory.parts)
    with_cells = sum(part.n_bytes for part in grows)
    return Growth(
        per_cell=with_cells / memory.n_ctx,
        per_sequence=(all_bytes - with_cells + memory.output_bytes) / memory.n_seq_max,
    )


def cell_bytes(memory: ContextMemory, n_cells: int, n_sequences: int) -> int:
    """What ``n_cells`` cells of a context take in keys and values, and ``n_sequences`` in recurrent states."""
    total = 0.0
    for part in memory.parts:
        n_used = n_sequences if part.kind is CacheKind.RECURRENT else n_cells
        total += part.n_bytes * min(n_used, part.n_cells) / part.n_cells
    return round(total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The most users there would be room for, and what is short then: ``memory`` or ``sequences``."""

    n_users: int
    limited_by: str


def users_that_fit(
    shape: Shape, *, limit_bytes: int, peak_bytes: int, private_bytes: int, memory: ContextMemory
) -> Fit:
    """For how many users ``limit_bytes`` would do, going by what ``shape`` took: ``peak_bytes`` in all, of which
    ``private_bytes`` in each process are no file's, with contexts that take ``memory`` each.

    What was measured and does not belong to a single user (weights, programs, what decode calls work in) is taken for
    what it was: more cells need a little more of the last.
    """
    if shape.per_user == "process":
        fixed = max(peak_bytes - shape.n_users * private_bytes, 0)
        return Fit(n_users=_whole((limit_bytes - fixed) / max(private_bytes, 1)), limited_by="memory")
    if shape.per_user == "context":
        fixed = max(peak_bytes - shape.n_users * memory.n_bytes, 0)
        return Fit(n_users=_whole((limit_bytes - fixed) / memory.n_bytes), limited_by="memory")
    growth = growth_of(memory)
    fixed = max(peak_bytes - growth.bytes_for(memory.n_ctx, shape.n_users), 0)
    n_users = 0
    while n_users < N_SEQUENCES_MAX:
        n_ctx = n_ctx_for(shape.n_shared + (n_users + 1) * shape.n_own)
        if fixed + growth.bytes_for(n_ctx, n_users + 1) > limit_bytes:
            return Fit(n_users=n_users, limited_by="memory")
        n_users += 1
    return Fit(n_users=n_users, limited_by="sequences")


def _whole(n: float) -> int:
    return max(int(n), 0)
