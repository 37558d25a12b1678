"""How many requests are taken, and when those that are not should come again."""

from __future__ import annotations

import threading
import time
from collections import deque

from llamakv.errors import BusyError

RETRY_UNKNOWN_S = 5
"""When to come again where nothing is known of how fast it goes."""

_RETRY_MAX_S = 60
_N_RATES = 64  # answers that the rate is made out from


class Queue:
    """Counts what is under way or waits: ``n_parallel`` and ``n_waiting_max`` at most. Safe between threads."""

    def __init__(self, n_parallel: int, n_waiting_max: int) -> None:
        self._n_parallel = n_parallel
        self._n_max = n_parallel + n_waiting_max
        self._lock = threading.Lock()
        self._ended: deque[float] = deque(maxlen=_N_RATES)
        self.n_outstanding = 0

    def enter(self, n: int) -> None:
        """Take ``n`` more answers; a single request is always taken.

        Raises:
            BusyError: there are too many; ``retry_after_s`` is when there should be a place.
        """
        with self._lock:
            if self.n_outstanding and self.n_outstanding + n > self._n_max:
                raise BusyError(
                    f"the queue is full: {self.n_outstanding} answers are under way or wait",
                    retry_after_s=self._retry_after_s(),
                )
            self.n_outstanding += n

    def leave(self, n: int, *, is_done: bool = False) -> None:
        """``n`` are over; ``is_done``: they were answered."""
        with self._lock:
            self.n_outstanding -= n
            if is_done:
                self._ended.append(time.perf_counter())

    def _retry_after_s(self) -> int:
        if len(self._ended) < 2:
            return RETRY_UNKNOWN_S
        each_s = (self._ended[-1] - self._ended[0]) / (len(self._ended) - 1)
        n_over = max(self.n_outstanding - self._n_parallel, 1)
        return min(max(round(n_over * each_s), 1), _RETRY_MAX_S)
