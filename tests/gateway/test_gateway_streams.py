"""Token frames and scheduler notices over real sockets."""

from __future__ import annotations

import asyncio

import msgpack
import pytest
import zmq
import zmq.asyncio
from gateway_fakes import until

from cluster.gateway.notices_in import NoticesIn, read_down
from cluster.gateway.ports import PortError
from cluster.gateway.tokens_in import PORT_MAX, PORT_MIN, TokensIn
from engine.serving.token_stream import Tokens, encode


async def test_token_frames_arrive_and_malformed_ones_are_counted():
    got, bad = [], []
    tokens = TokensIn(lambda sender, events: got.append((sender, events)), lambda: bad.append(1))
    endpoint = tokens.bind()
    tokens.start()
    assert PORT_MIN <= int(endpoint.rpartition(":")[2]) <= PORT_MAX
    assert endpoint.startswith("tcp://127.0.0.1:")
    with zmq.asyncio.Context() as context, context.socket(zmq.PUSH) as worker:
        worker.setsockopt(zmq.LINGER, 0)
        worker.connect(endpoint)
        event = Tokens("r", 0, 0, (1, 2))
        for frames in ([b"junk"], [b""], [msgpack.packb(["w", [["?", "r", 0]]])], [b"a", b"b"], [encode("w:1", [event])]):
            await worker.send_multipart(frames)
        await until(lambda: bool(got))
    assert got == [("w:1", [event])]
    assert len(bad) == 4
    await tokens.stop()


async def test_notices_are_followed_to_a_restarted_scheduler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cluster.gateway.notices_in.SILENCE_S", 0.02)
    down: list[str] = []
    with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as first, context.socket(zmq.PUB) as second:
        ports = [s.bind_to_random_port("tcp://127.0.0.1", min_port=20000, max_port=30000) for s in (first, second)]
        answers: list[str | None] = [f"tcp://127.0.0.1:{ports[0]}"]

        async def endpoint() -> str:
            if answers[0] is None:
                raise PortError("restarting")
            return answers[0]

        async def publish(socket: zmq.asyncio.Socket, worker_id: str) -> None:
            """A subscriber that is still connecting misses what is published: say it until it is heard."""
            async with asyncio.timeout(5):
                while worker_id not in down:
                    await socket.send(b"junk")
                    await socket.send(msgpack.packb(["up", worker_id, "i"]))
                    await socket.send(msgpack.packb(["down", worker_id, "i"]))
                    await asyncio.sleep(0.005)

        notices = NoticesIn(endpoint, down.append)
        notices.start()
        await publish(first, "decode-0")
        answers[0] = None
        await publish(first, "decode-1")  # the scheduler's calls fail, its notices still come
        answers[0] = f"tcp://127.0.0.1:{ports[1]}"
        await publish(second, "decode-2")
        assert notices.malformed > 0
        await notices.stop()


@pytest.mark.parametrize(
    "value", [None, [], ["down"], ["down", 1, "i"], ["down", "a", "b", "c"], {"down": 1}, "down", {(1, 2): 3}]
)
def test_malformed_notices(value: object):
    assert read_down(msgpack.packb(value)) is None


def test_notices_of_other_kinds():
    assert read_down(msgpack.packb(["down", "w", "i"])) == "w"
    assert read_down(msgpack.packb(["up", "w", "i"])) == ""
