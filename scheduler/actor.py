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
from scheduler.speeds_file import speeds_file


class SchedulerActor:
    """``settings`` is the dumped ``scheduler:`` section, ``curve`` the keys to talk to nodes with, ``order`` that of the
    prefill workers' queues, ``model`` what speeds were learnt with (empty: they are kept only in a file that is named). State is
    soft: a restarted scheduler learns of workers, nodes and blocks from their next heartbeats and snapshots."""

    def __init__(
        self, settings: dict[str, Any], curve: dict[str, str] | None = None, order: Order = "shortest", model: str = ""
    ) -> None:
        keys = CurveKeys.load(CurveSettings(**curve or {}))
        fetch = functools.partial(fetch_snapshot, keys=keys)
        parsed = SchedulerSettings(**settings)
        speeds = speeds_file(parsed.speeds_file, model)
        self._service = SchedulerService(parsed, fetch=fetch, keys=keys, order=order, speeds=speeds)
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

    def stop(self) -> None:
        """End the threads and write what is to be kept. The actor answers no more questions of sense after this."""
        self._service.stop()

    def view(self) -> dict[str, Any]:
        return self._service.view()
