"""Keeps the front door open: Ray restarts a dead actor's process, but a gateway also has to be told to bind again."""

from __future__ import annotations

import logging
import threading
from typing import Any, Final

log = logging.getLogger(__name__)

CHECK_PERIOD_S: Final = 2.0
CALL_TIMEOUT_S: Final = 10.0
JOIN_TIMEOUT_S: Final = 15.0


class Supervisor:
    """A thread of the launching process. ``gateway.start`` is idempotent: on a gateway that serves it returns the URL."""

    def __init__(self, gateway: Any) -> None:
        self._gateway = gateway
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        import ray
        from ray.exceptions import RayError

        while not self._stopping.wait(CHECK_PERIOD_S):
            try:
                ray.get(self._gateway.start.remote(), timeout=CALL_TIMEOUT_S)
            except RayError as error:
                log.warning("gateway: %s; trying again", type(error).__name__)
            except Exception:
                log.exception("gateway: trying again")
