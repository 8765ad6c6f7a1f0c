"""A pool node's shell: sockets, the arena, one I/O thread around the pure state (``node/state.py``). Knows nothing of Ray."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from typing import Any, Final

import zmq

from kv_pool.arena import Arena
from kv_pool.events.publisher import EventPublisher
from kv_pool.events.snapshot import Snapshot, snapshot_message
from kv_pool.events.types import DRAM
from kv_pool.node.messages import (
    Action,
    CancelFetch,
    Hello,
    Publish,
    Send,
    SendBlock,
    SetEpoch,
    StartFetch,
)
from kv_pool.node.slots import SlotState
from kv_pool.node.state import NodeState
from kv_pool.peers import PeerLinks
from kv_pool.policy.lru import LeastRecentlyUsed
from kv_pool.settings import PoolSettings
from kv_pool.sizes import parse_size
from kv_pool.transport import process
from kv_pool.transport.codec import MalformedMessageError, decode_map, decode_request, encode
from kv_pool.transport.sockets import bind, make_socket

log = logging.getLogger(__name__)

SLOTS_MIN: Final = 4
TICK_PERIOD_S: Final = 0.25
SENDING_POLL_S: Final = 0.002
MESSAGES_PER_TURN_MAX: Final = 256


class PoolNode:
    """One node: ``dram // slot_bytes`` slots of memory shared with the workers of this machine, and two endpoints on ``host``."""

    def __init__(self, *, node_id: str, slot_bytes: int, settings: PoolSettings, block_tokens: int = 1) -> None:
        slots = parse_size(settings.dram) // slot_bytes
        if slots < SLOTS_MIN:
            raise ValueError(
                f"pool.dram: {settings.dram} holds {slots} blocks of {slot_bytes} bytes, at least {SLOTS_MIN} are needed"
            )
        self.node_id = node_id
        self.incarnation = uuid.uuid4().hex[:16]
        self._settings = settings
        self._state = NodeState(slots=slots, block_tokens=block_tokens, settings=settings, policy=LeastRecentlyUsed())
        self._arena = Arena.create(slots, slot_bytes)
        self._context = zmq.Context()
        self._router = make_socket(self._context, zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a client that is gone is an error here, not a silent loss
        self.endpoint = bind(self._router, settings.host)
        self._events = EventPublisher(self._context, settings.host, node_id, self.incarnation)
        self.events_endpoint = self._events.endpoint
        self._peers = PeerLinks(self._context, slot_bytes, settings.client_dead_s)
        self._sending: list[tuple[zmq.MessageTracker, int]] = []
        self._gone: list[str] = []
        self._bytes = {"in": 0, "out": 0}
        self._malformed = 0
        self._corrupt = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pool-{node_id}", daemon=True)
        self._prefault = threading.Thread(target=self._arena.prefault, name=f"prefault-{node_id}", daemon=True)

    def start(self) -> None:
        self._prefault.start()
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the I/O thread, close sockets and memory. Safe to call twice."""
        self._stopping.set()
        for thread in (self._thread, self._prefault):
            if thread.is_alive():
                thread.join(timeout_s)

    def stats(self) -> dict[str, int | float]:
        """Counters and gauges, from any thread."""
        counts = self._state.slots.counts()
        return {
            "pid": os.getpid(),
            "slots_total": self._state.slots.count,
            "slots_free": counts[SlotState.FREE],
            "slots_reserved": counts[SlotState.RESERVED],
            "slots_committed": counts[SlotState.COMMITTED],
            "slots_quarantined": counts[SlotState.QUARANTINED],
            "slot_bytes": self._arena.slot_bytes,
            "leases": len(self._state.leases),
            "clients": len(self._state.clients),
            "acquires_waiting": len(self._state.tickets),
            "evictions_total": self._state.blocks.evictions,
            "bytes_in_total": self._bytes["in"],
            "bytes_out_total": self._bytes["out"],
            "malformed_total": self._malformed,
            "corrupt_total": self._corrupt,
        } | {f"{name}_total": count for name, count in self._state.counters.items()}

    # --- the I/O thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        next_tick = 0.0
        while not self._stopping.is_set():
            try:
                now = time.monotonic()
                if now >= next_tick:
                    self._tick(now)
                    next_tick = now + TICK_PERIOD_S
                self._turn(SENDING_POLL_S if self._sending else TICK_PERIOD_S)
            except Exception:
                log.exception("pool node %s: a turn failed", self.node_id)
        self._peers.close()
        self._events.close()
        self._router.close(0)
        self._context.destroy(linger=0)
        self._arena.close()

    def _turn(self, timeout_s: float) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        for socket in self._peers.sockets():
            poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll(int(timeout_s * 1000) or 1))
        if self._router in ready:
            self._take_messages()
        self._take_peer_messages()
        self._finish_sends()
        self._drop_gone()
        self._events.flush()

    def _tick(self, now: float) -> None:
        self._do(self._state.tick(now))
        for pid, started in {(pid, started) for _, pid, started in self._state.quarantined.values()}:
            if not process.alive(pid, started):
                self._do(self._state.process_gone(pid, started, now))
        for fetch, miss in self._peers.tick(now):
            self._do(self._state.fetch_ended(fetch, miss, now))

    def _take_messages(self) -> None:
        for _ in range(MESSAGES_PER_TURN_MAX):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            client = frames[0].hex()
            try:
                if len(frames) != 2:
                    raise MalformedMessageError("one frame is needed")
                self._take(client, decode_map(frames[1]))
            except MalformedMessageError as error:
                self._malformed += 1
                log.debug("malformed message: %s", error)
                self._send(client, {"op": "error", "code": "malformed"})

    def _take(self, client: str, message: dict[str, Any]) -> None:
        if message["op"] == "snapshot":
            self._send_raw(client, self._snapshot())
            return
        request = decode_request(message)
        if not isinstance(request, Hello) and message.get("inc") != self.incarnation:
            self._send(client, {"op": "error", "code": "stale_incarnation"})
            return
        self._do(self._state.handle(client, request, time.monotonic()))

    def _take_peer_messages(self) -> None:
        now = time.monotonic()
        for block in self._peers.receive(now, MESSAGES_PER_TURN_MAX):
            slot, actions = self._state.fetched(block.fetch, block.commit.key, now)
            self._do(actions)
            if slot is None:
                continue
            sound = block.land(self._arena.slot(slot))
            self._corrupt += not sound
            self._bytes["in"] += block.commit.length
            self._do(self._state.fill(slot, block.commit, private=block.private, sound=sound, now=now))
        for fetch, miss in self._peers.ended():
            self._do(self._state.fetch_ended(fetch, miss, now))

    # --- doing what the state says --------------------------------------------------------------------------------------------

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(client, message):
                    self._send(client, message)
                case SendBlock(client, message, slot, length, lease):
                    self._send_block(client, message, slot, length, lease)
                case Publish(event):
                    self._events.add(event)
                case SetEpoch(slot, epoch):
                    self._arena.set_epoch(slot, epoch)
                case StartFetch():
                    self._peers.start(action)
                case CancelFetch(fetch, peer):
                    self._peers.cancel(fetch, peer)

    def _send(self, client: str, message: dict[str, Any]) -> None:
        if message["op"] == "welcome":
            message = message | {
                "node_id": self.node_id,
                "inc": self.incarnation,
                "pid": os.getpid(),
                "fd": self._arena.fd,
                "slots": self._arena.slots,
                "slot_bytes": self._arena.slot_bytes,
                "client_dead_s": self._settings.client_dead_s,
            }
        self._send_raw(client, encode(message))

    def _send_raw(self, client: str, frame: bytes) -> None:
        try:
            self._router.send_multipart([bytes.fromhex(client), frame], zmq.NOBLOCK)
        except zmq.ZMQError:
            self._gone.append(client)

    def _send_block(self, client: str, message: dict[str, Any], slot: int, length: int, lease: int) -> None:
        """The payload leaves from the arena without a copy; its lease ends when zmq has let go of it."""
        payload = self._arena.slot_read_only(slot)[:length]
        try:
            tracker = self._router.send_multipart(
                [bytes.fromhex(client), encode(message), payload], zmq.NOBLOCK, copy=False, track=True
            )
        except zmq.ZMQError:
            self._gone.append(client)
            return
        assert tracker is not None
        self._bytes["out"] += length
        self._sending.append((tracker, lease))

    def _finish_sends(self) -> None:
        still: list[tuple[zmq.MessageTracker, int]] = []
        for tracker, lease in self._sending:
            if tracker.done:
                self._do(self._state.sent(lease))
            else:
                still.append((tracker, lease))
        self._sending = still

    def _drop_gone(self) -> None:
        gone, self._gone = self._gone, []
        for client in gone:
            self._do(self._state.client_gone(client))

    def _snapshot(self) -> bytes:
        self._events.flush()
        keys = {DRAM: tuple(self._state.blocks.keys())}
        return snapshot_message(Snapshot(self.node_id, self.incarnation, self._events.sequence, keys))
