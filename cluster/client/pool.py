"""Looking after the pool of a running cluster: what ``moonpool pool`` asks of the gateway."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from cluster.client import transport
from cluster.client.blocking import Client
from cluster.client.errors import ProtocolError
from cluster.client.wire import Request


class PoolAdmin:
    """``key`` is one of the gateway's ``admin_keys``. ``timeout_s`` bounds one call with its retries. Each node is a dict with
    ``id``, ``scheduler`` (how the scheduler sees it), ``status`` (what it says itself, or None) and ``error``.

    Errors: :mod:`cluster.client.errors`; ValueError where ``url`` is none.
    """

    def __init__(self, url: str = transport.DEFAULT_URL, *, key: str = "", timeout_s: float = 30.0) -> None:
        self._client = Client(url, api_key=key, timeout_s=timeout_s)

    def nodes(self) -> list[dict[str, Any]]:
        """All nodes, in order of their names."""
        nodes = self._client.ask(Request("/pool/nodes")).get("nodes")
        if not isinstance(nodes, list):
            raise ProtocolError("the answer has no list of nodes")
        return [_node(node) for node in nodes]

    def node(self, node_id: str) -> dict[str, Any]:
        return _node(self._client.ask(Request(f"/pool/nodes/{quote(node_id, safe='')}")))

    def drain(self, node_id: str, *, enable: bool) -> dict[str, Any]:
        """Have the node emptied, or take it into use again. Returns it as it is now."""
        return _node(self._client.ask(Request(f"/pool/nodes/{quote(node_id, safe='')}/drain", {"enable": enable})))

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _node(node: Any) -> dict[str, Any]:
    if not isinstance(node, dict) or not {"id", "scheduler", "status", "error"} <= node.keys():
        raise ProtocolError("the answer does not describe a node")
    return node
