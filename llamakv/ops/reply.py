"""Letting the model speak: tokens to text, stop strings, and the clock."""

from __future__ import annotations

import time
from dataclasses import dataclass

from llamakv.engine.contract import LiveSequence, Model
from llamakv.engine.text import TextStream, open_character
from llamakv.ops.requests import Reporter
from llamakv.records import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What was said: its text without stop string and end token, how many tokens it took (those included), why it
    ended, and seconds from ``started`` to the first token and to the last."""

    text: str
    n_tokens: int
    finish_reason: str
    first_token_s: float
    elapsed_s: float

    @property
    def tokens_per_s(self) -> float:
        """The rate after the first token; 0 where it cannot be told."""
        writing_s = self.elapsed_s - self.first_token_s
        return (self.n_tokens - 1) / writing_s if self.n_tokens > 1 and writing_s > 0 else 0.0


def write_reply(
    model: Model, sequence: LiveSequence, sampling: Sampling, reporter: Reporter, *, started: float
) -> Reply:
    """Generate until the model, a stop string, a limit or the user ends it; text goes out as it becomes certain. A
    character that the tokens before left incomplete is completed. ``started`` is a ``time.perf_counter`` value."""
    prime = open_character([model.token_bytes(token) for token in sequence.tokens[-4:]])
    stream = TextStream(model.token_bytes, stops=sampling.stop, prime=prime)
    first_s, n = 0.0, 0
    for token in sequence.generate(sampling, n_max=sampling.max_tokens, should_abort=reporter.should_abort):
        n += 1
        first_s = first_s or time.perf_counter() - started
        if not model.is_end(token):
            reporter.text(stream.feed(token))
        if stream.stopped:
            break
    reporter.text(stream.finish())
    return Reply(
        text=stream.text,
        n_tokens=n,
        finish_reason="stop" if stream.stopped else sequence.finish_reason,
        first_token_s=first_s,
        elapsed_s=time.perf_counter() - started,
    )
