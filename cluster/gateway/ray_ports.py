"""The cluster as Ray actors: named handles, each call once, each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import ray
from ray.exceptions import RayError

from cluster.gateway.ports import PortError
from decode_worker.task import DecodeTask
from prefill_worker.task import PrefillTask
from scheduler.plan import Plan, Rejection, RouteRequest

HANDLES_MAX: Final = 4096


class RayPorts:
    """A :class:`~cluster.gateway.ports.ClusterPorts`. A worker's id is its actor's name.

    Ray retries nothing (``max_task_retries=0``): whether a call that failed was carried out is not known, and the attempt number
    makes doing it again elsewhere safe. A handle whose actor failed is looked up again next time.
    """

    def __init__(self, *, scheduler: str, namespace: str, timeout_s: float, lookup: Callable[..., Any] = ray.get_actor) -> None:
        self._scheduler = scheduler
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._lookup = lookup
        self._handles: dict[str, Any] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def route(self, request: RouteRequest) -> Plan | Rejection:
        return await self._call(self._scheduler, "route", request)

    async def submit_prefill(self, worker_id: str, task: PrefillTask) -> str | None:
        return await self._call(worker_id, "submit", task)

    async def submit_decode(self, worker_id: str, task: DecodeTask) -> str | None:
        return await self._call(worker_id, "submit", task)

    async def abort(self, worker_id: str, request_id: str, attempt: int) -> None:
        await self._call(worker_id, "abort", request_id, attempt)

    async def finished(
        self, request_id: str, attempt: int, ttft_s: float | None = None, output_tokens: int | None = None
    ) -> None:
        await self._call(self._scheduler, "finished", request_id, attempt, ttft_s, output_tokens)

    async def report_failure(self, worker_id: str, request_id: str) -> None:
        await self._call(self._scheduler, "report_failure", worker_id, request_id)

    async def notices_endpoint(self) -> str:
        return (await self._call(self._scheduler, "endpoints"))["notices"]

    async def pool_nodes(self) -> list[dict[str, Any]]:
        return (await self._call(self._scheduler, "view"))["nodes"]

    async def node_status(self, node_id: str) -> dict[str, Any]:
        return await self._call(node_id, "status")

    async def drain_node(self, node_id: str, *, enable: bool) -> dict[str, Any]:
        return await self._call(node_id, "drain", enable)

    async def _call(self, actor: str, method: str, *arguments: object) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                handle = await self._handle(actor)
                return await getattr(handle, method).remote(*arguments)
        except TimeoutError as error:
            raise PortError(f"{actor}.{method} did not answer in {self._timeout_s:g} s") from error
        except RayError as error:
            self._handles.pop(actor, None)
            raise PortError(f"{actor}.{method}: {type(error).__name__}") from error

    async def _handle(self, actor: str) -> Any:
        """The actor's handle. The lookup asks Ray's head and blocks, so it runs on a thread; one at a time per actor, so that
        calls keep their order."""
        if actor in self._handles:
            return self._handles[actor]
        if len(self._locks) > HANDLES_MAX:
            raise PortError(f"more than {HANDLES_MAX} actors are named")
        async with self._locks.setdefault(actor, asyncio.Lock()):
            if actor not in self._handles:
                try:
                    self._handles[actor] = await asyncio.to_thread(self._lookup, actor, namespace=self._namespace)
                except ValueError as error:
                    raise PortError(f"there is no actor {actor}") from error
            return self._handles[actor]
