"""How errors reach a client: as OpenAI's servers say them, with nothing of this machine in them."""

from __future__ import annotations

import json
import math
import re

from starlette.responses import Response

from llamakv.errors import (
    AbortedError,
    BusyError,
    ConflictError,
    EngineError,
    ExistsError,
    FormatError,
    InterruptedByUser,
    LlamakvError,
    LockedError,
    MismatchError,
    NoRoomError,
    NotFoundError,
    ReadError,
    UsageError,
    WriteError,
)
from llamakv.server.jobs import UnreadError

STATUS_OF: tuple[tuple[type[LlamakvError], int, str | None], ...] = (
    (UsageError, 400, None),
    (NotFoundError, 404, None),
    (ExistsError, 409, None),
    (LockedError, 409, "the session is in use"),
    (ConflictError, 409, "the session was changed by somebody else meanwhile"),
    (MismatchError, 409, None),
    (NoRoomError, 400, None),
    (BusyError, 429, None),
    (UnreadError, 408, None),
    (AbortedError, 503, "the request was stopped"),
    (InterruptedByUser, 503, "the server is stopping"),
    (WriteError, 500, "the session could not be written"),
    (ReadError, 500, "the session could not be read"),
    (FormatError, 500, "the saved session is damaged or of a newer version"),
    (EngineError, 500, "the engine failed"),
    (LlamakvError, 500, "the server failed"),
)
"""The first class that fits tells the status, and the message where the error's own may speak of files."""

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_PATH = re.compile(r"(?<![\w.:/])/(?:[^\s'\"/]+/)+([^\s'\"/]+)")


class HttpError(Exception):
    """A request that is refused with a status, an OpenAI error object and maybe a time to come again. ``is_last``:
    nothing more is taken on its connection."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        is_last: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.is_last = is_last

    @property
    def body(self) -> dict[str, object]:
        """The error object, as clients of OpenAI know it."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """What to send where nothing has been sent yet."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.is_last:
            headers["Connection"] = "close"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.body, status=self.status, headers=headers)


def http_error(error: LlamakvError) -> HttpError:
    """What one of our errors is to a client: its message without paths, its hint (a command line) left out."""
    status, message = next((status, told) for kind, status, told in STATUS_OF if isinstance(error, kind))
    retry_after_s = None
    if isinstance(error, BusyError):
        told = error.fields.get("retry_after_s")
        retry_after_s = float(told) if isinstance(told, int | float) and math.isfinite(told) else 1.0
    return HttpError(
        status, message or _PATH.sub(r"\1", error.message), code=_code_of(error), retry_after_s=retry_after_s
    )


def _code_of(error: LlamakvError) -> str:
    if isinstance(error, NoRoomError):
        return "context_length_exceeded"
    return "rate_limit_exceeded" if isinstance(error, BusyError) else error.code


def json_bytes(values: object) -> bytes:
    """Compact JSON in UTF-8; infinities, which JSON lacks, must have been replaced."""
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def json_response(values: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer in JSON that nobody on the way keeps."""
    return Response(
        json_bytes(values),
        status_code=status,
        media_type="application/json",
        headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", **(headers or {})},
    )
