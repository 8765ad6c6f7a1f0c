"""uvicorn inside an event loop that is not its own: bound first, no signal handlers, an end with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from cluster.gateway.settings import GatewaySettings

BACKLOG: Final = 512
HEADER_BYTES_MAX: Final = 64 * 1024
KEEP_ALIVE_S: Final = 30
START_TIMEOUT_S: Final = 10.0
SEND_BUFFER_BYTES: Final = 256 * 1024
"""Of one connection in the kernel. Left to itself it grows to megabytes for a client that reads slowly."""
SHUTDOWN_S: Final = 2
"""For what is still running after the drain: it is cancelled then."""


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the process and its signals belong to somebody else


class HttpServer:
    """``app`` on the address of ``settings``. Belongs to one event loop."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app = app
        self._settings = settings
        self._server: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Serve from now on; returns the base URL. Raises OSError when the address is taken."""
        settings = self._settings
        bound = _bind(settings)
        config = uvicorn.Config(
            self._app, http="h11", ws="none", lifespan="off", log_config=None, log_level="warning", access_log=False,
            limit_concurrency=settings.connections_max, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=SHUTDOWN_S,
            h11_max_incomplete_event_size=HEADER_BYTES_MAX, server_header=False, proxy_headers=False,
        )  # fmt: skip
        self._server = _Uvicorn(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[bound]))
        async with asyncio.timeout(START_TIMEOUT_S):
            await self._server.listening.wait()
        host, port = bound.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self) -> None:
        """Close the port, cancel what still runs after a grace of ``SHUTDOWN_S``."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.wait({self._task})


def _bind(settings: GatewaySettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        # Inherited by connections: one whose peer acknowledges nothing is ended by the kernel, whatever is left to send on it.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.client_stall_s * 1000))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        bound.bind((settings.host, settings.port))
        bound.listen(BACKLOG)
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound
