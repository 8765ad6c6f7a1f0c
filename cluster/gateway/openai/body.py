"""From bytes on the wire to a JSON object: bounded in size, time and depth, and strict where ``json`` is not."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any, Final

from cluster.gateway.openai.errors import BODY_TIMEOUT, ApiError, shown

_STRING: Final = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NOT_BRACKETS: Final = re.compile(r"[^\[\]{}]++")


async def read_body(chunks: AsyncIterator[bytes], declared: str | None, *, bytes_max: int, timeout_s: float) -> bytes:
    """The whole body. ``declared`` is the Content-Length header, which is never trusted below the limit.

    Raises :class:`ApiError`: 413 over ``bytes_max`` (noticed while reading), 408 after ``timeout_s``.
    """
    too_long = declared is not None and declared.isdecimal() and int(declared[:20]) > bytes_max
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            if not too_long:
                async for chunk in chunks:
                    body += chunk
                    if len(body) > bytes_max:
                        too_long = True
                        break
    except TimeoutError:
        message = f"The request body did not arrive in {timeout_s:g} s."
        raise ApiError(BODY_TIMEOUT, message, code="body_timeout", headers={"connection": "close"}) from None
    if too_long:
        raise ApiError.too_large(bytes_max)
    return bytes(body)


def parse_object(body: bytes, *, depth_max: int) -> dict[str, Any]:
    """The JSON object in ``body``. Raises :class:`ApiError` (400): not UTF-8, not JSON, not an object, nested too deeply,
    a name twice, a number that is not one (NaN, Infinity, or too long)."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError.invalid(f"The request body is not valid UTF-8 (byte {error.start}).", code="invalid_utf8") from None
    if _deeper_than(text, depth_max):
        raise ApiError.invalid(f"The request body is nested more than {depth_max} levels deep.", code="too_deep")
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ApiError.invalid(f"The request body is not valid JSON ({error.msg}: {where}).", code="invalid_json") from None
    except ValueError:  # an integer of thousands of digits
        raise ApiError.invalid("The request body contains a number that is too long.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError.invalid("The request body must be a JSON object.", code="invalid_json")
    return value


def _deeper_than(text: str, depth_max: int) -> bool:
    """Whether brackets outside strings nest deeper than ``depth_max``; looked at before anything recursive runs."""
    depth = 0
    for bracket in _NOT_BRACKETS.sub("", _STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > depth_max:
            return True
    return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ApiError.invalid(f"The name '{shown(name)}' occurs twice in one object.", shown(name), "duplicate_name")
        found[name] = value
    return found


def _no_constant(name: str) -> Any:
    raise ApiError.invalid(f"{name} is not a JSON number.", code="invalid_json")
