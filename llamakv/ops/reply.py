"""Letting the model speak: tokens to text, stop strings, and the clock."""

from __future__ import annotations

import time
from dataclasses import dataclass

from llamakv.engine.contract import LiveSequence
from llamakv.ops.requests import Reporter
from llamakv.records import Message, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What was said: its text without stop string and end token, how many tokens it took (those included), why it
    ended, and seconds from ``started`` to the first token and to the last."""

    text: str
    n_tokens: int
    finish_reason: str
    first_token_s: float
    elapsed_s: float

    def message(self, p0: int, p1: int) -> Message:
        """What was said just now, as the message of the tokens ``[p0, p1)``."""
        return Message(role="assistant", content=self.text, p0=p0, p1=p1, finish=self.finish_reason, time_s=time.time())

    @property
    def tokens_per_s(self) -> float:
        """The rate after the first token; 0 where it cannot be told."""
        writing_s = self.elapsed_s - self.first_token_s
        return (self.n_tokens - 1) / writing_s if self.n_tokens > 1 and writing_s > 0 else 0.0


def write_reply(sequence: LiveSequence, sampling: Sampling, reporter: Reporter, *, started: float) -> Reply:
    """Generate until the model, a stop string, a limit or the user ends it; text goes out as it becomes certain. A
    character that the tokens before left incomplete is completed. ``started`` is a ``time.perf_counter`` value."""
    run = sequence.write(sampling)
    try:
        while not run.is_over and not reporter.should_abort():
            sequence.scheduler.step()
            reporter.text(run.take_text())
    finally:
        sequence.stop()
    reporter.text(run.take_text())
    return Reply(
        text=run.text,
        n_tokens=run.n_generated,
        finish_reason=run.finish_reason,
        first_token_s=run.first_token_s - started if run.first_token_s else 0.0,
        elapsed_s=time.perf_counter() - started,
    )
