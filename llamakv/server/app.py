"""The HTTP side as one application: routes, errors, the page, and who comes in."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ExceptionHandler

from llamakv.errors import LlamakvError
from llamakv.server.auth import Gate, check_may_know_all, client_of
from llamakv.server.contract import Service
from llamakv.server.errors_http import HttpError, http_error, json_response
from llamakv.server.limits import ServeOptions, Turnstile
from llamakv.server.metrics import CLIENT_GONE, Measure, Metrics
from llamakv.server.openai import ModelsEndpoint, TextEndpoint
from llamakv.server.openai_requests import read_chat, read_completion
from llamakv.server.sessions_api import SessionsEndpoint, line_json, plain

_PAGE = Path(__file__).parent / "page"
_PAGE_FILES = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
}
_PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_N_SESSIONS_SHOWN = 200
"""Conversations that the page is told of each second, those used last; ``/v1/sessions`` tells all."""


def make_app(service: Service, options: ServeOptions) -> Starlette:
    """The application over a service, which stays the caller's to open and to stop.

    Every refusal is an OpenAI error object. What goes wrong inside ends one request with 500 and is raised to the
    server that runs this, which logs it; nothing of it reaches the client.
    """
    metrics, turnstile = Metrics(service), Turnstile(options.max_concurrent_per_key)
    models = ModelsEndpoint(service, options)
    chat = TextEndpoint(service, options, turnstile, metrics, reader=read_chat, is_chat=True)
    completion = TextEndpoint(service, options, turnstile, metrics, reader=read_completion, is_chat=False)
    handlers: dict[type[Exception], ExceptionHandler] = {
        HttpError: _refused,
        LlamakvError: _failed,
        HTTPException: _not_served,
        ClientDisconnect: _gone,
        Exception: _broken,
    }

    async def health(_: Request) -> Response:
        status = "failed" if service.failure is not None else "ok" if service.is_ready else "stopping"
        return json_response({"status": status}, status=200 if status == "ok" else 503)

    async def told(request: Request) -> Response:
        check_may_know_all(client_of(request), options)
        return Response(metrics.text(), media_type=metrics.content_type, headers={"Cache-Control": "no-store"})

    async def live(request: Request) -> Response:
        space = client_of(request).space
        sessions = await service.sessions(space)
        values = {
            "ready": service.is_ready,
            "model": asdict(service.model),
            "counts": asdict(await service.counts_of(space)),
            "sessions": [line_json(line) for line in sessions[:_N_SESSIONS_SHOWN]],
            "n_sessions": len(sessions),
        }
        return json_response(plain(values))

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completion, methods=["POST"]),
            Route("/v1/models", models.all, methods=["GET"]),
            Route("/v1/models/{name:path}", models.one, methods=["GET"]),
            *SessionsEndpoint(service, options, turnstile).routes(),
            Route("/v1/live", live, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
            Route("/metrics", told, methods=["GET"]),
            Route("/", _page, methods=["GET"]),
            *(Route(f"{folder}/{name}", _page, methods=["GET"]) for name in _PAGE_FILES for folder in ("", "/static")),
        ],
        middleware=[Middleware(Measure, metrics=metrics), Middleware(Gate, options=options)],
        exception_handlers=handlers,
    )


async def _page(request: Request) -> Response:
    name = request.url.path.rpartition("/")[2] or "index.html"
    path = _PAGE / name
    if not path.is_file():
        raise HttpError(404, "the page is not part of this installation", code="not_found")
    return Response(path.read_bytes(), media_type=_PAGE_FILES[name], headers=_PAGE_HEADERS)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return error.response()


async def _failed(_: Request, error: Exception) -> Response:
    assert isinstance(error, LlamakvError)
    return http_error(error).response()


async def _not_served(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        told = f"{request.method} is not for this address, {allowed} is"
        response = HttpError(405, told, code="method_not_allowed").response()
        response.headers.update(error.headers or {})
        return response
    if error.status_code == 404:
        told = f"nothing is at this address{_instead(request)}"
        return HttpError(404, told, code="unknown_url").response()
    return HttpError(error.status_code, "the request cannot be read", code="bad_request").response()


def _instead(request: Request) -> str:
    """What a client may have wanted whose address is nearly one of ours."""
    path = request.url.path.rstrip("/")
    known = [route.path for route in request.app.routes if isinstance(route, Route) and "{" not in route.path]
    wanted = next((one for one in known if one in (f"/v1{path}", path) or (path.endswith(one) and one != "/")), None)
    if wanted is not None:
        return f"; did you mean {wanted}?"
    return "; of OpenAI's, chats, completions and models are served" if path.startswith("/v1/") else ""


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _broken(_: Request, __: Exception) -> Response:
    return HttpError(500, "something went wrong inside the server", code="internal_error").response()
