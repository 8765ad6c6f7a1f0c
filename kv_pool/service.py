"""A pool node's shell: sockets, the arena, and one I/O thread around the pure state (``node/state.py``). Knows nothing of Ray."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable
from typing import Final

import zmq

from kv_pool.arena import Arena
from kv_pool.events.publisher import EventPublisher
from kv_pool.events.replay import encode_replay
from kv_pool.events.snapshot import Snapshot, encode_snapshot
from kv_pool.events.types import DRAM
from kv_pool.node.messages import Answer, AskEvents, AskSnapshot, ErrorCode, Hello, Question, Refusal, Welcome
from kv_pool.node.slots import SlotState
from kv_pool.node.state import NodeState
from kv_pool.node.stimuli import (
    Action,
    Asked,
    CancelFetch,
    ClientGone,
    Event,
    Greet,
    Land,
    ProcessGone,
    Publish,
    Send,
    SendBlock,
    SetEpoch,
    StartFetch,
    Tick,
)
from kv_pool.peers import Arrival, PeerLinks, Pulled
from kv_pool.policy.lru import LeastRecentlyUsed
from kv_pool.settings import PoolSettings
from kv_pool.sizes import parse_size
from kv_pool.transport.codec import QUESTIONS, REQUESTS, MalformedMessageError, decode, encode
from kv_pool.transport.curve import CurveKeys, Gatekeeper, check_host
from kv_pool.transport.memory import keep_freed_memory
from kv_pool.transport.pieces import cut, pieces_of
from kv_pool.transport.process import Watched
from kv_pool.transport.sockets import MESSAGES_WAITING_MAX, bind, make_socket

log = logging.getLogger(__name__)

SLOTS_MIN: Final = 4
TICK_PERIOD_S: Final = 0.25
MESSAGES_PER_TURN_MAX: Final = 256


class PoolNode:
    """One node: ``dram // slot_bytes`` slots of memory shared with the workers of this machine, and two endpoints on ``host``.

    ``block_tokens``: what a public block must hold; None where any count will do. Raises ValueError where fewer than
    ``SLOTS_MIN`` slots fit or keys lack (:class:`CurveKeyError`), OSError where memory or ports lack.
    """

    def __init__(self, *, node_id: str, slot_bytes: int, settings: PoolSettings, block_tokens: int | None = None) -> None:
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
        self._state = NodeState(
            node_id=node_id,
            slots=slots,
            slot_bytes=slot_bytes,
            block_tokens=block_tokens,
            settings=settings,
            policy=LeastRecentlyUsed(),
        )
        self._arena = Arena.create(slots, slot_bytes)
        self._context = zmq.Context()
        self._gatekeeper = None if keys is None else Gatekeeper(self._context, keys)
        waiting_max = MESSAGES_WAITING_MAX + settings.fetch_inflight_blocks * pieces_of(slot_bytes)
        self._router = make_socket(self._context, zmq.ROUTER, waiting_max=waiting_max)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a client that is gone is an error here, not a silent loss
        self.endpoint = bind(self._router, settings.host, keys)
        self._events = EventPublisher(self._context, settings.host, node_id, self.incarnation, keys)
        self.events_endpoint = self._events.endpoint
        self._peers = PeerLinks(
            self._context,
            slot_bytes=slot_bytes,
            window=settings.fetch_inflight_blocks,
            dead_after_s=settings.client_dead_s,
            keys=keys,
        )
        self._processes = Watched()
        self._gone: list[str] = []
        self._landing: int | None = None
        """The slot that the state wants the latest arrival in."""
        self._counts = {"bytes_out": 0, "malformed": 0, "turns_failed": 0}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pool-{node_id}", daemon=True)

    def start(self) -> None:
        keep_freed_memory()
        self._arena.start_prefault()
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

    def stats(self) -> dict[str, int | float]:
        """Counters and gauges, from any thread."""
        state, slots = self._state, self._state.slots.counts()
        counts: dict[str, int | float] = {
            "pid": os.getpid(),
            "slots_total": state.slots.count,
            "slots_free": slots[SlotState.FREE],
            "slots_reserved": slots[SlotState.RESERVED],
            "slots_committed": slots[SlotState.COMMITTED],
            "slots_quarantined": slots[SlotState.QUARANTINED],
            "slot_bytes": self._arena.slot_bytes,
            "blocks_idle": state.blocks.idle,
            "leases": len(state.readers.leases),
            "clients": len(state.clients),
            "clients_lost": state.clients_lost,
            "acquires_waiting": len(state.readers.tickets),
            "fetches": len(state.readers.fetches),
            "commits": state.commits,
            "evictions": state.blocks.evictions,
            "hits": state.readers.hits,
            "misses": state.readers.misses,
            "late": state.readers.late,
            "refused": state.writers.refused,
            "corrupt": state.corrupt,
            "events_sequence": self._events.sequence,
            "bytes_in": self._peers.bytes_in,
        }
        return counts | self._counts

    def take_pulls(self) -> list[Pulled]:
        """Finished pulls from other nodes since the last call, the latest of them. From any one thread."""
        pulls: list[Pulled] = []
        with contextlib.suppress(IndexError):
            while True:
                pulls.append(self._peers.pulls.popleft())
        return pulls

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
        self._peers.close()
        self._events.close()
        self._router.close(0)
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._context.destroy(linger=0)  # lets go of the slots that were being sent
        self._processes.keep_only(set())
        self._arena.close()
        os.close(self._wake)

    def _turn(self, timeout_s: float) -> None:
        poller = zmq.Poller()
        processes = self._processes.fds()
        for source in (self._router, self._wake, *processes, *self._peers.sockets()):
            poller.register(source, zmq.POLLIN)
        waiting_ms = 0 if self._peers.pending or self._gone else max(0, int(timeout_s * 1000 + 1))
        ready = dict(poller.poll(waiting_ms))
        if self._router in ready:
            self._take_messages()
        self._take_peer_events()
        for fd, (pid, started) in processes.items():
            if fd in ready:
                self._react(ProcessGone(pid, started))
                self._forget_processes()
        gone, self._gone = self._gone, []
        for client in gone:
            self._react(ClientGone(client))
        self._events.flush()

    def _tick(self, now: float) -> None:
        self._peers.tick(now)
        self._react(Tick())
        self._forget_processes()

    def _forget_processes(self) -> None:
        """Keep watching those that are, or have written in their own name and may still."""
        clients = {(c.pid, c.started) for c in self._state.clients.values()}
        silent = {(q.pid, q.started) for q in self._state.writers.quarantined.values()}
        self._processes.keep_only(clients | silent)

    def _take_messages(self) -> None:
        for _ in range(MESSAGES_PER_TURN_MAX):
            try:
                name, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            client = name.hex()
            try:
                if len(frames) != 1:
                    raise MalformedMessageError("one frame is needed")
                self._take(client, frames[0])
            except MalformedMessageError as error:
                self._counts["malformed"] += 1
                log.debug("malformed message: %s", error)
                self._send(client, Refusal(ErrorCode.MALFORMED))

    def _take(self, client: str, frame: bytes) -> None:
        request, incarnation = decode(frame, REQUESTS | QUESTIONS)
        if isinstance(request, AskSnapshot | AskEvents):
            self._send_frames(client, self._answer(request))
            return
        if not isinstance(request, Hello) and incarnation != self.incarnation:
            self._send(client, Refusal(ErrorCode.STALE_INCARNATION))
            return
        self._react(Asked(client, request))  # type: ignore[arg-type]  # REQUESTS holds requests only
        if isinstance(request, Hello) and request.pid and not self._processes.add(request.pid, request.started):
            self._react(ProcessGone(request.pid, request.started))

    def _answer(self, question: Question) -> list[bytes]:
        self._events.flush()  # what is told must not be older than what is published
        if isinstance(question, AskEvents):
            return encode_replay(self._events.since(question.first))
        keys = {DRAM: tuple(self._state.blocks.public_keys())}
        return [encode_snapshot(Snapshot(self.node_id, self.incarnation, self._events.sequence, keys))]

    def _take_peer_events(self) -> None:
        for event in self._peers.receive(time.monotonic()):
            if isinstance(event, Arrival):
                self._landing = None
                self._react(event.event())
                if self._landing is not None:
                    event.landing.into(self._landing, self._arena.slot(self._landing))
            else:
                self._react(event)

    # --- doing what the state says --------------------------------------------------------------------------------------------

    def _react(self, event: Event) -> None:
        now = time.monotonic()
        self._do(self._state.handle(event, now), now)

    def _do(self, actions: Iterable[Action], now: float) -> None:
        for action in actions:
            match action:
                case Send(client, answer):
                    self._send(client, answer)
                case SendBlock():
                    self._send_block(action)
                case Greet(client):
                    self._send(client, self._welcome())
                case Publish(event):
                    self._events.add(event)
                case SetEpoch(slot, epoch):
                    self._arena.set_epoch(slot, epoch)
                case StartFetch():
                    self._peers.start(action, now)
                case CancelFetch(fetch, peer):
                    self._peers.cancel(fetch, peer)
                case Land(slot):
                    self._landing = slot

    def _welcome(self) -> Welcome:
        arena = self._arena
        return Welcome(self.node_id, os.getpid(), arena.fd, arena.slots, arena.slot_bytes, self._settings.client_dead_s)

    def _send(self, client: str, answer: Answer) -> None:
        self._send_frames(client, [encode(answer, self.incarnation)])

    def _send_block(self, action: SendBlock) -> None:
        """The bytes leave from the arena without a copy."""
        payload = self._arena.slot_read_only(action.slot)[: action.length]
        for header, piece in cut(action.answer, payload):
            if not self._send_frames(action.client, [encode(header, self.incarnation), piece], copy=False):
                return
            self._counts["bytes_out"] += len(piece)

    def _send_frames(self, client: str, frames: list[bytes | memoryview] | list[bytes], *, copy: bool = True) -> bool:
        try:
            self._router.send_multipart([bytes.fromhex(client), *frames], zmq.NOBLOCK, copy=copy)
        except zmq.ZMQError:  # it is gone, or takes nothing more
            self._gone.append(client)
            return False
        return True
