"""From the store: sessions are brought back when somebody goes on with them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from llamakv.engine.contract import Model, Run, RunRequest, Scheduler
from llamakv.engine.prefix import n_common
from llamakv.engine.text import join
from llamakv.errors import EngineError, FormatError, LlamakvError, MismatchError, NoRoomError, NotFoundError
from llamakv.ops.matching import check_layout, describe, reasons_to_recompute
from llamakv.ops.opening import OpenModel
from llamakv.ops.prefixes import N_WORTH, usable_cells
from llamakv.ops.requests import ResumeOptions
from llamakv.ops.resume_cost import sections_restored
from llamakv.records import MemoryKind, Sampling, SessionRecord, StateSection
from llamakv.server.conversations import N_KNOWN_MAX, Conversation, Conversations, is_still, load, stub_of
from llamakv.server.damage import Damage
from llamakv.server.engine_thread import EngineThread
from llamakv.server.folders import Folders, changed_s, path_of
from llamakv.server.jobs import Job, for_space
from llamakv.store.reuse import space_of
from llamakv.store.session_file import (
    SessionInfo,
    SessionReader,
    mark_used,
    n_cells_held,
    read_session,
    sections_up_to,
)
from llamakv.store.session_store import SessionStore


class Loader:
    """Brings sessions back. Its functions take their time, and may be called from several threads. ``has_scanned`` are
    the spaces whose stores were looked through."""

    def __init__(
        self,
        opened: OpenModel,
        scheduler: Scheduler,
        engine: EngineThread,
        conversations: Conversations,
        folders: Folders,
        *,
        make_room: Callable[[], bool],
        on_visitor: Callable[[Run], None],
        options: ResumeOptions,
        damage: Damage,
        tell: Callable[[str], None],
    ) -> None:
        self._opened = opened
        self._scheduler = scheduler
        self._engine = engine
        self._conversations = conversations
        self._folders = folders
        self._make_room = make_room
        self._on_visitor = on_visitor
        self._options = options
        self._damage = damage
        self._tell = tell
        self._told: set[tuple[Path, float]] = set()
        self._lock = threading.Lock()
        self._loads: dict[tuple[str, Path, int], Future[Run]] = {}
        self._scans: dict[str, threading.Lock] = {}
        self.has_scanned: set[str] = set()

    @property
    def _space(self) -> str:
        return space_of(self._opened.identity, self._opened.model.settings, self._opened.model.versions)

    def scan(self, space: str) -> None:
        """Know the sessions of a space's store as they are now; those that changed or are new are read."""
        root = self._folders.of(space)
        if root is None or not root.is_dir():
            self.has_scanned.add(space)
            return
        with self._lock:
            lock = self._scans.setdefault(space, threading.Lock())
        with lock:
            found = {path.stem: path for path in root.glob("*.bin") if not path.name.startswith(".")}
            stamped = sorted(((changed_s(path), name) for name, path in found.items()), reverse=True)
            for stamp_s, name in reversed(stamped[:N_KNOWN_MAX]):
                one = self._conversations.get(space, name)
                is_known = one is not None and (one.run is not None or one.changed_s == stamp_s)
                if not is_known and not self._conversations.is_active(space, name):
                    self._read_stub(space, name, found[name], stamp_s)
            for one in self._conversations.of(space):
                if one.run is None and one.name not in found:
                    self._conversations.remove(one)
            self.has_scanned.add(space)

    def _read_stub(self, space: str, name: str, path: Path, stamp_s: float) -> None:
        try:
            info = read_session(path)
        except LlamakvError:
            return
        record = info.record
        if space_of(record.identity, record.settings, record.versions) != self._space:
            return  # of another model: it may be resumed by name, with what that says
        stub = self.stub(info, space, name=name, changed_s=stamp_s)
        stub.messages = ()
        with self._conversations.lock:
            there = self._conversations.get(space, name)
            if self._conversations.is_active(space, name) or (there is not None and there.run is not None):
                return
            self._conversations.add(stub)

    def stub(self, info: SessionInfo, space: str, *, name: str, changed_s: float) -> Conversation:
        """A session in the store as a conversation, with what it is found by."""
        stub = stub_of(info, space, name=name, changed_s=changed_s)
        stub.is_exact = self._is_exact(info)
        self._conversations.make_keys(stub)
        return stub

    def _is_exact(self, info: SessionInfo) -> bool:
        """Whether tokens are what a client was told: not where a stop string was cut off, nor text in which special
        tokens cannot be seen."""
        model, record = self._opened.model, info.record
        if record.chat is not None:
            last = record.chat.messages[-1] if record.chat.messages else None
            if last is None or last.role != "assistant":
                return True
            written = record.tokens[last.p0 : last.p1]
            is_end = bool(written) and model.is_end(written[-1])
            return is_end or join(model.token_bytes(token) for token in written) == last.content
        pieces = [model.token_bytes(token) for token in record.tokens]
        if model.is_end(record.tokens[-1]):
            del pieces[-1]
        return all(pieces[1:]) and b"".join(pieces) == (record.text or "").encode("utf-8", "surrogatepass")

    def make_ready(self, space: str) -> None:
        """Have looked at what a store has, so that nobody waits for that."""
        from llamakv.store import codec
        from llamakv.store.cache import StoreCache  # late: SQLite is not needed without a store

        root = self._folders.of(space)
        if root is not None:
            codec.make_ready()
        if root is not None and root.is_dir():
            with contextlib.suppress(LlamakvError), StoreCache(root) as cache:
                cache.longest_prefix(self._space, (0, 0))

    def is_there(self, space: str, name: str) -> bool:
        """Whether the store has a session of this name, of whatever model."""
        root = self._folders.of(space)
        return root is not None and os.path.exists(path_of(root, name))  # no error, whatever the disk says

    def load_words(self, one: Conversation) -> None:
        """Take back from the store what was said.

        Raises:
            NotFoundError, FormatError, ReadError: it cannot be had.
        """
        root = self._folders.of(one.space)
        if root is None:
            raise NotFoundError(f"session '{one.name}' is not in memory any more")
        info = read_session(path_of(root, one.name))
        with self._conversations.lock:
            if not one.is_loaded:
                if not is_still(one, info):
                    raise NotFoundError(f"session '{one.name}' was changed by somebody else")
                load(one, info)

    # ------------------------------------------------------------ prefixes

    def bring_prefix(
        self, space: str, tokens: Sequence[int], n_coming: int, is_unwanted: Callable[[], bool]
    ) -> tuple[Run | None, bool]:
        """Have the longest beginning of some tokens in memory that the store has, if it is worth it: ``n_coming`` of
        them are being read or written now. Returns the run that has it, which is held, and whether cells came from the
        store. Never fails: what cannot be brought back is read like all else."""
        from llamakv.store.cache import StoreCache  # late: SQLite is not needed without a store

        root = self._folders.of(space)
        n_live = max(n_coming, self._n_live(space, tokens))
        if root is None or len(tokens) - 1 - n_live < N_WORTH or not root.is_dir():
            return None, False
        path = root
        try:
            with StoreCache(root) as cache:
                hint = cache.longest_prefix(self._space, tokens)
            if hint is None or hint.n_cells < n_live + N_WORTH:
                return None, False
            path = hint.path
            info = read_session(path)
            n_cells = 0 if self._damage.is_in(info) else usable_cells(info, tokens)
            if n_cells < n_live + N_WORTH:
                return None, False
            key = (space, path, n_cells)
            return self._once(key, lambda: self._adopt_prefix(space, key[1], tokens, is_unwanted))
        except NoRoomError:
            return None, False
        except LlamakvError as error:
            if isinstance(error, FormatError):
                self._damage.look_for(path)
            self._say_once(path, error)
            return None, False

    def _say_once(self, path: Path, error: LlamakvError) -> None:
        """Say what cannot be had from the store, unless somebody has just removed it; once for each version of it."""
        try:
            version = path, changed_s(path)
        except OSError:
            return
        if version not in self._told:
            self._told.add(version)
            self._tell(f"{path.stem} could not be brought back and is read again: {error.message}")

    def _n_live(self, space: str, tokens: Sequence[int]) -> int:
        """How many cells of these tokens there are in memory to begin with."""
        if self._opened.info.kind not in (MemoryKind.RECURRENT, MemoryKind.HYBRID):
            return self._conversations.n_live(space, tokens)
        wholes = (run.tokens[:-1] for run in self._scheduler.kept if run.space == space)
        return max((len(whole) for whole in wholes if n_common(whole, tokens) == len(whole)), default=0)

    def _once(self, key: tuple[str, Path, int], action: Callable[[], Run]) -> tuple[Run | None, bool]:
        """Do what several want at the same time only once; all wait for it, and hold what came."""
        with self._lock:
            running = self._loads.get(key)
            own = None if running is not None else Future[Run]()
            if own is not None:
                self._loads[key] = own
        if running is not None:
            run = running.result()
            return run if self._scheduler.hold(run) else None, True
        assert own is not None
        try:
            run = action()
        except BaseException as error:
            own.set_exception(error)
            raise
        else:
            own.set_result(run)
            return run, True
        finally:
            with self._lock:
                del self._loads[key]

    def _adopt_prefix(self, space: str, path: Path, tokens: Sequence[int], is_unwanted: Callable[[], bool]) -> Run:
        """Bring cells into memory, held."""
        with SessionReader(path) as reader:
            info = reader.info
            n_cells = usable_cells(info, tokens)
            is_whole = n_cells == len(info.record.tokens) - 1
            one = self._conversations.get(space, path.stem) if is_whole else None
            wanted = info.record.tokens if is_whole else tokens[: n_cells + 1]
            run = self._adopt(reader, wanted, space, is_unwanted)
        self._scheduler.hold(run)
        mark_used(path)
        if one is None or not self._take_over(one, info, run):
            self._on_visitor(run)
        self._scheduler.let_go(run)
        return run

    def _take_over(self, one: Conversation, info: SessionInfo, run: Run) -> bool:
        """A conversation's cells are in memory again; False if they were already, or it has gone on."""
        with self._conversations.lock:
            if one.run is not None or one.is_gone or self._conversations.get(one.space, one.name) is not one:
                return False
            if not is_still(one, info):
                return False
            load(one, info)
            one.run, one.is_saved, one.is_let_go = run, True, True
            one.n_settled = len(info.record.tokens) - 1
            one.changed_s = changed_s(info.path)
            return True

    def _adopt(self, reader: SessionReader, tokens: Sequence[int], space: str, is_unwanted: Callable[[], bool]) -> Run:
        """Bring cells into memory; where there is no room, others are let go of as long as there are any."""
        info = reader.info
        kept = sections_up_to(info.record.kind, info.sections, len(tokens) - 1)
        wanted = sections_restored(kept)

        def sections(n_there: int) -> Iterator[StateSection]:
            return reader.read([section for section in wanted if section.p_used > n_there or section.p1 > n_there])

        while True:
            try:
                with self._engine.beside():
                    return self._scheduler.adopt(tokens, sections, space=space)
            except NoRoomError as error:
                if not is_unwanted() and self._make_room():
                    continue
                if space:
                    raise for_space(error, space) from error
                raise

    # ------------------------------------------------------------ whole sessions

    def bring_session(self, space: str, name: str) -> Conversation:
        """Have a saved session in memory.

        Raises:
            NotFoundError, FormatError, MismatchError, NoRoomError: it is as it was.
        """
        root = self._folders.of(space)
        one = self._conversations.get(space, name)
        if one is not None and one.run is not None and self._scheduler.has_cells(one.run):
            return one
        if root is None:
            raise NotFoundError(f"no session is called '{name}': the server has no store")
        path = SessionStore(root).resolve(name)
        if not path.exists():
            raise NotFoundError(f"no session is called '{name}'")
        with SessionReader(path) as reader:
            info = reader.info
            reasons = self._check(info)
            n_cells = n_cells_held(info.record.kind, info.sections)
            if reasons:
                run = self._read_again(info.record.tokens, space)
            else:
                run = self._adopt(reader, info.record.tokens[: n_cells + 1], space, lambda: False)
        mark_used(path)
        fresh = self.stub(info, space, name=name, changed_s=changed_s(path))
        with self._conversations.lock:
            there = self._conversations.get(space, name)
            if there is not None and there.run is not None and not self._scheduler.has_cells(there.run):
                there.run, there.is_let_go = None, False  # they were given to others, and nobody has taken notice
            if there is not None and there.run is None and is_still(there, info):
                fresh = there
            elif there is not None and there.run is not None:  # somebody was quicker
                self._scheduler.release(run)
                return there
            else:
                self._conversations.add(fresh)
            self._take_over(fresh, info, run)
            fresh.place.is_stale = bool(reasons)
        self._scheduler.let_go(run)
        return fresh

    def _read_again(self, tokens: Sequence[int], space: str) -> Run:
        """Have tokens in memory without their stored state. One more is written, which nobody sees."""
        is_over = threading.Event()
        request = RunRequest(tokens=tuple(tokens), sampling=Sampling(max_tokens=1), keeps_cells=True, space=space)
        job = Job(request=request, index=0, outbox=None, on_over=lambda job, has_cells: is_over.set())
        self._engine.submit([job])
        is_over.wait()
        if job.run is None or not job.run.is_over or not self._scheduler.has_cells(job.run):
            raise (job.run.error if job.run is not None else None) or EngineError("the session could not be read again")
        return job.run

    def _check(self, info: SessionInfo) -> tuple[str, ...]:
        """Refuse a session that is not of this model and these settings. Returns why its tokens are to be read again
        all the same.

        Raises:
            MismatchError: says which and why.
        """
        record, model = info.record, self._opened.model
        if record.identity != self._opened.identity:
            raise MismatchError(
                f"{info.path.stem} was saved with {describe(record.identity)}, served is "
                f"{describe(self._opened.identity)}",
                expected=record.identity.digest,
                actual=self._opened.identity.digest,
            )
        check_layout(record, model.settings)
        _check_settings(record, model)
        reasons = reasons_to_recompute(record, model.versions, self._options)
        if reasons and not self._options.recompute:
            raise MismatchError(
                f"{info.path.stem} cannot be taken as it is: {'; '.join(reasons)}",
                hint="start the server with --recompute to have its tokens read again",
            )
        return reasons


def _check_settings(record: SessionRecord, model: Model) -> None:
    """Raises: MismatchError."""
    now = model.settings
    for field in ("type_k", "type_v", "flash_attn", "swa_full", "rope_freq_base", "rope_freq_scale"):
        if field == "swa_full" and record.kind.value == "dense":
            continue
        then, there = getattr(record.settings, field), getattr(now, field)
        if then != there:
            raise MismatchError(
                f"the session was saved with {field} {then}, the server runs with {there}",
                field=field,
                expected=str(then),
                actual=str(there),
            )
