"""The service behind ``serve``: one model, one scheduler, and the conversations that are kept over them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llamakv.engine.contract import Scheduler
from llamakv.engine.llamacpp.dry_run import LlamaEstimator
from llamakv.engine.memory import TokenMemory
from llamakv.errors import EngineError, LlamakvError, WriteError
from llamakv.ops.budget import Budget
from llamakv.ops.copying import Within
from llamakv.ops.matching import FoundModel, stamp_of
from llamakv.ops.opening import OpenModel
from llamakv.ops.process_memory import available_bytes
from llamakv.ops.requests import ModelRequest, Reporter, ResumeOptions
from llamakv.server.answers import Answers, Sums, in_thread
from llamakv.server.contract import Ask, ServedModel, ServiceCounts, SessionLine
from llamakv.server.conversations import Conversations
from llamakv.server.damage import Damage
from llamakv.server.engine_thread import EngineThread
from llamakv.server.folders import Folders
from llamakv.server.jobs import LlamaAnswer
from llamakv.server.loader import Loader
from llamakv.server.saver import Saver, Tally
from llamakv.server.sessions import Sessions, n_distinct_cells
from llamakv.server.sizes import Room, choose_room, n_cells_first
from llamakv.store.files import check_folder

if TYPE_CHECKING:
    from llamakv.server.run import ServeRequest

SAVE_DELAY_S = 2.0
"""How long a conversation is idle before it is saved: a quick next turn would be saved all over again."""

_POLL_S = 0.02


def open_service(request: ServeRequest, reporter: Reporter, *, save_delay_s: float = SAVE_DELAY_S) -> LlamaService:
    """Load the model, choose how much is kept in memory, and have what is to be warm there.

    Raises:
        LlamakvError: the model cannot be used, or a session that is to be warm; nothing is left open.
    """
    if request.store is not None:
        _warn_if_unwritable(request.store, reporter)
    sizes = _token_memory(request)
    found = FoundModel(
        path=request.model_path,
        stamp=stamp_of(request.model_path),
        digest=request.model_digest,
        n_bytes=request.model_bytes,
        adapters=request.adapters,
    )
    model_request = ModelRequest(
        path=request.model_path,
        n_gpu_layers=request.n_gpu_layers,
        n_threads=request.n_threads,
        n_ctx=request.n_ctx,
        on_log=request.on_log,
        cache_dir=Path(),
    )
    opened = OpenModel(found, model_request, request.memory, reporter=reporter)
    try:
        free_bytes = available_bytes()
        room = choose_room(
            n_ctx_max=opened.n_ctx_max(),
            n_cells=request.n_cells,
            n_sequences=request.n_sequences,
            bytes_per_cell=sizes.kv_bytes_per_token,
            bytes_per_sequence=sizes.recurrent_bytes_per_sequence,
            free_bytes=free_bytes,
        )
        scheduler = opened.model.open_scheduler(
            request.memory,
            n_parallel=room.n_parallel,
            n_ctx_min=n_cells_first(room, bytes_per_cell=sizes.kv_bytes_per_token, free_bytes=free_bytes),
            n_ctx_max=room.n_ctx_max,
            n_cells_max=room.n_cells_max,
            n_kept=room.n_kept,
            is_within_memory=True,
            later_share=request.prefix_share,
            n_threads=opened.n_threads,
        )
        service = LlamaService(opened, scheduler, request, room, reporter, save_delay_s=save_delay_s, sizes=sizes)
        try:
            service.warm(request.warm)
        except BaseException:
            service.close()
            raise
        return service
    except BaseException:
        opened.close()
        raise


def _warn_if_unwritable(store: Path, reporter: Reporter) -> None:
    """Say at the start what else the first save would: the folder, or what it would be made in, cannot be written."""
    try:
        check_folder(next(folder for folder in (store, *store.absolute().parents) if folder.exists()))
    except WriteError as error:
        reporter.warning(
            f"{error.message}: conversations stay in memory while there is room, and are lost after that or at the end"
        )


def _token_memory(request: ServeRequest) -> TokenMemory:
    try:
        with LlamaEstimator(request.model_path, on_log=request.on_log) as dry:
            return dry.per_token(request.memory)
    except EngineError:  # opening the model says what is wrong with it
        return TokenMemory(kv_bytes_per_token=0, recurrent_bytes_per_sequence=0)


def _added(parts: Sequence[Sums] | Sequence[Tally], nothing: Sums | Tally) -> dict[str, int]:
    """The sums of all spaces, by name."""
    return {name: sum(getattr(one, name) for one in parts) for name in asdict(nothing)}


@dataclass(slots=True, kw_only=True)
class _Stop:
    deadline_s: float
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class LlamaService:
    """``Service`` of the contract. ``close`` frees everything at once; ``stop`` saves before."""

    def __init__(
        self,
        opened: OpenModel,
        scheduler: Scheduler,
        request: ServeRequest,
        room: Room,
        reporter: Reporter,
        *,
        save_delay_s: float,
        sizes: TokenMemory,
    ) -> None:
        self._opened = opened
        self._scheduler = scheduler
        self._request = request
        self._room = room
        self._reporter = reporter
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: _Stop | None = None
        self._is_closed = False
        self._conversations = Conversations()
        folders, damage = Folders(request.store), Damage()
        self._engine = EngineThread(
            scheduler, on_shortage=lambda: self._saver.hurry(), on_failure=lambda error: self._tell(error.message)
        )
        self._saver = Saver(
            opened,
            scheduler,
            self._engine,
            self._conversations,
            folders,
            compress="none" if request.compress == "none" else "auto",
            make_budget=self._make_budget,
            save_delay_s=save_delay_s,
            n_bytes_per_cell=float(sizes.kv_bytes_per_token),
            damage=damage,
            tell=self._tell,
        )
        self._loader = Loader(
            opened,
            scheduler,
            self._engine,
            self._conversations,
            folders,
            make_room=self._saver.make_room,
            on_visitor=self._saver.visitors.add,
            options=ResumeOptions(recompute=request.recompute, trust_state=request.trust_state),
            damage=damage,
            tell=self._tell,
        )
        self._answers = Answers(
            opened,
            scheduler,
            self._engine,
            self._saver,
            self._loader,
            self._conversations,
            room,
            n_waiting_max=request.n_waiting_max,
            saves=request.store is not None,
        )
        self._sessions = Sessions(
            scheduler,
            self._engine,
            self._saver,
            self._loader,
            self._conversations,
            folders,
            room,
            prefix_share=request.prefix_share,
            within=Within(budget=self._make_budget(), reporter=Reporter(warning=self._tell)),
            under_way=self._answers.under_way,
        )
        info = opened.info
        self._model = ServedModel(
            name=info.name or request.model_path.stem,
            digest=opened.identity.digest,
            n_ctx_max=room.n_ctx_max,
            n_vocab=info.n_vocab,
            created_s=request.model_path.stat().st_mtime,
            settings={
                **asdict(opened.model.settings),
                "memory_kind": info.kind.value,
                "architecture": info.architecture,
                "quantisation": info.quantisation,
            },
        )

    def _make_budget(self) -> Budget:
        request = self._request
        return Budget(max_bytes=request.max_bytes, ttl_s=request.ttl_s, store_ttl_s=request.store_ttl_s)

    def _tell(self, line: str) -> None:
        """Say what went wrong, on the thread that may speak."""
        if self._loop is None:
            self._reporter.warning(line)
            return
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._reporter.warning, line)

    # ------------------------------------------------------------ facts

    @property
    def model(self) -> ServedModel:
        """The model that is served."""
        return self._model

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._stop is None and not self._is_closed and self._engine.error is None

    @property
    def failure(self) -> LlamakvError | None:
        """Why the engine does not work any more."""
        return self._engine.error

    @property
    def counts(self) -> ServiceCounts:
        """Where it stands."""
        counts = self._engine.counts
        sums = _added(list(self._answers.sums.values()), Sums())
        sums |= _added(list(self._saver.tallies.values()), Tally())
        return ServiceCounts(
            n_active=counts.n_active,
            n_waiting=max(self._answers.queue.n_outstanding - counts.n_active, 0),
            n_live=counts.n_kept,
            n_cells=counts.n_cells,
            n_cells_pinned=sum(one.n_tokens - 1 for one in self._sessions.pinned()),
            n_cells_max=counts.n_cells_max,
            n_ctx=self._engine.n_ctx,
            n_sequences_max=self._room.n_sequences,
            **sums,
        )

    async def counts_of(self, space: str) -> ServiceCounts:
        """Where a space stands; see the contract."""
        if not space:
            return self.counts
        return await in_thread(self._answers.preparing, partial(self._counts_of, space))

    def _counts_of(self, space: str) -> ServiceCounts:
        live = self._conversations.live(space)
        runs = [job.run for job, _ in self._answers.under_way(space) if job.run is not None and not job.is_waiting]
        sums, tally = self._answers.sums.get(space, Sums()), self._saver.tallies.get(space, Tally())
        return replace(
            self.counts,
            n_active=len(runs),
            n_live=len(live),
            n_cells=n_distinct_cells(live)
            + sum(len(run.tokens) - 1 - run.n_reused for run in runs if self._scheduler.has_cells(run)),
            n_cells_pinned=sum(one.n_tokens - 1 for one in live if one.is_pinned),
            **asdict(sums),
            **asdict(tally),
        )

    # ------------------------------------------------------------ requests

    async def ask(self, ask: Ask) -> LlamaAnswer:
        """Queue a request; see the contract."""
        self._loop = asyncio.get_running_loop()
        return await self._answers.ask(ask)

    async def sessions(self, space: str) -> Sequence[SessionLine]:
        """The conversations of a space; see the contract."""
        return await in_thread(self._answers.preparing, partial(self._sessions.lines, space))

    async def save(self, name: str, new_name: str | None, space: str) -> SessionLine:
        """Have a conversation in the store; see the contract."""
        return await in_thread(self._answers.acting, partial(self._sessions.save, name, new_name, space))

    async def resume(self, name: str, space: str) -> SessionLine:
        """Bring a saved session into memory; see the contract."""
        return await in_thread(self._answers.acting, partial(self._sessions.resume, name, space))

    async def fork(self, name: str, new_name: str, space: str, at: str | None) -> SessionLine:
        """A conversation that begins as another; see the contract."""
        return await in_thread(self._answers.acting, partial(self._sessions.fork, name, new_name, space, at))

    async def delete(self, name: str, space: str) -> None:
        """Forget a conversation; see the contract."""
        await in_thread(self._answers.acting, partial(self._sessions.delete, name, space))

    async def inspect(self, name: str, space: str) -> dict[str, object]:
        """All about a session; see the contract."""
        return await in_thread(self._answers.preparing, partial(self._sessions.inspect, name, space))

    async def pin(self, name: str, space: str, *, pinned: bool) -> SessionLine:
        """Keep its cells whatever comes; see the contract."""
        return await in_thread(self._answers.acting, partial(self._sessions.pin, name, space, pinned=pinned))

    def warm(self, names: Sequence[str]) -> None:
        """Have sessions in memory, pinned, and what the first request would wait for. Raises: as ``pin``."""
        self._answers.make_ready()
        if self._request.store is not None:
            self._loader.scan("")
            self._loader.make_ready("")
        for number, name in enumerate(names, 1):
            self._sessions.pin(name, "", pinned=True)
            self._reporter.progress("restore", number, len(names))

    # ------------------------------------------------------------ the end

    async def stop(self, timeout_s: float) -> None:
        """Take no more, and save; see the contract. Called again, it gives answers under way less time."""
        until_s = time.perf_counter() + timeout_s
        if self._stop is not None:
            self._stop.deadline_s = min(self._stop.deadline_s, until_s)
            await asyncio.shield(self._stop.done)
            return
        self._stop = stop = _Stop(deadline_s=until_s)
        self._loop = asyncio.get_running_loop()
        self._answers.refuse_more()
        try:
            while (
                self._answers.queue.n_outstanding
                and time.perf_counter() < stop.deadline_s
                and self._engine.error is None
            ):
                await asyncio.sleep(_POLL_S)
            self._answers.turns.close()
            await asyncio.to_thread(self._end)
        finally:
            if not stop.done.done():
                stop.done.set_result(None)

    def _end(self) -> None:
        """End what is still under way, save all that is kept, free everything."""
        if self._engine.error is None:
            self._answers.end(self._engine.hold())
        if self._request.store is not None:
            self._saver.save_all()
        self.close()

    def close(self) -> None:
        """Free everything; what is not saved is lost."""
        if self._is_closed:
            return
        self._is_closed = True
        self._answers.refuse_more()
        self._saver.stop()
        self._engine.stop()
        self._answers.close()
        self._scheduler.close()
        self._opened.close()
