"""moonpool: ``from cluster import Client, AsyncClient``. Nothing is imported before it is asked for (PEP 562)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.client.asynchronous import AsyncClient
    from cluster.client.blocking import Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> Any:
    if name == "Client":
        from cluster.client.blocking import Client

        return Client
    if name == "AsyncClient":
        from cluster.client.asynchronous import AsyncClient

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
