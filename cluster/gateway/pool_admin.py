"""What operators may ask of the pool, and who may ask.

Through the gateway and not through Ray, because a cluster that ``moonpool serve`` started has a Ray of its own with a random
token, which no other process should have: whoever joins Ray may run code in it. Here there are two questions and one order.
"""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from cluster.gateway.keys import KeySet
from cluster.gateway.openai.errors import ApiError, shown
from cluster.gateway.ports import PoolPorts, PortError
from cluster.gateway.settings import GatewaySettings

ASKED_AT_ONCE_MAX: Final = 32
PROXY_HEADERS: Final = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


class PoolAdmin:
    """The pool's nodes, each as ``{"id", "scheduler", "status", "error"}``: how the scheduler sees it, what it says itself (None
    where it does not answer) and why it does not (None where it does). Raises :class:`ApiError`."""

    def __init__(self, ports: PoolPorts) -> None:
        self._ports = ports
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE_MAX)

    async def nodes(self) -> list[dict[str, Any]]:
        return list(await asyncio.gather(*(self._ask(node) for node in await self._known())))

    async def node(self, node_id: str) -> dict[str, Any]:
        return await self._ask(await self._find(node_id))

    async def drain(self, node_id: str, *, enable: bool) -> dict[str, Any]:
        """Begin, or take back. Doing it twice is doing it once."""
        node = await self._find(node_id)
        try:
            status = await self._ports.drain_node(node_id, enable=enable)
        except PortError as error:
            raise ApiError.unavailable(f"The node did not take the order: {error}.", "node_unavailable") from error
        return {"id": node_id, "scheduler": node, "status": status, "error": None}

    # --- inside ---------------------------------------------------------------------------------------------------------

    async def _known(self) -> list[dict[str, Any]]:
        try:
            return sorted(await self._ports.pool_nodes(), key=lambda node: node["id"])
        except PortError as error:
            raise ApiError.unavailable("The scheduler does not answer.", "no_scheduler") from error

    async def _find(self, node_id: str) -> dict[str, Any]:
        """Only what the scheduler calls a node is asked: a request may name no other actor."""
        for node in await self._known():
            if node["id"] == node_id:
                return node
        raise ApiError(404, f"There is no pool node `{shown(node_id)}`.", code="node_not_found")

    async def _ask(self, node: dict[str, Any]) -> dict[str, Any]:
        status, error = None, None
        async with self._asking:
            try:
                status = await self._ports.node_status(node["id"])
            except PortError as failure:
                error = str(failure)
        return {"id": node["id"], "scheduler": node, "status": status, "error": error}


class AdminGate:
    """Who may: whoever has one of ``admin_keys``. Where there are none, somebody on this machine, if the gateway has no users to
    be told apart from operators (``api_keys``); not a browser, which may act for a page from elsewhere, and nobody behind a
    proxy."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._admins = KeySet(settings.admin_keys)
        self._has_users = bool(settings.api_keys)

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raises :class:`ApiError` (401, 403)."""
        if self._admins:
            if self._admins.find(headers) is None:
                raise ApiError(
                    401, "Incorrect admin key provided.", code="invalid_admin_key", headers={"www-authenticate": "Bearer"}
                )
            return
        if self._has_users:
            raise _forbidden("This gateway has users (gateway.api_keys): set gateway.admin_keys to look after its pool.")
        peer = scope.get("client")
        if peer is None or not _loopback(peer[0]) or any(name in headers for name in PROXY_HEADERS):
            raise _forbidden("Without gateway.admin_keys only the gateway's own machine may look after its pool.")
        if "origin" in headers or not _loopback(urlsplit(f"//{headers.get('host', '')}").hostname or ""):
            raise _forbidden("Without gateway.admin_keys no web page may look after the pool.")


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, code="admin_only")


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
