"""Going back in a live sequence, with the help of the places its file remembers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from llamakv.engine.contract import AbortCheck, LiveSequence, Rewound
from llamakv.engine.prefix import n_common
from llamakv.errors import NotFoundError, StoreError
from llamakv.ops.requests import Reporter
from llamakv.records import SectionKind
from llamakv.store.session_file import SessionInfo, SessionReader


def go_back(
    sequence: LiveSequence,
    stored: SessionInfo | None,
    n_tokens: int,
    reporter: Reporter,
    *,
    should_abort: AbortCheck | None = None,
) -> Rewound:
    """Keep the first ``n_tokens`` tokens, and say so if the memory made it necessary to read some of them again.
    ``stored`` is the session as it was last saved or read.

    Raises:
        AbortedError: ``should_abort`` stopped it; fewer tokens are left.
    """
    fetch_tails(sequence, stored)
    n_before = sequence.n_cells
    result = sequence.rewind(
        n_tokens,
        on_progress=lambda done, total: reporter.progress("prefill", done, total),
        should_abort=should_abort,
    )
    if result.n_evaluated:
        reporter.notice(
            f"this model's memory cannot go back from {n_before:,} to {sequence.n_cells:,} tokens: "
            f"{result.n_evaluated:,} tokens were read again"
        )
    return result


def put_back(sequence: LiveSequence, stored: SessionInfo | None, before: Sequence[int]) -> None:
    """Make the sequence what it was when it had the tokens ``before``, whatever was done to it since."""
    fetch_tails(sequence, stored)
    same = n_common(before, sequence.tokens)
    sequence.rewind(same)
    if before[same:]:
        sequence.extend(before[same:])


def fetch_tails(sequence: LiveSequence, stored: SessionInfo | None) -> None:
    """Give the sequence the places in its file that it could go back to; without them tokens are read again."""
    tails = [] if stored is None else [s for s in stored.sections if s.kind is SectionKind.TAIL]
    tails = [s for s in tails if s.p1 <= sequence.n_settled]
    if stored is None or not tails:
        return
    with suppress(StoreError, NotFoundError), SessionReader(stored.path) as reader:
        if reader.info.commit == stored.commit:
            for section in reader.read(tails):
                sequence.remember(section)
