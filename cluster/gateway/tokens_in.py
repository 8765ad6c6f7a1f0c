"""Token frames from all workers: one PULL socket, read on the gateway's event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Final

import zmq
import zmq.asyncio

from engine.serving.token_stream import FRAME_BYTES_MAX, Event, MalformedFrameError, decode

log = logging.getLogger(__name__)

PORT_MIN: Final = 20000
PORT_MAX: Final = 29999
BIND_TRIES: Final = 100
FRAMES_WAITING_MAX: Final = 4096
"""Per worker, here; a worker that gets no further drops frames, and the gap makes the request start over from what it has."""
FRAMES_PER_TURN_MAX: Final = 64
"""A receive that finds a frame waiting does not give way to the rest of the event loop: after so many, that is done by hand."""
RESTART_PAUSE_S: Final = 0.1


class TokensIn:
    """``on_events(sender, events)`` is called for every sound frame; a frame that is not costs a count and nothing else."""

    def __init__(self, on_events: Callable[[str, list[Event]], None], on_malformed: Callable[[], None]) -> None:
        self._on_events = on_events
        self._on_malformed = on_malformed
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None

    def bind(self) -> str:
        """Bind to loopback; returns the endpoint for the workers. To be called on the event loop, as the rest."""
        socket = self._socket = self._context.socket(zmq.PULL)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, FRAMES_WAITING_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        port = socket.bind_to_random_port("tcp://127.0.0.1", min_port=PORT_MIN, max_port=PORT_MAX + 1, max_tries=BIND_TRIES)
        return f"tcp://127.0.0.1:{port}"

    def start(self) -> None:
        """Read from now on what has arrived since :meth:`bind`."""
        assert self._socket is not None
        self._task = asyncio.create_task(self._read(self._socket))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._socket is not None:
            self._socket.close(linger=0)
        self._context.term()

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        for turn in itertools.count(1):
            if turn % FRAMES_PER_TURN_MAX == 0:
                await asyncio.sleep(0)
            try:
                frames = await socket.recv_multipart()
            except zmq.ZMQError:
                log.exception("token socket: receive failed")
                await asyncio.sleep(RESTART_PAUSE_S)
                continue
            try:
                if len(frames) != 1:
                    raise MalformedFrameError("a token message has one frame")
                sender, events = decode(frames[0])
            except MalformedFrameError:
                self._on_malformed()
                continue
            self._on_events(sender, events)
