"""The node's side of KV events: batches them by turn, numbers and publishes them, and keeps the latest for those who missed
some."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import zmq

from kv_pool.events.codec import encode_batch
from kv_pool.events.types import BlockEvent, EventBatch
from kv_pool.transport.curve import CurveKeys
from kv_pool.transport.sockets import bind, make_socket

EVENTS_PER_BATCH_MAX: Final = 512
BATCHES_KEPT_MAX: Final = 256
"""For replay; what is older takes a snapshot."""


class EventPublisher:
    """Owned by the node's I/O thread. A reader that falls behind loses batches (zmq drops them), sees the gap in the sequence and
    asks for a replay or a snapshot."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], host: str, node_id: str, incarnation: str, keys: CurveKeys | None = None
    ) -> None:
        self._socket = make_socket(context, zmq.PUB)
        self.endpoint = bind(self._socket, host, keys)
        self.node_id = node_id
        self.incarnation = incarnation
        self._waiting: list[BlockEvent] = []
        self._kept: deque[Sequence[bytes]] = deque(maxlen=BATCHES_KEPT_MAX)
        self.sequence = -1
        """Of the last batch sent."""

    def add(self, event: BlockEvent) -> None:
        self._waiting.append(event)
        if len(self._waiting) >= EVENTS_PER_BATCH_MAX:
            self.flush()

    def flush(self) -> None:
        """Send what was added as one batch."""
        if not self._waiting:
            return
        self.sequence += 1
        batch = EventBatch(self.sequence, self.node_id, self.incarnation, time.time(), tuple(self._waiting))
        self._waiting = []
        frames = encode_batch(batch)
        self._kept.append(frames)
        self._socket.send_multipart(frames, zmq.NOBLOCK)

    def since(self, first: int) -> list[Sequence[bytes]] | None:
        """The frames of batch ``first`` and all later ones; None where ``first`` is no longer kept or not there yet."""
        oldest = self.sequence + 1 - len(self._kept)
        if not oldest <= first <= self.sequence:
            return None
        return list(self._kept)[first - oldest :]

    def close(self) -> None:
        self._socket.close(0)
