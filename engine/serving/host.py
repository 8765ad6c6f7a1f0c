"""What a prefill and a decode worker have in common around their own state: threads, inbox, pool transfer, heartbeat, fence.

Threads of a worker process: Ray's (calls arrive, go into the inbox), the *engine thread* (owns the model, the device cache, the
state machine and the token sockets), the transfer thread, the heartbeat thread. Whatever arrives for the engine thread comes
through one bounded inbox, in order.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from engine.serving.token_sender import TokenSender
from engine.serving.transfer import BlockTransfer, NodeAddress, Notice
from kv_pool.heartbeat import HeartbeatSender

log = logging.getLogger(__name__)

INBOX_MAX: Final = 65536
TICK_PERIOD_S: Final = 0.25
STOP_TIMEOUT_S: Final = 10.0
ENGINE_STALLED_S: Final = 300.0
"""Longer than any one forward."""
FAILURES_MAX: Final = 20
"""Consecutive engine-thread errors after which the process ends, so that Ray replaces it."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Who this worker is to the scheduler. ``actor`` is its Ray name, ``incarnation`` new at each start of the process."""

    worker_id: str
    role: str
    actor: str
    incarnation: str
    node_id: str


@dataclass(frozen=True, slots=True)
class Fenced:
    """Inbox item: the scheduler gave this worker up under a newer fence."""

    fence: int


class WorkerCore(Protocol):
    """The part that differs; all methods run on the engine thread, but ``load_report`` (any thread)."""

    def handle(self, item: object, now: float) -> None: ...
    def tick(self, now: float) -> None: ...
    def step(self, now: float) -> bool:
        """Run one forward if there is one to run; says whether it did."""
        ...

    def load_report(self) -> dict[str, Any]: ...


class WorkerHost:
    """Runs a :class:`WorkerCore`. ``resolve`` names the scheduler's report endpoint (None while there is none)."""

    def __init__(
        self, identity: WorkerIdentity, *, sender: TokenSender, transfer_for: Callable[[Callable[[Notice], None]], BlockTransfer]
    ) -> None:
        self.identity = identity
        self.sender = sender
        self.transfer = transfer_for(self.post)
        self.fence = 0
        self._last_turn = time.monotonic()
        self._inbox: queue.Queue[object] = queue.Queue(INBOX_MAX)
        self._stopping = threading.Event()
        self._core: WorkerCore | None = None
        self._heartbeat: HeartbeatSender | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, core: WorkerCore, *, resolve: Callable[[], str | None], heartbeat_s: float) -> None:
        self._core = core
        self._heartbeat = HeartbeatSender(
            resolve=resolve, payload=self._heartbeat_payload, on_reply=self._on_heartbeat_reply, period_s=heartbeat_s
        )
        self.transfer.start()
        self._thread.start()
        self._heartbeat.start()

    def post(self, item: object) -> None:
        """Hand ``item`` to the engine thread, from any thread. The inbox is far larger than all limits upstream together."""
        self._inbox.put(item, timeout=1.0)

    def stop(self) -> None:
        self._stopping.set()
        self._inbox.put(None, timeout=1.0)
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)
        self.transfer.stop()

    # --- engine thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._core is not None
        failures = 0
        next_tick = 0.0
        while not self._stopping.is_set():
            try:
                now = self._last_turn = time.monotonic()
                if now >= next_tick:
                    self._core.tick(now)
                    next_tick = now + TICK_PERIOD_S
                worked = self._core.step(now)
                self.sender.flush()
                self._drain(0.0 if worked else TICK_PERIOD_S)
                self.sender.flush()
                failures = 0
            except Exception:
                failures += 1
                log.exception("engine thread: step failed (%d in a row)", failures)
                if failures >= FAILURES_MAX:
                    log.critical("engine thread: giving up, the process ends so that it is replaced")
                    os._exit(1)
        self.sender.close()

    def _drain(self, timeout_s: float) -> None:
        """Handle all that has arrived, waiting at most ``timeout_s`` for the first."""
        assert self._core is not None
        try:
            item = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
            while True:
                if item is not None:
                    self._core.handle(item, time.monotonic())
                item = self._inbox.get_nowait()
        except queue.Empty:
            return

    # --- heartbeat thread -----------------------------------------------------------------------------------------------

    def _heartbeat_payload(self) -> dict[str, Any]:
        assert self._core is not None
        if time.monotonic() - self._last_turn > ENGINE_STALLED_S:
            # A heartbeat must not vouch for an engine thread that hangs; Ray replaces the process.
            log.critical("engine thread: no turn for %.0f s, the process ends so that it is replaced", ENGINE_STALLED_S)
            os._exit(1)
        who = self.identity
        return {
            "v": 1,
            "role": who.role,
            "id": who.worker_id,
            "incarnation": who.incarnation,
            "actor": who.actor,
            "node_id": who.node_id,
            "fence": self.fence,
            "load": self._core.load_report(),
        }

    def _on_heartbeat_reply(self, reply: dict[str, Any]) -> None:
        fence = int(reply.get("fence", 0))
        if fence > self.fence:
            self.post(Fenced(fence))
            self.fence = fence  # only now: a fence that is acknowledged must have been delivered
        endpoint, incarnation = reply.get("node_endpoint"), reply.get("node_incarnation")
        if isinstance(endpoint, str) and isinstance(incarnation, str):
            self.transfer.use_node(NodeAddress(endpoint, incarnation))
