"""How far an op is, on a line that goes away. Apart from the rest, since most commands never show it."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from llamakv.cli import config, render, streams
from llamakv.cli.output import has_colour

_PHASES = {
    "digest": "checking the model file",
    "load": "loading the model",
    "read": "reading the file",
    "prefill": "reading",
    "restore": "restoring",
    "save": "saving",
    "answers": "answering",
    "bench": "measuring",
    "survey": "looking at sessions",
    "verify": "checking",
    "collect": "removing",
}
_IN_BYTES = frozenset({"digest", "load", "read", "verify"})
_NOUNS = {"answers": "answer", "bench": "step", "survey": "session", "collect": "section"}
"""What a phase counts, where that is not tokens."""

_DELAY_S = 0.3


class ProgressLine:
    """A line on stderr that tells how far an op is, once it takes longer than a moment; gone when it is done.

    Shown only on a terminal that can redraw a line, and not with ``quiet``.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._shown = streams.is_terminal(sys.stderr) and not quiet and not config.is_basic_terminal()
        self._progress: Progress | None = None
        self._phase = ""
        self._began_s = 0.0
        self._first = 0
        self._rate: float | None = None

    def set_rate(self, tokens_per_s: float) -> None:
        """Take an op's ``rate`` callback."""
        self._rate = tokens_per_s

    def update(self, phase: str, n_done: int, n_total: int) -> None:
        """Take an op's ``progress`` callback."""
        if not self._shown:
            return
        now = time.monotonic()
        if phase != self._phase:
            self.clear()
            self._phase, self._began_s, self._first = phase, now, n_done
        if self._progress is None and now - self._began_s >= _DELAY_S and n_done < n_total:
            self._progress = self._start(phase)
            self._progress.add_task(
                _PHASES.get(phase, phase), total=n_total, completed=n_done, at_s=now, rate=self._rate
            )
        elif self._progress is not None:
            task = self._progress.tasks[0]
            self._progress.update(task.id, completed=n_done, total=n_total, at_s=now, rate=self._rate)

    def pause(self) -> None:
        """Take the line out of the way of something else on the terminal; the next update brings it back."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def clear(self) -> None:
        """Take the line away; what comes next is another phase."""
        self.pause()
        self._phase = ""

    def _start(self, phase: str) -> Progress:
        colour = has_colour(sys.stderr)
        console = Console(
            file=sys.stderr, markup=False, highlight=False, emoji=False, no_color=not colour, legacy_windows=False
        )
        progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=18),
            _Amount(
                in_bytes=phase in _IN_BYTES,
                noun=_NOUNS.get(phase, "token"),
                began_s=self._began_s,
                first=self._first,
            ),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            refresh_per_second=4,
        )
        progress.start()
        return progress


class _Amount(ProgressColumn):
    """``1,234 of 5,000 tokens · 120.0 tokens/s · 31 s left``."""

    def __init__(self, *, in_bytes: bool, noun: str, began_s: float, first: int) -> None:
        super().__init__()
        self._in_bytes = in_bytes
        self._noun = noun
        self._began_s = began_s
        self._first = first

    def render(self, task: Task) -> Text:
        done, total = int(task.completed), int(task.total or 0)
        at_s: float = task.fields["at_s"]
        elapsed_s = at_s - self._began_s
        speed = (done - self._first) / elapsed_s if elapsed_s > 0 else 0.0
        if self._in_bytes:
            parts = [f"{render.size(done)} of {render.size(total)}"]
        else:
            parts = [f"{done:,} of {render.count(total, self._noun)}"]
            rate: float | None = task.fields.get("rate") if self._noun != "token" else speed
            if rate:
                parts.append(f"{rate:,.0f} tokens/s")
        if speed > 0 and total > done:
            parts.append(f"{_coarse((total - done) / speed - (time.monotonic() - at_s))} left")
        return Text(" · ".join(parts))


def _coarse(left_s: float) -> str:
    return f"{max(1, round(left_s))} s" if left_s < 59.5 else render.seconds(left_s)
