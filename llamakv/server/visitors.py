"""What was brought from the store for others to begin with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from llamakv.engine.contract import Run

VISIT_S = 2.0
"""How long these stay when nobody holds them."""


class Visitors:
    """Runs that were brought from the store for others to begin with, and belong to no conversation: they stay for
    ``VISIT_S``, and as long as somebody holds them (``is_held``). Safe between threads."""

    def __init__(self, is_held: Callable[[Run], bool]) -> None:
        self._is_held = is_held
        self._lock = threading.Lock()
        self._until_s: dict[Run, float] = {}

    def add(self, run: Run) -> None:
        """One has come."""
        with self._lock:
            self._until_s[run] = time.perf_counter() + VISIT_S

    def due(self) -> list[Run]:
        """Those whose time is over; they are told once."""
        now_s = time.perf_counter()
        with self._lock:
            over = [run for run, until_s in self._until_s.items() if until_s <= now_s and not self._is_held(run)]
            for run in over:
                del self._until_s[run]
        return over
