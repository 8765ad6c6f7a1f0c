"""zmq sockets as this floor uses them: bounded queues, no lingering, loopback unless told otherwise, ports that Ray leaves
alone."""

from __future__ import annotations

from typing import Final

import zmq

from kv_pool.transport.curve import CurveKeys, announced

PORT_MIN: Final = 20000
PORT_MAX: Final = 30000
"""Ports of PORT_MIN .. PORT_MAX - 1 are bound."""
BIND_TRIES: Final = 100
MESSAGES_WAITING_MAX: Final = 4096
CONTROL_BYTES_MAX: Final = 1024 * 1024
RECONNECT_MS: Final = 100
RECONNECT_MS_MAX: Final = 2000
HANDSHAKE_MS_MAX: Final = 5000


def make_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    *,
    bytes_max: int = CONTROL_BYTES_MAX,
    waiting_max: int = MESSAGES_WAITING_MAX,
) -> zmq.Socket[bytes]:
    """A socket that drops its queue when closed, and drops a peer that sends a frame over ``bytes_max``."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, waiting_max)
    socket.setsockopt(zmq.RCVHWM, waiting_max)
    socket.setsockopt(zmq.MAXMSGSIZE, bytes_max)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS_MAX)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
    return socket


def bind(socket: zmq.Socket[bytes], host: str, keys: CurveKeys | None = None) -> str:
    """Bind to a free port of our range on ``host``; returns the endpoint to announce. Raises zmq.ZMQError where none is free."""
    if keys is not None:
        keys.serve(socket)
    port = socket.bind_to_random_port(f"tcp://{host}", min_port=PORT_MIN, max_port=PORT_MAX, max_tries=BIND_TRIES)
    return announced(f"tcp://{host}:{port}", keys)
