"""A pool node's shell: sockets, the arena, the disk, and one I/O thread around the pure state (``node/state.py``). Knows
nothing of Ray."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections import deque
from concurrent.futures import Future
from typing import Any, Final

import zmq

from kv_pool import status
from kv_pool.arena import Arena
from kv_pool.effects import Effects
from kv_pool.events.publisher import EventPublisher
from kv_pool.events.replay import encode_replay
from kv_pool.events.snapshot import Snapshot, encode_snapshot
from kv_pool.events.types import DRAM, SSD
from kv_pool.local_clients import LocalClients
from kv_pool.node.messages import AskEvents, AskSnapshot, ErrorCode, Goodbye, Hello, Question, Refusal, Welcome
from kv_pool.node.state import NodeState
from kv_pool.node.stimuli import (
    Asked,
    ClientGone,
    Drain,
    Event,
    ProcessGone,
    Tick,
)
from kv_pool.peers import Arrival, PeerLinks, Pulled
from kv_pool.policy.registry import make_eviction_policy
from kv_pool.remote_clients import RemoteClients
from kv_pool.settings import PoolSettings, SsdSettings
from kv_pool.sizes import parse_size
from kv_pool.ssd.disk.disk import SsdDisk
from kv_pool.ssd.make import segment_bytes, segment_count
from kv_pool.ssd.records import DiskDown
from kv_pool.transport.codec import QUESTIONS, REQUESTS, MalformedMessageError, decode
from kv_pool.transport.curve import CurveKeys, Gatekeeper, check_host
from kv_pool.transport.memory import keep_freed_memory
from kv_pool.transport.pieces import pieces_of
from kv_pool.transport.process import Watched
from kv_pool.transport.sockets import MESSAGES_WAITING_MAX

log = logging.getLogger(__name__)

SLOTS_MIN: Final = 4
ORDERS_MAX: Final = 16
SPIN_S: Final = 50e-6
"""After a worker's message it looks for the next one so long before it sleeps: workers speak in bursts, waking up costs more."""
STATUS_TIMEOUT_S: Final = 5.0
DISK_STOP_TIMEOUT_S: Final = 3.0
TICK_PERIOD_S: Final = 0.25


class PoolNode:
    """One node: ``dram // slot_bytes`` slots of memory shared with the workers of this machine, and (``ssd.directory``) a log
    on its SSD.

    Three doors: ``local_endpoint`` for workers of this machine, ``endpoint`` for other nodes and questions, ``events_endpoint``
    where it publishes; the latter two on ``host``. ``block_tokens``: what a public block must hold; None where any count will
    do. Raises ValueError where fewer than ``SLOTS_MIN`` slots fit or keys lack (:class:`CurveKeyError`), OSError where memory
    or ports lack.
    """

    def __init__(
        self,
        *,
        node_id: str,
        slot_bytes: int,
        settings: PoolSettings,
        ssd: SsdSettings | None = None,
        block_tokens: int | None = None,
    ) -> None:
        slots = parse_size(settings.dram) // slot_bytes
        if slots < SLOTS_MIN:
            raise ValueError(
                f"pool.dram: {settings.dram} holds {slots} blocks of {slot_bytes} bytes, at least {SLOTS_MIN} are needed"
            )
        keys = CurveKeys.load(settings.curve)
        check_host(settings.host, keys)
        self.node_id = node_id
        self.incarnation = uuid.uuid4().hex[:16]
        self._settings = settings
        self._ssd = ssd or SsdSettings()
        self._state = self._make_state(slots, slot_bytes, block_tokens)
        self._arena = Arena.create(slots, slot_bytes)
        self._context = zmq.Context()
        self._gatekeeper = None if keys is None else Gatekeeper(self._context, keys)
        waiting_max = MESSAGES_WAITING_MAX + settings.fetch_inflight_blocks * pieces_of(slot_bytes)
        self._remote = RemoteClients(self._context, settings.host, waiting_max=waiting_max, keys=keys)
        self.endpoint = self._remote.endpoint
        self._events = EventPublisher(self._context, settings.host, node_id, self.incarnation, keys)
        self.events_endpoint = self._events.endpoint
        self._local = LocalClients(f"moonpool-{self.incarnation}")
        self.local_endpoint = self._local.endpoint
        self._peers = PeerLinks(
            self._context,
            slot_bytes=slot_bytes,
            window=settings.fetch_inflight_blocks,
            dead_after_s=settings.client_dead_s,
            keys=keys,
        )
        self._processes = Watched()
        self._counts = {"malformed": 0, "turns_failed": 0}
        self._orders: deque[Drain] = deque(maxlen=ORDERS_MAX)
        self._questions: deque[Future[dict[str, Any]]] = deque(maxlen=ORDERS_MAX)
        self._poller = zmq.Poller()
        self._polled: list[zmq.Socket[bytes] | int] = []
        self._local_spoke = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._disk = self._make_disk()
        self._effects = Effects(
            Welcome(node_id, slots, slot_bytes, settings.client_dead_s),
            self.incarnation,
            arena=self._arena,
            local=self._local,
            remote=self._remote,
            events=self._events,
            peers=self._peers,
            disk=self._disk,
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pool-{node_id}", daemon=True)

    def start(self) -> None:
        """Raises SsdFormatError or OSError where the SSD's directory cannot be this node's; the node is stopped then."""
        keep_freed_memory()
        self._arena.start_prefault()
        if self._disk is not None:
            try:
                self._disk.start()
            except BaseException:
                self.stop()
                raise
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the I/O thread, close sockets and memory. Safe to call twice, and without ``start``."""
        if self._stopping.is_set():
            return
        os.eventfd_write(self._wake, 1)  # first: once it knows that it is to stop, the thread closes this
        self._stopping.set()
        if self._thread.ident is None:
            self._close()
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("pool node %s: the I/O thread did not end in %g s", self.node_id, timeout_s)

    def drain(self, *, enable: bool) -> None:
        """Have the node emptied, or take it into use again. What has become of it: :meth:`status`. From any thread. Raises
        RuntimeError where orders pile up."""
        if len(self._orders) >= ORDERS_MAX:
            raise RuntimeError("the node does not carry out its orders")
        self._orders.append(Drain(enable))
        self._kick()

    @property
    def draining(self) -> bool:
        return self._state.writers.draining

    def stats(self) -> dict[str, int | float]:
        """Counters and gauges, from any thread."""
        counts = status.counters(self._state)
        here = {
            "slot_bytes": self._arena.slot_bytes,
            "events_sequence": self._events.sequence,
            "bytes_in": self._peers.bytes_in,
            "bytes_out": self._effects.bytes_out,
            "malformed": self._counts["malformed"],
            "turns_failed": self._counts["turns_failed"] + self._effects.failed,
        }
        return counts | here

    def status(self) -> dict[str, Any]:
        """All that an operator may want to know of the node, from any thread. Raises TimeoutError where the node does not
        answer."""
        if not self._thread.is_alive():
            return self._status()
        if len(self._questions) >= ORDERS_MAX:
            raise TimeoutError("the node does not answer")
        answer: Future[dict[str, Any]] = Future()
        self._questions.append(answer)
        self._kick()
        return answer.result(STATUS_TIMEOUT_S)

    def _status(self) -> dict[str, Any]:
        disk = None if self._disk is None else self._disk.stats() | {"healthy": self._disk.healthy}
        return {
            "node_id": self.node_id,
            "incarnation": self.incarnation,
            "counters": self.stats(),
            "ssd": status.ssd(self._state, self._settings, disk, time.time()),
            "draining": self._state.writers.draining,
            "empty": self._state.empty,
        }

    def take_pulls(self) -> list[Pulled]:
        """Finished pulls from other nodes since the last call, the latest of them. From any one thread."""
        pulls: list[Pulled] = []
        with contextlib.suppress(IndexError):
            while True:
                pulls.append(self._peers.pulls.popleft())
        return pulls

    # --- making it ----------------------------------------------------------------------------------------------------------

    def _make_state(self, slots: int, slot_bytes: int, block_tokens: int | None) -> NodeState:
        return NodeState(
            node_id=self.node_id,
            slots=slots,
            slot_bytes=slot_bytes,
            block_tokens=block_tokens,
            settings=self._settings,
            policy=make_eviction_policy(self._settings.eviction),
            ssd=self._ssd if self._ssd.directory else None,
            wall_offset=time.time() - time.monotonic(),
        )

    def _make_disk(self) -> SsdDisk | None:
        if not self._ssd.directory:
            return None
        return SsdDisk(
            directory=self._ssd.directory.replace("{node}", self.node_id),
            segments=segment_count(self._ssd),
            segment_bytes=segment_bytes(self._ssd),
            slot=self._arena.slot_pages,
            wake=self._kick,
            threads=self._ssd.threads,
            hang_s=self._ssd.hang_s,
            retry_s=self._ssd.retry_s,
            jobs_max=self._ssd.reads_in_flight + self._ssd.writes_in_flight,
        )

    def _kick(self) -> None:
        with contextlib.suppress(OSError):  # closed meanwhile
            os.eventfd_write(self._wake, 1)

    # --- the I/O thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        next_tick = 0.0
        while not self._stopping.is_set():
            try:
                now = time.monotonic()
                if now >= min(next_tick, self._state.next_deadline() or next_tick):
                    self._tick(now)
                    next_tick = now + TICK_PERIOD_S
                self._turn(min(next_tick, self._state.next_deadline() or next_tick) - now)
            except Exception:  # one message must not end the node
                self._counts["turns_failed"] += 1
                log.exception("pool node %s: a turn failed", self.node_id)
        self._close()

    def _close(self) -> None:
        while self._questions:
            self._questions.popleft().set_exception(TimeoutError("the node has been stopped"))
        if self._disk is not None:
            now = time.monotonic()
            self._effects.do(self._state.last_words(now), now)
            self._disk.stop(DISK_STOP_TIMEOUT_S)
        self._peers.close()
        self._events.close()
        self._local.close()
        self._remote.close()
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._context.destroy(linger=0)  # lets go of the slots that were being sent
        self._processes.keep_only(set())
        self._arena.close()
        wake, self._wake = self._wake, -1
        os.close(wake)

    def _turn(self, timeout_s: float) -> None:
        processes = self._processes.fds()
        self._watch([self._remote.socket, self._local.fd, self._wake, *processes, *self._peers.sockets()])
        waiting_ms = 0 if self._peers.pending or self._effects.pending else max(0, int(timeout_s * 1000 + 1))
        if waiting_ms and self._local_spoke and self._local.look_out(SPIN_S):
            waiting_ms = 0
        ready = dict(self._poller.poll(waiting_ms))
        self._local_spoke = self._local.fd in ready
        if self._local_spoke:
            self._take_local_messages()
        if self._remote.socket in ready:
            self._take_remote_messages()
        self._take_peer_events()
        if self._wake in ready:
            self._take_woken()
        for fd, (pid, started) in processes.items():
            if fd in ready:
                self._react(ProcessGone(pid, started))
                self._forget_processes()
        for client in self._effects.take_gone():
            self._react(ClientGone(client))
        self._events.flush()

    def _watch(self, sources: list[zmq.Socket[bytes] | int]) -> None:
        """Have the poller look at ``sources`` and nothing else. They change rarely, and setting up costs."""
        if sources != self._polled:
            self._poller = zmq.Poller()
            for source in sources:
                self._poller.register(source, zmq.POLLIN)
            self._polled = sources

    def _take_woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._orders:
            self._react(self._orders.popleft())
        if self._disk is not None:
            for event in self._disk.take():
                if isinstance(event, DiskDown):
                    log.warning("pool node %s: goes on without its SSD: %s", self.node_id, event.reason)
                self._react(event)
        while self._questions:
            answer = self._questions.popleft()
            try:
                answer.set_result(self._status())
            except Exception as error:
                answer.set_exception(error)

    def _tick(self, now: float) -> None:
        self._peers.tick(now)
        if self._disk is not None:
            self._disk.tick(now)
        self._react(Tick(time.time() - now))
        self._forget_processes()

    def _forget_processes(self) -> None:
        """Keep watching those that are, or have written in their own name and may still."""
        clients = {(c.pid, c.started) for c in self._state.clients.values()}
        silent = {(q.pid, q.started) for q in self._state.writers.quarantined.values()}
        self._processes.keep_only(clients | silent)

    def _take_local_messages(self) -> None:
        for client, frame in self._local.receive():
            if frame is None:
                self._react(ClientGone(client))
                continue
            try:
                request, incarnation = decode(frame, REQUESTS)
            except MalformedMessageError as error:
                self._malformed(client, error)
                continue
            if isinstance(request, Hello):
                self._hello(client)
            elif incarnation != self.incarnation:
                self._effects.send(client, Refusal(ErrorCode.STALE_INCARNATION))
            else:
                self._react(Asked(client, request))  # type: ignore[arg-type]  # REQUESTS holds requests only
                if isinstance(request, Goodbye):
                    self._local.drop(client)

    def _hello(self, client: str) -> None:
        """What a client says of itself counts for nothing: the kernel knows."""
        pid, started = self._local.worker(client)
        if pid <= 0:  # of another PID namespace: nobody could tell when it dies
            self._local.drop(client)
            return
        self._react(Asked(client, Hello(pid, started)))
        if not self._processes.add(pid, started):
            self._react(ProcessGone(pid, started))

    def _malformed(self, client: str, error: MalformedMessageError) -> None:
        self._counts["malformed"] += 1
        log.debug("malformed message: %s", error)
        self._effects.send(client, Refusal(ErrorCode.MALFORMED))

    def _take_remote_messages(self) -> None:
        for client, frames in self._remote.receive():
            try:
                if len(frames) != 1:
                    raise MalformedMessageError("one frame is needed")
                self._take(client, frames[0])
            except MalformedMessageError as error:
                self._malformed(client, error)

    def _take(self, client: str, frame: bytes) -> None:
        request, incarnation = decode(frame, REQUESTS | QUESTIONS)
        if isinstance(request, AskSnapshot | AskEvents):
            self._effects.reply(client, self._answer(request))
            return
        if not isinstance(request, Hello) and incarnation != self.incarnation:
            self._effects.send(client, Refusal(ErrorCode.STALE_INCARNATION))
            return
        self._react(Asked(client, request))  # type: ignore[arg-type]  # REQUESTS holds requests only

    def _answer(self, question: Question) -> list[bytes]:
        self._events.flush()  # what is told must not be older than what is published
        if isinstance(question, AskEvents):
            return encode_replay(self._events.since(question.first))
        keys = {DRAM: tuple(self._state.blocks.public_keys()), SSD: tuple(self._state.ssd_keys())}
        return [encode_snapshot(Snapshot(self.node_id, self.incarnation, self._events.sequence, keys))]

    def _take_peer_events(self) -> None:
        for event in self._peers.receive(time.monotonic()):
            if isinstance(event, Arrival):
                self._effects.landing = None
                self._react(event.event())
                slot = self._effects.landing
                if slot is not None:
                    event.landing.into(slot, self._arena.slot(slot))
            else:
                self._react(event)

    # --- deciding and doing ---------------------------------------------------------------------------------------------------

    def _react(self, event: Event) -> None:
        """Never raises: what comes after an event that we cannot take must not be lost with it."""
        now = time.monotonic()
        try:
            actions = self._state.handle(event, now)
        except Exception:
            self._counts["turns_failed"] += 1
            log.exception("pool node %s: %s failed", self.node_id, type(event).__name__)
            return
        self._effects.do(actions, now)
