"""Who is let in: known hosts, no other sites' pages, API keys."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from llamakv.server.errors_http import HttpError
from llamakv.server.limits import ServeOptions

OPEN_PATHS = frozenset(("/", "/index.html", "/app.js", "/style.css", "/health"))

_CLIENT = "llamakv.client"
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Whose request it is: the key's name (empty: the server is open), and the space its cells and sessions are in."""

    name: str
    space: str


def client_of(connection: HTTPConnection) -> Client:
    """The client that ``Gate`` let in."""
    client = connection.scope[_CLIENT]
    assert isinstance(client, Client)
    return client


def check_may_know_all(client: Client, options: ServeOptions) -> None:
    """Refuse who may not know what all keys together do: with a ``metrics_key`` all others, else with ``isolate`` all.

    Raises:
        HttpError: 403.
    """
    if options.metrics_key is None and options.isolate:
        told = "no key may read the metrics, which add up all of them: start the server with --metrics-key NAME"
    elif options.metrics_key not in (None, client.name):
        told = "the metrics are for the key that --metrics-key names"
    else:
        return
    raise HttpError(403, told, code="metrics_not_allowed")


class Gate:
    """Middleware that refuses what may not come in, before anything of it is read.

    A body whose length is told in two ways (what one on the way takes for a body another may take for a request) gets
    400 and the end of its connection. A wrong ``Host`` (a page that had its name point here) and a changing request
    from another site's page get 403, a missing or wrong key 401. The page and ``/health`` need no key: the page asks
    for it.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in options.allowed_hosts)
        self._digests = [
            (_digest(key.encode()), Client(name=name, space=_space_of(key) if options.isolate else ""))
            for name, key in options.keys.items()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope[_CLIENT] = self._admit(HTTPConnection(scope))
            except HttpError as refused:
                await refused.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admit(self, connection: HTTPConnection) -> Client:
        is_old = connection.scope["http_version"] == "1.0"  # which knows no chunks
        if "transfer-encoding" in connection.headers and ("content-length" in connection.headers or is_old):
            raise HttpError(
                400,
                f"Transfer-Encoding is not taken {'in HTTP/1.0' if is_old else 'together with Content-Length'}",
                code="bad_request",
                is_last=True,
            )
        host = connection.headers.get("host", "")
        if self._hosts and _host_name(host) not in self._hosts:
            raise HttpError(403, "the server is not called by this host name", code="host_not_allowed")
        origin = connection.headers.get("origin")
        if origin is not None and connection.scope["method"] not in ("GET", "HEAD") and not _is_same(origin, host):
            raise HttpError(403, "requests from other sites' pages are not taken", code="origin_not_allowed")
        path = connection.scope["path"]
        if not self._digests or path in OPEN_PATHS:
            return Client(name="", space="")
        return self._known(connection)

    def _known(self, connection: HTTPConnection) -> Client:
        given = connection.headers.get("authorization", "")
        scheme, _, key = given.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise HttpError(401, "an API key is needed, as 'Authorization: Bearer KEY'", code="invalid_api_key")
        digest, found = _digest(key.strip().encode("latin-1")), None
        for known, client in self._digests:  # all of them, whatever comes: the time must not tell
            if hmac.compare_digest(known, digest):
                found = client
        if found is None:
            raise HttpError(401, "the API key is not known here", code="invalid_api_key")
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _space_of(key: str) -> str:
    """A name for the key's own space that does not give the key away."""
    return hashlib.blake2b(key.encode(), digest_size=16, person=b"llamakv space").hexdigest()


def _host_name(host: str) -> str:
    """``[::1]:8080`` → ``[::1]``."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdigit() else host.lower()


def _is_same(origin: str, host: str) -> bool:
    try:
        site = urlsplit(origin)
        port = site.port or _DEFAULT_PORTS.get(site.scheme)
        asked = urlsplit(f"//{host}")
        asked_port = asked.port or _DEFAULT_PORTS.get(site.scheme)
    except ValueError:
        return False
    return site.hostname is not None and (site.hostname, port) == (asked.hostname, asked_port)
