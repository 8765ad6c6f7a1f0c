"""The asynchronous client: the same calls as :class:`~cluster.client.blocking.Client`, awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Self

import httpx

from cluster.client import transport, wire
from cluster.client.errors import MoonpoolError, StreamCutError, error_of_response
from cluster.client.exposition import parse_metrics
from cluster.client.replies import Reply
from cluster.client.retry import RetryPolicy
from cluster.client.sse import EventReader
from cluster.client.timing import StreamTiming
from cluster.client.wire import Messages, Request, StreamState


class AsyncTextStream:
    """As :class:`~cluster.client.blocking.TextStream`, with ``async for`` and ``async with``."""

    def __init__(self, response: httpx.Response, deadline: transport.Deadline, timing: StreamTiming) -> None:
        self._response = response
        self._deadline = deadline
        self._state = StreamState(request_id=response.headers.get("x-request-id", ""))
        self._pieces = self._read()
        self.timing = timing

    @property
    def text(self) -> str:
        """What has arrived so far."""
        return self._state.text

    async def reply(self) -> Reply:
        """The whole answer; reads what is left of it. Raises as iterating does."""
        async for _ in self:
            pass
        return self._state.reply()

    async def close(self) -> None:
        await self._pieces.aclose()
        await self._response.aclose()  # the reader may not have begun

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        return await anext(self._pieces)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _read(self) -> AsyncGenerator[str]:
        reader = EventReader()
        try:
            async for chunk in self._response.aiter_bytes():
                self._deadline.check()
                for event in reader.push(chunk):
                    if delta := self._state.take(event):
                        self.timing.mark(time.perf_counter())
                        yield delta
                    if self._state.done:
                        self._state.reply()  # nothing may be missing
                        return
        except httpx.TimeoutException as error:
            raise transport.translate(error) from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise StreamCutError(f"the stream broke ({type(error).__name__})", self._state.text) from error
        finally:
            await self._response.aclose()
        raise StreamCutError("the stream ended without its end mark", self._state.text)


class AsyncClient:
    """As :class:`~cluster.client.blocking.Client`::

        async with AsyncClient() as client:
            reply = await client.chat("Why is the sky blue?")
            async with await client.stream_chat("And at night?") as stream:
                async for piece in stream:
                    print(piece, end="")

    Belongs to one event loop. Cancelling a call, or closing a stream early, ends the request at the server too.
    """

    def __init__(
        self, url: str = transport.DEFAULT_URL, *, api_key: str = "", model: str = "",
        timeout_s: float = transport.DEFAULT_TIMEOUT_S, retries: int = 2,
    ) -> None:  # fmt: skip
        self.url = transport.base_url(url)
        self._model = model
        self._timeout_s = timeout_s
        self._retry = RetryPolicy(retries + 1)
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=transport.headers(api_key), trust_env=transport.trusts_environment(self.url)
        )

    async def chat(self, messages: Messages, *, model: str = "", details: bool = False, **options: Any) -> Reply:
        name = await self._model_name(model)
        return await self._whole(wire.chat_request(messages, name, options, stream=False, details=details))

    async def complete(self, prompt: str, *, model: str = "", details: bool = False, **options: Any) -> Reply:
        name = await self._model_name(model)
        return await self._whole(wire.completion_request(prompt, name, options, stream=False, details=details))

    async def stream_chat(self, messages: Messages, *, model: str = "", details: bool = False, **options: Any) -> AsyncTextStream:
        name = await self._model_name(model)
        return await self._stream(wire.chat_request(messages, name, options, stream=True, details=details))

    async def stream_complete(self, prompt: str, *, model: str = "", details: bool = False, **options: Any) -> AsyncTextStream:
        name = await self._model_name(model)
        return await self._stream(wire.completion_request(prompt, name, options, stream=True, details=details))

    async def models(self) -> list[str]:
        return wire.parse_models(wire.parse_object(await self._get("/v1/models")))

    async def metrics(self) -> dict[str, float]:
        return parse_metrics((await self._get("/metrics")).decode(errors="replace"))

    async def ask(self, request: Request) -> dict[str, Any]:
        return wire.parse_object((await self._body(request))[0])

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- inside ---------------------------------------------------------------------------------------------------------

    async def _model_name(self, model: str) -> str:
        if not (model or self._model):
            self._model = wire.first_model(await self.models())
        return model or self._model

    async def _get(self, path: str) -> bytes:
        body, _ = await self._body(Request(path))
        return body

    async def _whole(self, request: Request) -> Reply:
        body, request_id = await self._body(request)
        return wire.parse_reply(wire.parse_object(body), request_id)

    async def _body(self, request: Request) -> tuple[bytes, str]:
        deadline = transport.Deadline(self._timeout_s)
        response = await self._open(request, deadline)
        try:
            return await _read_all(response, deadline), response.headers.get("x-request-id", "")
        finally:
            await response.aclose()

    async def _stream(self, request: Request) -> AsyncTextStream:
        timing = StreamTiming(time.perf_counter())
        deadline = transport.Deadline(self._timeout_s)
        return AsyncTextStream(await self._open(request, deadline), deadline, timing)

    async def _open(self, request: Request, deadline: transport.Deadline) -> httpx.Response:
        """A response with a good status, its body unread. The caller closes it."""
        failed = 0
        while True:
            try:
                return await self._try(request, deadline)
            except MoonpoolError as error:
                failed += 1
                wait_s = self._retry.wait_s(error, failed, deadline.left_s())
                if wait_s is None:
                    raise
                await asyncio.sleep(wait_s)

    async def _try(self, request: Request, deadline: transport.Deadline) -> httpx.Response:
        built = self._http.build_request(
            "GET" if request.body is None else "POST", request.path, json=request.body, headers=request.headers,
            timeout=deadline.httpx_timeout(),
        )  # fmt: skip
        try:
            response = await self._http.send(built, stream=True)
        except httpx.HTTPError as error:
            raise transport.translate(error) from error
        if response.status_code < 400:
            return response
        try:
            raise error_of_response(response.status_code, response.headers, await _read_all(response, deadline))
        finally:
            await response.aclose()


async def _read_all(response: httpx.Response, deadline: transport.Deadline) -> bytes:
    limit = transport.BodyLimit()
    try:
        async for part in response.aiter_bytes():
            deadline.check()
            limit.add(part)
    except httpx.HTTPError as error:
        raise transport.translate(error) from error
    return limit.body()
