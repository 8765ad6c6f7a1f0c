"""A worker's way out to the gateways: one PUSH socket per gateway, one frame per step, never waiting."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import zmq

from engine.serving.addresses import TokenSink
from engine.serving.token_stream import Event, encode

FRAMES_WAITING_MAX: Final = 1024
GATEWAYS_MAX: Final = 64


class TokenSender:
    """Owned by the engine thread. A gateway that takes nothing for ``FRAMES_WAITING_MAX`` frames loses frames; it notices the gap
    by the token index and plans the request again."""

    def __init__(self, sender: str) -> None:
        self._sender = sender
        self._context = zmq.Context()
        self._sockets: OrderedDict[str, zmq.Socket[bytes]] = OrderedDict()
        self._batch: dict[str, list[Event]] = {}
        self.frames_dropped = 0

    def add(self, sink: TokenSink, event: Event) -> None:
        """Put ``event`` in the step's frame for ``sink``."""
        self._batch.setdefault(sink.endpoint, []).append(event)

    def flush(self) -> None:
        """Send what was added, one frame per gateway."""
        for endpoint, events in self._batch.items():
            try:
                self._socket(endpoint).send(encode(self._sender, events), zmq.NOBLOCK)
            except zmq.ZMQError:
                self.frames_dropped += 1
        self._batch.clear()

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close(linger=0)
        self._sockets.clear()
        self._context.term()

    def _socket(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._sockets.get(endpoint)
        if socket is None:
            if len(self._sockets) >= GATEWAYS_MAX:
                self._sockets.popitem(last=False)[1].close(linger=0)
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, FRAMES_WAITING_MAX)
            socket.connect(endpoint)
            self._sockets[endpoint] = socket
        self._sockets.move_to_end(endpoint)
        return socket
