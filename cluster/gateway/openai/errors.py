"""Errors as OpenAI's API words them: ``{"error": {"message", "type", "param", "code"}}``. No prompt text in any of them."""

from __future__ import annotations

import json
import math
from typing import Any, Final

BODY_TIMEOUT: Final = 408
SHOWN_CHARS_MAX: Final = 100
"""Of anything from the request (a model or field name) that a message repeats."""


class ApiError(Exception):
    """What the client is told. ``param`` names the field at fault; ``retry_after_s`` becomes the ``Retry-After`` header."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None,
        code: str | None = None, retry_after_s: float | None = None, headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))

    @classmethod
    def invalid(cls, message: str, param: str | None = None, code: str | None = None) -> ApiError:
        return cls(400, message, param=param, code=code)

    @classmethod
    def too_large(cls, limit: int) -> ApiError:
        # The rest of the body is unread: the connection cannot be used again.
        return cls(413, f"The request body is longer than {limit} bytes.", code="body_too_large", headers={"connection": "close"})

    @classmethod
    def unknown_model(cls, name: str) -> ApiError:
        return cls(404, f"The model `{shown(name)}` does not exist.", param="model", code="model_not_found")

    @classmethod
    def overloaded(cls, retry_after_s: float) -> ApiError:
        message = "The cluster is at capacity. Try again later."
        return cls(429, message, kind="rate_limit_error", code="overloaded", retry_after_s=retry_after_s)

    @classmethod
    def unavailable(cls, message: str, code: str, *, retry_after_s: float = 1.0) -> ApiError:
        return cls(503, message, kind="server_error", code=code, retry_after_s=retry_after_s)

    @classmethod
    def timed_out(cls, limit_s: float) -> ApiError:
        return cls(504, f"The request was not finished in {limit_s:g} s.", kind="server_error", code="timeout")

    @classmethod
    def internal(cls, detail: str) -> ApiError:
        return cls(500, f"The gateway failed ({detail}).", kind="server_error", code="internal_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def to_json(self) -> bytes:
        return json.dumps(self.body()).encode()


def shown(text: str) -> str:
    """``text`` from a request, short enough and free of control characters."""
    cut = text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"
    return "".join(c if c.isprintable() else "?" for c in cut)
