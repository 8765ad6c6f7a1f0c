"""Ray shell of a prefill worker: loads the engine, starts the threads, takes tasks. Every method returns at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.serving.actor import WorkerActor
from prefill_worker.task import Abort, PrefillSettings, PrefillTask

if TYPE_CHECKING:
    from prefill_worker.worker import PrefillWorker


class PrefillActor(WorkerActor):
    """``settings`` is the dumped ``prefill:`` section; the rest as in :class:`~engine.serving.actor.WorkerActor`."""

    role = "prefill"

    def __init__(self, settings: dict[str, Any], **common: Any) -> None:
        self._settings = PrefillSettings(**settings)
        super().__init__(cache_size=self._settings.device_cache, threads=self._settings.threads, **common)
        self._worker = self._worker_class()(self.engine, self._settings, self.host)
        self.start(self._worker)

    def _worker_class(self) -> type[PrefillWorker]:
        from prefill_worker.worker import PrefillWorker  # heavy: see engine/serving/actor.py

        return PrefillWorker

    def submit(self, task: PrefillTask) -> str | None:
        """Take ``task``; the answer goes to the task's token sink. Returns why not, or None."""
        if not self._worker.submit_allowed():
            return "the worker's queue is full"
        self.host.post(task)
        return None

    def abort(self, request_id: str, attempt: int) -> None:
        self.host.post(Abort(request_id, attempt))

    def stats(self) -> dict[str, Any]:
        """Counters and gauges for ``/metrics``."""
        return self.common_stats() | {f"{name}_total": count for name, count in self._worker.counters.items()}
