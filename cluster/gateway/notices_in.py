"""The scheduler's notices (a worker is down, a worker is up), followed across restarts of the scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgpack
import zmq
import zmq.asyncio

from cluster.gateway.ports import PortError

log = logging.getLogger(__name__)

NOTICE_BYTES_MAX: Final = 64 * 1024
NOTICES_WAITING_MAX: Final = 1024
SILENCE_S: Final = 2.0
"""After this the scheduler is asked whether its endpoint is still the one listened to. Notices are rare, silence is normal."""


class NoticesIn:
    """``endpoint()`` asks the scheduler where it publishes; ``on_down(worker_id)`` is called for every worker that is gone."""

    def __init__(self, endpoint: Callable[[], Awaitable[str]], on_down: Callable[[str], None]) -> None:
        self._endpoint = endpoint
        self._on_down = on_down
        self._context: zmq.asyncio.Context | None = None
        self._task: asyncio.Task[None] | None = None
        self.malformed = 0

    def start(self) -> None:
        """Follow the notices from now on; to be called on the event loop."""
        self._context = zmq.asyncio.Context()
        self._task = asyncio.create_task(self._follow(self._context))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._context is not None:
            self._context.term()

    async def _follow(self, context: zmq.asyncio.Context) -> None:
        socket: zmq.asyncio.Socket | None = None
        connected = ""
        try:
            while True:
                try:
                    current = await self._ask(connected)
                    if current != connected:
                        if socket is not None:
                            socket.close(linger=0)
                        socket, connected = _subscribe(context, current), current
                    if socket is None:
                        await asyncio.sleep(SILENCE_S)
                    else:
                        await self._listen(socket)
                except Exception:  # a gateway that follows no notices would learn of every loss by a stall only
                    log.exception("notices: trying again")
                    await asyncio.sleep(SILENCE_S)
        finally:
            if socket is not None:
                socket.close(linger=0)

    async def _ask(self, connected: str) -> str:
        try:
            return await self._endpoint()
        except PortError:
            return connected

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        """Take notices until there is none for ``SILENCE_S``."""
        while await socket.poll(int(SILENCE_S * 1000)):
            frame = (await socket.recv_multipart())[0]
            worker_id = read_down(frame)
            if worker_id is None:
                self.malformed += 1
            elif worker_id:
                self._on_down(worker_id)


def read_down(frame: bytes) -> str | None:
    """The worker that the notice ``["down", worker_id, incarnation]`` names; empty for others, None for a malformed one."""
    try:
        kind, worker_id, _ = _strings(msgpack.unpackb(frame))
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    return worker_id if kind == "down" else ""


def _strings(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("a notice is a list of strings")
    return value


def _subscribe(context: zmq.asyncio.Context, endpoint: str) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, NOTICES_WAITING_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, NOTICE_BYTES_MAX)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    return socket
