"""To the store: a thread writes idle conversations, whose cells may then be given to others."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from llamakv.engine.contract import Run, Scheduler
from llamakv.engine.prompt import template_digest
from llamakv.engine.text import join
from llamakv.errors import EngineError, LlamakvError, NotFoundError, StoreError
from llamakv.ops.budget import Budget
from llamakv.ops.copying import Within
from llamakv.ops.keeping import Keeper
from llamakv.ops.opening import OpenModel
from llamakv.ops.prefixes import N_WORTH, usable_cells
from llamakv.ops.requests import Compress, Reporter
from llamakv.records import Chat, SectionKind
from llamakv.server.conversations import Conversation, Conversations
from llamakv.server.damage import Damage
from llamakv.server.engine_thread import EngineThread
from llamakv.server.folders import Folders, changed_s, path_of
from llamakv.server.left_out import keep_in_store
from llamakv.server.live_cells import LiveCells, LiveModel
from llamakv.server.visitors import VISIT_S, Visitors
from llamakv.store.reuse import space_of
from llamakv.store.session_file import SessionInfo, read_session
from llamakv.store.session_store import SessionStore
from llamakv.store.store_folder import make_store

_RETRY_S = 30.0
"""How long after a failed save it is tried again."""

_IDLE_S = 1.0
"""How often it is looked what to save while nothing happens."""

_N_LATELY = 16
"""Sessions saved last that others may begin with: no look at the store is needed for these."""

_PATIENCE_S = 60.0
"""How long who needs room waits for something to be saved."""

_POLL_S = 0.01

_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class Tally:
    """What was saved and lost of a space, since the beginning."""

    n_saves: int = 0
    n_save_failures: int = 0
    n_dropped: int = 0


class Saver:
    """The thread that writes. ``save_delay_s`` after a conversation was used last it is saved; at once where cells are
    short (``hurry``). What was saved may be dropped from memory when others need the cells. ``tell`` gets what went
    wrong, once for each kind. All of it may be called from any thread."""

    def __init__(
        self,
        opened: OpenModel,
        scheduler: Scheduler,
        engine: EngineThread,
        conversations: Conversations,
        folders: Folders,
        *,
        compress: Compress,
        make_budget: Callable[[], Budget],
        save_delay_s: float,
        n_bytes_per_cell: float,
        damage: Damage,
        tell: Callable[[str], None],
    ) -> None:
        self._opened = opened
        self._scheduler = scheduler
        self._engine = engine
        self._conversations = conversations
        self._folders = folders
        self._compress = compress
        self._budgets: dict[str, Budget] = {}
        self._make_budget = make_budget
        self._save_delay_s = save_delay_s
        self._n_bytes_per_cell = n_bytes_per_cell
        self._damage = damage
        self._tell = tell
        self._told: set[str] = set()
        self._condition = threading.Condition()
        self._tasks: deque[Callable[[], None]] = deque()
        self._is_hurried = self._is_ending = self._is_over = False
        self._lately: deque[SessionInfo] = deque(maxlen=_N_LATELY)
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)  # by space
        self.visitors = Visitors(scheduler.is_held)
        self._thread = threading.Thread(target=self._work, name="llamakv-saver", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ for other threads

    def call(self, action: Callable[[], _T]) -> Future[_T]:
        """Do something with the store, before anything else that waits to be saved."""
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

        with self._condition:
            if self._is_over:
                future.set_exception(EngineError("the server is stopping"))
            else:
                self._tasks.append(run)
                self._condition.notify_all()
        return future

    def hurry(self) -> bool:
        """Others need cells: let go of conversations now. Returns whether there are any that could be."""
        with self._condition:
            self._is_hurried = True
            self._condition.notify_all()
        return any(not one.is_pinned for one in self._conversations.live())

    def make_room(self) -> bool:
        """Have a conversation let go of, and wait until it is; False where there is none."""
        before = self._n_held()
        if not before:
            return False
        until_s = time.perf_counter() + _PATIENCE_S
        while time.perf_counter() < until_s and not self._is_ending:
            self.hurry()
            time.sleep(_POLL_S)
            if self._n_held() < before:
                return True
        return False

    def _n_held(self) -> int:
        return sum(not one.is_let_go and not one.is_pinned for one in self._conversations.live())

    def wake(self) -> None:
        """A conversation has become idle."""
        with self._condition:
            self._condition.notify_all()

    def save_all(self) -> None:
        """Save whatever is not."""
        for one in self._conversations.live():
            if one.is_wanted and not one.is_saved:
                self.call(partial(self._try_saving, one)).result()

    def stop(self) -> None:
        """End the thread when what it was asked for is done."""
        with self._condition:
            self._is_ending = True
            self._condition.notify_all()
        self._thread.join()

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        while True:
            with self._condition:
                if not self._tasks and not self._is_hurried and not self._is_ending:
                    self._condition.wait(self._wait_s())
                tasks = list(self._tasks)
                self._tasks.clear()
                is_hurried = self._is_hurried
                if self._is_ending and not tasks:
                    self._is_over = True
                    return
            for task in tasks:
                task()
            if is_hurried:
                self._let_one_go()
                with self._condition:
                    self._is_hurried = False  # whoever asked meanwhile looks again first
            elif not tasks:
                due = self._next_due()
                if due is not None:
                    self._try_saving(due)
            self.sweep()

    def _wait_s(self) -> float:
        waiting = [self._due_s(one) for one in self._conversations.live() if self._is_unsaved(one)]
        return min(_IDLE_S, max(min(waiting, default=_IDLE_S) - time.time(), 0.001))

    def _is_unsaved(self, one: Conversation) -> bool:
        return one.is_wanted and not one.is_saved and one.run is not None and self._folders.of(one.space) is not None

    def _due_s(self, one: Conversation) -> float:
        return max(one.used_s + self._save_delay_s, one.failed_s + _RETRY_S if one.failed_s else 0.0)

    def _next_due(self) -> Conversation | None:
        now_s = time.time()

        def is_due(one: Conversation) -> bool:
            if 0.0 < one.failed_s <= now_s:
                is_time = one.failed_s + _RETRY_S <= now_s
            else:  # a time to come: the clock was set back
                is_time = max(one.used_s, one.failed_s) > now_s or self._due_s(one) <= now_s
            return is_time and self._is_unsaved(one)

        due = [one for one in self._conversations.live() if is_due(one)]
        return min(due, key=lambda one: one.used_s, default=None)

    def _let_one_go(self) -> None:
        """Give up the cells of the conversation that was used longest ago: saved, if that can be done."""
        owners = {one.run: one for one in self._conversations.live()}
        for run in self._scheduler.kept:
            one = owners.get(run)
            if one is None or one.is_pinned or one.is_let_go:
                continue
            if self._is_unsaved(one):
                self._try_saving(one)
            if not one.is_saved and one.is_wanted:
                self._say("dropped", "conversations that could not be saved are dropped from memory: cells are short")
            one.is_let_go = True
            self._scheduler.let_go(run)
            self._engine.wake()
            return

    def sweep(self) -> None:
        """Take notice of cells that were given to others."""
        for one in self._conversations.live():
            run = one.run
            if run is None or self._scheduler.has_cells(run):
                continue
            with self._conversations.lock:
                if one.run is not run or one.is_saving or one.is_gone:
                    continue
                self.tallies[one.space].n_dropped += 1
                one.run, one.is_let_go = None, False
                self._conversations.rest(one)
        for run in self.visitors.due():
            self._scheduler.release(run)
        self._scheduler.release_copies(VISIT_S)

    # ------------------------------------------------------------ saving

    def save(self, one: Conversation) -> None:
        """Save a conversation that is in memory. On the saver's own thread.

        Raises:
            WriteError, NoRoomError, ...: nothing was changed; it stays in memory.
        """
        root = self._folders.of(one.space)
        if root is None:
            raise NotFoundError("nothing is saved: the server has no store", hint="start it without --no-store")
        with self._conversations.lock:
            run = one.run
            if run is None or not self._scheduler.has_cells(run):
                if one.is_saved:
                    return
                raise NotFoundError(f"session '{one.name}' is not in memory any more")
            one.is_saving = True
        try:
            make_store(root)
            self._write(one, run, root)
        finally:
            with self._conversations.lock:
                one.is_saving = False
                is_gone = one.is_gone
            if is_gone:
                self._scheduler.release(run)

    def _write(self, one: Conversation, run: Run, root: Path) -> None:
        within = Within(budget=self._budget_of(one.space))
        left_out = keep_in_store(one, root, is_taken=partial(self._conversations.is_taken, one.space), within=within)
        if left_out is not None:
            self._tell(f"session '{one.name}' went on without some of its messages, which '{left_out}' has")
        place = one.place
        stored = place.info or one.parent
        if stored is not None:
            is_unusable = place.is_stale or self._damage.is_in(stored)
            one.n_settled = 0 if is_unusable else min(one.n_settled, stored.n_cells_held)
        cells = LiveCells(
            scheduler=self._scheduler,
            conversation=one,
            run=run,
            n_ctx=self._engine.n_ctx,
            n_bytes_per_cell=self._n_bytes_per_cell,
        )
        keeper = Keeper(
            LiveModel(opened=self._opened, sequence=cells),
            stored,
            compress=self._compress,
            budget=self._budget_of(one.space),
            created_s=one.created_s,
        )
        if stored is None:
            self._begin_with_saved(keeper, one, root)
        chat, text = self._words_of(one)
        with self._engine.beside():
            saved = keeper.save(
                path_of(root, place.name),
                chat=chat,
                text=text,
                sampling=one.sampling,
                reporter=Reporter(warning=lambda line: self._say("aside", line)),
                name=place.name,
                aside_on_conflict=True,
                is_taken=lambda name: name != place.name and self._conversations.is_taken(one.space, name),
            )
        with self._conversations.lock:
            if saved.asked is not None:
                self._conversations.rename(one, saved.info.path.stem)
            self._lately.append(saved.info)
            place.info, place.is_stale, one.parent = saved.info, False, None
            one.is_saved, one.failed_s = True, 0.0
            one.n_stored_bytes = saved.info.n_stored_bytes
            one.changed_s = changed_s(saved.info.path)
            one.n_settled = len(one.tokens) - 1
        self.tallies[one.space].n_saves += 1
        if not one.is_gone:
            self._scheduler.let_go(run)
            one.is_let_go = True
            self._engine.wake()

    def _begin_with_saved(self, keeper: Keeper, one: Conversation, root: Path) -> None:
        """Find what the store has of the cells it began with, so that they are not written again."""
        if one.n_settled < N_WORTH:
            return
        info = self._saved_lately(one, root)
        if info is None:
            with contextlib.suppress(StoreError, NotFoundError):
                info = self._saved_ever(one, root)
        if info is None or self._damage.is_in(info):
            return
        n_cells = _without_scraps(info, min(one.n_settled, usable_cells(info, one.tokens)))
        if n_cells >= N_WORTH:
            one.n_settled = n_cells
            keeper.begins_with(info)

    def _saved_lately(self, one: Conversation, root: Path) -> SessionInfo | None:
        """One of those saved last that has all of it, but for a few cells."""
        wanted = one.tokens[: one.n_settled + 1]
        fitting = ((usable_cells(info, wanted), info) for info in reversed(self._lately) if info.path.parent == root)
        return next((info for n_cells, info in fitting if n_cells + N_WORTH > one.n_settled), None)

    def _saved_ever(self, one: Conversation, root: Path) -> SessionInfo | None:
        from llamakv.store.cache import StoreCache  # late: SQLite is not needed without a store

        space = space_of(self._opened.identity, self._opened.model.settings, self._opened.model.versions)
        with StoreCache(root) as cache:
            hint = cache.longest_prefix(space, one.tokens[: one.n_settled + 1])
        return None if hint is None else read_session(hint.path)

    def _words_of(self, one: Conversation) -> tuple[Chat | None, str | None]:
        if one.template is None:
            return None, join(self._opened.model.token_bytes(token) for token in one.tokens)
        chat = Chat(template=one.template, template_digest=template_digest(one.template), messages=one.messages)
        return chat, None

    def _try_saving(self, one: Conversation) -> None:
        try:
            self.save(one)
        except LlamakvError as error:
            self._note_failure(one, error)
        except Exception as error:  # a bug must not end the thread that saves the others
            self._note_failure(one, StoreError(f"session '{one.name}' could not be saved: {error!r}"))

    def _note_failure(self, one: Conversation, error: LlamakvError) -> None:
        if not one.failed_s:
            self.tallies[one.space].n_save_failures += 1
        one.failed_s = time.time()
        self._say(error.code, f"session '{one.name}' could not be saved: {error.message}")

    def _budget_of(self, space: str) -> Budget:
        return self._budgets.setdefault(space, self._make_budget())

    def _say(self, kind: str, line: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._tell(line)

    def remove(self, one: Conversation) -> None:
        """Remove a conversation from the store. On the saver's own thread. Raises: LockedError, WriteError."""
        root = self._folders.of(one.space)
        if root is not None and path_of(root, one.name).exists():
            SessionStore(root).remove(str(path_of(root, one.name)))


def _without_scraps(info: SessionInfo, n_cells: int) -> int:
    """As many cells of a session as are worth sharing: a section for the sake of a few of its cells is not, since it is
    read as a whole."""
    for section in info.sections:
        is_last = section.kind is SectionKind.CELLS and section.p0 < n_cells <= section.p_used
        if is_last and n_cells < min(section.p1, section.p0 + N_WORTH):
            return section.p0
    return n_cells
