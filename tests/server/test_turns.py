"""Whose turn it is: keys and users alike, whoever asks for more."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from llamakv.engine.contract import RunRequest
from llamakv.errors import EngineError
from llamakv.records import Sampling
from llamakv.server import turns as module
from llamakv.server.contract import Ask
from llamakv.server.jobs import Job, LlamaAnswer
from llamakv.server.service import LlamaService
from llamakv.server.turns import N_AHEAD, Turn, Turns
from tests.server.service_driver import GREEDY, Said, answer_to, chat, open_for, said
from tests.server.test_service import run, until

REQUEST = RunRequest(tokens=(1,), sampling=Sampling())


class FakeEngine:
    """Begins what has its turn in as many places as there are, and pauses what it is told to."""

    def __init__(self, n_places: int) -> None:
        self.n_places = n_places
        self.begun: list[str] = []
        self.going: list[Turn] = []
        self.ended: list[tuple[str, str]] = []
        self.paused: list[str] = []
        self.is_short = False
        self.lost: set[str] = set()
        self.sent_back: list[str] = []
        self.resumed: list[str] = []
        self.turns = Turns(
            n_places, n_still_max=8, pause=self.pause, resume=self.resume, end=self.end,
            is_short=lambda: self.is_short, send_back=self.send_back,
            has_cells=lambda job: job.name not in self.lost,
        )  # fmt: skip

    def ask(self, name: str, *, user: str = "", n: int = 1, timeout_s: float | None = None) -> Turn:
        jobs = [FakeJob(name) for _ in range(n)]
        deadline_s = None if timeout_s is None else time.perf_counter() + timeout_s
        turn = Turn(key=name[0], user=user, jobs=jobs, begin=self.begin, deadline_s=deadline_s)
        self.turns.enter(turn)
        return turn

    async def begin(self, turn: Turn) -> None:
        self.begun.append(turn.jobs[0].name)
        self.going.append(turn)
        self.start()

    def start(self) -> None:
        for turn in self.going[: self.n_places]:
            for job in turn.jobs:
                job.has_started = True

    def finish(self, turn: Turn) -> None:
        for job in turn.jobs:
            job.is_over = True
        self.going.remove(turn)
        self.start()
        self.turns.leave(turn)

    def end(self, turn: Turn, reason: str) -> None:
        self.ended.append((turn.jobs[0].name, reason))

    async def pause(self, jobs: Sequence[Job]) -> bool:
        turn = next(turn for turn in self.going if turn.jobs is jobs)
        self.going.remove(turn)
        self.paused.append(jobs[0].name)
        self.start()
        return True

    async def send_back(self, jobs: Sequence[Job]) -> bool:
        self.sent_back.append(jobs[0].name)
        return True

    def resume(self, jobs: Sequence[Job]) -> None:
        self.resumed.append(jobs[0].name)
        self.going.append(next(turn for turn in self.turns._turns if turn.jobs is jobs))


class FakeJob(Job):
    def __init__(self, name: str) -> None:
        super().__init__(request=REQUEST, index=0, outbox=None, on_over=lambda job, has_cells: None)
        self.name = name
        self.has_started = False

    @property
    def is_waiting(self) -> bool:
        return not self.has_started and not self.is_over


def act(make: Callable[[], Coroutine[object, object, None]]) -> None:
    asyncio.run(asyncio.wait_for(make(), 30))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_who_has_fewest_places_is_next() -> None:
    async def go() -> None:
        engine = FakeEngine(2)
        first = [engine.ask(f"a{n}") for n in range(8)]
        engine.ask("b0")
        engine.ask("b1")
        engine.ask("c0")
        await settle()
        assert engine.begun == ["a0", "a1", "a2", "a3"]  # two were made ready while there was nobody else
        for n in range(4):
            engine.finish(first[n])
            await settle()
        assert engine.begun[4:] == ["b0", "a4"]  # which has waited longest of those who have none
        engine.turns.close()

    act(go)


def test_of_one_key_the_users_have_their_turns_alike() -> None:
    async def go() -> None:
        engine = FakeEngine(2)
        first = [engine.ask(f"a{n}", user="ann") for n in range(5)]
        engine.ask("a-bob", user="bob")
        await settle()
        for n in range(3):
            engine.finish(first[n])
            await settle()
        assert engine.begun == ["a0", "a1", "a2", "a3", "a-bob"]
        engine.turns.close()

    act(go)


def test_who_waits_long_enough_has_a_turn_whatever_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        engine = FakeEngine(1)
        held = [engine.ask("a0"), engine.ask("a1"), engine.ask("a2")]
        old = engine.ask("a3")
        engine.ask("b0")
        await settle()
        old.since_s -= 4 * module.AGEING_S
        for turn in held:
            engine.finish(turn)
        await settle()
        assert engine.begun[3:] == ["a3"]
        engine.turns.close()

    act(go)


def test_an_answer_stands_still_for_who_waits_and_goes_on_when_its_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(module, "_TICK_S", 0.001)

    async def go() -> None:
        engine = FakeEngine(4)
        many = [engine.ask(f"a{n}") for n in range(10)]
        await settle()
        assert len(engine.begun) == 4 + N_AHEAD
        one, other = engine.ask("b0"), engine.ask("b1")
        await until(lambda: not one.is_waiting and not other.is_waiting)
        assert sorted(engine.paused[:2]) == ["a4", "a5"]  # these were only made ready
        await asyncio.sleep(0.05)  # half of the places are theirs: nobody else stands still
        n_paused = len(engine.paused)
        assert sum(turn.has_place and not turn.is_waiting for turn in many) == 2
        await asyncio.sleep(0.05)
        assert len(engine.paused) == n_paused
        engine.finish(one)
        engine.finish(other)
        await settle()
        for turn in many:
            await until(lambda turn=turn: turn.has_place)
            engine.finish(turn)
        await settle()
        assert engine.ended == []
        assert engine.turns._turns == {}

    act(go)


def test_who_waits_for_cells_has_nobody_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(module, "_TICK_S", 0.001)

    async def go() -> None:
        engine = FakeEngine(4)
        for n in range(3):
            engine.ask(f"a{n}")
        await settle()
        engine.n_places = 3  # there is no room for a fourth
        waiting = engine.ask("b0")
        await asyncio.sleep(0.05)
        assert (waiting.is_begun, waiting.is_waiting, engine.paused) == (True, True, [])
        engine.turns.close()

    act(go)


def test_what_stands_still_gives_its_cells_to_who_lacks_them_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    monkeypatch.setattr(module, "_TICK_S", 0.001)

    async def go() -> None:
        engine = FakeEngine(4)
        for n in range(4):
            engine.ask(f"a{n}", user="ann")
        await settle()
        engine.n_places, engine.is_short = 0, True  # whatever they give, it is not enough
        waiting = engine.ask("b0")
        await until(lambda: bool(engine.resumed))
        assert waiting.is_waiting
        assert Counter(engine.sent_back) == dict.fromkeys(set(engine.paused), module.N_SENT_BACK_MAX)
        engine.turns.close()

    act(go)


def test_what_waits_for_cells_again_lets_who_is_new_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    monkeypatch.setattr(module, "_TICK_S", 0.001)

    async def go() -> None:
        engine = FakeEngine(4)
        many = [engine.ask(f"a{n}", user="ann") for n in range(2)]
        await settle()
        engine.n_places, engine.is_short, engine.lost = 0, True, {"a1"}
        engine.ask("b0")
        await until(lambda: many[1].is_paused)  # it has the place of nobody who could begin
        assert "a1" not in engine.sent_back
        engine.turns.close()

    act(go)


def test_nobody_gives_cells_to_answers_of_his_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(module, "_TICK_S", 0.001)

    async def go() -> None:
        engine = FakeEngine(3)
        engine.is_short = True
        for n in range(3):
            engine.ask(f"a{n}", user="ann")
        await settle()
        engine.n_places = 2
        engine.ask("a3", user="ann")
        await asyncio.sleep(0.05)
        assert engine.sent_back == []
        engine.turns.close()

    act(go)


def test_what_stands_still_goes_on_although_others_keep_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    monkeypatch.setattr(module, "_TICK_S", 0.001)
    monkeypatch.setattr(module, "AGEING_S", 0.05)

    async def go() -> None:
        engine = FakeEngine(4)
        many = [engine.ask(f"a{n}", user="ann") for n in range(4)]
        await settle()
        for key in "bcdefg":
            engine.ask(f"{key}0")
        await until(lambda: any(turn.is_paused for turn in many))
        paused = {turn.jobs[0].name for turn in many if turn.is_paused}
        keys = (chr(code) for code in range(200, 10**6))
        async with asyncio.timeout(20):
            while not paused <= set(engine.resumed):
                for turn in [turn for turn in engine.going if turn not in many and not turn.is_waiting]:
                    engine.finish(turn)
                    engine.ask(f"{next(keys)}0")
                await asyncio.sleep(0.002)
        engine.turns.close()

    act(go)


def test_another_stands_still_where_the_first_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(module, "_TICK_S", 0.001)

    async def go() -> None:
        engine = FakeEngine(2)
        reading, writing = engine.ask("a0"), engine.ask("a1")
        await settle()

        async def pause(jobs: Sequence[Job]) -> bool:
            return jobs is not reading.jobs and await engine.pause(jobs)

        engine.turns._pause = pause
        waiting = engine.ask("b0")
        await until(lambda: not waiting.is_waiting)
        assert (reading.is_paused, writing.is_paused) == (False, True)
        engine.turns.close()

    act(go)


def test_what_waits_is_cancelled_and_ends_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TICK_S", 0.001)

    async def go() -> None:
        engine = FakeEngine(1)
        begun = [engine.ask(f"a{n}") for n in range(3)]
        gone, late, left = engine.ask("a3"), engine.ask("a4", timeout_s=0.01), engine.ask("a5")
        await settle()
        assert not engine.turns.cancel(begun[0], "interrupted")
        assert engine.turns.cancel(gone, "interrupted")
        await until(lambda: late not in engine.turns._turns)
        engine.turns.close()
        assert engine.ended == [("a3", "interrupted"), ("a4", "timeout"), ("a5", "interrupted")]
        assert left not in engine.turns._turns

    act(go)


# ---------------------------------------------------------------- with an engine


def check_same(one: Said, alone: Said) -> None:
    """Check that an answer is the one given alone, but for what rounding decides where two tokens are as likely."""
    told, expected = ([logprob for piece in of.pieces for logprob in piece.logprobs] for of in (one, alone))
    assert len(told) == len(expected)
    for left, right in zip(told, expected, strict=True):
        if left.token != right.token:
            likely = {other.token: other.logprob for other in right.top}
            assert right.logprob - likely[left.token] < 0.05
            return
        assert abs(left.logprob - right.logprob) < 0.05
    assert one.text == alone.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["M", "MH"])
def test_long_answers_of_one_user_do_not_keep_another_waiting(
    models: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of the long ones is over before the others' short answers are, and all of them are what they are alone."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(module, "_TICK_S", 0.01)
    long = replace(GREEDY, max_tokens=200)

    def of(user: str, content: str, sampling: Sampling = GREEDY) -> Ask:
        return replace(chat(content, sampling=sampling), user=user, n_top_logprobs=3)

    async def go(service: LlamaService) -> None:
        hogs = [await service.ask(of("hog", f"tell me more: {n}", long)) for n in range(8)]
        reading = [asyncio.ensure_future(said(one)) for one in hogs]
        await until(lambda: service.counts.n_active == 4)
        shorts = [await answer_to(service, of("guest", f"and me? {n}")) for n in range(3)]
        assert not any(task.done() for task in reading)
        longs = [await task for task in reading]
        assert {one.finish for one in longs} == {"length"}
        for n, one in enumerate(shorts):
            check_same(one, await answer_to(service, of("", f"and me? {n}")))
        for n in (0, 7):
            check_same(longs[n], await answer_to(service, of("", f"tell me more: {n}", long)))

    with open_for(models(name), None, n_sequences=8, n_cells=8192) as service:
        run(service, go)


@pytest.mark.parametrize("name", ["M", pytest.param("MS", marks=pytest.mark.slow)])
def test_answers_without_a_limit_share_few_cells_and_leave_some_to_others(
    models: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them might become as long as there are cells; all begin at once, and a short one of another user does not
    wait for their ends."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    monkeypatch.setattr(module, "_TICK_S", 0.01)
    endless = replace(GREEDY, max_tokens=None)

    def of(user: str, content: str, sampling: Sampling) -> Ask:
        return replace(chat(content, system=None, sampling=sampling), user=user, n_top_logprobs=3)

    async def go(service: LlamaService) -> None:
        hogs = [await service.ask(of("hog", f"tell me more: {n}", endless)) for n in range(3)]
        reading = [asyncio.ensure_future(said(one)) for one in hogs]
        await until(lambda: service.counts.n_active == 3)
        await until(lambda: service.counts.n_cells > 900)
        shorts = [await answer_to(service, of("guest", f"and me? {n}", GREEDY)) for n in range(3)]
        assert not all(task.done() for task in reading)
        longs = [await task for task in reading]
        assert {one.finish for one in longs} <= {"context", "stop"}
        for n, one in enumerate(shorts):
            check_same(one, await answer_to(service, of("", f"and me? {n}", GREEDY)))
        for n, one in enumerate(longs):
            limit = replace(GREEDY, max_tokens=one.usage.n_generated)
            check_same(one, await answer_to(service, of("", f"tell me more: {n}", limit)))
        assert all(one.usage.n_prompt < 60 for one in longs)

    with open_for(models(name), None, n_sequences=8, n_cells=1024) as service:
        run(service, go)


def test_a_paused_answer_that_is_left_frees_its_cells(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(module, "_TICK_S", 0.01)
    long = replace(GREEDY, max_tokens=3000)

    async def go(service: LlamaService) -> None:
        hogs: list[LlamaAnswer] = [
            await service.ask(replace(chat(f"tell me: {n}", sampling=long), user="hog")) for n in range(2)
        ]
        await until(lambda: service.counts.n_active == 2)
        guest = await service.ask(replace(chat("and me?", sampling=long), user="guest"))
        await until(lambda: any(turn.is_paused for turn in service._answers.turns._turns))
        for one in (*hogs, guest):
            one.cancel()
        await until(lambda: service.counts.n_active + service.counts.n_waiting == 0)
        assert service.counts.n_cells == 0

    with open_for(model_path, None, n_sequences=4, n_cells=16384) as service:
        run(service, go)


@pytest.mark.parametrize("n_guests", [1, 3])
def test_what_stands_still_goes_on_where_others_need_its_cells(
    model_path: Path, n_guests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    monkeypatch.setattr(module, "_TICK_S", 0.01)

    def of(user: str, n: int) -> Ask:
        return replace(chat("tell me more", system=user, sampling=replace(GREEDY, max_tokens=n)), user=user)

    async def go(service: LlamaService) -> None:
        hogs = [asyncio.ensure_future(answer_to(service, of("hog", 450 + n))) for n in range(2)]
        await until(lambda: service.counts.n_active == 2)
        guests = [asyncio.ensure_future(answer_to(service, of(f"guest {n}", 800))) for n in range(n_guests)]
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*hogs, *guests)
        assert {one.finish for one in answers} == {"length"}

    with open_for(model_path, None, n_sequences=4, n_cells=1024) as service:
        run(service, go)


# ---------------------------------------------------------------- the end


def test_an_answer_that_is_being_brought_when_the_server_ends_is_told(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    def bring(*_: object) -> tuple[None, bool]:
        is_over.wait(20)
        return None, False

    async def go(service: LlamaService) -> None:
        monkeypatch.setattr(service._loader, "bring_prefix", bring)
        reading = asyncio.ensure_future(said(await service.ask(chat("hello there"))))
        await until(lambda: any(turn.is_begun for turn in service._answers.turns._turns))
        stopping = asyncio.ensure_future(service.stop(0.0))
        await until(lambda: not service._engine.is_alive)
        is_over.set()
        await stopping
        with pytest.raises(EngineError, match="the server is stopping"):
            await asyncio.wait_for(reading, 20)

    with open_for(model_path, tmp_path / "store") as service:
        asyncio.run(go(service))


def test_a_session_that_is_being_read_again_does_not_keep_the_server_from_ending(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def before(service: LlamaService) -> None:
        await answer_to(service, chat("hello there", session="notes"))

    async def go(service: LlamaService) -> None:
        monkeypatch.setattr(service._loader, "_check", lambda info: ("another build",))
        monkeypatch.setattr(service._scheduler, "step", list)
        resuming = asyncio.ensure_future(service.resume("notes", ""))
        await until(lambda: bool(service._engine._jobs))
        await asyncio.wait_for(service.stop(0.0), 20)
        with pytest.raises(EngineError):
            await resuming

    with open_for(model_path, tmp_path / "store") as service:
        run(service, before)
    with open_for(model_path, tmp_path / "store") as service:
        asyncio.run(go(service))
