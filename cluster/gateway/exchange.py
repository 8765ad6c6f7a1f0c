"""One HTTP exchange: body in under limits, answer out as JSON or as a stream, and an eye on the client all the time.

Frameworks notice a client that left only when they next write to it. Here a task listens for the disconnect from the moment the
body is in, so that a request whose client is gone gives its workers back at once, streaming or not.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from cluster.gateway.generation import Generation
from cluster.gateway.openai.body import parse_object, read_body
from cluster.gateway.openai.errors import BODY_TIMEOUT, ApiError
from cluster.gateway.openai.responses import DONE, sse
from cluster.gateway.service import Call, GatewayService
from cluster.gateway.service_wish import read_wish

OUTCOME: Final = "moonpool.outcome"
"""Scope key: what the metrics call the end of the exchange, where the status does not say it."""
TENANT: Final = "moonpool.tenant"
"""Scope key: the cache domain of the caller, set by the edge."""
DETAILS_HEADER: Final = "x-moonpool-details"
CLIENT_GONE: Final = "client_gone"

DRAIN_S: Final = 1.0
DRAIN_BYTES_MAX: Final = 16 * 1024 * 1024
"""How much of the body of a refused request is read and thrown away, so that its sender gets to see why."""

_SSE_HEADERS: Final = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_JSON_HEADERS: Final = [(b"content-type", b"application/json")]


class ClientGoneError(Exception):
    """The client closed the connection, or takes nothing any more."""


Make = Callable[[dict[str, Any], Call], Awaitable[tuple[Generation, bool]]]
"""``GatewayService.chat`` or ``.completion``."""


class Exchange:
    """ASGI endpoint of one route."""

    def __init__(self, service: GatewayService, make: Make) -> None:
        self._service = service
        self._make = make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = self._service.now()
        body, writer = _Body(receive), _Writer(send, self._service.settings.client_stall_s)
        try:
            try:
                with self._service.slots.hold() as hold:
                    given = await self._read(scope, body)
                    await _while_connected(receive, self._answer(scope, given, arrived, hold, writer))
            except ApiError as error:
                if error.status != BODY_TIMEOUT:
                    await body.drain()
                await self._refuse(scope, error, writer)
        except ClientGoneError:
            scope[OUTCOME] = CLIENT_GONE

    async def _read(self, scope: Scope, body: _Body) -> dict[str, Any]:
        settings = self._service.settings
        declared = Headers(scope=scope).get("content-length")
        async with aclosing(body.chunks()) as chunks:
            data = await read_body(chunks, declared, bytes_max=settings.body_bytes_max, timeout_s=settings.body_timeout_s)
        return parse_object(data, depth_max=settings.json_depth_max)

    async def _answer(
        self, scope: Scope, given: dict[str, Any], arrived: float, hold: Callable[[int], None], writer: _Writer
    ) -> None:
        headers = Headers(scope=scope)
        call = Call(scope.get(TENANT, ""), arrived, headers.get(DETAILS_HEADER) == "1", hold, read_wish(headers))
        generation, streams = await self._make(given, call)
        if not streams:
            await writer.whole(200, _JSON_HEADERS, json.dumps(await generation.whole(), ensure_ascii=False).encode())
            return
        async with aclosing(generation.stream()) as events:
            async for event in events:
                await writer.part(_SSE_HEADERS, event)
        await writer.end()

    async def _refuse(self, scope: Scope, error: ApiError, writer: _Writer) -> None:
        """An error as a status, or, where the stream has begun, as its last event."""
        scope[OUTCOME] = str(error.status)
        if writer.started:
            await writer.part(_SSE_HEADERS, sse(error.body()) + DONE)
            await writer.end()
        else:
            headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
            await writer.whole(error.status, _JSON_HEADERS + headers, error.to_json())


class _Writer:
    """Sends a response's messages. A client that takes nothing for ``stall_s`` counts as gone; until then its answer waits in the
    request's own state, which is never longer than the answer."""

    def __init__(self, send: Send, stall_s: float) -> None:
        self._send = send
        self._stall_s = stall_s
        self.started = False

    async def whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._write({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        await self._write({"type": "http.response.body", "body": body})

    async def part(self, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        if not self.started:
            self.started = True
            await self._write({"type": "http.response.start", "status": 200, "headers": headers})
        await self._write({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        await self._write({"type": "http.response.body", "body": b""})

    async def _write(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send(message)
        except (TimeoutError, OSError) as error:
            raise ClientGoneError from error


class _Body:
    """The request's body as it comes. Raises :class:`ClientGoneError` when the client leaves meanwhile."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ended = False

    async def chunks(self) -> AsyncGenerator[bytes]:
        while not self._ended:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            self._ended = not message.get("more_body", False)
            yield message.get("body", b"")

    async def drain(self) -> None:
        """Throw away what is unread, within bounds: an answer to a client that is still sending would be lost in a reset."""
        left = DRAIN_BYTES_MAX
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S), aclosing(self.chunks()) as chunks:
                async for chunk in chunks:
                    left -= len(chunk)
                    if left <= 0:
                        return


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``; cancel it and raise :class:`ClientGoneError` when the client leaves first."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        finished = working.done()
        working.cancel()
        watching.cancel()
        await asyncio.wait({working, watching})
    if finished:
        await working
    else:
        raise ClientGoneError


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
