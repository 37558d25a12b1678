"""The options of ``serve`` that no other command has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from llamakv.cli.commands.options import MEMORY, SESSIONS, complete_session, memory_size
from llamakv.cli.commands.values import n_tokens, not_empty, real, time_span, whole

API_KEYS_VARIABLE = "LLAMAKV_API_KEYS"
N_SEQUENCES_MAX = 254
"""llama.cpp's 256 sequences, less the scratch sequence and one to move states through."""

SERVER, LIMITS = "Server", "Limits"

HOST, PORT = "127.0.0.1", 8080
GRACE_S = 10.0
PREFIX_SHARE = 0.5
MAX_QUEUE, MAX_CONNECTIONS, MAX_TIME_S, MAX_BODY_BYTES = 64, 64, 600.0, 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerGroup:
    """Where to serve, and to whom."""

    host: Annotated[
        str | None,
        typer.Option("--host", metavar="ADDRESS", parser=not_empty, rich_help_panel=SERVER,
                     help="Address to serve at (default: 127.0.0.1, this machine only; others need API keys)."),
    ] = None  # fmt: skip
    port: Annotated[
        int | None,
        typer.Option("--port", metavar="N", parser=whole(0, 65535), rich_help_panel=SERVER,
                     help="Port to serve at; 0 takes a free one (default: 8080)."),
    ] = None  # fmt: skip
    api_key_file: Annotated[
        str | None,
        typer.Option("--api-key-file", metavar="FILE", rich_help_panel=SERVER,
                     help=f"API keys, one a line, or NAME KEY (default: ${API_KEYS_VARIABLE}, with commas between)."),
    ] = None  # fmt: skip
    isolate: Annotated[
        bool,
        typer.Option("--isolate", metavar="", rich_help_panel=SERVER,
                     help="Each API key has its own cells, sessions and --max-bytes; nothing is shared between keys."),
    ] = False  # fmt: skip
    metrics_key: Annotated[
        str | None,
        typer.Option("--metrics-key", metavar="NAME", parser=not_empty, rich_help_panel=SERVER,
                     help="Name of the API key that may read /metrics (default: any; none with --isolate)."),
    ] = None  # fmt: skip
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="NAME", parser=not_empty, rich_help_panel=SERVER,
                     help="Another name the model answers to; repeatable."),
    ] = None  # fmt: skip
    grace: Annotated[
        float | None,
        typer.Option("--grace", metavar="SECONDS", parser=real(0.0, 86400.0), rich_help_panel=SERVER,
                     help="When stopped, time for answers under way to end (default: 10)."),
    ] = None  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomGroup:
    """How much is kept in memory, and where the rest goes."""

    parallel: Annotated[
        int | None,
        typer.Option("--parallel", metavar="N", parser=whole(1, N_SEQUENCES_MAX), rich_help_panel=MEMORY,
                     help=f"Most conversations in memory, where it allows, up to {N_SEQUENCES_MAX} (default: all)."),
    ] = None  # fmt: skip
    cells: Annotated[
        int | None,
        typer.Option("--cells", metavar="N", parser=whole(1, 2**31 - 1), rich_help_panel=MEMORY,
                     help="Most cells of all conversations; fewer where memory is short (default: by memory)."),
    ] = None  # fmt: skip
    prefix_share: Annotated[
        float | None,
        typer.Option("--prefix-share", metavar="X", parser=real(0.0, 1.0), rich_help_panel=MEMORY,
                     help="Share of cells, 0 to 1, for prefixes that are pinned or shared by several (default: 0.5)."),
    ] = None  # fmt: skip
    warm: Annotated[
        list[str] | None,
        typer.Option("--warm", metavar="NAME", rich_help_panel=SESSIONS, autocompletion=complete_session,
                     help="Session to have in memory, pinned, from the beginning; repeatable."),
    ] = None  # fmt: skip
    no_store: Annotated[
        bool,
        typer.Option("--no-store", metavar="", rich_help_panel=SESSIONS,
                     help="Keep conversations in memory only; nothing is read from the store or written to it."),
    ] = False  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsGroup:
    """What a request may ask for, and how many may wait."""

    max_queue: Annotated[
        int | None,
        typer.Option("--max-queue", metavar="N", parser=whole(0, 100_000), rich_help_panel=LIMITS,
                     help="Requests that may wait; more are told to come again, 429 (default: 64)."),
    ] = None  # fmt: skip
    max_connections: Annotated[
        int | None,
        typer.Option("--max-connections", metavar="N", parser=whole(1, 100_000), rich_help_panel=LIMITS,
                     help="Connections one address may have open; this machine has no such limit (default: 64)."),
    ] = None  # fmt: skip
    max_time: Annotated[
        float | None,
        typer.Option("--max-time", metavar="TIME", parser=time_span, rich_help_panel=LIMITS,
                     help="Longest time for a request, from when it came: 90, 30m (default: 10m)."),
    ] = None  # fmt: skip
    max_body: Annotated[
        int | None,
        typer.Option("--max-body", metavar="SIZE", parser=memory_size, rich_help_panel=LIMITS,
                     help="Largest body of a request (default: 4MiB)."),
    ] = None  # fmt: skip
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", metavar="N", parser=n_tokens, rich_help_panel=LIMITS,
                     help="Longest reply, in tokens; -1 is no limit (default: -1, as far as there is room)."),
    ] = None  # fmt: skip
