"""What processes do in tests. Light to import, since each of them does."""

from __future__ import annotations

import os
import signal
import time

from llamakv.errors import NoRoomError
from llamakv.ops.bench.processes import Link


def add(link: Link, a: int, b: int) -> tuple[int, int, list[str]]:
    link.tell("adding")
    link.tell({"a": a})
    return a + b, os.getpid(), sorted(s.name for s in signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def fail(link: Link) -> None:
    raise NoRoomError("no room for 9 cells", hint="use fewer", needed=9)


def break_down(link: Link) -> None:
    {}["missing"]


def die(link: Link, number: int) -> None:
    if number:
        os.kill(os.getpid(), number)
    os._exit(7)


def wait_long(link: Link) -> None:
    link.tell(os.getpid())
    time.sleep(600)


def meet(link: Link, delay_s: float) -> tuple[float, float]:
    time.sleep(delay_s)
    before = time.monotonic()
    link.wait_for_others()
    return before, time.monotonic()


def take(link: Link, n_bytes: int) -> int:
    taken = b"x" * n_bytes
    link.wait_for_others()
    return len(taken)
