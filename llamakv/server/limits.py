"""What the server's owner allows, and how a request is held to it before anything of it is worked on."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from starlette.requests import Request

from llamakv.records import Sampling
from llamakv.server.errors_http import HttpError

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_BODY_TIME_S = 60.0
"""How long a client may take to send its body: 4 MiB need 0.6 Mbit/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Limits and secrets of the HTTP side.

    ``keys`` maps names to API keys; without any the server is open. With ``isolate`` each key has cells and sessions of
    its own. ``metrics_key`` names the only one that is told the metrics, which are of all keys together; None: all are,
    with ``isolate`` none. ``max_body_bytes`` holds for one request (4 MiB are about a million tokens of text).
    ``max_tokens`` is the most that may be asked for each choice, and what is taken where nothing is said; None: as far
    as there is room. ``max_concurrent_per_key`` requests of a key are under way at once (all clients together where
    there are no keys). One other machine has ``max_connections_per_address`` connections open at most, this one as many
    as there may be. ``max_time_s`` is how long a request may take, from when it came. ``sampling`` holds the parameters
    of requests that name none. ``model_alias`` are further names the model answers to. ``allowed_hosts`` are the host
    names, without port, that clients may call the server by; none: any (bound elsewhere than to loopback, with keys).
    """

    keys: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    isolate: bool = False
    metrics_key: str | None = None
    max_body_bytes: int = 4 << 20
    max_tokens: int | None = None
    max_choices: int = 16
    max_concurrent_per_key: int = 64
    max_connections_per_address: int = 64
    max_time_s: float = 600.0
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.3))
    model_alias: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = LOOPBACK_HOSTS


class Turnstile:
    """Counts the requests of each client that are under way. For one event loop."""

    def __init__(self, n_max: int) -> None:
        self._n_max = n_max
        self._n_inside: Counter[str] = Counter()

    @contextmanager
    def enter(self, client: str) -> Iterator[None]:
        """Hold one of the client's places.

        Raises:
            HttpError: 429, all are taken.
        """
        if self._n_inside[client] >= self._n_max:
            raise HttpError(
                429,
                f"this key has {self._n_max} requests under way, which is the limit",
                code="rate_limit_exceeded",
                retry_after_s=1,
            )
        self._n_inside[client] += 1
        try:
            yield
        finally:
            self._n_inside[client] -= 1
            if not self._n_inside[client]:
                del self._n_inside[client]


async def read_object(request: Request, options: ServeOptions, *, may_be_empty: bool = False) -> dict[str, object]:
    """The JSON object a request brings; memory taken is bounded by ``max_body_bytes`` while it is read.

    Raises:
        HttpError: 413 too large, 408 too slow, 400 not a JSON object in UTF-8.
        ClientDisconnect: the client went away.
    """
    try:
        async with asyncio.timeout(min(_BODY_TIME_S, options.max_time_s)):
            body = await _read(request, options.max_body_bytes)
    except TimeoutError as error:
        raise HttpError(408, "the request's body did not come in time", code="timeout") from error
    if may_be_empty and not body.strip():
        return {}
    return _parse(body)


async def _read(request: Request, n_max: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > n_max):
        raise _too_large(n_max)
    body = bytearray()
    async for piece in request.stream():
        if len(body) + len(piece) > n_max:
            raise _too_large(n_max)
        body += piece
    return bytes(body)


def _too_large(n_max: int) -> HttpError:
    return HttpError(413, f"the request's body is larger than {n_max} bytes", code="body_too_large")


def _parse(body: bytes) -> dict[str, object]:
    try:
        text = body.decode("utf-8")
        values = _loads(text)
        if "\\ud" in text or "\\uD" in text:  # half a character: JSON has it, no text and no answer can
            json.dumps(values, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise HttpError(400, "the request's JSON is nested too deeply", code="invalid_json") from error
    except UnicodeError as error:
        raise HttpError(400, "the request's body is not UTF-8 text", code="invalid_json") from error
    except ValueError as error:
        raise HttpError(400, f"the request's body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(values, dict):
        raise HttpError(400, "the request's body must be a JSON object", code="invalid_json")
    return values


def _loads(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # CPython does not read such numbers, which would take it too long
        n_max = sys.get_int_max_str_digits()
        raise HttpError(
            400, f"a number in the request's body has more than {n_max} digits", code="invalid_json"
        ) from error


def _refuse_constant(name: str) -> float:
    raise HttpError(400, f"the request's body is not JSON: {name} is not a JSON number", code="invalid_json")
