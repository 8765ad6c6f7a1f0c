"""Both clients against a small real HTTP server. Each case runs once blocking and once awaited."""

from __future__ import annotations

import asyncio
import inspect
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_api import PIECES, FakeApi

import cluster
from cluster import AsyncClient, Client
from cluster.client import errors

TEXT = "".join(PIECES)


class Awaited:
    """:class:`AsyncClient` behind the interface of :class:`Client`, so that one test covers both."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(*args, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            answer = self._runner.run(getattr(self._client, name)(*args, **options))
            return AwaitedStream(self._runner, answer) if name.startswith("stream") else answer

        return call

    def __enter__(self) -> Awaited:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


class AwaitedStream:
    def __init__(self, runner: asyncio.Runner, stream: Any) -> None:
        self._runner = runner
        self._stream = stream

    def __iter__(self) -> Iterator[str]:
        async def following() -> str | None:
            return await anext(self._stream, None)

        return iter(lambda: self._runner.run(following()), None)

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._stream, name)
        return (lambda: self._runner.run(member())) if inspect.iscoroutinefunction(member) else member

    def __enter__(self) -> AwaitedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._stream.close())


@pytest.fixture(params=[Client, Awaited])
def make(request: pytest.FixtureRequest) -> type[Client]:
    return request.param


@pytest.fixture
def client(make: type[Client], api: FakeApi) -> Iterator[Client]:
    with make(api.url, timeout_s=10, retries=0) as client:
        yield client


def test_chat_and_complete(client: Client, api: FakeApi) -> None:
    reply = client.chat("hi", max_tokens=3, temperature=None)
    assert (reply.text, reply.finish_reason, reply.model, reply.request_id) == (TEXT, "stop", "good", "r1")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.cached_tokens) == (12, 3, 8)
    assert reply.details is None
    assert api.seen[-1] == {"model": "good", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert client.chat(history, model="other").text == TEXT
    assert api.seen[-1] == {"model": "other", "messages": history}
    assert client.complete("once", seed=1).text == TEXT
    assert api.seen[-1] == {"model": "good", "prompt": "once", "seed": 1}


def test_details_are_asked_for_and_parsed(client: Client, api: FakeApi) -> None:
    for details in (client.chat("hi", details=True).details, client.stream_complete("hi", details=True).reply().details):
        assert details is not None
        assert (details.attempts, details.cached_by_tier["dram"], details.prefill_s, details.handoff_s) == (2, 8, 0.2, None)


@pytest.mark.parametrize("call", ["stream_chat", "stream_complete"])
def test_streams_give_text_then_usage(client: Client, api: FakeApi, call: str) -> None:
    with getattr(client, call)("hi") as stream:
        assert list(stream) == PIECES
        reply = stream.reply()
        assert stream.text == TEXT
    assert api.seen[-1]["stream_options"] == {"include_usage": True}
    assert (reply.text, reply.finish_reason, reply.usage.cached_tokens, reply.request_id) == (TEXT, "length", 8, "r1")
    assert stream.timing.pieces == 3
    assert 0 < stream.timing.ttft_s < 10
    assert 0 <= stream.timing.tbt_s(3) < 10


def test_reply_of_a_stream_reads_the_rest(client: Client) -> None:
    with client.stream_chat("hi") as stream:
        assert next(iter(stream)) == PIECES[0]
        assert stream.reply().text == TEXT


def test_leaving_a_stream_ends_it_at_the_server(client: Client, api: FakeApi) -> None:
    before = api.gone
    with client.stream_chat("hi", model="endless") as stream:
        assert next(iter(stream)) == PIECES[0]
    deadline = time.monotonic() + 5
    while api.gone == before:
        assert time.monotonic() < deadline, "the server still streams"
        time.sleep(0.01)


def test_models_and_metrics(client: Client) -> None:
    assert client.models() == ["good", "other"]
    metrics = client.metrics()
    assert metrics['moonpool_gateway_cached_tokens_total{tier="dram"}'] == 512.0
    assert metrics["up"] == 1.0


def test_a_server_without_models(make: type[Client], api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "models", [])
    with make(api.url) as client, pytest.raises(errors.ProtocolError, match="no model"):
        client.chat("hi")


@pytest.mark.parametrize("url", ["{}/v1", "{}/", "{}/v1/"])
def test_an_openai_address_works(make: type[Client], api: FakeApi, url: str) -> None:
    with make(url.format(api.url), api_key="secret") as client:
        assert client.chat("hi").text == TEXT
    assert api.headers[-1]["authorization"] == "Bearer secret"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValueError, match="must look like"):
        Client(url)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.BadRequestError), (401, errors.AuthenticationError), (403, errors.AuthenticationError),
        (404, errors.NotFoundError), (413, errors.BadRequestError), (429, errors.OverloadedError),
        (500, errors.ServerError), (503, errors.UnavailableError), (504, errors.ServerError),
    ],
)  # fmt: skip
@pytest.mark.parametrize("call", ["chat", "stream_chat"])
def test_error_statuses(client: Client, status: int, kind: type[errors.ApiError], call: str) -> None:
    with pytest.raises(errors.ApiError) as caught:
        getattr(client, call)("hi", model=f"status-{status}")
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.message, caught.value.code) == (status, "no room", "overloaded")
    assert (caught.value.request_id, caught.value.retry_after_s) == ("r1", 0.0)


def test_an_error_page_that_is_not_ours(client: Client) -> None:
    with pytest.raises(errors.ServerError, match="answered 502") as caught:
        client.chat("hi", model="proxy-page")
    assert caught.value.status == 502


@pytest.mark.parametrize("model", ["not-json", "strange"])
def test_answers_in_another_form(client: Client, model: str) -> None:
    with pytest.raises(errors.ProtocolError):
        client.chat("hi", model=model)


@pytest.mark.parametrize("model", ["bad-sse", "bad-chunk", "not-utf8", "no-usage"])
def test_malformed_streams(client: Client, model: str) -> None:
    with client.stream_chat("hi", model=model) as stream, pytest.raises(errors.ProtocolError) as caught:
        list(stream)
    assert not isinstance(caught.value, errors.StreamCutError)


@pytest.mark.parametrize("model", ["cut", "ends-early"])
def test_cut_streams_keep_what_came(client: Client, model: str) -> None:
    with client.stream_chat("hi", model=model) as stream, pytest.raises(errors.StreamCutError) as caught:
        list(stream)
    assert caught.value.text == PIECES[0] == stream.text


def test_an_error_inside_a_stream(client: Client) -> None:
    with client.stream_chat("hi", model="fails") as stream, pytest.raises(errors.ServerError) as caught:
        list(stream)
    assert (caught.value.status, caught.value.code, caught.value.request_id) == (None, "attempts_exhausted", "r1")


@pytest.mark.parametrize(("call", "model"), [("chat", "slow"), ("stream_chat", "slow"), ("stream_chat", "endless")])
def test_time_is_bounded(make: type[Client], api: FakeApi, call: str, model: str) -> None:
    began = time.monotonic()
    with make(api.url, timeout_s=0.3) as client, pytest.raises(errors.TimedOutError):
        for _ in getattr(client, call)("hi", model=model):
            pass
    assert 0.25 < time.monotonic() - began < 3


def test_busy_servers_are_asked_again(make: type[Client], api: FakeApi) -> None:
    api.calls.pop("twice-busy", None)
    with make(api.url, retries=1) as client, pytest.raises(errors.OverloadedError):
        client.chat("hi", model="twice-busy")
    assert api.calls.pop("twice-busy") == 2
    with make(api.url, retries=2) as client:
        assert client.chat("hi", model="twice-busy").text == TEXT
    assert api.calls["twice-busy"] == 3


def test_failures_that_may_have_cost_work_are_not_repeated(make: type[Client], api: FakeApi) -> None:
    with make(api.url, retries=5) as client:
        for model in ("status-500", "status-503", "status-400", "not-json"):
            api.calls.pop(model, None)
            with pytest.raises(errors.MoonpoolError):
                client.chat("hi", model=model)
            assert api.calls[model] == 1


def test_nobody_listens(make: type[Client]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        began = time.monotonic()
        with make(url, retries=2) as client, pytest.raises(errors.UnreachableError):
            client.models()
    assert 0.3 <= time.monotonic() - began < 5  # waits of 0.1 s and 0.2 s between three attempts


def test_names_of_the_package() -> None:
    assert cluster.Client is Client
    assert cluster.AsyncClient is AsyncClient
    with pytest.raises(AttributeError, match="Klient"):
        _ = cluster.Klient  # type: ignore[attr-defined]


def test_both_clients_offer_the_same() -> None:
    """Every public name of one is in the other, with the same parameters."""

    def shape(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in vars(kind).items()
            if inspect.isfunction(member) and (name == "__init__" or not name.startswith("_"))
        }

    assert shape(Client) == shape(AsyncClient)
