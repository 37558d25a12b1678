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
"""Answers that are made ready while all places are taken: a place that is given up is taken again in the next step."""

_TICK_S = 0.1
PATIENCE_S = 0.5
"""How long somebody waits before another, who has at least two places more, has one of his answers stand still."""

N_SENT_BACK_MAX = 3
"""How often an answer gives its cells to others, since it reads its tokens again each time, and how often it lets
others pass when it waits for some again."""

AGEING_S = 5.0
"""Waiting for so long counts as much as having a place less, so that nobody waits for ever."""


@dataclass(slots=True, eq=False, kw_only=True)
class Turn:
    """An answer that has its turn to come, or has it, or stands still. ``jobs`` are its choices, which are of ``user``
    of the API key called ``key``; ``begin`` has it written; it is over when its time is up (``time.perf_counter``)
    before that. ``since_s`` is since when it waits, or goes on; ``n_sent_back`` how often its cells were given to
    others, ``n_passed`` how often others went first when it waited for some again, and its user had nothing else."""

    key: str
    user: str
    jobs: Sequence[Job]
    begin: Callable[[Turn], Awaitable[None]]
    deadline_s: float | None
    since_s: float = field(default_factory=time.perf_counter)
    task: asyncio.Task[None] | None = None
    is_paused: bool = False
    is_begun: bool = False
    n_sent_back: int = 0
    n_passed: int = 0

    @property
    def n_left(self) -> int:
        """Choices that are not over."""
        return sum(not job.is_over for job in self.jobs)

    @property
    def n_started(self) -> int:
        """Choices that have cells, and are not over."""
        return sum(not job.is_waiting and not job.is_over for job in self.jobs)

    @property
    def has_place(self) -> bool:
        """Whether it goes on, or is to as soon as there is a place."""
        return self.is_begun and not self.is_paused

    @property
    def is_waiting(self) -> bool:
        """Whether nothing of it could be written yet, or goes on now."""
        return not self.has_place or all(job.is_waiting for job in self.jobs)


class Turns:
    """Answers under way: ``n_places`` choices at most go on at the same time. While all are of one user, ``n_ahead``
    more are made ready.

    Who has fewest places is next: first of all keys, then users of a key, then who waits longest. Where somebody waits
    although another has two places more, or has one and he none, the answer of that one which has been written for
    longest stands still (``pause`` returns whether it does; ``resume`` has it go on) until its own turn comes again;
    ``n_still_max`` choices at most do, since they keep their cells. Where it is cells that somebody waits for who is to
    begin (``is_short``), what has lost its own lets him pass (``has_cells``), and what stands still gives its own
    (``send_back`` returns whether it had any). ``end`` is told of answers that never begin, and why. For one event
    loop, but for ``leave``.
    """

    def __init__(
        self,
        n_places: int,
        *,
        n_ahead: int = N_AHEAD,
        n_still_max: int,
        pause: Callable[[Sequence[Job]], Awaitable[bool]],
        resume: Callable[[Sequence[Job]], None],
        end: Callable[[Turn, str], None],
        is_short: Callable[[], bool],
        send_back: Callable[[Sequence[Job]], Awaitable[bool]],
        has_cells: Callable[[Job], bool],
    ) -> None:
        self._n_places = n_places
        self._n_ahead = n_ahead
        self._n_still_max = n_still_max
        self._pause = pause
        self._resume = resume
        self._end = end
        self._is_short = is_short
        self._send_back = send_back
        self._has_cells = has_cells
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
        others, but does not take the cells that somebody waits for."""
        now_s, used = time.perf_counter(), self._used()
        paused = {(turn.key, turn.user) for turn in self._turns if turn.is_paused}
        lacking = {(turn.key, turn.user) for turn in self._lack_cells()} if paused else set()

        def rank(turn: Turn) -> tuple[int, int, float]:
            age = int((now_s - turn.since_s) / AGEING_S)
            return used[turn.key,] - age, used[turn.key, turn.user] - age, turn.since_s

        def is_next(turn: Turn) -> bool:
            if turn.is_paused:
                return turn.n_passed >= N_SENT_BACK_MAX or lacking <= {(turn.key, turn.user)}
            return not turn.is_begun and (turn.key, turn.user) not in paused

        waiting = [turn for turn in self._turns if is_next(turn)]
        turn = min(waiting, key=rank, default=None)
        if turn is None or turn.is_paused or len({(one.key, one.user) for one in self._turns}) > 1:
            n_most = self._n_places
        else:
            n_most = self._n_places + self._n_ahead
        return turn if n_used < n_most else None

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
            for one in self._to_let_pass():
                if await self._pause(one.jobs):
                    one.is_paused = True
                    one.n_passed += not self._has_another(one)
            for one in self._to_give_cells():
                one.n_sent_back += 1
                if await self._send_back(one.jobs):
                    break
            self._use_free_place()
            self._go_on()

    @property
    def _n_going(self) -> int:
        """Choices that are read or written."""
        return sum(turn.n_started for turn in self._turns if turn.has_place and self._have_cells(turn))

    def _use_free_place(self) -> None:
        """Have what stands still go on where those that are ready do not take the place: it may have what they need."""
        now_s, paused = time.perf_counter(), [turn for turn in self._turns if turn.is_paused]
        if not paused or self._n_going >= self._n_places:
            self._free_since_s = None
        elif self._free_since_s is None:
            self._free_since_s = now_s
        elif now_s - self._free_since_s > PATIENCE_S and not self._to_give_cells():
            self._free_since_s = None
            turn = min(paused, key=lambda one: (not one.n_started, one.since_s))
            turn.is_paused, turn.since_s = False, now_s
            self._resume(turn.jobs)

    def _to_make_way(self) -> list[Turn]:
        """Answers one of which is to stand still for somebody who waits, the first that can: first of all what was only
        made ready."""
        is_for_cells = self._n_going < self._n_places
        if is_for_cells and not self._lack_cells():
            return []  # it is for neither a place nor cells that they wait
        now_s, used = time.perf_counter(), self._used()
        n_still = sum(turn.n_started for turn in self._turns if turn.is_paused)
        patient = [turn for turn in self._turns if turn.is_waiting and now_s - turn.since_s > PATIENCE_S]
        for turn in sorted(patient, key=lambda turn: turn.since_s):
            own = turn.n_left if turn.has_place else 0
            found = []
            for other in self._turns:
                of_both = (other.key,) if other.key != turn.key else (other.key, other.user)
                mine = (turn.key, turn.user)[: len(of_both)]
                n_mine = used[mine] - own
                has_more = used[of_both] >= n_mine + (2 if n_mine or other.is_waiting or of_both == mine else 1)
                may_stand = other.has_place and other is not turn and n_still + other.n_started <= self._n_still_max
                if other.n_started:  # it has what somebody waits for, and may give it
                    may_give = not is_for_cells or other.n_sent_back < N_SENT_BACK_MAX
                    may_stand = may_stand and may_give and self._have_cells(other)
                if has_more and may_stand:
                    found.append(other)
            if found:
                return sorted(
                    found,
                    key=lambda one: (one.n_started > 0, -used[one.key,], -used[one.key, one.user], one.since_s),
                )
        return []

    def _lack_cells(self) -> list[Turn]:
        """Who waits, in spite of having a place, for cells of others."""
        if not self._is_short():
            return []
        until_s = time.perf_counter() - PATIENCE_S
        found = [turn for turn in self._turns if turn.has_place and turn.is_waiting and turn.since_s < until_s]
        return [turn for turn in found if turn.task is not None and turn.task.done()]  # else it is being brought

    def _of_others(self) -> list[Turn]:
        """What was begun, and is not of the only user who lacks cells; nothing where nobody does."""
        lacking = {(turn.key, turn.user) for turn in self._lack_cells()}
        return [turn for turn in self._turns if turn.n_started and lacking - {(turn.key, turn.user)}]

    def _to_let_pass(self) -> list[Turn]:
        """What waits for cells again, before those who lack some."""
        found = [turn for turn in self._of_others() if turn.has_place and not self._have_cells(turn)]
        return [turn for turn in found if turn.n_passed < N_SENT_BACK_MAX or self._has_another(turn)]

    def _has_another(self, turn: Turn) -> bool:
        """Whether another answer of the same user goes on."""
        return any(
            other.has_place and other.n_started and self._have_cells(other)
            for other in self._turns
            if other is not turn and (other.key, other.user) == (turn.key, turn.user)
        )

    def _to_give_cells(self) -> list[Turn]:
        """What stands still whose cells are for those who lack some, the first that has any."""
        found = [turn for turn in self._of_others() if turn.is_paused and turn.n_sent_back < N_SENT_BACK_MAX]
        return sorted(filter(self._have_cells, found), key=lambda turn: -turn.since_s)

    def _have_cells(self, turn: Turn) -> bool:
        return any(self._has_cells(job) for job in turn.jobs if not job.is_over)
