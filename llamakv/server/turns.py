"""Whose turn it is: answers begin in an order that is fair to keys and their users, and long ones make way."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from llamakv.server.jobs import Job

N_AHEAD = 2
"""Answers that are made ready (brought from the store, say) while all places are taken: a place that is given up is
taken again in the next step."""

_TICK_S = 0.1
PATIENCE_S = 0.5
"""How long somebody waits before another, who has at least two places more, has one of his answers stand still."""

AGEING_S = 5.0
"""Waiting for so long counts as much as having a place less, so that nobody waits for ever."""


@dataclass(slots=True, eq=False, kw_only=True)
class Turn:
    """An answer that has its turn to come, or has it, or stands still. ``jobs`` are its choices, which are of ``user``
    of the API key called ``key``; ``begin`` has it written; it is over when its time is up (``time.perf_counter``)
    before that. ``since_s`` is since when it waits, or goes on."""

    key: str
    user: str
    jobs: Sequence[Job]
    begin: Callable[[Turn], Awaitable[None]]
    deadline_s: float | None
    since_s: float = field(default_factory=time.perf_counter)
    task: asyncio.Task[None] | None = None
    is_paused: bool = False
    is_begun: bool = False

    @property
    def n_left(self) -> int:
        """Choices that are not over."""
        return sum(not job.is_over for job in self.jobs)

    @property
    def has_place(self) -> bool:
        """Whether it goes on, or is to as soon as there is a place."""
        return self.is_begun and not self.is_paused

    @property
    def is_waiting(self) -> bool:
        """Whether nothing of it could be written yet, or goes on now."""
        return not self.has_place or all(job.is_waiting for job in self.jobs)


class Turns:
    """Answers under way: ``n_places`` choices at most go on at the same time, and ``N_AHEAD`` more are made ready.

    Who has fewest places is next: first of all keys, then users of a key, then who waits longest. Where somebody waits
    although another has two places more, the answer of that one which has been written for longest stands still
    (``pause`` returns whether it does; ``resume`` has it go on) until its own turn comes again. ``end`` is told of
    answers that never begin, and why. For one event loop, but for ``leave``.
    """

    def __init__(
        self,
        n_places: int,
        *,
        pause: Callable[[Sequence[Job]], Awaitable[bool]],
        resume: Callable[[Sequence[Job]], None],
        end: Callable[[Turn, str], None],
    ) -> None:
        self._n_places = n_places
        self._pause = pause
        self._resume = resume
        self._end = end
        self._turns: dict[Turn, None] = {}
        self._watching: asyncio.Task[None] | None = None
        self._free_since_s: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def enter(self, turn: Turn) -> None:
        """Have an answer begin when its turn comes."""
        self._loop = asyncio.get_running_loop()
        self._turns[turn] = None
        self._go_on()

    def leave(self, turn: Turn) -> None:
        """It is over: others have its place. From any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._take_away, turn)

    def cancel(self, turn: Turn, reason: str) -> bool:
        """End an answer that is still to begin; False if it has begun."""
        if turn.is_begun:
            return False
        self._turns.pop(turn, None)
        self._end(turn, reason)
        return True

    def close(self) -> None:
        """End all that is still to begin."""
        for turn in list(self._turns):
            self.cancel(turn, "interrupted")
        if self._watching is not None:
            self._watching.cancel()

    # ------------------------------------------------------------ who is next

    def _used(self) -> Counter[tuple[str, ...]]:
        """Places that keys have, and users of keys."""
        used: Counter[tuple[str, ...]] = Counter()
        for turn in self._turns:
            if turn.has_place:
                used[turn.key,] += turn.n_left
                used[turn.key, turn.user] += turn.n_left
        return used

    def _next(self, n_used: int) -> Turn | None:
        """Who has the next place, or is made ready for one. What stands still has its place before its user gets
        others, and goes on in a place that is free."""
        now_s, used = time.perf_counter(), self._used()
        paused = {(turn.key, turn.user) for turn in self._turns if turn.is_paused}
        most = {True: self._n_places, False: self._n_places + N_AHEAD}

        def rank(turn: Turn) -> tuple[int, int, bool, float]:
            age = int((now_s - turn.since_s) / AGEING_S)
            return used[turn.key,] - age, used[turn.key, turn.user] - age, not turn.is_paused, turn.since_s

        waiting = [
            turn
            for turn in self._turns
            if not turn.has_place and (turn.is_paused or (turn.key, turn.user) not in paused)
        ]
        turn = min(waiting, key=rank, default=None)
        return turn if turn is not None and n_used < most[turn.is_paused] else None  # nobody is made ready before it

    def _go_on(self) -> None:
        """Give places to those who are next, as long as there are any."""
        n_used = sum(turn.n_left for turn in self._turns if turn.has_place)
        while (turn := self._next(n_used)) is not None:
            n_used += turn.n_left
            turn.since_s = time.perf_counter()
            if turn.is_paused:
                turn.is_paused = False
                self._resume(turn.jobs)
            else:
                turn.is_begun = True
                turn.task = asyncio.ensure_future(turn.begin(turn))
        if any(turn.is_waiting for turn in self._turns) and (self._watching is None or self._watching.done()):
            self._watching = asyncio.ensure_future(self._watch())

    def _take_away(self, turn: Turn) -> None:
        self._turns.pop(turn, None)
        self._go_on()

    # ------------------------------------------------------------ while somebody waits

    async def _watch(self) -> None:
        while any(turn.is_waiting for turn in self._turns):
            await asyncio.sleep(_TICK_S)
            now_s = time.perf_counter()
            for turn in list(self._turns):
                if not turn.is_begun and turn.deadline_s is not None and now_s > turn.deadline_s:
                    self.cancel(turn, "timeout")
            for one in self._to_make_way():
                if await self._pause(one.jobs):  # else it does not write yet
                    one.is_paused, one.since_s = True, time.perf_counter()
                    break
            self._use_free_place()
            self._go_on()

    def _use_free_place(self) -> None:
        """Have what stands still go on where those that are ready do not take the place: it may have what they need."""
        now_s, paused = time.perf_counter(), [turn for turn in self._turns if turn.is_paused]
        jobs = [job for turn in self._turns if turn.has_place for job in turn.jobs]
        if not paused or sum(not job.is_waiting and not job.is_over for job in jobs) >= self._n_places:
            self._free_since_s = None
        elif self._free_since_s is None:
            self._free_since_s = now_s
        elif now_s - self._free_since_s > PATIENCE_S:
            self._free_since_s = None
            turn = min(paused, key=lambda one: one.since_s)
            turn.is_paused, turn.since_s = False, now_s
            self._resume(turn.jobs)

    def _to_make_way(self) -> list[Turn]:
        """Answers one of which is to stand still for somebody who waits, the first that can."""
        going_on = [turn for turn in self._turns if turn.has_place and not turn.is_waiting]
        if sum(not job.is_waiting and not job.is_over for turn in going_on for job in turn.jobs) < self._n_places:
            return []  # it is not for a place that they wait
        now_s, used = time.perf_counter(), self._used()
        patient = [turn for turn in self._turns if turn.is_waiting and now_s - turn.since_s > PATIENCE_S]
        for turn in sorted(patient, key=lambda turn: turn.since_s):
            own = turn.n_left if turn.has_place else 0
            found = []
            for other in going_on:
                of_both = (other.key,) if other.key != turn.key else (other.key, other.user)
                mine = (turn.key, turn.user)[: len(of_both)]
                if used[of_both] >= used[mine] - own + 2:
                    found.append(other)
            if found:
                return sorted(found, key=lambda one: (-used[one.key,], -used[one.key, one.user], one.since_s))
        return []
