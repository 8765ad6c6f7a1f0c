"""zmq sockets that are gone after the test, whatever the test did."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import zmq

OpenSocket = Callable[[int], zmq.Socket[bytes]]


@pytest.fixture
def open_socket() -> Iterator[OpenSocket]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    opened: list[zmq.Socket[bytes]] = []

    def open_one(kind: int) -> zmq.Socket[bytes]:
        opened.append(context.socket(kind))
        return opened[-1]

    yield open_one
    for socket in opened:
        socket.close(0)
    context.term()
