"""The scheduler as a Ray actor: a thin shell. Plain methods only:
one ``async def`` would move all of them onto one event loop."""

from __future__ import annotations

import functools
from typing import Any

from kv_pool.events.snapshot import fetch_snapshot
from kv_pool.settings import CurveSettings
from kv_pool.transport.curve import CurveKeys
from prefill_worker.task import Order
from scheduler.plan import Plan, Rejection, RouteRequest, SchedulerSettings
from scheduler.service import SchedulerService


class SchedulerActor:
    """``settings`` is the dumped ``scheduler:`` section, ``curve`` the keys to talk to nodes with, ``order`` that of the
    prefill workers' queues. State is soft: a restarted
    scheduler learns of workers, nodes and blocks from their next heartbeats and snapshots."""

    def __init__(self, settings: dict[str, Any], curve: dict[str, str] | None = None, order: Order = "shortest") -> None:
        keys = CurveKeys.load(CurveSettings(**curve or {}))
        fetch = functools.partial(fetch_snapshot, keys=keys)
        self._service = SchedulerService(SchedulerSettings(**settings), fetch=fetch, keys=keys, order=order)
        self._service.start()

    def endpoints(self) -> dict[str, str]:
        """Where heartbeats go (``reports``) and where notices come from (``notices``)."""
        return {"reports": self._service.reports_endpoint, "notices": self._service.notices_endpoint}

    def route(self, request: RouteRequest) -> Plan | Rejection:
        return self._service.route(request)

    def finished(self, request_id: str, attempt: int, ttft_s: float | None = None, output_tokens: int | None = None) -> None:
        self._service.finished(request_id, attempt, ttft_s, output_tokens)

    def report_failure(self, worker_id: str, request_id: str) -> None:
        self._service.report_failure(worker_id, request_id)

    def view(self) -> dict[str, Any]:
        return self._service.view()
