"""Blocks between a worker's device cache and its pool node, off the engine's thread.

One thread owns the pool client. The engine thread orders loads and publishes and gets what became of them through ``deliver``; it
alone allocates and frees device blocks, this thread only copies bytes into or out of blocks it was given. Every order ends with
exactly one *ended* notice, whatever happens (lost node, timeout, cancel), and only then may the engine free the blocks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from engine.cache.paged import PagedCache
from engine.serving.addresses import BlockSource
from kv_pool.client import (
    AcquireEnded,
    ClientEvent,
    Granted,
    LeasedBlock,
    Miss,
    NodeLost,
    PoolClient,
    PoolUnavailableError,
    Reserved,
    ReservedSlot,
    ReserveRefused,
    Tier,
)
from kv_pool.keys import BlockKey

log = logging.getLogger(__name__)

ORDERS_MAX: Final = 4096
TIER_NAMES: Final = {
    Tier.DRAM: "dram", Tier.SSD: "ssd", Tier.REMOTE_DRAM: "remote_dram", Tier.REMOTE_SSD: "remote_ssd",
}  # fmt: skip
CONNECT_TIMEOUT_S: Final = 2.0
RECONNECT_PERIOD_S: Final = 0.5
KEEPALIVE_PERIOD_S: Final = 1.0
STOP_TIMEOUT_S: Final = 5.0
PUBLISH_MARGIN_S: Final = 5.0
FAILED_TURN_PAUSE_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where the worker's pool node is now; a restarted node has another incarnation."""

    endpoint: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Fetch ``keys`` into device blocks ``targets`` (one each), in order. ``wait``: also wait for keys not yet committed.
    A last key without a target carries only ``meta`` (an empty tail). ``consume`` names keys deleted once read."""

    order: int
    keys: tuple[BlockKey, ...]
    targets: tuple[int | None, ...]
    wait: bool
    source: BlockSource | None
    timeout_s: float
    consume: frozenset[BlockKey] = frozenset()


@dataclass(frozen=True, slots=True)
class PublishedBlock:
    """One block to store: ``tokens`` of device block ``block`` (None: nothing but ``meta``)."""

    key: BlockKey
    parent: BlockKey | None
    block: int | None
    tokens: int
    meta: bytes = b""


@dataclass(frozen=True, slots=True)
class PublishOrder:
    order: int
    blocks: tuple[PublishedBlock, ...]
    timeout_s: float
    private: bool = False


@dataclass(frozen=True, slots=True)
class CancelOrder:
    order: int


@dataclass(frozen=True, slots=True)
class BlockLoaded:
    """Block ``position`` of a load is verified and in place. ``tier`` is one of ``TIER_NAMES``."""

    order: int
    position: int
    tier: str
    meta: bytes


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """Last notice of a load: the first ``available`` keys are in place; ``miss`` says why not all."""

    order: int
    available: int
    miss: Miss | None


@dataclass(frozen=True, slots=True)
class PublishEnded:
    """Last notice of a publish: all blocks are in the pool (``ok``), or why not."""

    order: int
    ok: bool
    detail: str = ""


Notice = BlockLoaded | LoadEnded | PublishEnded


@dataclass(slots=True)
class _Load:
    order: LoadOrder
    placed: int = 0
    corrupt: bool = False


@dataclass(slots=True)
class TransferCounters:
    """Read by the worker's stats; written by the transfer thread only."""

    blocks_loaded: int = 0
    blocks_published: int = 0
    blocks_corrupt: int = 0
    bytes_loaded: int = 0
    bytes_published: int = 0
    node_losses: int = 0


@dataclass(slots=True)
class _Pending:
    loads: dict[int, _Load] = field(default_factory=dict)
    publishes: dict[int, PublishOrder] = field(default_factory=dict)
    tickets: dict[int, int] = field(default_factory=dict)
    """order -> ticket of a load, for cancels."""
    publish_deadlines: dict[int, float] = field(default_factory=dict)
    """The node answers within the order's time; should it not, the order ends here (a deadline on both sides)."""


class BlockTransfer:
    """The transfer thread of one worker. ``deliver`` is called from that thread and must not block."""

    def __init__(self, cache: PagedCache, *, block_bytes: int, client_id: str, deliver: Callable[[Notice], None]) -> None:
        self._cache = cache
        self._block_bytes = block_bytes
        self._client_id = client_id
        self._deliver = deliver
        self._orders: deque[LoadOrder | PublishOrder | CancelOrder] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self._wanted: NodeAddress | None = None
        self._client: PoolClient | None = None
        self._connected_to: NodeAddress | None = None
        self._connections = 0
        self._next_connect = self._next_keepalive = 0.0
        self._pending = _Pending()
        self.counters = TransferCounters()
        self._thread = threading.Thread(target=self._run, name="block-transfer", daemon=True)

    # --- called from other threads --------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def use_node(self, address: NodeAddress | None) -> None:
        """The pool node to talk to from now on. The heartbeat calls this with every reply."""
        if address is not None and address != self._wanted:
            self._wanted = address
            self._kick()

    def order(self, order: LoadOrder | PublishOrder | CancelOrder) -> None:
        """Queue one order. Raises OverflowError when ``ORDERS_MAX`` wait: the worker's own limits should prevent it."""
        if len(self._orders) >= ORDERS_MAX:
            raise OverflowError("transfer queue is full")
        self._orders.append(order)
        self._kick()

    @property
    def connected(self) -> bool:
        return self._client is not None

    def stop(self) -> None:
        self._stopping.set()
        self._kick()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)
        os.close(self._wake)

    def _kick(self) -> None:
        os.eventfd_write(self._wake, 1)

    # --- the transfer thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._turn()
            except Exception:
                # Whatever it was, no order may stay without its end: the engine thread would hold the blocks for ever.
                log.exception("block transfer: a turn failed, everything in flight counts as lost")
                try:
                    self._drop_client("the transfer failed")
                except Exception:
                    log.critical("block transfer: orders without an end, the process ends so that it is replaced", exc_info=True)
                    os._exit(1)
                self._stopping.wait(FAILED_TURN_PAUSE_S)
        self._drop_client("the worker stops")

    def _turn(self) -> None:
        """Keep the connection, wait for an order or an answer, deal with all there are."""
        now = time.monotonic()
        if self._client is None or self._connected_to != self._wanted:
            if now >= self._next_connect:
                self._next_connect = now + RECONNECT_PERIOD_S
                self._connect()
        elif now >= self._next_keepalive:
            self._client.keepalive()
            self._next_keepalive = now + KEEPALIVE_PERIOD_S
        self._wait(KEEPALIVE_PERIOD_S if self._client else RECONNECT_PERIOD_S)
        self._take_orders()
        if self._client is not None:
            for event in self._client.poll(0.0):
                self._on_event(event)
        self._end_overdue_publishes()

    def _end_overdue_publishes(self) -> None:
        now = time.monotonic()
        for ticket in [t for t, deadline in self._pending.publish_deadlines.items() if deadline <= now]:
            del self._pending.publish_deadlines[ticket]
            order = self._pending.publishes.pop(ticket, None)  # slots that still come are given back unwritten
            if order is not None:
                self._deliver(PublishEnded(order.order, ok=False, detail="the pool node did not answer"))

    def _wait(self, timeout_s: float) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        if self._client is not None:
            poller.register(self._client.fileno(), select.POLLIN)
        if not self._orders:
            poller.poll(timeout_s * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _connect(self) -> None:
        """(Re)connect to the wanted node. A failure is retried by the loop and meanwhile every order ends as lost."""
        wanted = self._wanted
        if self._client is not None:
            self._drop_client("the pool node was replaced")
        if wanted is None:
            return
        self._connections += 1
        client_id = f"{self._client_id}.{self._connections}"
        client = PoolClient(wanted.endpoint, client_id=client_id, block_bytes=self._block_bytes)
        try:
            client.connect(CONNECT_TIMEOUT_S)
        except PoolUnavailableError as error:
            log.warning("pool node unavailable: %s", error)
            client.close()
            return
        except BaseException:
            client.close()
            raise
        self._client, self._connected_to = client, wanted

    def _drop_client(self, reason: str) -> None:
        """End everything in flight as lost."""
        if self._client is not None:
            self.counters.node_losses += 1
            self._client.close()
        self._client = self._connected_to = None
        pending, self._pending = self._pending, _Pending()
        for load in pending.loads.values():
            self._deliver(LoadEnded(load.order.order, load.placed, Miss.LOST))
        for publish in pending.publishes.values():
            self._deliver(PublishEnded(publish.order, ok=False, detail=reason))

    def _take_orders(self) -> None:
        while self._orders:
            order = self._orders.popleft()
            match order:
                case CancelOrder():
                    ticket = self._pending.tickets.get(order.order)
                    if ticket is not None and self._client is not None:
                        self._end_load(ticket, Miss.LATE)
                case LoadOrder():
                    try:
                        self._start_load(order)
                    except Exception:
                        self._deliver(LoadEnded(order.order, 0, Miss.LOST))
                        raise
                case PublishOrder():
                    try:
                        self._start_publish(order)
                    except Exception:
                        self._deliver(PublishEnded(order.order, ok=False, detail="the transfer failed"))
                        raise

    def _start_load(self, order: LoadOrder) -> None:
        if self._client is None:
            self._deliver(LoadEnded(order.order, 0, Miss.LOST))
            return
        sources = () if order.source is None else (order.source,)
        ticket = self._client.acquire(order.keys, wait=order.wait, sources=sources, timeout_s=order.timeout_s)
        self._pending.loads[ticket] = _Load(order)
        self._pending.tickets[order.order] = ticket

    def _start_publish(self, order: PublishOrder) -> None:
        if self._client is None:
            self._deliver(PublishEnded(order.order, ok=False, detail="no pool node"))
            return
        keys = [block.key for block in order.blocks]
        parent = order.blocks[0].parent
        ticket = self._client.reserve(keys, timeout_s=order.timeout_s, private=order.private, parent=parent)
        self._pending.publishes[ticket] = order
        self._pending.publish_deadlines[ticket] = time.monotonic() + order.timeout_s + PUBLISH_MARGIN_S

    def _on_event(self, event: ClientEvent) -> None:
        match event:
            case Granted():
                self._place(event)
            case AcquireEnded():
                load = self._pending.loads.get(event.ticket)
                if load is not None:
                    self._end_load(event.ticket, event.miss, cancel=False)
            case Reserved():
                self._store(event.ticket, event.slots)
            case ReserveRefused():
                order = self._pending.publishes.pop(event.ticket, None)
                if order is not None:
                    self._deliver(PublishEnded(order.order, ok=False, detail=event.reason))
            case NodeLost():
                self._drop_client(event.reason)

    def _place(self, event: Granted) -> None:
        """Bring blocks into the device cache, give all their leases back with one message."""
        assert self._client is not None
        load = self._pending.loads.get(event.ticket)
        consumed: list[int] = []
        for position, block in enumerate(event.blocks, event.position):
            if load is None or position != load.placed or not self._place_one(load, block):
                break
            if block.key in load.order.consume:
                consumed.append(block.lease)
        self._client.release([block.lease for block in event.blocks if block.lease not in consumed])
        if consumed:
            self._client.release(consumed, consume=True)
        if load is not None and load.corrupt:
            self._end_load(event.ticket, Miss.CORRUPT)

    def _place_one(self, load: _Load, block: LeasedBlock) -> bool:
        order, position = load.order, load.placed
        target = order.targets[position]
        if target is not None:
            self._cache.import_block(block.buffer, target)
        # After the copy: a block whose bytes or slot changed meanwhile is a miss, never served.
        if not block.verify():
            self.counters.blocks_corrupt += 1
            load.corrupt = True
            return False
        load.placed += 1
        self.counters.blocks_loaded += 1
        self.counters.bytes_loaded += self._block_bytes if target is not None else 0
        self._deliver(BlockLoaded(order.order, position, TIER_NAMES[block.tier], block.meta))
        return True

    def _end_load(self, ticket: int, miss: Miss | None, *, cancel: bool = True) -> None:
        assert self._client is not None
        load = self._pending.loads.pop(ticket)
        self._pending.tickets.pop(load.order.order, None)
        self._deliver(LoadEnded(load.order.order, load.placed, miss))
        if cancel:
            self._client.cancel(ticket)

    def _store(self, ticket: int, slots: Sequence[ReservedSlot | None]) -> None:
        assert self._client is not None
        order = self._pending.publishes.get(ticket)
        if order is None:
            for slot in slots:
                if slot is not None:
                    self._client.abandon(slot)
            return
        for block, slot in zip(order.blocks, slots, strict=True):
            if slot is None:  # the pool has it already, or another writer brings the same bytes
                continue
            if block.block is not None:
                self._cache.export_block(block.block, slot.buffer)
            self._client.commit(slot, tokens=block.tokens, parent=block.parent, meta=block.meta)
            self.counters.blocks_published += 1
            self.counters.bytes_published += self._block_bytes
        del self._pending.publishes[ticket]
        self._deliver(PublishEnded(order.order, ok=True))
