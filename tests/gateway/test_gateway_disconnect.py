"""A client that leaves, stalls or hangs costs nothing beyond a second, and bounded memory until then."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import openai
import pytest
from gateway_fakes import FakeCluster, Fault, Served, served, until

from cluster.gateway.exchange import ClientGoneError, _Writer

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 500}


def nothing_left(gateway: Served) -> bool:
    cluster = gateway.cluster
    return (
        not cluster.running
        and not cluster.occupied
        and not gateway.service.slots.taken
        and not gateway.service.dispatcher.in_flight
    )


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_client_that_leaves_frees_its_workers(stream: bool, phase: str):
    cluster = FakeCluster(prefill_s=60 if phase == "prefill" else 0, step_s=0.01)
    async with served(cluster, stall_timeout_s=60) as gateway:
        reader, writer = await _post(gateway, BODY | {"stream": stream})
        await until(lambda: len(cluster.running) == 2 if phase == "prefill" else len(cluster.running) == 1)
        if stream and phase == "decode":
            assert b"200" in await reader.readline()
        writer.close()
        assert await until(lambda: nothing_left(gateway)) < 1.0
        workers = {worker for worker, _, _ in cluster.aborted}
        assert "decode-0" in workers
        text = gateway.service.metrics.text().decode()
        assert 'outcome="client_gone",route="/v1/completions"} 1.0' in text


async def test_client_that_leaves_before_its_tasks_arrive_leaves_none_behind():
    cluster = FakeCluster(submit_s=0.1, step_s=0.01)
    async with served(cluster) as gateway:
        _, writer = await _post(gateway, BODY)
        await until(lambda: bool(cluster.occupied))
        writer.close()
        await until(lambda: not cluster.occupied)
        await until(lambda: len(cluster.aborted) == 2 and nothing_left(gateway))
        assert len(cluster.tasks) == 2  # they did arrive, and were given back


async def test_all_choices_are_freed_together():
    async with served(FakeCluster(step_s=0.01)) as gateway:
        _, writer = await _post(gateway, BODY | {"n": 4, "stream": True})
        await until(lambda: gateway.service.dispatcher.in_flight == 4)
        writer.close()
        assert await until(lambda: nothing_left(gateway)) < 1.0


async def test_slow_client_holds_one_answer_and_no_more():
    """The client reads nothing while its answer is made. The workers finish, the text waits once, and all of it arrives."""
    cluster = FakeCluster()
    async with served(cluster) as gateway:
        reader, writer = await _post(gateway, BODY | {"stream": True, "n": 8, "logprobs": 5, "seed": 0}, buffer=4096)
        await until(lambda: not cluster.running and bool(cluster.tasks), 10.0)
        stream = (await asyncio.wait_for(reader.read(), 20)).decode()
        writer.close()
        assert stream.count('"finish_reason":"length"') == 8


async def test_stalled_client_is_dropped():
    """More than sockets and buffers hold is sent to a client that takes nothing: it is given up after ``client_stall_s``."""
    cluster = FakeCluster(step_s=0.0005)
    async with served(cluster, client_stall_s=0.3, stall_timeout_s=60) as gateway:
        body = BODY | {"stream": True, "n": 8, "logprobs": 5}
        _, writer = await _post(gateway, body, buffer=1024)
        writer.transport.pause_reading()
        await until(lambda: gateway.service.slots.taken == 8)
        await until(lambda: nothing_left(gateway), 20.0)
        writer.close()
        assert 'outcome="client_gone"' in gateway.service.metrics.text().decode()


async def test_send_that_hangs_is_a_client_that_is_gone():
    async def send(message: object) -> None:
        await asyncio.Event().wait()

    with pytest.raises(ClientGoneError):
        await _Writer(send, stall_s=0.01).part([], b"x")


async def test_request_out_of_time_is_an_error_not_a_hang():
    cluster = FakeCluster(faults=[Fault("silent")])
    async with (
        served(cluster, request_timeout_s=0.2, stall_timeout_s=60) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as client,
    ):
        reply = await client.post("/v1/completions", json=BODY)
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "timeout")
        await until(lambda: nothing_left(gateway))


async def test_error_after_the_stream_began_is_its_last_event():
    cluster = FakeCluster(faults=[Fault("internal", 5)])
    async with served(cluster, attempts_max=1) as gateway:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client:
            stream = await client.completions.create(**BODY, stream=True)
            with pytest.raises(openai.APIError) as failed:
                async for _ in stream:
                    pass
        assert failed.value.code == "attempts_exhausted"
        await until(lambda: nothing_left(gateway))


async def test_drain_lets_answers_finish_and_takes_no_more():
    cluster = FakeCluster(step_s=0.005)
    async with served(cluster) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        under_way = asyncio.create_task(client.post("/v1/completions", json=BODY | {"max_tokens": 20}))
        await until(lambda: gateway.service.slots.taken == 1)
        draining = asyncio.create_task(gateway.service.drain(5.0))
        await asyncio.sleep(0)
        assert (await client.post("/v1/completions", json=BODY)).json()["error"]["code"] == "draining"
        assert (await under_way).status_code == 200
        await draining


async def _post(gateway: Served, body: dict, buffer: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request; ``buffer`` bounds what the kernel and the reader take for a client that does not read."""
    host, port = gateway.url.removeprefix("http://").split(":")
    sock = socket.socket()
    if buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=buffer or 2**16)
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(data)
    writer.write(head + data)
    await writer.drain()
    return reader, writer
