"""The node's side of other nodes, and of whoever has a question: one zmq ROUTER. Owned by the node's I/O thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import zmq

from kv_pool.transport.curve import CurveKeys
from kv_pool.transport.sockets import bind, make_socket

MESSAGES_PER_TURN_MAX: Final = 256


class RemoteClients:
    """Clients are named by what zmq calls their connection, in hexadecimal. Raises zmq.ZMQError where no port is free."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, *, waiting_max: int, keys: CurveKeys | None) -> None:
        self.socket = make_socket(context, zmq.ROUTER, waiting_max=waiting_max)
        """For the poller."""
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a client that is gone is an error here, not a silent loss
        self.endpoint = bind(self.socket, host, keys)

    def receive(self) -> Iterator[tuple[str, list[bytes]]]:
        """(client, frames), at most ``MESSAGES_PER_TURN_MAX``."""
        for _ in range(MESSAGES_PER_TURN_MAX):
            try:
                name, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield name.hex(), frames

    def send(self, client: str, frames: Sequence[bytes | memoryview], *, copy: bool = True) -> bool:
        """False where the client is gone or takes nothing more. Not copied, a frame must stay as it is until it has left."""
        try:
            self.socket.send_multipart([bytes.fromhex(client), *frames], zmq.NOBLOCK, copy=copy)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self.socket.close(0)
