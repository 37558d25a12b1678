"""Keeps what windowed layers have of every sequence, also where it is out of the sequence's window."""

from __future__ import annotations

from llamakv.engine.llamacpp.native import Pointer, api


class WindowGuard:
    """The engine gives a cell that is out of its sequence's window to whatever comes next, with all cells before it
    (``llama_kv_cache::find_slot`` and ``apply_ubatch``), also in memory that has room for everything; but not one that
    several sequences share (engine-facts d7). So the sequence ``seq_id``, which is never decoded, shares all that is
    about to leave a window.

    ``note`` what may have become longer and ``note_removed`` what was taken away; ``protect`` before the engine looks
    for cells.
    """

    def __init__(self, memory: Pointer, seq_id: int, n_window: int) -> None:
        self._memory = memory
        self._seq_id = seq_id
        self._n_window = n_window
        self._n_shared: dict[int, int] = {}
        self._noted: set[int] = set()

    def note(self, seq_id: int) -> None:
        """A sequence may have become longer."""
        self._noted.add(seq_id)

    def note_removed(self, seq_id: int, p0: int) -> None:
        """A sequence lost its cells from ``p0`` on (-1: all); those that only the guard has now are freed. The guard
        loses those of others from there on too, until ``protect``."""
        p0 = max(p0, 0)
        if self._n_shared.get(seq_id, 0) <= p0:
            return
        api.llama_memory_seq_rm(self._memory, self._seq_id, p0, -1)
        for other, n_shared in self._n_shared.items():
            if n_shared > p0:
                self._n_shared[other] = p0
                self._noted.add(other)

    def protect(self) -> None:
        """Share what may be out of a window once the engine looks for cells. That is nothing of what came after the
        last multiple of the window's length, be it one that slides or one of chunks."""
        for seq_id in self._noted:
            n_shared = self._n_shared.get(seq_id, 0)
            n_cells = api.llama_memory_seq_pos_max(self._memory, seq_id) + 1
            if n_cells // self._n_window > n_shared // self._n_window:
                api.llama_memory_seq_cp(self._memory, seq_id, self._seq_id, n_shared, n_cells)
                self._n_shared[seq_id] = n_cells
        self._noted.clear()
