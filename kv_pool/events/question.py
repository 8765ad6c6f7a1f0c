"""One question to a node from somebody who is no client of it."""

from __future__ import annotations

import zmq

from kv_pool.node.messages import Question
from kv_pool.transport.codec import encode
from kv_pool.transport.curve import CurveKeys, connect
from kv_pool.transport.sockets import make_socket


class NoAnswerError(Exception):
    """The node is not there, or did not answer in time."""


def ask(endpoint: str, question: Question, timeout_s: float, *, bytes_max: int, keys: CurveKeys | None = None) -> list[bytes]:
    """The frames of the answer, each at most ``bytes_max`` long. Blocks at most ``timeout_s``; raises :class:`NoAnswerError`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = make_socket(context, zmq.DEALER, bytes_max=bytes_max)
    try:
        connect(socket, endpoint, keys)
        socket.send(encode(question, ""))
        if not socket.poll(int(timeout_s * 1000)):
            raise NoAnswerError(f"no answer in {timeout_s:g} s")
        return socket.recv_multipart()
    except zmq.ZMQError as error:
        raise NoAnswerError(str(error)) from error
    finally:
        socket.close(0)
        context.term()
