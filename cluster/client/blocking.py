"""The synchronous client."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator
from types import TracebackType
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


class TextStream:
    """An answer while it is made: iterate over its text. Closing it early ends the request at the server too.

    After the last piece :meth:`reply` is the whole answer with its usage; ``timing`` says when text came.
    """

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

    def reply(self) -> Reply:
        """The whole answer; reads what is left of it. Raises as iterating does."""
        for _ in self:
            pass
        return self._state.reply()

    def close(self) -> None:
        self._pieces.close()
        self._response.close()  # the reader may not have begun

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> Generator[str]:
        reader = EventReader()
        try:
            for chunk in self._response.iter_bytes():
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
            self._response.close()
        raise StreamCutError("the stream ended without its end mark", self._state.text)


class Client:
    """Talks to a running cluster::

        with Client("http://127.0.0.1:8000") as client:
            print(client.chat("Why is the sky blue?").text)
            for piece in client.stream_chat("And at night?"):
                print(piece, end="")

    ``timeout_s`` bounds a whole request with its retries, streams included. Without ``model`` the server's first model is used.
    ``retries`` counts second tries after a failed connection or a 429 (see :mod:`cluster.client.retry`).
    May be shared between threads. Errors: :mod:`cluster.client.errors`.
    """

    def __init__(
        self, url: str = transport.DEFAULT_URL, *, api_key: str = "", model: str = "",
        timeout_s: float = transport.DEFAULT_TIMEOUT_S, retries: int = 2,
    ) -> None:  # fmt: skip
        self.url = transport.base_url(url)
        self._model = model
        self._timeout_s = timeout_s
        self._retry = RetryPolicy(retries + 1)
        self._http = httpx.Client(
            base_url=self.url, headers=transport.headers(api_key), trust_env=transport.trusts_environment(self.url)
        )

    def chat(self, messages: Messages, *, model: str = "", details: bool = False, **options: Any) -> Reply:
        """The answer to a conversation, or to one user message. ``options`` are the API's fields (``max_tokens``,
        ``temperature``, ``seed``, ``stop``, ...)."""
        request = wire.chat_request(messages, self._model_name(model), options, stream=False, details=details)
        return self._whole(request)

    def complete(self, prompt: str, *, model: str = "", details: bool = False, **options: Any) -> Reply:
        """The continuation of ``prompt``, without a chat template."""
        request = wire.completion_request(prompt, self._model_name(model), options, stream=False, details=details)
        return self._whole(request)

    def stream_chat(self, messages: Messages, *, model: str = "", details: bool = False, **options: Any) -> TextStream:
        """As :meth:`chat`, while it is made."""
        return self._stream(wire.chat_request(messages, self._model_name(model), options, stream=True, details=details))

    def stream_complete(self, prompt: str, *, model: str = "", details: bool = False, **options: Any) -> TextStream:
        """As :meth:`complete`, while it is made."""
        return self._stream(wire.completion_request(prompt, self._model_name(model), options, stream=True, details=details))

    def models(self) -> list[str]:
        """Names of the models that the server answers for."""
        return wire.parse_models(wire.parse_object(self._get("/v1/models")))

    def metrics(self) -> dict[str, float]:
        """The server's counters and gauges, by name and labels."""
        return parse_metrics(self._get("/metrics").decode(errors="replace"))

    def ask(self, request: Request) -> dict[str, Any]:
        """A request of another kind, whose answer is a JSON object."""
        deadline = transport.Deadline(self._timeout_s)
        with contextlib.closing(self._open(request, deadline)) as response:
            return wire.parse_object(_read_all(response, deadline))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _model_name(self, model: str) -> str:
        if not (model or self._model):
            self._model = wire.first_model(self.models())
        return model or self._model

    def _get(self, path: str) -> bytes:
        deadline = transport.Deadline(self._timeout_s)
        with contextlib.closing(self._open(Request(path), deadline)) as response:
            return _read_all(response, deadline)

    def _whole(self, request: Request) -> Reply:
        deadline = transport.Deadline(self._timeout_s)
        with contextlib.closing(self._open(request, deadline)) as response:
            body = _read_all(response, deadline)
            return wire.parse_reply(wire.parse_object(body), response.headers.get("x-request-id", ""))

    def _stream(self, request: Request) -> TextStream:
        timing = StreamTiming(time.perf_counter())
        deadline = transport.Deadline(self._timeout_s)
        return TextStream(self._open(request, deadline), deadline, timing)

    def _open(self, request: Request, deadline: transport.Deadline) -> httpx.Response:
        """A response with a good status, its body unread. The caller closes it."""
        failed = 0
        while True:
            try:
                return self._try(request, deadline)
            except MoonpoolError as error:
                failed += 1
                wait_s = self._retry.wait_s(error, failed, deadline.left_s())
                if wait_s is None:
                    raise
                time.sleep(wait_s)

    def _try(self, request: Request, deadline: transport.Deadline) -> httpx.Response:
        built = self._http.build_request(
            "GET" if request.body is None else "POST", request.path, json=request.body, headers=request.headers,
            timeout=deadline.httpx_timeout(),
        )  # fmt: skip
        try:
            response = self._http.send(built, stream=True)
        except httpx.HTTPError as error:
            raise transport.translate(error) from error
        if response.status_code < 400:
            return response
        with contextlib.closing(response):
            raise error_of_response(response.status_code, response.headers, _read_all(response, deadline))


def _read_all(response: httpx.Response, deadline: transport.Deadline) -> bytes:
    limit = transport.BodyLimit()
    try:
        for part in response.iter_bytes():
            deadline.check()
            limit.add(part)
    except httpx.HTTPError as error:
        raise transport.translate(error) from error
    return limit.body()
