"""Whose turn it is to use a context, where several threads want to."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from llamakv.errors import EngineError
from llamakv.records import StateSection


class TurnLock:
    """A reentrant lock that threads get in the order in which they asked for it.

    ``threading.RLock`` nearly always goes back to the thread that has just released it: one that steps without a pause
    would keep those out that save and bring back sequences meanwhile.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[tuple[int, threading.Lock]] = deque()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self, *, blocking: bool = True) -> bool:
        """Have it; False if it is somebody else's and this is not to block."""
        me = threading.get_ident()
        with self._mutex:
            if self._owner in (None, me):
                self._owner = me
                self._depth += 1
                return True
            if not blocking:
                return False
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append((me, turn))
        try:
            turn.acquire()  # released by whoever hands it over
        except BaseException:  # Ctrl-C while waiting
            self._give_up(me, turn)
            raise
        return True

    def _give_up(self, me: int, turn: threading.Lock) -> None:
        with self._mutex:
            if (me, turn) in self._waiting:
                self._waiting.remove((me, turn))
                return
        self.release()

    def release(self) -> None:
        """Give it to the one that has waited longest."""
        with self._mutex:
            assert self._owner == threading.get_ident()
            self._depth -= 1
            if self._depth:
                return
            self._owner = None
            if self._waiting:
                self._owner, turn = self._waiting.popleft()
                self._depth = 1
                turn.release()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def piece_by_piece(
    sections: Iterator[StateSection], lock: TurnLock, is_there: Callable[[], bool] = lambda: True
) -> Iterator[StateSection]:
    """Sections, each taken while no other thread uses the context, and what they are of is still there.

    Raises:
        EngineError: it is not.
    """
    while True:
        with lock:
            if not is_there():
                raise EngineError("the cells of a run were freed while they were exported")
            section = next(sections, None)
        if section is None:
            return
        yield section
