"""The node's side of KV events: batches them by turn, numbers and publishes them."""

from __future__ import annotations

import time

import zmq

from kv_pool.events.codec import encode_batch
from kv_pool.events.types import BlockEvent, EventBatch
from kv_pool.transport.sockets import bind, make_socket

EVENTS_PER_BATCH_MAX = 512


class EventPublisher:
    """Owned by the node's I/O thread. A reader that falls behind loses batches (zmq drops), sees the gap and takes a snapshot."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, node_id: str, incarnation: str) -> None:
        self._socket = make_socket(context, zmq.PUB)
        self.endpoint = bind(self._socket, host)
        self._node_id = node_id
        self._incarnation = incarnation
        self._waiting: list[BlockEvent] = []
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
        batch = EventBatch(self.sequence, self._node_id, self._incarnation, time.time(), tuple(self._waiting))
        self._waiting = []
        self._socket.send_multipart(encode_batch(batch), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close(0)
