"""The scheduler's shell: sockets and threads around :class:`~scheduler.state.SchedulerState`. Usable without Ray.

::

    workers, nodes --reports--> ROUTER --+                      +--> PUB --notices--> gateways
    nodes --KV events---------> SUB -----+--> I/O thread: state +
    snapshot thread --inbox--------------+                      +--> snapshot thread (asks a node, may take seconds)
    caller's threads: route(), finished(), report_failure(), view()

The I/O thread owns all sockets. The state is behind one lock, held for one event or one decision at a time; what callers tell the
state causes no action, so that only the I/O thread acts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import msgpack
import zmq

from kv_pool.events.codec import BATCH_BYTES_MAX, MalformedEventError, decode_batch
from kv_pool.transport.curve import CurveKeys, address_of, connect
from prefill_worker.task import Order
from scheduler.journal_file import JournalFile
from scheduler.messages import (
    Action,
    BlocksChanged,
    Event,
    FetchSnapshot,
    Follow,
    Notice,
    Reply,
    RequestEnded,
    SnapshotFailed,
    SpeedsRecalled,
    Tick,
    Unfollow,
    WorkerFailed,
)
from scheduler.plan import Plan, Rejection, RouteRequest, SchedulerSettings
from scheduler.report import REPORT_BYTES_MAX, MalformedReportError, read_report, write_reply
from scheduler.snapshot_thread import SnapshotFetcher, SnapshotThread, WakeUp
from scheduler.speeds import Speeds
from scheduler.speeds_file import SpeedsFile, SpeedsKeeper
from scheduler.state import SchedulerState

log = logging.getLogger(__name__)

HOST: Final = "127.0.0.1"
PORT_MIN, PORT_MAX = 20000, 29999
REPORTS_WAITING_MAX: Final = 10_000
EVENTS_WAITING_MAX: Final = 10_000
NOTICES_WAITING_MAX: Final = 1_000
MESSAGES_PER_TURN_MAX: Final = 256
"""Of one socket, before the others get their turn."""
TICK_S: Final = 0.25
JOIN_TIMEOUT_S: Final = 5.0


class SchedulerService:
    """``keys`` are needed where nodes are off loopback, ``speeds`` is where what was learnt is kept. ``start`` binds and runs,
    ``stop`` joins. All other methods are for any thread and wait for nothing but the lock."""

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        fetch: SnapshotFetcher,
        clock: Callable[[], float] = time.monotonic,
        keys: CurveKeys | None = None,
        order: Order = "shortest",
        speeds: SpeedsFile | None = None,
    ) -> None:
        self._state = SchedulerState(settings, order=order)
        self._journal = JournalFile(Path(settings.journal).expanduser(), settings, order) if settings.journal else None
        self._speeds = speeds
        self._keeper = None if speeds is None else SpeedsKeeper(speeds, self._learnt)
        self._clock = clock
        self._keys = keys
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._wake_up = WakeUp()
        self._snapshots = SnapshotThread(fetch, self._wake_up.ring)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._reports = self._context.socket(zmq.ROUTER)
        self._notices = self._context.socket(zmq.PUB)
        self._events = self._context.socket(zmq.SUB)
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._malformed = {"reports": 0, "events": 0}
        self.reports_endpoint = ""
        self.notices_endpoint = ""

    # --- for callers ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind both endpoints to loopback ports and start the threads. Raises zmq.ZMQError where no port is free, OSError where
        the journal cannot be made."""
        self._reports.setsockopt(zmq.MAXMSGSIZE, REPORT_BYTES_MAX)
        self.reports_endpoint = _bind(self._reports, REPORTS_WAITING_MAX)
        self.notices_endpoint = _bind(self._notices, NOTICES_WAITING_MAX)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.setsockopt(zmq.RCVHWM, EVENTS_WAITING_MAX)
        self._events.setsockopt(zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
        self._events.setsockopt(zmq.SUBSCRIBE, b"kv@")
        if self._journal is not None:
            self._journal.start()
        if self._speeds is not None and (learnt := self._speeds.load()) is not None:
            self._tell(SpeedsRecalled(learnt))
        if self._keeper is not None:
            self._keeper.start()
        self._snapshots.start()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake_up.ring()
        self._snapshots.stop()
        if self._thread.ident is None:
            self._close()
            return
        self._thread.join(JOIN_TIMEOUT_S)
        if self._keeper is not None:
            self._keeper.stop()
        if self._journal is not None:
            self._journal.stop()
        if self._thread.is_alive():
            log.error("scheduler: the I/O thread did not end in %g s", JOIN_TIMEOUT_S)

    def route(self, request: RouteRequest) -> Plan | Rejection:
        with self._lock:
            now = self._clock()
            answer = self._state.route(request, now)
            if self._journal is not None:
                self._journal.note(now, request, answer)
        if isinstance(answer, Plan):
            terms = answer.terms
            log.info(
                "plan %s/%d: %s -> %s, %d blocks from %s; queue %.4f load %.4f compute %.4f handoff %.4f s",
                answer.request_id, answer.attempt, answer.prefill_worker, answer.decode_worker, answer.cached_blocks,
                answer.prefill_source.node_id if answer.prefill_source else "its node",
                terms.queue_s, terms.load_s - terms.overlap_s, terms.compute_s, terms.handoff_s,
            )  # fmt: skip
        else:
            log.info("no plan %s/%d: %s (%s)", answer.request_id, answer.attempt, answer.reason, answer.detail)
        return answer

    def finished(self, request_id: str, attempt: int, ttft_s: float | None = None, output_tokens: int | None = None) -> None:
        """Tell of an end (:class:`~scheduler.messages.RequestEnded`)."""
        self._tell(RequestEnded(request_id, attempt, ttft_s, output_tokens))

    def report_failure(self, worker_id: str, request_id: str) -> None:
        log.info("%s failed %s", worker_id, request_id)
        self._tell(WorkerFailed(worker_id, request_id))

    def view(self) -> dict[str, Any]:
        with self._lock:
            view = self._state.view(self._clock()) | {"malformed": dict(self._malformed)}
        return view | ({} if self._journal is None else {"journal": self._journal.view()})

    def _learnt(self) -> Speeds:
        with self._lock:
            return self._state.learnt()

    def _tell(self, event: RequestEnded | WorkerFailed | SpeedsRecalled) -> None:
        actions = self._decide(event)
        assert not actions, "callers' events cause no actions: they could not be carried out here"

    def _decide(self, event: Event) -> list[Action]:
        with self._lock:
            now = self._clock()
            actions = self._state.handle(event, now)
            if self._journal is not None:
                self._journal.note(now, event, actions)
        return actions

    # --- the I/O thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._reports, self._events, self._wake_up):
            poller.register(source, zmq.POLLIN)
        next_tick = self._clock()
        while not self._stopping.is_set():
            try:
                ready = dict(poller.poll(max(0, int((next_tick - self._clock()) * 1000) + 1)))
                if self._wake_up.fileno() in ready:
                    self._wake_up.clear()
                self._take_reports()
                self._take_events()
                for event in self._snapshots.results():
                    self._handle(event)
                # After the messages: what waited in the sockets while this process was held up was said in time.
                if self._clock() >= next_tick:
                    self._handle(Tick())
                    next_tick = self._clock() + TICK_S
            except Exception:
                log.exception("scheduler: one turn failed")
                self._stopping.wait(TICK_S)  # whatever it is, it must not become a busy loop
        self._close()

    def _close(self) -> None:
        for sock in (self._reports, self._events, self._notices):
            sock.close(linger=0)
        self._context.term()
        self._wake_up.close()

    def _take_reports(self) -> None:
        for frames in _arrived(self._reports):
            try:
                report = read_report(frames[-1])
            except MalformedReportError as error:
                self._malformed["reports"] += 1
                log.warning("a report was not taken: %s", error)
                continue
            self._handle(report, reply_to=frames[0])

    def _take_events(self) -> None:
        for frames in _arrived(self._events):
            try:
                batch = decode_batch(frames)
            except MalformedEventError as error:
                self._malformed["events"] += 1
                log.warning("an event batch was not taken (a snapshot will show what it said): %s", error)
                continue
            self._handle(BlocksChanged(batch))

    def _handle(self, event: Event, reply_to: bytes | None = None) -> None:
        actions = self._decide(event)
        for action in actions:
            match action:
                case Reply():
                    if reply_to is not None:
                        _send(self._reports, [reply_to, write_reply(action)])
                case Notice(kind, worker_id, incarnation):
                    log.log(logging.WARNING if kind == "down" else logging.INFO, "%s (%s) is %s", worker_id, incarnation, kind)
                    _send(self._notices, [cast(bytes, msgpack.packb([kind, worker_id, incarnation]))])
                case Follow(endpoint):
                    self._follow(endpoint)
                case Unfollow(endpoint):
                    self._unfollow(endpoint)
                case FetchSnapshot():
                    if not self._snapshots.ask(action):
                        self._handle(SnapshotFailed(action.node_id, action.incarnation))

    def _follow(self, endpoint: str) -> None:
        try:
            connect(self._events, endpoint, self._keys)
        except zmq.ZMQError as error:
            log.warning("events: cannot connect: %s", error)  # the node is then known by its snapshots only

    def _unfollow(self, endpoint: str) -> None:
        try:
            self._events.disconnect(address_of(endpoint))
        except zmq.ZMQError as error:
            log.info("events: was not connected: %s", error)


def _bind(socket: zmq.Socket[bytes], waiting_max: int) -> str:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, waiting_max)
    socket.setsockopt(zmq.RCVHWM, waiting_max)
    port = socket.bind_to_random_port(f"tcp://{HOST}", PORT_MIN, PORT_MAX)
    return f"tcp://{HOST}:{port}"


def _arrived(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """Messages that are there, at most a turn's worth."""
    found: list[list[bytes]] = []
    while len(found) < MESSAGES_PER_TURN_MAX:
        try:
            found.append(socket.recv_multipart(zmq.DONTWAIT))
        except zmq.Again:
            break
    return found


def _send(socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
    """Best effort: who does not read loses replies, which come again, or notices, which silence makes up for."""
    try:
        socket.send_multipart(frames, zmq.DONTWAIT)
    except zmq.ZMQError as error:
        log.info("a message was dropped: %s", error)
