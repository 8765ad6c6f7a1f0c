"""A pool node that says what a test wants it to say, to a real one that pulls from it."""

from __future__ import annotations

import contextlib
import time
from typing import TypeVar

import xxhash
import zmq

from kv_pool.keys import BlockKey
from kv_pool.node.messages import Answer, Granted, Hello, Piece, Pull, Tier, Welcome, grant_row
from kv_pool.transport.codec import REQUESTS, decode, encode
from kv_pool.transport.pieces import cut
from tests.kv_pool.pool_world import BLOCK_TOKENS, Source, content

T = TypeVar("T")


class PlayedPeer:
    def __init__(self, router: zmq.Socket[bytes], block_bytes: int, incarnation: str = "i1") -> None:
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.SNDTIMEO, 5000)
        port = router.bind_to_random_port("tcp://127.0.0.1", min_port=20000, max_port=30000)
        self.source = Source("played", f"tcp://127.0.0.1:{port}")
        self.incarnation = incarnation
        self.greeting = Welcome("played", 8, block_bytes, 3.0)
        self._router = router
        self._name = b""

    def hear(self, kind: type[T]) -> T:
        """The next message of this kind; others are passed over."""
        deadline = time.monotonic() + 10
        while True:
            assert self._router.poll(max(0, int((deadline - time.monotonic()) * 1000))), f"no {kind}"
            self._name, frame = self._router.recv_multipart()
            message, _ = decode(frame, REQUESTS)
            if isinstance(message, kind):
                return message

    def pending(self) -> bool:
        return bool(self._router.poll(0))

    def welcome(self) -> Pull:
        self.hear(Hello)
        self.say(self.greeting)
        return self.hear(Pull)

    def say(self, answer: Answer, *frames: bytes | memoryview) -> None:
        self.say_frames(encode(answer, self.incarnation), *frames)

    def say_frames(self, *frames: bytes | memoryview) -> None:
        """Waits where the other side reads slowly; goes nowhere where it has hung up."""
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart([self._name, *frames])


def granted(pull: Pull, k: BlockKey, length: int, *, position: int = 0, lease: int = 1) -> Granted:
    checksum = xxhash.xxh3_64_intdigest(content(k, length))
    row = grant_row(k, None, 0, 1, BLOCK_TOKENS, length, checksum, private=False)
    return Granted(pull.ticket, position, lease, row, bytes((Tier.DRAM,)))


def messages(pull: Pull, k: BlockKey, length: int, **more: int) -> list[tuple[Granted | Piece, memoryview]]:
    """What an honest peer sends for one block."""
    return list(cut(granted(pull, k, length, **more), memoryview(content(k, length))))
