"""Work on many sections at once, results in order, memory bounded."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def n_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


def map_ahead(
    executor: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item], n_ahead: int
) -> Iterator[Result]:
    """Return ``work(item)`` of each item in order, computed by ``executor`` ahead of the consumer.

    Work on the first items starts at once, before anything is asked of the result. Besides the result being
    consumed, at most ``n_ahead`` items are waiting, running or finished. An exception of ``work`` is raised in
    place of its result; leaving the iterator cancels what has not begun.
    """
    source = iter(items)
    pending: deque[Future[Result]] = deque()

    def fill() -> None:
        while len(pending) < n_ahead:
            try:
                item = next(source)
            except StopIteration:
                return
            pending.append(executor.submit(work, item))

    def results() -> Iterator[Result]:
        try:
            while pending:
                future = pending.popleft()
                fill()
                yield future.result()
                del future
        finally:
            for future in pending:
                future.cancel()

    fill()
    return results()
