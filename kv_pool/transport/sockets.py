"""zmq sockets as this project uses them: bounded queues, no lingering, loopback unless told otherwise, ports that Ray leaves
alone."""

from __future__ import annotations

from typing import Final

import zmq

PORT_MIN: Final = 20000
PORT_MAX: Final = 30000
BIND_TRIES: Final = 100
MESSAGES_WAITING_MAX: Final = 4096
CONTROL_BYTES_MAX: Final = 1024 * 1024


def make_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, *, bytes_max: int = CONTROL_BYTES_MAX) -> zmq.Socket[bytes]:
    """A socket that drops its queue when closed and refuses frames over ``bytes_max``."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, MESSAGES_WAITING_MAX)
    socket.setsockopt(zmq.RCVHWM, MESSAGES_WAITING_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, bytes_max)
    return socket


def bind(socket: zmq.Socket[bytes], host: str) -> str:
    """Bind to a free port of our range on ``host``; returns the endpoint. Raises zmq.ZMQError where none is free."""
    port = socket.bind_to_random_port(f"tcp://{host}", min_port=PORT_MIN, max_port=PORT_MAX, max_tries=BIND_TRIES)
    return f"tcp://{host}:{port}"
