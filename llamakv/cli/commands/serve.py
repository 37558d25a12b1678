"""``serve``: many users, one cache."""

from __future__ import annotations

import importlib.util
import math
import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from llamakv.cli import config, requests
from llamakv.cli.commands.grouping import takes_options
from llamakv.cli.commands.options import BudgetGroup, MemoryGroup, ModelGroup, StoreGroup
from llamakv.cli.commands.serve_options import (
    API_KEYS_VARIABLE,
    GRACE_S,
    HOST,
    MAX_BODY_BYTES,
    MAX_CONNECTIONS,
    MAX_QUEUE,
    MAX_TIME_S,
    PORT,
    PREFIX_SHARE,
    LimitsGroup,
    RoomGroup,
    ServerGroup,
)
from llamakv.cli.output import Json, Output, to_json
from llamakv.errors import InterruptedByUser, UsageError

if TYPE_CHECKING:
    from llamakv.ops.requests import Reporter
    from llamakv.server.limits import ServeOptions
    from llamakv.server.run import Ready, Served, ServeRequest

PARTLY_DONE = 3
_SHORT_KEY = 16
"""Keys with fewer characters are worth a warning: they may be guessed."""

LIBRARIES = ("starlette", "uvicorn", "prometheus_client")
"""What the extra brings."""


@takes_options
def serve(
    output: Output,
    model: ModelGroup,
    memory: MemoryGroup,
    store: StoreGroup,
    budget: BudgetGroup,
    server: ServerGroup,
    room: RoomGroup,
    limits: LimitsGroup,
) -> None:
    """Serve a model to many users, as OpenAI's servers do, with what they have in common read only once.

    Example: llamakv serve -m model.gguf --port 8080
    """
    from llamakv.cli.reporting import running

    missing = next((name for name in LIBRARIES if importlib.util.find_spec(name) is None), None)
    if missing is not None:
        raise UsageError(f"serving needs {missing}, which is not installed", hint='pip install "llamakv[serve]"')
    if room.no_store and (store.store is not None or room.warm):
        option = "--store" if store.store is not None else "--warm"
        raise UsageError(f"{option} needs a store, and --no-store means none", hint="leave one of them out")
    if server.isolate and room.warm:
        raise UsageError(
            "--warm has sessions in memory that are nobody's own, and --isolate keeps all keys from them",
            hint="leave one of them out",
        )
    options = _options(output, server, limits)
    stops = _Stops(output)
    with running(output) as reporter:
        served = _run(
            output,
            reporter,
            lambda: _request(output, model, memory, store, budget, server, room, limits, reporter),
            options,
            server,
            stops,
        )
    _conclude(output, served, stops)


def _run(
    output: Output,
    reporter: Reporter,
    request: Callable[[], ServeRequest],
    options: ServeOptions,
    server: ServerGroup,
    stops: _Stops,
) -> Served:
    from llamakv.server.run import run_server
    from llamakv.server.service import open_service

    def on_ready(ready: Ready) -> None:
        reporter.pause()
        _tell_ready(output, ready)

    return run_server(
        lambda: open_service(request(), reporter),
        options,
        host=server.host or HOST,
        port=PORT if server.port is None else server.port,
        grace_s=GRACE_S if server.grace is None else server.grace,
        should_stop=stops.count,
        on_ready=on_ready,
        on_error=reporter.warning,
        on_log=output.log if output.verbose else None,
    )


class _Stops:
    """How often the user said to stop. The process's interrupts know how often Ctrl-C was pressed, but only the last
    signal that is to end it: each is taken from there, so that a second one counts too."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._interrupts = output.interrupts
        self._signals: list[int] = []
        self._n_told = 0

    def count(self) -> int:
        """Asked often; says what happens now when there is something new."""
        if self._interrupts.ending is not None:
            self._signals.append(self._interrupts.ending)
            self._interrupts.ending = None
        n_stops = self._interrupts.n_pressed + len(self._signals)
        if n_stops and not self._n_told:
            self._output.note("stopping: answers under way may end, then everything is saved; once more to hurry")
        self._n_told = n_stops
        return n_stops or int(self._output.stopped)

    @property
    def status(self) -> int:
        """The exit status of a process that was ended so."""
        return 128 + self._signals[0] if self._signals else InterruptedByUser.exit_status


# ---------------------------------------------------------------- in


def _options(output: Output, server: ServerGroup, limits: LimitsGroup) -> ServeOptions:
    from llamakv.server.limits import ServeOptions

    keys = _keys(output, server.api_key_file)
    if server.isolate and not keys:
        raise UsageError("--isolate keeps API keys apart, and there are none", hint="--api-key-file keys.txt")
    if server.metrics_key is not None and server.metrics_key not in keys:
        known = ", ".join(repr(name) for name in keys) or "none"
        raise UsageError(
            f"no API key is called {server.metrics_key!r}, there are: {known}",
            hint=f"echo {server.metrics_key} $(head -c 24 /dev/urandom | base64) >> keys.txt",
        )
    return ServeOptions(
        keys=keys,
        isolate=server.isolate,
        metrics_key=server.metrics_key,
        max_body_bytes=limits.max_body or MAX_BODY_BYTES,
        max_tokens=None if limits.max_tokens == -1 else limits.max_tokens,
        max_connections_per_address=limits.max_connections or MAX_CONNECTIONS,
        max_time_s=limits.max_time or MAX_TIME_S,
        model_alias=tuple(server.alias or ()),
    )


def _request(
    output: Output,
    model: ModelGroup,
    memory: MemoryGroup,
    store: StoreGroup,
    budget: BudgetGroup,
    server: ServerGroup,
    room: RoomGroup,
    limits: LimitsGroup,
    reporter: Reporter,
) -> ServeRequest:
    wanted = requests.model_request(output, model, memory)
    from llamakv.ops.matching import find_model, merge_memory
    from llamakv.server.run import ServeRequest

    settings = merge_memory(requests.memory_options(memory), None, None, may_change=True)
    found = find_model(wanted, None, reporter)
    return ServeRequest(
        model_path=found.path,
        model_digest=found.digest,
        model_bytes=found.n_bytes,
        adapters=found.adapters,
        n_gpu_layers=wanted.n_gpu_layers,
        n_threads=wanted.n_threads,
        memory=settings,
        n_ctx=wanted.n_ctx,
        n_cells=room.cells,
        n_sequences=room.parallel,
        prefix_share=PREFIX_SHARE if room.prefix_share is None else room.prefix_share,
        n_waiting_max=MAX_QUEUE if limits.max_queue is None else limits.max_queue,
        store=None if room.no_store else config.store_dir(store.store),
        compress=requests.compress(memory),
        max_bytes=budget.max_bytes if budget.max_bytes is not None else requests.max_bytes_variable(),
        ttl_s=budget.ttl,
        store_ttl_s=requests.ttl_variable(),
        warm=tuple(room.warm or ()),
        recompute=memory.recompute,
        trust_state=memory.trust_state,
        isolate=server.isolate,
        on_log=wanted.on_log,
    )


def _keys(output: Output, file: str | None) -> dict[str, str]:
    """API keys by name: of a file, or else of the environment. Raises UsageError, NotFoundError."""
    if file is not None:
        text = requests.read_text(file)
        where, lines = requests.input_name(file), text.splitlines()
        if file != "-" and os.stat(file).st_mode & (stat.S_IRGRP | stat.S_IROTH):
            output.warning(f"other users of this machine can read {file}: chmod 600 {file}")
    else:
        where, lines = API_KEYS_VARIABLE, (config.variable(API_KEYS_VARIABLE) or "").split(",")
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name, key = (f"key {len(keys) + 1}", words[0]) if len(words) == 1 else (words[0], words[1])
        if len(words) > 2 or not key.isascii() or not key.isprintable():
            raise UsageError(f"line {number} of {where} is neither a key nor a name and a key", path=where)
        if name in keys or key in keys.values():
            raise UsageError(f"line {number} of {where} has a name or a key that was there before", path=where)
        if len(key) < _SHORT_KEY:
            output.warning(f"line {number} of {where}: a key of {len(key)} characters may be guessed")
        keys[name] = key
    if file is not None and not keys:
        make_one = f"(umask 077; head -c 24 /dev/urandom | base64 > {file})"
        raise UsageError(f"{where} holds no key", hint=make_one, path=where)
    return keys


# ---------------------------------------------------------------- out


def _tell_ready(output: Output, ready: Ready) -> None:
    counts = ready.counts
    kind = str(ready.model.settings.get("memory_kind", ""))
    if kind in ("recurrent", "hybrid"):
        output.warning(
            f"{ready.model.name} is {kind}: others can begin only where its conversations, their system prompts or "
            "their prompts end"
        )
    if not output.json:
        output.note(
            f"serving {ready.model.name} on {ready.url} · room for {counts.n_cells_max:,} tokens in memory, of "
            f"{counts.n_sequences_max:,} conversation{'s' * (counts.n_sequences_max != 1)} at most"
        )
        return
    output.stream_line(
        "ready",
        {
            "url": ready.url,
            "host": ready.host,
            "port": ready.port,
            "pid": os.getpid(),
            "model": to_json(ready.model),
            "cells": counts.n_cells_max,
            "sequences": counts.n_sequences_max,
            "context": counts.n_ctx,
        },
    )


def _conclude(output: Output, served: Served, stops: _Stops) -> None:
    """What was done, as text or the closing document, and the exit status: 0 after a stop in which everything was
    ended and saved, since to be stopped is how a server ends."""
    counts = served.counts
    n_reused = counts.n_reused_memory + counts.n_reused_store
    output.check()
    if not output.json:
        share = f" ({math.floor(100 * n_reused / counts.n_prompt_tokens)} %)" if counts.n_prompt_tokens else ""
        output.note(
            f"stopped · {n_reused:,} of {counts.n_prompt_tokens:,} prompt tokens reused{share} · "
            f"{counts.n_generated:,} generated · {counts.n_saves:,} save{'s' * (counts.n_saves != 1)}"
        )
    data: dict[str, Json] = {
        "model": served.model.name,
        "elapsed_s": round(served.elapsed_s, 3),
        "was_hurried": served.was_hurried,
        "counts": to_json(counts),
    }
    if counts.n_save_failures:
        output.warning(f"{counts.n_save_failures:,} save{'s' * (counts.n_save_failures != 1)} failed")
    if served.was_hurried:
        output.failure(
            InterruptedByUser("interrupted; answers under way were cut short", status=stops.status), data=data
        )
        raise typer.Exit(stops.status)
    output.document(data, status="partial" if counts.n_save_failures else "ok")
    if counts.n_save_failures:
        raise typer.Exit(PARTLY_DONE)
