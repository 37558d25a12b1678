"""Ctrl-C and the signals that end a process, as flags that a running op asks for.

While an op runs nothing may be raised from a signal handler: the engine calls back into Python from native code. So
the handler only counts, and the op, which asks ``should_abort`` often, stops by itself and keeps what is finished.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from llamakv.errors import InterruptedByUser

_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
_PATIENCE = 3
"""Ctrl-C pressed this often within one op leaves at once, for an engine that does not react."""


class Interrupts:
    """Counts Ctrl-C; remembers a request to end. One per process, used from the main thread.

    Outside an op Ctrl-C raises KeyboardInterrupt, and a request to end is raised too, or given to ``on_end`` where
    that is set (an event loop would swallow what is raised).
    """

    def __init__(self) -> None:
        self.n_pressed = 0
        self.ending: int | None = None
        self.saving = False
        self.on_end: Callable[[InterruptedByUser], None] | None = None
        self._running = False

    def install(self) -> None:
        """Take over SIGINT, SIGTERM and SIGHUP; a signal the parent process ignores stays ignored."""
        for number in (signal.SIGINT, *_ENDING):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def should_abort(self) -> bool:
        """Whether the running op is to stop; quick, never raises."""
        return self.n_pressed > 0 or self.ending is not None

    @contextlib.contextmanager
    def op(self) -> Iterator[None]:
        """While an op runs: signals only set flags. Ctrl-C pressed before counts no more."""
        self.n_pressed = 0
        self.saving = False
        self._running = True
        try:
            yield
        finally:
            self._running = False
            self.saving = False

    def note_phase(self, phase: str) -> None:
        """Say what the op is doing; during ``save`` no number of Ctrl-C ends the process."""
        self.saving = phase == "save"

    def check(self) -> None:
        """Raise what was asked for while an op ran.

        Raises:
            InterruptedByUser: with the exit status in ``fields["status"]``.
        """
        if self.ending is not None:
            raise ended(self.ending)
        if self.n_pressed:
            raise InterruptedByUser("interrupted", status=130)

    def check_ending(self) -> None:
        """As ``check``, for Ctrl-C that only stops a reply: raises for SIGTERM and SIGHUP alone."""
        if self.ending is not None:
            raise ended(self.ending)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            self.ending = number
            if not self._running:
                if self.on_end is None:
                    raise ended(number)
                self.on_end(ended(number))
            return
        if not self._running:
            raise KeyboardInterrupt
        self.n_pressed += 1
        if self.saving:
            return
        if self.n_pressed == _PATIENCE - 1:
            _say("\nstopping; Ctrl-C once more leaves at once, without what is not finished\n")
        elif self.n_pressed >= _PATIENCE:
            _say("\n")
            os._exit(130)


def ended(number: int) -> InterruptedByUser:
    """What a signal that ends the process is reported as."""
    return InterruptedByUser(f"ended by {signal.Signals(number).name}", status=128 + number)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
