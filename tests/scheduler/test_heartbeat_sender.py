"""The heartbeat thread against a ROUTER of the test's own: replies, silence, garbage, and an end that never hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from kv_pool.heartbeat import HeartbeatSender

PERIOD_S = 0.03
WAIT_MS = 5000


class Router:
    """A scheduler's report socket; heartbeats are read and answered by hand."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1", 20000, 29999)
        self.endpoint = f"tcp://127.0.0.1:{port}"

    def receive(self) -> tuple[bytes, dict[str, Any]]:
        assert self.socket.poll(WAIT_MS), "no heartbeat came"
        identity, frame = self.socket.recv_multipart()
        return identity, msgpack.unpackb(frame)

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def router() -> Iterator[Router]:
    router = Router()
    yield router
    router.close()


class Owner:
    """Counts what the sender asks of it."""

    def __init__(self) -> None:
        self.payloads = 0
        self.replies: list[dict[str, Any]] = []
        self.replied = threading.Event()

    def payload(self) -> dict[str, Any]:
        self.payloads += 1
        return {"n": self.payloads}

    def on_reply(self, reply: dict[str, Any]) -> None:
        self.replies.append(reply)
        self.replied.set()


def sender_for(owner: Owner, resolve: Any) -> HeartbeatSender:
    return HeartbeatSender(resolve=resolve, payload=owner.payload, on_reply=owner.on_reply, period_s=PERIOD_S)


def test_sends_at_once_and_periodically_and_hands_over_replies(router: Router) -> None:
    owner = Owner()
    sender = sender_for(owner, lambda: router.endpoint)
    sender.start()
    try:
        identity, first = router.receive()
        assert first == {"n": 1}
        router.socket.send_multipart([identity, msgpack.packb({"fence": 7})])
        assert owner.replied.wait(5)
        assert owner.replies == [{"fence": 7}]
        assert router.receive()[1] == {"n": 2}
    finally:
        sender.stop()


def test_asks_again_after_silence_and_follows_a_scheduler_that_moved(router: Router) -> None:
    elsewhere = Router()
    asked: list[float] = []

    def resolve() -> str | None:
        asked.append(time.monotonic())
        return None if len(asked) == 1 else router.endpoint if len(asked) == 2 else elsewhere.endpoint

    sender = sender_for(Owner(), resolve)
    sender.start()
    try:
        router.receive()  # found at the second try; it never answers
        elsewhere.receive()
        assert asked[1] - asked[0] >= 4 * PERIOD_S
        assert asked[2] - asked[1] >= 4 * PERIOD_S
    finally:
        sender.stop()
        elsewhere.close()


def test_reports_are_not_drained_into_nowhere() -> None:
    """``payload`` may tell things once only: it is not asked while there is no connection."""
    owner, asked = Owner(), threading.Event()

    def resolve() -> str:
        asked.set()
        return "tcp://127.0.0.1:1"  # nobody listens there

    sender = sender_for(owner, resolve)
    sender.start()
    assert asked.wait(5)
    deadline = time.monotonic() + 5 * PERIOD_S
    while time.monotonic() < deadline:
        assert owner.payloads == 0
    sender.stop()


def test_garbage_and_raising_callbacks_cost_one_heartbeat_only(router: Router) -> None:
    owner = Owner()

    def payload() -> dict[str, Any]:
        owner.payload()
        if owner.payloads == 1:
            raise RuntimeError("not now")
        return {"n": owner.payloads}

    def on_reply(reply: dict[str, Any]) -> None:
        owner.on_reply(reply)
        if len(owner.replies) == 1:
            raise RuntimeError("not this one")

    sender = HeartbeatSender(resolve=lambda: router.endpoint, payload=payload, on_reply=on_reply, period_s=PERIOD_S)
    sender.start()
    try:
        identity, beat = router.receive()
        assert beat == {"n": 2}
        for frame in (b"\xc1garbage", msgpack.packb([1]), msgpack.packb({"fence": 1}), msgpack.packb({"fence": 2})):
            router.socket.send_multipart([identity, frame])
        for _ in range(3):
            router.receive()
        assert owner.replies == [{"fence": 1}, {"fence": 2}]
    finally:
        sender.stop()


def test_a_hanging_resolve_does_not_hold_up_the_end() -> None:
    entered, release = threading.Event(), threading.Event()

    def resolve() -> None:
        entered.set()
        release.wait(30)

    sender = sender_for(Owner(), resolve)
    sender.start()
    assert entered.wait(5)
    started = time.monotonic()
    sender.stop()
    assert time.monotonic() - started < 1.0
    sender.stop()
    release.set()


def test_stop_without_start_and_a_bad_period() -> None:
    sender_for(Owner(), lambda: None).stop()
    with pytest.raises(ValueError, match="period_s"):
        HeartbeatSender(resolve=lambda: None, payload=dict, on_reply=print, period_s=0)
