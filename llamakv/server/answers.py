"""Requests for text: from what is asked to runs, and from runs that are over to conversations that are kept."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from llamakv.engine.contract import Run, RunRequest, Scheduler
from llamakv.engine.prefix import n_common
from llamakv.engine.room import no_room
from llamakv.engine.text import join
from llamakv.errors import BusyError, LlamakvError, NoRoomError
from llamakv.ops.opening import OpenModel
from llamakv.ops.prefixes import N_WORTH
from llamakv.records import Message
from llamakv.server.claims import Claim, Claims
from llamakv.server.contract import Ask
from llamakv.server.conversations import Conversation, Conversations
from llamakv.server.digests import begin_of, excerpt
from llamakv.server.engine_thread import EngineThread
from llamakv.server.jobs import Job, LlamaAnswer, Outbox
from llamakv.server.left_out import keep_in_memory
from llamakv.server.loader import Loader
from llamakv.server.prompts import Prompt, Prompts, is_long
from llamakv.server.queue import RETRY_UNKNOWN_S, Queue
from llamakv.server.saver import Saver
from llamakv.server.sizes import Room
from llamakv.server.turns import N_AHEAD, Turn, Turns
from llamakv.store.session_store import check_name

_N_PREPARING, _N_LOADING, _N_ACTING = 4, 2, 2  # threads

_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class Sums:
    """What all answers of a space took so far."""

    n_prompt_tokens: int = 0
    n_reused_memory: int = 0
    n_reused_store: int = 0
    n_evaluated: int = 0
    n_generated: int = 0
    n_sent_back: int = 0


async def in_thread(pool: ThreadPoolExecutor, action: Callable[[], _T]) -> _T:
    """Do what takes its time elsewhere than in the event loop."""
    return await asyncio.get_running_loop().run_in_executor(pool, action)


class Answers:
    """What is asked, under way and over. ``n_waiting_max`` requests may wait beside those under way; ``saves`` says
    whether there is a store.

    ``submit`` and ``ask`` are for the event loop; what is over is taken in on the engine thread.
    """

    def __init__(
        self,
        opened: OpenModel,
        scheduler: Scheduler,
        engine: EngineThread,
        saver: Saver,
        loader: Loader,
        conversations: Conversations,
        room: Room,
        *,
        n_waiting_max: int,
        saves: bool,
    ) -> None:
        self._opened = opened
        self._scheduler = scheduler
        self._engine = engine
        self._saver = saver
        self._loader = loader
        self._conversations = conversations
        self._room = room
        self._saves = saves
        self._prompts = Prompts(opened, conversations, loader.load_words, n_tokens_max=room.n_ctx_max)
        self._lock = threading.Lock()
        self._claims: dict[Job, tuple[Prompt, Claim]] = {}
        self._is_closed = False
        self._names = Claims(conversations, loader)
        self.queue = Queue(room.n_parallel, n_waiting_max)
        self.turns = Turns(
            room.n_parallel,
            n_ahead=min(room.n_kept // 4, N_AHEAD),  # they are kept meanwhile, where they are brought from the store
            n_still_max=room.n_kept,
            pause=lambda jobs: self._between_steps(partial(engine.pause, jobs)),
            resume=lambda jobs: engine.resume(jobs),
            is_short=lambda: scheduler.is_short,
            send_back=lambda jobs: self._between_steps(partial(engine.send_back, jobs)),
            has_cells=lambda job: job.run is not None and scheduler.has_cells(job.run),
            end=self._end_unbegun,
        )
        self.sums: defaultdict[str, Sums] = defaultdict(Sums)  # by space
        self.preparing = ThreadPoolExecutor(_N_PREPARING, thread_name_prefix="llamakv-prepare")
        self.preparing_long = ThreadPoolExecutor(1, thread_name_prefix="llamakv-prepare-long")
        self.loading = ThreadPoolExecutor(_N_LOADING, thread_name_prefix="llamakv-load")
        self.acting = ThreadPoolExecutor(_N_ACTING, thread_name_prefix="llamakv-act")  # which may wait for a disk

    def under_way(self, space: str) -> list[tuple[Job, str]]:
        """What is being answered in a space, and the names it is kept under."""
        with self._lock:
            return [(job, claim.place.name) for job, (_, claim) in self._claims.items() if job.request.space == space]

    def make_ready(self) -> None:
        """Have what the first prompt would wait for."""
        self._prompts.make_ready()

    def refuse_more(self) -> None:
        """Take no more requests."""
        self._is_closed = True

    def close(self) -> None:
        """End the threads, which use the scheduler; what is being brought from the store is not waited for long."""
        self._is_closed = True
        for pool in (self.preparing, self.preparing_long, self.loading, self.acting):
            pool.shutdown(wait=True, cancel_futures=True)

    def _check_open(self) -> None:
        if self._engine.error is not None:
            raise self._engine.error
        if self._is_closed:
            raise BusyError("the server is stopping", retry_after_s=RETRY_UNKNOWN_S)

    # ------------------------------------------------------------ in

    async def ask(self, ask: Ask) -> LlamaAnswer:
        """Queue a request; see the contract."""
        arrived_s = time.perf_counter()
        self._check_open()
        self.queue.enter(ask.n_choices)
        deadline_s = None if ask.timeout_s is None else arrived_s + ask.timeout_s
        claims: list[Claim] = []
        unwanted = threading.Event()
        try:
            pool = self.preparing_long if is_long(ask.prompt) else self.preparing  # one that is long delays no others
            prompt = await in_thread(pool, partial(self._prepare, ask, claims, unwanted))
            self._check_open()
        except BaseException:
            with self._conversations.lock:  # the thread that prepares may still be at work
                unwanted.set()
                self._names.give_back(ask.space, claims)
            self.queue.leave(ask.n_choices)
            raise
        return self._enter(ask, prompt, claims, deadline_s)

    def _enter(self, ask: Ask, prompt: Prompt, claims: Sequence[Claim], deadline_s: float | None) -> LlamaAnswer:
        """Have it wait for its turn."""
        outbox = Outbox(self._opened.model.token_bytes)
        jobs = []
        for index in range(ask.n_choices):
            request = RunRequest(
                tokens=prompt.tokens,
                sampling=replace(ask.sampling, seed=(ask.sampling.seed + index) % 2**32),
                keeps_cells=True,
                space=ask.space,
                n_top_logprobs=ask.n_top_logprobs,
                places=prompt.places,
            )
            on_over = partial(self._over, prompt, claims[index])
            job = Job(request=request, index=index, outbox=outbox, on_over=on_over, deadline_s=deadline_s)
            job.keeps_when_left = claims[index].is_named
            jobs.append(job)
        begin = partial(self._begin, ask.space, prompt, claims)
        turn = Turn(key=ask.key, user=ask.user, jobs=jobs, begin=begin, deadline_s=deadline_s)
        for job in jobs:
            job.turn = turn
        self.turns.enter(turn)
        return LlamaAnswer(jobs, outbox, partial(self._cancel, turn))

    def _cancel(self, turn: Turn, jobs: Sequence[Job]) -> None:
        if self.turns.cancel(turn, "interrupted"):
            return
        for job in jobs:
            job.is_cancelled = True
        self._engine.cancel(jobs)

    def _prepare(self, ask: Ask, claims: list[Claim], unwanted: threading.Event) -> Prompt:
        """What is to be read, and the names it is to be kept under, which are taken from now on."""
        if ask.session is not None:
            check_name(ask.session)
        self._opened.model.check_sampling(ask.sampling)
        if ask.space not in self._loader.has_scanned or self._is_unknown(ask):
            self._loader.scan(ask.space)
        prompt = self._prompts.read(ask)
        if self._is_unknown(ask):  # somebody else has changed it, and what was known of it is forgotten
            self._loader.scan(ask.space)
            prompt = self._prompts.read(ask)
        if len(prompt.tokens) >= self._room.n_ctx_max:
            n, n_most, n_train = len(prompt.tokens), self._room.n_ctx_max, self._opened.info.n_ctx_train
            raise NoRoomError(
                f"the prompt has {n:,} tokens, and a conversation may have {n_most:,}",
                hint=no_room(needed=n + 1, used=0, limit=n_most, n_ctx_train=n_train).hint,
                needed=n + 1,
                limit=n_most,
            )
        with self._conversations.lock:
            if unwanted.is_set():
                return prompt
            claims += self._names.take(ask, prompt)
        owner = self._conversations.get(ask.space, claims[0].place.name)
        if owner is not None and owner.place.info is None and owner.is_saved:
            with contextlib.suppress(LlamakvError):  # it is saved beside it then
                self._loader.load_words(owner)
        return prompt

    def _is_unknown(self, ask: Ask) -> bool:
        """Whether the store has a session of the wanted name that somebody else made since it was looked through."""
        name = ask.session
        return (
            name is not None
            and self._conversations.get(ask.space, name) is None
            and self._loader.is_there(ask.space, name)
        )

    async def _begin(self, space: str, prompt: Prompt, claims: Sequence[Claim], turn: Turn) -> None:
        """Its turn has come: have what the store has of it, and have it written."""
        jobs = turn.jobs
        try:
            jobs[0].held, is_brought = await self._bring(space, prompt, turn)
            if self._engine.error is not None:
                raise self._engine.error
            for job in jobs:
                job.source = "store" if is_brought else "memory"
                if job.deadline_s is not None:
                    timeout_s = max(job.deadline_s - time.perf_counter(), 0.0)
                    job.request = replace(job.request, timeout_s=timeout_s)
            with self._lock:
                self._claims.update((job, (prompt, claim)) for job, claim in zip(jobs, claims, strict=True))
            self._engine.submit(jobs)
        except LlamakvError as error:
            self._end_unbegun(turn, "", error)
        except BaseException:
            self._end_unbegun(turn, "interrupted")
            raise

    def _end_unbegun(self, turn: Turn, reason: str, error: LlamakvError | None = None) -> None:
        """End an answer that the engine never heard of."""
        for job in turn.jobs:
            if job.is_over:
                continue
            job.is_over, job.finish_reason = True, reason
            job.on_over(job, False)
            if job.outbox is not None and error is not None:
                job.outbox.fail(error)
            elif job.outbox is not None:
                job.outbox.put(job.index, "", finish_reason=reason)

    async def _bring(self, space: str, prompt: Prompt, turn: Turn) -> tuple[Run | None, bool]:
        """Have what the store has of a prompt in memory, unless it is not wanted any more or the time is up before.
        Returns what was brought, held, and whether cells were."""
        base = prompt.base
        if not self._saves or (prompt.goes_on and base is not None and base.run is not None):
            return None, False
        with self._lock:
            coming = [job.request.tokens for job in self._claims if job.request.space == space]

        is_late = threading.Event()

        def is_unwanted() -> bool:
            return is_late.is_set() or self._is_closed or all(job.is_cancelled for job in turn.jobs)

        def bring() -> tuple[Run | None, bool]:
            n_coming = max((n_common(tokens[:-1], prompt.tokens) for tokens in coming), default=0)
            held, is_brought = self._loader.bring_prefix(space, prompt.tokens, n_coming, is_unwanted)
            if held is not None and is_unwanted():
                self._scheduler.unhold(held)
                held = None
            return held, is_brought

        future = asyncio.wrap_future(self.loading.submit(bring))
        waiting_s = None if turn.deadline_s is None else max(turn.deadline_s - time.perf_counter(), 0.0)
        try:
            return await asyncio.wait_for(asyncio.shield(future), waiting_s)
        except TimeoutError:
            is_late.set()
            future.add_done_callback(self._take_back)
            return None, False

    def _take_back(self, future: asyncio.Future[tuple[Run | None, bool]]) -> None:
        if not future.cancelled() and future.exception() is None and (held := future.result()[0]) is not None:
            self._engine.call(partial(self._scheduler.unhold, held))  # which may wait for a step

    async def _between_steps(self, action: Callable[[], bool]) -> bool:
        try:
            return await asyncio.wrap_future(self._engine.call(action))
        except LlamakvError:  # the server is stopping
            return False

    # ------------------------------------------------------------ answers that are over (on the engine thread)

    def _over(self, prompt: Prompt, claim: Claim, job: Job, has_cells: bool) -> None:
        run, space = job.run, job.request.space
        with self._lock:
            self._claims.pop(job, None)
            if run is not None:
                self._add_up(self.sums[space], run, job)
        try:
            if run is not None and has_cells:
                if run.n_generated:
                    self._keep(self._conversation_of(prompt, claim, job, run, job.finish_reason))
                else:
                    self._scheduler.release(run)
        finally:
            self._names.give_back(space, [claim])
            self.queue.leave(1, is_done=job.finish_reason not in ("", "interrupted"))
            if job.turn is not None and not job.turn.n_left:
                self.turns.leave(job.turn)
            self._saver.wake()

    def _add_up(self, sums: Sums, run: Run, job: Job) -> None:
        sums.n_prompt_tokens += min(run.n_reused + run.n_evaluated, len(job.request.tokens))
        sums.n_sent_back += run.n_sent_back
        sums.n_evaluated += run.n_evaluated
        sums.n_generated += run.n_generated
        if job.source == "store":
            sums.n_reused_store += run.n_reused
        else:
            sums.n_reused_memory += run.n_reused

    def _conversation_of(self, prompt: Prompt, claim: Claim, job: Job, run: Run, finish_reason: str) -> Conversation:
        tokens, text, now_s = tuple(run.tokens), run.text, time.time()
        n_prompt = len(prompt.tokens)
        reply = Message(role="assistant", content=text, p0=n_prompt, p1=len(tokens), finish=finish_reason, time_s=now_s)
        messages = (*prompt.messages, reply) if prompt.template is not None else ()
        said = None if prompt.said is None else prompt.said + text
        parent = claim.parent
        one = Conversation(
            space=job.request.space,
            place=claim.place,
            created_s=prompt.now_s,
            used_s=now_s,
            n_tokens=len(tokens),
            tokens=tokens,
            template=prompt.template,
            messages=messages,
            said=said,
            marks=prompt.marks,
            sampling=job.request.sampling,
            is_exact=self._is_exact(tokens[n_prompt:], text),
            run=run,
            parent=None if parent is None else parent.place.info,
            n_settled=run.n_reused,
            n_turns=sum(message.role == "assistant" for message in messages) or 1,
            first_text=excerpt(messages, said),
            begin=begin_of(messages, said),
            n_prompt=n_prompt,
            is_named=claim.is_named,
            is_wanted=self._saves and (claim.is_named or len(tokens) - 1 >= N_WORTH),
        )
        self._conversations.make_keys(one)
        return one

    def _is_exact(self, written: Sequence[int], text: str) -> bool:
        """Whether the tokens of a reply are its text: not where a stop string was cut off."""
        model = self._opened.model
        if model.is_end(written[-1]):
            return True
        return join(model.token_bytes(token) for token in written) == text

    def _keep(self, one: Conversation) -> None:
        run = one.run
        assert run is not None
        conversations, scheduler = self._conversations, self._scheduler
        with conversations.lock:
            same = conversations.find_same(one) if one.place.info is None else None
            if same is not None and conversations.get(one.space, one.name) is None and not one.is_named:
                same.used_s = one.used_s
                scheduler.release(run)
                return
            before = self._add(one)
            if before is not None:
                self._supersede(before, one)
            if not one.is_wanted:
                one.is_let_go = True
                scheduler.let_go(run)

    def _add(self, one: Conversation) -> Conversation | None:
        """Know it; what it leaves out of what its name stood for stays beside it."""
        with self._conversations.lock:
            there = self._conversations.get(one.space, one.name)
            if there is not None and there.run is not None and self._scheduler.has_cells(there.run):
                is_there = partial(self._loader.is_there, one.space)
                if keep_in_memory(one, there, self._conversations, is_there=is_there):
                    self._move_pin(there, one)
            return self._conversations.add(one)

    def _move_pin(self, before: Conversation, one: Conversation) -> None:
        if before.is_pinned and one.run is not None:
            one.is_pinned = True
            self._scheduler.pin(one.run, is_pinned=True)
            before.is_pinned = False
            if before.run is not None:
                self._scheduler.pin(before.run, is_pinned=False)

    def _supersede(self, before: Conversation, one: Conversation) -> None:
        """A conversation has gone on: what it was before is not needed any more."""
        before.is_gone = True
        if before.run is not None and not before.is_saving:
            self._scheduler.release(before.run)
        self._move_pin(before, one)

    def end(self, left: Sequence[Job]) -> None:
        """What was written stays; the scheduler makes no step any more, so runs are what they are."""
        for job in left:
            run, known = job.run, self._claims.get(job)
            job.is_over, job.finish_reason = True, "interrupted"
            if known is None:  # of no request: somebody waits for it
                job.on_over(job, False)
            if run is not None and known is not None and run.n_generated and self._scheduler.is_whole(run):
                prompt, claim = known
                one = self._conversation_of(prompt, claim, job, run, "interrupted")
                one.is_exact = False
                self._add(one)
            if job.outbox is not None:
                job.outbox.put(job.index, run.take_text() if run is not None else "", finish_reason="interrupted")
