"""The callbacks an op gets: progress, notices and reply text, and whether to stop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from llamakv.cli.output import Output

if TYPE_CHECKING:
    from llamakv.ops.requests import Reporter


@contextlib.contextmanager
def running(output: Output, *, text: Callable[[str], None] | None = None) -> Iterator[Reporter]:
    """Run an op: yields its reporter. Progress is cleared away, and signals only set flags until it is over.

    ``text`` takes what the reporter's ``text`` is given, once the progress line is out of its way (None: it is not
    shown).
    """
    from llamakv.cli.render.progress import ProgressLine
    from llamakv.ops.requests import Reporter

    line = ProgressLine(quiet=output.quiet)
    interrupts = output.interrupts

    def on_progress(phase: str, n_done: int, n_total: int) -> None:
        interrupts.note_phase(phase)
        line.update(phase, n_done, n_total)

    def on_notice(message: str) -> None:
        line.pause()
        output.notice(message)

    def on_warning(message: str) -> None:
        line.pause()
        output.warning(message)

    def on_text(piece: str) -> None:
        interrupts.note_phase("")
        line.clear()
        if text is not None:
            text(piece)

    def should_abort() -> bool:
        return interrupts.should_abort() or output.stopped

    with interrupts.op():
        try:
            yield Reporter(
                notice=on_notice,
                warning=on_warning,
                progress=on_progress,
                rate=line.set_rate,
                pause=line.pause,
                text=on_text,
                should_abort=should_abort,
            )
        finally:
            line.clear()
