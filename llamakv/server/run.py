"""Runs the HTTP side over a service: the socket, the loop, a graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import uvicorn
from starlette.applications import Starlette

from llamakv.engine.contract import MemoryRequest
from llamakv.errors import LlamakvError, NoRoomError, UsageError
from llamakv.records import Adapter
from llamakv.server.app import make_app
from llamakv.server.connections import SEND_BUFFER_BYTES, Connection, connections, is_loopback
from llamakv.server.contract import ServedModel, Service, ServiceCounts
from llamakv.server.limits import LOOPBACK_HOSTS, ServeOptions

_BACKLOG = 128
_HEADER_BYTES_MAX = 32 << 10
_KEEP_ALIVE_S = 30.0
_FLUSH_TIME_S = 2
"""How long clients may take to read the rest of their answers once everything is saved."""


class AddressInUseError(LlamakvError):
    """Another process listens at that address."""

    code = "address_in_use"
    exit_status = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """What a service is asked for.

    The model: a file whose content has ``model_digest`` (BLAKE3, hex) and ``model_bytes``, with its adapters, and how
    to run it. ``n_ctx`` is the most tokens a conversation may have, ``n_cells`` the most cells all of them may take,
    ``n_sequences`` how many are answered or kept in memory at the same time; None: as the model and memory allow.
    ``prefix_share`` (0 to 1) is how much of the cells pinned prefixes may take at most, ``n_waiting_max`` how long the
    queue may be. ``store`` is None where nothing is to be saved; ``max_bytes``, ``ttl_s`` and ``store_ttl_s`` are the
    store's budget, as for ``save``. ``warm`` names sessions to have in memory, pinned, before the first request.
    ``recompute`` and ``trust_state`` say what to do with a saved session whose state does not fit. ``on_log`` gets the
    engine's own log.
    """

    model_path: Path
    model_digest: str
    model_bytes: int
    adapters: tuple[tuple[Path, Adapter], ...] = ()
    n_gpu_layers: int = 0
    n_threads: int | None = None
    memory: MemoryRequest
    n_ctx: int | None = None
    n_cells: int | None = None
    n_sequences: int | None = None
    prefix_share: float = 0.5
    n_waiting_max: int = 64
    store: Path | None
    compress: str = "auto"
    max_bytes: float | None = None
    ttl_s: float | None = None
    store_ttl_s: float | None = None
    warm: tuple[str, ...] = ()
    recompute: bool = False
    trust_state: bool = False
    isolate: bool = False
    on_log: Callable[[str], None] | None = None


class ServeReporter(Protocol):
    """Callbacks of a service while it opens and stops; as those of an op. Called from the thread that opens it."""

    @property
    def notice(self) -> Callable[[str], None]: ...
    @property
    def warning(self) -> Callable[[str], None]: ...
    @property
    def progress(self) -> Callable[[str, int, int], None]: ...
    @property
    def should_abort(self) -> Callable[[], bool]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Requests are taken now, at ``url``."""

    url: str
    host: str
    port: int
    model: ServedModel
    counts: ServiceCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """How it ended: where everything stood, how long requests were taken, and whether answers were cut short."""

    model: ServedModel
    counts: ServiceCounts
    elapsed_s: float
    was_hurried: bool


def run_server(
    make_service: Callable[[], Service],
    options: ServeOptions,
    *,
    host: str,
    port: int,
    grace_s: float,
    should_stop: Callable[[], int],
    on_ready: Callable[[Ready], None],
    on_error: Callable[[str], None],
    on_log: Callable[[str], None] | None = None,
) -> Served:
    """Serve until ``should_stop`` says so; installs no signal handlers.

    At an address of this machine only, ``options.allowed_hosts`` become its names, elsewhere any are allowed.

    The address (``port`` 0: a free one) is taken before the service is made, so that nobody waits for a model that
    cannot be served; connections are taken after that. ``should_stop`` is asked ten times a second how often the user
    said so. From the first time on new requests get 503, those under way have ``grace_s`` seconds to end, and what is
    not saved is saved; from the second time on they have none. ``on_error`` gets what went wrong inside the server,
    ``on_log`` a line for each request. All callbacks run on the calling thread. If the engine fails it stops by itself.

    Raises:
        UsageError: the address cannot be had, or is open to other machines and there are no keys.
        AddressInUseError: somebody else has it.
        LlamakvError: what ``make_service`` raises, why the engine failed, or the service where it could not save.
    """
    address = _resolve(host, port)
    is_local = is_loopback(address[1][0])
    if not options.keys and not is_local:
        raise UsageError(
            f"{host} is open to other machines, and there are no API keys",
            hint=f"(umask 077; head -c 24 /dev/urandom | base64 > keys.txt) && llamakv serve --host {host} "
            "--api-key-file keys.txt",
            host=host,
        )
    shown = f"[{host}]" if ":" in host else host
    options = replace(options, allowed_hosts=(*LOOPBACK_HOSTS, shown) if is_local else ())
    with contextlib.closing(_bind(*address, host=host)) as listener:
        service = make_service()
        connection = connections(n_max_per_address=options.max_connections_per_address)
        server = _Server(make_app(service, options), service, connection, grace_s=grace_s, should_stop=should_stop)
        bound = listener.getsockname()
        server.ready = lambda: on_ready(
            Ready(
                url=f"http://{shown}:{bound[1]}",
                host=bound[0], port=bound[1], model=service.model, counts=service.counts,
            )
        )  # fmt: skip
        began_s = time.monotonic()
        with _logging(on_error, on_log):
            asyncio.run(server.serve_until_stopped(listener))
    if service.failure is not None:
        raise service.failure
    return Served(
        model=service.model,
        counts=service.counts,
        elapsed_s=time.monotonic() - began_s,
        was_hurried=server.was_hurried,
    )


# ---------------------------------------------------------------- the socket


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"the host {host!r} has no address on this machine: {error}", host=host) from error
    found.sort(key=lambda info: info[0] != socket.AF_INET)  # 'localhost' may have both; clients try IPv4 in any case
    return found[0][0], (str(found[0][4][0]), port)


def _bind(family: socket.AddressFamily, address: tuple[str, int], *, host: str) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not if another one listens there
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections have it from here
        listener.bind(address)
    except PermissionError as error:
        listener.close()
        raise UsageError(f"port {address[1]} needs rights this user lacks", hint="--port 8080") from error
    except OSError as error:
        listener.close()
        if address[1] and _is_taken(error):
            raise _taken(host, address[1]) from error
        raise UsageError(f"{host} port {address[1]} cannot be had: {error.strerror}", host=host) from error
    return listener


def _is_taken(error: OSError) -> bool:
    return error.errno == errno.EADDRINUSE


def _taken(host: str, port: int) -> AddressInUseError:
    return AddressInUseError(
        f"port {port} of {host} is in use by another program", hint="--port 0 takes a free one", host=host, port=port
    )


# ---------------------------------------------------------------- uvicorn


class _Server(uvicorn.Server):
    """Uvicorn without signal handlers of its own, that stops the service before it stops listening: until everything
    is saved, clients are told so instead of finding nobody."""

    def __init__(
        self,
        app: Starlette,
        service: Service,
        connection: type[Connection],
        *,
        grace_s: float,
        should_stop: Callable[[], int],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=connection,
                ws="none",
                lifespan="off",
                log_config=None,
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=int(_KEEP_ALIVE_S),
                timeout_graceful_shutdown=_FLUSH_TIME_S,
                h11_max_incomplete_event_size=_HEADER_BYTES_MAX,
            )
        )
        self.ready: Callable[[], None] = lambda: None
        self.was_hurried = False
        self._service = service
        self._grace_s = grace_s
        self._should_stop = should_stop
        self._stops: list[asyncio.Task[None]] = []

    async def serve_until_stopped(self, listener: socket.socket) -> None:
        """Serve; the service is stopped whatever happens."""
        try:
            await self.serve(sockets=[listener])
        except SystemExit as leaving:  # uvicorn's way to say that the application did not start
            raise NoRoomError("the server could not be started") from leaving
        except OSError as error:
            if _is_taken(error):  # somebody began to listen there while the model was loaded
                name = listener.getsockname()
                raise _taken(name[0], name[1]) from error
            raise
        finally:
            if not self._stops:
                self._stop(0.0)
            await asyncio.gather(*self._stops)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals as they are: whoever runs the server knows what to do with them."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.ready()

    async def on_tick(self, counter: int) -> bool:
        n_asked = self._should_stop() or int(self._service.failure is not None)
        if n_asked and not self._stops:
            self._stop(self._grace_s)
        if n_asked > 1 and len(self._stops) == 1:
            self.was_hurried = not self._stops[0].done()
            self._stop(0.0)
        self.should_exit = bool(self._stops) and all(task.done() for task in self._stops)
        return await super().on_tick(counter)

    def _stop(self, timeout_s: float) -> None:
        self._stops.append(asyncio.get_running_loop().create_task(self._service.stop(timeout_s)))


@contextlib.contextmanager
def _logging(on_error: Callable[[str], None], on_log: Callable[[str], None] | None) -> Iterator[None]:
    """Send uvicorn's log where ours goes: errors always, the rest only where it is wanted."""
    handler = _Handler(on_error, on_log)
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "uvicorn.access")]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        is_wanted = on_log is not None and logger.name == "uvicorn.access"
        logger.setLevel(logging.INFO if is_wanted else logging.WARNING)
        logger.propagate = False
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, level, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


class _Handler(logging.Handler):
    def __init__(self, on_error: Callable[[str], None], on_log: Callable[[str], None] | None) -> None:
        super().__init__()
        self._on_error = on_error
        self._on_log = on_log

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            reason = record.exc_info[1] if record.exc_info else None
            what = "" if reason is None else f": {type(reason).__name__}: {reason}"
            self._on_error(f"{record.getMessage().splitlines()[0]}{what}")
        if self._on_log is not None:
            self._on_log(self.format(record))
