"""What the gateway needs from the rest of the cluster. Ray implements it in ``ray_ports.py``; tests implement it in process."""

from __future__ import annotations

from typing import Any, Protocol

from decode_worker.task import DecodeTask
from prefill_worker.task import PrefillTask
from scheduler.plan import Plan, Rejection, RouteRequest


class PortError(Exception):
    """A call did not get through, or nobody answered in time. It may or may not have been carried out."""


class PoolPorts(Protocol):
    """What operators ask of the pool. Deadlines and errors as in :class:`ClusterPorts`."""

    async def pool_nodes(self) -> list[dict[str, Any]]:
        """The pool nodes as the scheduler sees them: ``id``, ``live``, ``draining``, ``silent_s`` and more."""
        ...

    async def node_status(self, node_id: str) -> dict[str, Any]:
        """What a node says of itself. ``node_id`` must be one that the scheduler knows."""
        ...

    async def drain_node(self, node_id: str, *, enable: bool) -> dict[str, Any]:
        """Have a node emptied, or take it into use again; returns its status."""
        ...


class ClusterPorts(PoolPorts, Protocol):
    """Every method answers within its own deadline or raises :class:`PortError`; none is retried inside.

    A worker gets the calls of one gateway in the order in which they were made.
    """

    async def route(self, request: RouteRequest) -> Plan | Rejection:
        """Ask the scheduler for a pair of workers."""
        ...

    async def submit_prefill(self, worker_id: str, task: PrefillTask) -> str | None:
        """Hand a task over. Returns why the worker refuses it, or None."""
        ...

    async def submit_decode(self, worker_id: str, task: DecodeTask) -> str | None: ...

    async def abort(self, worker_id: str, request_id: str, attempt: int) -> None:
        """The attempt is over for the gateway: its blocks may go back. Unknown attempts are ignored."""
        ...

    async def finished(
        self, request_id: str, attempt: int, ttft_s: float | None = None, output_tokens: int | None = None
    ) -> None:
        """Tell the scheduler that the attempt no longer occupies its pair, however it ended: seconds from its plan to the first
        token (None: there was none), and the tokens of the whole answer if it is complete."""
        ...

    async def report_failure(self, worker_id: str, request_id: str) -> None:
        """Tell the scheduler that a worker did not do what it should."""
        ...

    async def notices_endpoint(self) -> str:
        """Where the scheduler publishes its notices now."""
        ...
