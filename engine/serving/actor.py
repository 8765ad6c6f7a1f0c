"""What the Ray shells of both workers share: engine, host, heartbeat resolution. Knows Ray only through names and
``get_actor``.

Whoever holds a handle to an actor has Ray import the module of its class, and Ray stands still for as long as that takes. So the
modules of the worker actors import what is heavy (torch, the engine) where it is used: the gateway's first request must not wait
seconds for libraries that the gateway never uses.
"""

from __future__ import annotations

import logging
import os
import uuid
from typing import TYPE_CHECKING, Any, ClassVar

from engine.models.source import ModelNotAvailableError, resolve_model
from engine.settings import ModelSettings
from kv_pool.sizes import parse_size

if TYPE_CHECKING:
    from engine.serving.host import WorkerCore

RESOLVE_TIMEOUT_S = 2.0


class WorkerActor:
    """Base of the two worker actors. Plain methods only: one ``async def`` would move all of them onto one event loop.

    ``model`` is the dumped ``model:`` section; ``node_id`` is the worker's pool node, whose address comes with each heartbeat
    reply;
    ``scheduler`` and ``namespace`` name the scheduler actor.
    """

    role: ClassVar[str]

    def __init__(
        self, *, worker_id: str, model: dict[str, Any], cache_size: str, threads: int, node_id: str, scheduler: str,
        namespace: str, heartbeat_s: float, fingerprint: str = "", log_level: str = "WARNING",
    ) -> None:  # fmt: skip
        from engine.engine import Engine
        from engine.serving.host import WorkerHost, WorkerIdentity
        from engine.serving.token_sender import TokenSender
        from engine.serving.transfer import BlockTransfer

        logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._scheduler, self._namespace, self._heartbeat_s = scheduler, namespace, heartbeat_s
        settings = ModelSettings(**model)
        files = resolve_model(settings)
        if fingerprint and files.fingerprint != fingerprint:
            # Also after a restart: blocks under the cluster's keys must come from the cluster's weights.
            raise ModelNotAvailableError(
                f"the model here is {files.fingerprint}, the cluster serves {fingerprint}: the files differ"
            )
        self.engine = Engine.load(
            files, settings, cache_bytes=parse_size(cache_size), threads=threads, pack_weights=self.role == "decode"
        )
        incarnation = uuid.uuid4().hex[:16]
        self.identity = WorkerIdentity(worker_id, self.role, worker_id, incarnation, node_id)
        block_bytes = self.engine.layout.block_bytes
        client_id = f"{worker_id}:{incarnation}"
        self.host = WorkerHost(
            self.identity,
            sender=TokenSender(client_id),
            transfer_for=lambda deliver: BlockTransfer(
                self.engine.cache, block_bytes=block_bytes, client_id=client_id, deliver=deliver
            ),
        )

    def start(self, core: WorkerCore) -> None:
        from engine.serving.warm_up import warm_up

        warm_up(self.engine)
        self.host.start(core, resolve=self._resolve_scheduler, heartbeat_s=self._heartbeat_s)

    def describe(self) -> dict[str, Any]:
        """Identity of the model as this worker runs it: all workers of a cluster must agree on everything but ``worker``."""
        return {
            "worker": {"id": self.identity.worker_id, "incarnation": self.identity.incarnation, "pid": os.getpid()},
            "identity": [list(part) for part in self.engine.identity()],
            "layout": self.engine.layout.to_wire(),
            "context_max": self.engine.context_max,
            "device": self.engine.device,
            "dtype": self.engine.dtype,
        }

    def ping(self) -> str:
        return self.identity.incarnation

    def common_stats(self) -> dict[str, Any]:
        counters = self.host.transfer.counters
        return {
            "pid": os.getpid(),
            "pool_connected": int(self.host.transfer.connected),
            "cache_blocks": self.engine.cache.block_count,
            "cache_blocks_free": self.engine.cache.free_count,
            "frames_dropped_total": self.host.sender.frames_dropped,
            "blocks_loaded_total": counters.blocks_loaded,
            "blocks_published_total": counters.blocks_published,
            "blocks_corrupt_total": counters.blocks_corrupt,
            "bytes_loaded_total": counters.bytes_loaded,
            "bytes_published_total": counters.bytes_published,
            "node_losses_total": counters.node_losses,
        }

    def shutdown(self) -> None:
        self.host.stop()

    def _resolve_scheduler(self) -> str | None:
        """The scheduler's report endpoint, asked of Ray by name; None while there is no scheduler."""
        import ray
        from ray.exceptions import RayError

        try:
            actor = ray.get_actor(self._scheduler, namespace=self._namespace)
            endpoints: Any = ray.get(actor.endpoints.remote(), timeout=RESOLVE_TIMEOUT_S)
            return endpoints["reports"]
        except (ValueError, RayError):
            return None
