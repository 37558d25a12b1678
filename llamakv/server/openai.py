"""OpenAI's endpoints over the service: chats, completions, models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from time import perf_counter

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llamakv.server.auth import client_of
from llamakv.server.chunks import Pace, gather, stream, while_connected
from llamakv.server.contract import ServedModel, Service
from llamakv.server.errors_http import HttpError, json_response
from llamakv.server.limits import ServeOptions, Turnstile, read_object
from llamakv.server.metrics import Metrics
from llamakv.server.openai_answers import Wording
from llamakv.server.openai_requests import TextRequest, check_model

Reader = Callable[[Mapping[str, object], ServedModel, ServeOptions, str], TextRequest]


class TextEndpoint:
    """One of the endpoints that write text, as an ASGI application: ``reader`` reads its requests."""

    def __init__(
        self,
        service: Service,
        options: ServeOptions,
        turnstile: Turnstile,
        metrics: Metrics,
        *,
        reader: Reader,
        is_chat: bool,
    ) -> None:
        self._service = service
        self._options = options
        self._turnstile = turnstile
        self._metrics = metrics
        self._reader = reader
        self._is_chat = is_chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        client = client_of(request)
        refuse_while_stopping(self._service)
        with self._turnstile.enter(client.name):
            pace = Pace(began_s=perf_counter())
            values = await read_object(request, self._options)
            wanted = self._reader(values, self._service.model, self._options, client.space)
            wanted = replace(wanted, ask=replace(wanted.ask, key=client.name))
            try:
                await self._answer(wanted, scope, receive, send, pace)
            finally:
                self._metrics.text_ended(pace)

    async def _answer(self, wanted: TextRequest, scope: Scope, receive: Receive, send: Send, pace: Pace) -> None:
        wording = Wording(
            self._service.model,
            is_chat=self._is_chat,
            has_logprobs=wanted.ask.n_top_logprobs is not None,
            echo=wanted.echo,
        )
        asking = partial(self._service.ask, wanted.ask)
        try:
            if wanted.is_stream:
                await while_connected(receive, stream(asking, wanted, wording, send, pace))
                return
            timeout_s = wanted.ask.timeout_s or self._options.max_time_s
            pieces, usage = await while_connected(receive, gather(asking, timeout_s, pace))
        except ClientDisconnect:
            return
        await json_response(wording.whole(pieces, wanted.ask.n_choices, usage))(scope, receive, send)


def refuse_while_stopping(service: Service) -> None:
    """Raises: HttpError: 503, requests are not taken."""
    if service.failure is not None:
        raise HttpError(503, "the engine failed, and the server ends", code="engine", retry_after_s=30)
    if not service.is_ready:
        raise HttpError(503, "the server is stopping", code="stopping", retry_after_s=5)


class ModelsEndpoint:
    """The one model, under its name and its aliases."""

    def __init__(self, service: Service, options: ServeOptions) -> None:
        self._service = service
        self._options = options

    async def all(self, _: Request) -> Response:
        """``GET /v1/models``."""
        names = (self._service.model.name, *self._options.model_alias)
        return json_response({"object": "list", "data": [self._told(name) for name in dict.fromkeys(names)]})

    async def one(self, request: Request) -> Response:
        """``GET /v1/models/{name}``. Raises: HttpError: 404."""
        name = str(request.path_params["name"])
        check_model(name, self._service.model, self._options)
        return json_response(self._told(name))

    def _told(self, name: str) -> dict[str, object]:
        model = self._service.model
        return {
            "id": name,
            "object": "model",
            "created": int(model.created_s),
            "owned_by": "llamakv",
            "root": model.name,
            "max_model_len": model.n_ctx_max,
        }
