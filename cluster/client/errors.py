"""What can go wrong between a client and the cluster.

::

    MoonpoolError
    ├── UnreachableError         no connection came about (retried)
    ├── TimedOutError            the answer was not complete in the time given
    ├── ProtocolError            the answer is not what the API promises
    │   └── StreamCutError       the stream ended before its end; ``text`` is what had come
    └── ApiError                 the server said no: status, message, kind, param, code, request_id
        ├── BadRequestError      400, 413, 422 and other 4xx: the request has to change (``param`` names the field)
        ├── AuthenticationError  401, 403
        ├── NotFoundError        404: no such model or path
        ├── OverloadedError      429: at capacity; ``retry_after_s`` (retried)
        └── ServerError          5xx: the cluster failed
            └── UnavailableError 503: no worker, no scheduler, shutting down

No message holds text of a prompt or of an answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

MESSAGE_CHARS_MAX: Final = 1000


class MoonpoolError(Exception):
    """Root of everything that the client raises."""


class UnreachableError(MoonpoolError):
    """Nobody listens at the address, or the connection was refused or reset before the request was through."""


class TimedOutError(MoonpoolError):
    """The time given for the request is over."""


class ProtocolError(MoonpoolError):
    """The server's bytes are not what the API promises."""


class StreamCutError(ProtocolError):
    """The connection ended in the middle of a stream. ``text`` is what had arrived of the answer."""

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class ApiError(MoonpoolError):
    """An error in OpenAI's form. ``status`` is None where it came inside a stream that had begun with 200."""

    def __init__(
        self, message: str, *, status: int | None = None, kind: str = "", param: str | None = None, code: str | None = None,
        request_id: str = "", retry_after_s: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.request_id = request_id
        self.retry_after_s = retry_after_s


class BadRequestError(ApiError):
    pass


class AuthenticationError(ApiError):
    pass


class NotFoundError(ApiError):
    pass


class OverloadedError(ApiError):
    pass


class ServerError(ApiError):
    pass


class UnavailableError(ServerError):
    pass


_BY_STATUS: Final = {
    401: AuthenticationError, 403: AuthenticationError, 404: NotFoundError, 429: OverloadedError, 503: UnavailableError,
}  # fmt: skip
_BY_KIND: Final = {"server_error": ServerError, "rate_limit_error": OverloadedError}


def error_of_response(status: int, headers: Mapping[str, str], body: bytes) -> ApiError:
    """The error that a response with a status of 400 or more stands for; its body need not be OpenAI's (a proxy's page)."""
    kind = _BY_STATUS.get(status, ServerError if status >= 500 else BadRequestError)
    fields = _fields(body)
    return kind(
        fields.pop("message") or f"The server answered {status}.",
        status=status,
        request_id=headers.get("x-request-id", ""),
        retry_after_s=_seconds(headers.get("retry-after")),
        **fields,
    )


def error_in_stream(error: Any, request_id: str) -> ApiError:
    """The error that a stream ended with."""
    fields = _fields_of(error)
    kind = _BY_KIND.get(fields["kind"], BadRequestError)
    return kind(fields.pop("message") or "The server ended the stream with an error.", request_id=request_id, **fields)


def _fields(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        data = None
    return _fields_of(data.get("error") if isinstance(data, dict) else None)


def _fields_of(error: Any) -> dict[str, Any]:
    if not isinstance(error, dict):
        return {"message": "", "kind": "", "param": None, "code": None}

    def text(name: str) -> str | None:
        value = error.get(name)
        return value[:MESSAGE_CHARS_MAX] if isinstance(value, str) else None

    return {"message": text("message") or "", "kind": text("type") or "", "param": text("param"), "code": text("code")}


def _seconds(text: str | None) -> float | None:
    """``Retry-After`` in seconds; its other form, a date, is not used by the API and counts as absent."""
    try:
        seconds = float(text) if text is not None else None
    except ValueError:
        return None
    return seconds if seconds is not None and math.isfinite(seconds) and seconds >= 0 else None
