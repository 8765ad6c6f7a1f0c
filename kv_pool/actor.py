"""Ray shell of a pool node. Plain methods only, each returns at once; the node's work is in its own thread."""

from __future__ import annotations

import logging
import os
from typing import Any, Final

from kv_pool.heartbeat import HeartbeatSender
from kv_pool.service import PoolNode
from kv_pool.settings import PoolSettings, SsdSettings
from kv_pool.transport.curve import CurveKeys

RESOLVE_TIMEOUT_S: Final = 2.0


class PoolNodeActor:
    """Starts its node with the process. A restart is a new incarnation with an empty arena: readers purge what they knew."""

    def __init__(
        self, *, node_id: str, slot_bytes: int, settings: dict[str, Any], ssd: dict[str, Any], scheduler_name: str, namespace: str,
        heartbeat_s: float, block_tokens: int | None = None, log_level: str = "WARNING",
    ) -> None:  # fmt: skip
        logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._scheduler_name, self._namespace = scheduler_name, namespace
        pool = PoolSettings(**settings)
        self._node = PoolNode(
            node_id=node_id,
            slot_bytes=slot_bytes,
            settings=pool,
            ssd=SsdSettings(**ssd),
            block_tokens=block_tokens,
        )
        self._node.start()
        self._heartbeat = HeartbeatSender(
            resolve=self._resolve_scheduler, payload=self._payload, on_reply=lambda _: None, period_s=heartbeat_s,
            keys=CurveKeys.load(pool.curve),
        )  # fmt: skip
        self._heartbeat.start()

    def describe(self) -> dict[str, Any]:
        node = self._node
        return {
            "node_id": node.node_id,
            "incarnation": node.incarnation,
            "endpoint": node.endpoint,
            "events": node.events_endpoint,
            "local": node.local_endpoint,
            "pid": os.getpid(),
        }

    def stats(self) -> dict[str, int | float]:
        return self._node.stats()

    def status(self) -> dict[str, Any]:
        """All that an operator may want to know of the node."""
        return self._node.status()

    def drain(self, enable: bool) -> dict[str, Any]:
        """Have the node emptied, or take it into use again; returns its status as it is now."""
        self._node.drain(enable=enable)
        return self._node.status()

    def ping(self) -> str:
        return self._node.incarnation

    def shutdown(self) -> None:
        self._heartbeat.stop()
        self._node.stop()

    def _payload(self) -> dict[str, Any]:
        node, stats = self._node, self._node.stats()
        return {
            "v": 1,
            "role": "node",
            "id": node.node_id,
            "incarnation": node.incarnation,
            "actor": node.node_id,
            "node_id": node.node_id,
            "fence": 0,
            "load": {
                "endpoint": node.endpoint,
                "events": node.events_endpoint,
                "local": node.local_endpoint,
                "draining": node.draining,
                "slots_total": stats["slots_total"],
                "slots_free": stats["slots_free"],
                "slot_bytes": stats["slot_bytes"],
                "sequence": stats["events_sequence"],
                "pulls": [list(pulled) for pulled in node.take_pulls()],
            },
        }

    def _resolve_scheduler(self) -> str | None:
        """The scheduler's report endpoint, asked of Ray by name; None while there is no scheduler."""
        import ray
        from ray.exceptions import RayError

        try:
            actor: Any = ray.get_actor(self._scheduler_name, namespace=self._namespace)
            endpoints: Any = ray.get(actor.endpoints.remote(), timeout=RESOLVE_TIMEOUT_S)
            return endpoints["reports"]
        except (ValueError, RayError):
            return None
