"""``/v1/sessions``: the conversations that are kept, and what can be done with one."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llamakv.server.auth import client_of
from llamakv.server.contract import Service, SessionLine
from llamakv.server.errors_http import json_response
from llamakv.server.fields import Fields, refuse
from llamakv.server.limits import ServeOptions, Turnstile, read_object
from llamakv.server.openai import refuse_while_stopping

_N_NAME_CHARACTERS_MAX = 200


class SessionsEndpoint:
    """The routes below ``/v1/sessions``; each client sees its own space only."""

    def __init__(self, service: Service, options: ServeOptions, turnstile: Turnstile) -> None:
        self._service = service
        self._options = options
        self._turnstile = turnstile

    def routes(self) -> list[Route]:
        """All of them."""
        one = "/v1/sessions/{name}"
        acts = {"save": self._save, "resume": self._resume, "fork": self._fork, "pin": self._pin, "unpin": self._unpin}
        return [
            Route("/v1/sessions", self._list, methods=["GET"]),
            Route(one, self._inspect, methods=["GET"]),
            Route(one, self._changing(self._delete), methods=["DELETE"]),
            *(Route(f"{one}/{name}", self._changing(act), methods=["POST"]) for name, act in acts.items()),
        ]

    def _changing(
        self, act: Callable[[str, str, Fields], Awaitable[dict[str, object]]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A handler that holds one of the client's places while it acts on the session, with the body's fields."""

        async def handle(request: Request) -> Response:
            client = client_of(request)
            refuse_while_stopping(self._service)
            with self._turnstile.enter(client.name):
                fields = Fields(await read_object(request, self._options, may_be_empty=True))
                return json_response(plain(await act(_name(request), client.space, fields)))

        return handle

    async def _list(self, request: Request) -> Response:
        lines = await self._service.sessions(client_of(request).space)
        return json_response({"object": "list", "data": [line_json(line) for line in lines]})

    async def _inspect(self, request: Request) -> Response:
        return json_response(plain(await self._service.inspect(_name(request), client_of(request).space)))

    async def _delete(self, name: str, space: str, fields: Fields) -> dict[str, object]:
        fields.close()
        await self._service.delete(name, space)
        return {"object": "session.deleted", "name": name, "deleted": True}

    async def _save(self, name: str, space: str, fields: Fields) -> dict[str, object]:
        new_name = _new_name(fields)
        fields.close()
        return line_json(await self._service.save(name, new_name, space))

    async def _resume(self, name: str, space: str, fields: Fields) -> dict[str, object]:
        fields.close()
        return line_json(await self._service.resume(name, space))

    async def _fork(self, name: str, space: str, fields: Fields) -> dict[str, object]:
        new_name = _new_name(fields)
        at = fields.take("at")
        fields.close()
        if new_name is None:
            raise refuse("as", "'as' must be the new session's name", code="missing_required_parameter")
        if type(at) is int and 0 <= at < 1 << 31:
            at = str(at)
        if at is not None and (not isinstance(at, str) or not 0 < len(at) <= 20):
            raise refuse("at", "'at' must be a turn, as 'turn2', or a number of tokens")
        return line_json(await self._service.fork(name, new_name, space, at))

    async def _pin(self, name: str, space: str, fields: Fields) -> dict[str, object]:
        fields.close()
        return line_json(await self._service.pin(name, space, pinned=True))

    async def _unpin(self, name: str, space: str, fields: Fields) -> dict[str, object]:
        fields.close()
        return line_json(await self._service.pin(name, space, pinned=False))


def _name(request: Request) -> str:
    name = str(request.path_params["name"])
    if len(name) > _N_NAME_CHARACTERS_MAX:
        raise refuse("name", f"a session's name has {_N_NAME_CHARACTERS_MAX} characters at most")
    return name


def _new_name(fields: Fields) -> str | None:
    """``as``, or ``new_name``, which is easier to write in some languages."""
    name, other = (fields.text(field, _N_NAME_CHARACTERS_MAX) for field in ("as", "new_name"))
    if name is not None and other is not None:
        raise refuse("new_name", "'as' and 'new_name' are the same, give one")
    return other if name is None else name


def line_json(line: SessionLine) -> dict[str, object]:
    """A session as data."""
    return {"object": "session", **asdict(line)}


def plain(value: object) -> object:
    """Data that JSON can say: infinities as text, tuples as lists, anything else by its name."""
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
