"""Every bad request gets a 4xx in OpenAI's form that names the field, and costs no worker anything."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from gateway_fakes import Served, served, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
SECRET = "xyzzy-private-words"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HI} | fields


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "abc"} | fields


FIELDS = [  # path, body, status, the field named
    (CHAT, {"messages": HI}, 400, "model"),
    (CHAT, {"model": "tiny"}, 400, "messages"),
    (CHAT, chat(messages=[]), 400, "messages"),
    (CHAT, chat(messages="hi"), 400, "messages"),
    (CHAT, chat(messages=["hi"]), 400, "messages[0]"),
    (CHAT, chat(messages=[{"role": "user"}]), 400, "messages[0].content"),
    (CHAT, chat(messages=[{"role": "user", "content": None}]), 400, "messages[0].content"),
    (CHAT, chat(messages=[{"role": "user", "content": 5}]), 400, "messages[0].content"),
    (CHAT, chat(messages=[{"role": "user", "content": []}]), 400, "messages[0].content"),
    (CHAT, chat(messages=[{"role": "user", "content": "\ud800"}]), 400, "messages[0].content"),
    (CHAT, chat(messages=[*HI, {"role": "tool", "content": "x"}]), 400, "messages[1].role"),
    (CHAT, chat(messages=[{"role": "user", "content": "x", "contents": "x"}]), 400, "messages[0].contents"),
    (CHAT, chat(messages=[{"role": "user", "content": "x", "tool_calls": [{}]}]), 400, "messages[0].tool_calls"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]), 400,
     "messages[0].content[0].type"),
    (CHAT, chat(messages=[*HI, {"role": "assistant", "content": SECRET}]), 400, "messages"),  # the template refuses it
    (CHAT, chat(messages=HI * 5000), 400, "messages"),
    (CHAT, chat(model="other"), 404, "model"),
    (CHAT, chat(model=3), 400, "model"),
    (CHAT, chat(temperature=-0.1), 400, "temperature"),
    (CHAT, chat(temperature=2.1), 400, "temperature"),
    (CHAT, chat(temperature="warm"), 400, "temperature"),
    (CHAT, chat(temperature=True), 400, "temperature"),
    (CHAT, chat(temperature=10**400), 400, "temperature"),
    (CHAT, chat(top_p=0), 400, "top_p"),
    (CHAT, chat(top_p=1.01), 400, "top_p"),
    (CHAT, chat(top_k=-1), 400, "top_k"),
    (CHAT, chat(n=0), 400, "n"),
    (CHAT, chat(n=9), 400, "n"),
    (CHAT, chat(n=1.5), 400, "n"),
    (CHAT, chat(seed="x"), 400, "seed"),
    (CHAT, chat(seed=2**70), 400, "seed"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    (CHAT, chat(max_tokens=-1), 400, "max_tokens"),
    (CHAT, chat(max_tokens=505), 400, "max_tokens"),
    (CHAT, chat(max_completion_tokens=505), 400, "max_completion_tokens"),
    (CHAT, chat(messages=[{"role": "user", "content": "x" * 600}]), 400, "messages"),
    (CHAT, chat(stop=["a"] * 5), 400, "stop"),
    (CHAT, chat(stop=""), 400, "stop"),
    (CHAT, chat(stop="x" * 300), 400, "stop"),
    (CHAT, chat(stop=[1]), 400, "stop[0]"),
    (CHAT, chat(stream="yes"), 400, "stream"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options"),
    (CHAT, chat(stream=True, stream_options={"include_usage": 1}), 400, "stream_options.include_usage"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (CHAT, chat(logprobs=3), 400, "logprobs"),
    (CHAT, chat(cache_salt="no spaces"), 400, "cache_salt"),
    (CHAT, chat(cache_salt="x" * 129), 400, "cache_salt"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice"),
    (CHAT, chat(response_format={"type": "json_object"}), 400, "response_format"),
    (CHAT, chat(frequency_penalty=0.5), 400, "frequency_penalty"),
    (CHAT, chat(logit_bias={"5": -100}), 400, "logit_bias"),
    (CHAT, chat(temprature=1), 400, "temprature"),
    (TEXT, {"model": "tiny"}, 400, "prompt"),
    (TEXT, text(prompt=""), 400, "prompt"),
    (TEXT, text(prompt=[]), 400, "prompt"),
    (TEXT, text(prompt=5), 400, "prompt"),
    (TEXT, text(prompt=[[]]), 400, "prompt[0]"),
    (TEXT, text(prompt=["a", 5]), 400, "prompt[1]"),
    (TEXT, text(prompt=["a", ""]), 400, "prompt[1]"),
    (TEXT, text(prompt=["a", "\udfff"]), 400, "prompt[1]"),
    (TEXT, text(prompt=[5, "a"]), 400, "prompt[0]"),
    (TEXT, text(prompt=[True]), 400, "prompt[0]"),
    (TEXT, text(prompt=[257]), 400, "prompt"),
    (TEXT, text(prompt=[[1], [-1]]), 400, "prompt[1]"),
    (TEXT, text(prompt=["a"] * 33), 400, "prompt"),
    (TEXT, text(prompt="x" * 512), 400, "prompt"),
    (TEXT, text(prompt="x" * 500, max_tokens=13), 400, "max_tokens"),
    (TEXT, text(logprobs=6), 400, "logprobs"),
    (TEXT, text(echo=True), 400, "echo"),
    (TEXT, text(best_of=2), 400, "best_of"),
    (TEXT, text(suffix="x"), 400, "suffix"),
]  # fmt: skip

RAW = [  # body, status, code
    (b"", 400, "invalid_json"),
    (b"{", 400, "invalid_json"),
    (b"[]", 400, "invalid_json"),
    (b'"x"', 400, "invalid_json"),
    (b'{"model": "tiny", "model": "tiny"}', 400, "duplicate_name"),
    (b'{"temperature": NaN}', 400, "invalid_json"),
    (b'{"temperature": -Infinity}', 400, "invalid_json"),
    (b'{"temperature": 1e999, "model": "tiny", "messages": [{"role": "user", "content": "x"}]}', 400, "invalid_value"),
    (b'{"seed": ' + b"9" * 5000 + b"}", 400, "invalid_json"),
    (b'{"model": "\xff"}', 400, "invalid_utf8"),
    (b"[" * 100_000, 400, "too_deep"),
    (b'{"user":' * 40 + b"1" + b"}" * 40, 400, "too_deep"),
    (b'{"messages": [{"content": "' + b"[" * 99 + b'"}], "nothing": 1}', 400, "unknown_parameter"),  # brackets in text are text
]


async def _harmless(gateway: Served) -> None:
    """No worker and no scheduler heard of it, nothing is held."""
    assert gateway.cluster.routed == []
    assert gateway.service.slots.taken == 0


async def test_every_bad_field_is_named():
    async with served() as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        for path, body, status, field in FIELDS:
            reply = await client.post(path, content=json.dumps(body))
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (status, field), (body, error)
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert SECRET not in reply.text
        await _harmless(gateway)


async def test_every_bad_body_is_refused():
    async with served() as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        for body, status, code in RAW:
            reply = await client.post(CHAT, content=body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), body[:60]
        await _harmless(gateway)


async def test_fields_that_ask_for_nothing_are_let_through():
    body = chat(
        user="u", store=True, metadata={"a": "b"}, tools=[], tool_choice="none", response_format={"type": "text"},
        frequency_penalty=0, presence_penalty=0.0, logit_bias={}, n=None, stop=None, seed=None, service_tier="auto",
        max_tokens=2, parallel_tool_calls=True, temperature=1,
        messages=[{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                  {"role": "user", "content": "c", "name": "bob"}],
    )  # fmt: skip
    async with served() as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        reply = await client.post(CHAT, json=body)
        assert reply.status_code == 200
        assert bytes(gateway.cluster.tasks[0].token_ids) == b"<system>ab<user>c<assistant>"


async def test_wrong_paths_and_methods():
    async with served() as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        assert (await client.get(CHAT)).json()["error"]["code"] == "method_not_allowed"
        assert (await client.get("/v2/chat")).json()["error"]["code"] == "unknown_url"
        assert (await client.get("/docs")).status_code == 404


@pytest.mark.parametrize("declared", [True, False], ids=["content-length", "chunked"])
async def test_body_over_the_limit_is_413(declared: bool):
    async def chunks():
        for _ in range(40):
            yield b"x" * 1024

    async with served(body_bytes_max=8192) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        reply = await client.post(CHAT, content=b"x" * 40_000 if declared else chunks())
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
        assert (await client.post(CHAT, json=chat(max_tokens=2))).status_code == 200


async def test_refusal_reaches_a_client_that_is_still_sending():
    async with served(requests_max=1) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        with gateway.service.slots.hold():
            reply = await client.post(CHAT, json=chat(messages=[{"role": "user", "content": "x" * 3_000_000}]))
            assert (reply.status_code, reply.json()["error"]["code"]) == (429, "overloaded")
        await _harmless(gateway)


async def test_endless_body_is_cut_off():
    """Chunked, no Content-Length, never ending: read to the limit, drained for a bounded time, then the connection is closed."""
    async with served(body_bytes_max=8192) as gateway:
        reader, writer = await _open(gateway, b"transfer-encoding: chunked")

        async def feed() -> None:
            try:
                while True:
                    writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
                    await writer.drain()
                    await asyncio.sleep(0)  # let the answer be read: a reset, which follows in the end, throws it away
            except OSError:
                return

        feeding = asyncio.create_task(feed())
        async with asyncio.timeout(5):
            assert b"413" in await reader.readline()
            await feeding
        writer.close()
        await _harmless(gateway)


async def test_body_that_does_not_come_is_408():
    async with served(body_timeout_s=0.1) as gateway:
        reader, writer = await _open(gateway, b"content-length: 100")
        writer.write(b'{"model"')
        async with asyncio.timeout(5):
            assert b"408" in await reader.readline()
        writer.close()
        await _harmless(gateway)


async def test_client_that_leaves_during_its_body_frees_its_slot():
    async with served() as gateway:
        _, writer = await _open(gateway, b"content-length: 100")
        await until(lambda: gateway.service.slots.taken == 1)
        writer.close()
        await until(lambda: gateway.service.slots.taken == 0)


async def _open(gateway: Served, header: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + header + b"\r\n\r\n")
    await writer.drain()
    return reader, writer
