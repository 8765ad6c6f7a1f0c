"""One pool node's decisions. ``handle(client, request, now)`` and the events around it are the only doors; actions come out.

Life of a block: reserved (a slot, one writer, invisible) -> committed (visible, may be leased) -> gone (evicted as an unleased leaf,
consumed, expired). Two-phase, so nothing half-written is ever visible.

Life of an acquire (a *ticket* of a client)::

    keys    k0  k1  k2 | k3  k4  k5
            granted    | next one is looked for: here, in a fetch under way, at the source, or (wait) from a writer to come
    ends when all are granted, or with a typed miss; what was granted stays leased until released
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kv_pool.keys import BlockKey
from kv_pool.node.blocks import Block, Blocks
from kv_pool.node.fetches import Fetch, Fetches
from kv_pool.node.messages import (
    Abandon,
    Acquire,
    Action,
    Cancel,
    CancelFetch,
    Commit,
    Goodbye,
    Hello,
    Keepalive,
    Miss,
    Release,
    Request,
    Reserve,
    Send,
    SendBlock,
    SetEpoch,
)
from kv_pool.node.slots import Slots, SlotState
from kv_pool.policy.eviction import EvictionPolicy
from kv_pool.settings import PoolSettings

CLIENTS_MAX = 4096
NODE = ""
"""Client name under which the node itself holds the slots of blocks that arrive from peers."""


@dataclass(slots=True)
class Lease:
    key: BlockKey
    client: str


@dataclass(slots=True)
class Reservation:
    key: BlockKey
    client: str
    private: bool


@dataclass(slots=True)
class Ticket:
    """An acquire under way. ``position`` is the next key to grant; ``source_failed`` says that the source had its say."""

    client: str
    request: Acquire
    deadline: float
    position: int = 0
    source_failed: Miss | None = None

    @property
    def next_key(self) -> BlockKey:
        return self.request.keys[self.position]

    @property
    def id(self) -> tuple[str, int]:
        return self.client, self.request.ticket


@dataclass(slots=True)
class WaitingReserve:
    client: str
    request: Reserve
    deadline: float


@dataclass(slots=True)
class Client:
    pid: int
    started: int
    last_heard: float
    leases: set[int] = field(default_factory=set[int])
    reservations: set[int] = field(default_factory=set[int])
    tickets: set[int] = field(default_factory=set[int])


class NodeState:
    """See the module docstring. Not thread-safe; one owner."""

    def __init__(self, *, slots: int, block_tokens: int, settings: PoolSettings, policy: EvictionPolicy) -> None:
        self.settings = settings
        self.slots = Slots(slots)
        self.blocks = Blocks(self.slots, policy, block_tokens)
        self.clients: dict[str, Client] = {}
        self.reservations: dict[int, Reservation] = {}
        self.writers: dict[BlockKey, int] = {}
        self.leases: dict[int, Lease] = {}
        self.tickets: dict[tuple[str, int], Ticket] = {}
        self.quarantined: dict[int, tuple[str, int, int]] = {}
        """slot -> (client, pid, started) of a writer that fell silent."""
        self.fetches = Fetches(settings.fetch_inflight_blocks)
        self._parked: dict[BlockKey, set[tuple[str, int]]] = {}
        self._waiting_reserves: list[WaitingReserve] = []
        self._next_lease = 0
        self.counters = {"hits": 0, "misses": 0, "commits": 0, "refused": 0, "late": 0, "clients_lost": 0}

    # --- doors ------------------------------------------------------------------------------------------------------------

    def handle(self, client: str, request: Request, now: float) -> list[Action]:
        """One checked request of ``client``. One from a client that has not said hello is answered with an error."""
        if isinstance(request, Hello):
            return self._hello(client, request, now)
        known = self.clients.get(client)
        if known is None:
            return self._spoke_too_late(client)
        known.last_heard = now
        match request:
            case Reserve():
                return self._reserve(client, request, now)
            case Commit():
                return self._commit(client, request, now)
            case Abandon():
                return self._abandon(client, request.slot, now)
            case Acquire():
                return self._acquire(client, request, now)
            case Cancel():
                return self._drop_ticket((client, request.ticket))
            case Release():
                return self._release(client, request)
            case Keepalive():
                return [Send(client, {"op": "alive"})]
            case Goodbye():
                return self._forget(client, quarantine=False)

    def client_gone(self, client: str) -> list[Action]:
        """The client's connection is gone, or takes nothing more. It may still be writing."""
        return self._forget(client, quarantine=True) if client in self.clients else []

    def sent(self, lease: int) -> list[Action]:
        """A block's bytes have left for another node."""
        return self._end_lease(lease, consume=True)

    def tick(self, now: float) -> list[Action]:
        """Everything that time ends."""
        actions: list[Action] = self.blocks.expire(now)
        for ticket in [t for t in self.tickets.values() if t.deadline <= now]:
            actions += self._end(ticket, Miss.LATE)
        for name in [n for n, c in self.clients.items() if now - c.last_heard > self.settings.client_dead_s]:
            self.counters["clients_lost"] += 1
            actions += self._forget(name, quarantine=True)
        for waiting in [w for w in self._waiting_reserves if w.deadline <= now]:
            self._waiting_reserves.remove(waiting)
            actions += self._refuse(waiting.client, waiting.request.ticket, "no room in the pool before the deadline")
        return actions + self._serve_waiting_reserves(now)

    def process_gone(self, pid: int, started: int, now: float) -> list[Action]:
        """The process of silent writers is dead: nothing writes to their slots any more."""
        actions: list[Action] = []
        for slot in [s for s, (_, p, t) in self.quarantined.items() if (p, t) == (pid, started)]:
            actions += self._give_back_quarantined(slot)
        return actions + self._serve_waiting_reserves(now)

    # --- blocks from peers --------------------------------------------------------------------------------------------------

    def fetched(self, fetch: int, key: BlockKey, now: float) -> tuple[int | None, list[Action]]:
        """``key`` has arrived: the slot to put its bytes into, or None where it is not wanted or there is no room."""
        under_way = self.fetches.get(fetch)
        if under_way is None or key not in under_way.keys or self.blocks.get(key) is not None or key in self.writers:
            return None, []
        actions = self._make_room(1)
        if not self.slots.free:
            return None, actions
        slot, more = self._take_slot(NODE, key, private=False)
        return slot, actions + more

    def fill(self, slot: int, commit: Commit, *, private: bool, sound: bool, now: float) -> list[Action]:
        """The bytes of a fetched block are in ``slot``; ``sound`` says that their checksum is right."""
        reservation = self.reservations[slot]
        reservation.private = private
        return self._store(slot, commit, now) if sound else self._unreserve(slot)

    def fetch_ended(self, fetch: int, miss: Miss | None, now: float) -> list[Action]:
        """No more blocks of this fetch. Its waiters look again; for those that asked as it did, the source has had its say."""
        ended = self.fetches.end(fetch)
        if ended is None:
            return []
        actions: list[Action] = []
        for ticket in self._parked_on(ended.keys):
            if ticket.request.source == ended.peer:
                if miss is None:  # it came, and there was no room for it
                    ticket.source_failed = Miss.REFUSED
                elif ended.wait or not ticket.request.wait:
                    ticket.source_failed = miss
            actions += self._advance(ticket, now)
        return actions

    # --- clients ------------------------------------------------------------------------------------------------------------

    def _hello(self, client: str, hello: Hello, now: float) -> list[Action]:
        if client in self.clients:
            self.clients[client].last_heard = now
        elif len(self.clients) >= CLIENTS_MAX:
            return [Send(client, {"op": "error", "code": "too_many_clients"})]
        else:
            self.clients[client] = Client(hello.pid, hello.started, now)
        return [Send(client, {"op": "welcome"})]

    def _spoke_too_late(self, client: str) -> list[Action]:
        """Given up as dead, or never met. A silent writer that speaks has finished writing: its slots are free again."""
        actions: list[Action] = []
        for slot in [s for s, (name, _, _) in self.quarantined.items() if name == client]:
            actions += self._give_back_quarantined(slot)
        return [*actions, Send(client, {"op": "error", "code": "unknown_client"})]

    def _forget(self, name: str, *, quarantine: bool) -> list[Action]:
        """Take back everything that the client held. With ``quarantine`` it may still be writing into its slots."""
        client = self.clients.pop(name)
        actions: list[Action] = []
        for ticket in list(client.tickets):
            actions += self._drop_ticket((name, ticket))
        for lease in list(client.leases):
            actions += self._end_lease(lease, consume=False, client=client)
        for slot in list(client.reservations):
            reservation = self.reservations.pop(slot)
            self.writers.pop(reservation.key, None)
            if quarantine and client.pid:
                self.slots.quarantine(slot)
                self.quarantined[slot] = (name, client.pid, client.started)
            else:
                self.slots.give_back(slot)
                actions.append(SetEpoch(slot, self.slots.epoch(slot)))
        self._waiting_reserves = [w for w in self._waiting_reserves if w.client != name]
        return actions

    def _give_back_quarantined(self, slot: int) -> list[Action]:
        del self.quarantined[slot]
        self.slots.give_back(slot)
        return [SetEpoch(slot, self.slots.epoch(slot))]

    # --- writing ------------------------------------------------------------------------------------------------------------

    def _reserve(self, client: str, request: Reserve, now: float) -> list[Action]:
        waiting = WaitingReserve(client, request, now + request.timeout_s)
        if len(request.keys) > self.slots.count:
            return self._refuse(client, request.ticket, f"{len(request.keys)} blocks do not fit a pool of {self.slots.count}")
        if self._waiting_reserves or not self._wants_fit(waiting):
            if len(self._waiting_reserves) >= self.settings.waiting_acquires_max:
                return self._refuse(client, request.ticket, "too many writers wait for room")
            self._waiting_reserves.append(waiting)
            return self._serve_waiting_reserves(now)
        return self._grant_reserve(waiting)

    def _wanted(self, request: Reserve) -> list[BlockKey]:
        return [key for key in request.keys if self.blocks.get(key) is None and key not in self.writers]

    def _wants_fit(self, waiting: WaitingReserve) -> bool:
        return len(self._wanted(waiting.request)) <= self.slots.free

    def _serve_waiting_reserves(self, now: float) -> list[Action]:
        """In order of arrival: one that needs much is not passed for ever by those that need little."""
        actions: list[Action] = []
        while self._waiting_reserves:
            actions += self._make_room(len(self._wanted(self._waiting_reserves[0].request)))
            if not self._wants_fit(self._waiting_reserves[0]):
                break
            actions += self._grant_reserve(self._waiting_reserves.pop(0))
        return actions

    def _make_room(self, count: int) -> list[Action]:
        """Evict until ``count`` slots are free, or nothing more may go."""
        actions: list[Action] = []
        while self.slots.free < count:
            evicted = self.blocks.evict_one()
            if evicted is None:
                break
            actions += evicted
        return actions

    def _grant_reserve(self, waiting: WaitingReserve) -> list[Action]:
        actions: list[Action] = []
        rows: list[list[int] | None] = []
        for key in waiting.request.keys:
            if self.blocks.get(key) is not None or key in self.writers:
                rows.append(None)
                continue
            slot, more = self._take_slot(waiting.client, key, waiting.request.private)
            rows.append([slot, self.slots.epoch(slot)])
            actions += more
        return [*actions, Send(waiting.client, {"op": "reserved", "ticket": waiting.request.ticket, "slots": rows})]

    def _take_slot(self, client: str, key: BlockKey, private: bool) -> tuple[int, list[Action]]:
        slot = self.slots.take()
        self.reservations[slot] = Reservation(key, client, private)
        self.writers[key] = slot
        if client in self.clients:
            self.clients[client].reservations.add(slot)
        return slot, [SetEpoch(slot, self.slots.epoch(slot))]

    def _refuse(self, client: str, ticket: int, reason: str) -> list[Action]:
        self.counters["refused"] += 1
        return [Send(client, {"op": "refused", "ticket": ticket, "reason": reason})]

    def _commit(self, client: str, commit: Commit, now: float) -> list[Action]:
        reservation = self.reservations.get(commit.slot)
        if reservation is None or reservation.client != client or reservation.key != commit.key:
            return [Send(client, {"op": "error", "code": "not_reserved"})]
        return self._store(commit.slot, commit, now)

    def _store(self, slot: int, commit: Commit, now: float) -> list[Action]:
        reservation = self._drop_reservation(slot)
        self.slots.commit(slot)
        self.counters["commits"] += 1
        expires = now + self.settings.handoff_ttl_s if reservation.private else None
        block = Block(commit.key, slot, commit.parent, commit.tokens, commit.length, commit.checksum, commit.meta, now, expires)
        actions = self.blocks.store(block)
        for ticket in self._parked_on((commit.key,)):
            actions += self._advance(ticket, now)
        return actions + self._serve_waiting_reserves(now)

    def _abandon(self, client: str, slot: int, now: float) -> list[Action]:
        reservation = self.reservations.get(slot)
        if reservation is None or reservation.client != client:
            return [Send(client, {"op": "error", "code": "not_reserved"})]
        return self._unreserve(slot) + self._serve_waiting_reserves(now)

    def _unreserve(self, slot: int) -> list[Action]:
        self._drop_reservation(slot)
        self.slots.give_back(slot)
        return [SetEpoch(slot, self.slots.epoch(slot))]

    def _drop_reservation(self, slot: int) -> Reservation:
        reservation = self.reservations.pop(slot)
        del self.writers[reservation.key]
        client = self.clients.get(reservation.client)
        if client is not None:
            client.reservations.discard(slot)
        return reservation

    # --- reading ------------------------------------------------------------------------------------------------------------

    def _acquire(self, client: str, request: Acquire, now: float) -> list[Action]:
        ticket = Ticket(client, request, now + request.timeout_s)
        if ticket.id in self.tickets or len(self.tickets) >= self.settings.waiting_acquires_max:
            self.counters["refused"] += 1
            return [Send(client, ended(request.ticket, 0, Miss.REFUSED))]
        self.tickets[ticket.id] = ticket
        self.clients[client].tickets.add(request.ticket)
        return self._advance(ticket, now)

    def _advance(self, ticket: Ticket, now: float) -> list[Action]:
        """Grant what can be granted now; then park, start a fetch, or end."""
        self._unpark(ticket)
        actions: list[Action] = []
        while ticket.position < len(ticket.request.keys):
            block = self.blocks.get(ticket.next_key)
            if block is None:
                break
            actions += self._grant(ticket, block, now)
        if ticket.position == len(ticket.request.keys):
            return actions + self._end(ticket, None)
        return actions + self._look_elsewhere(ticket, now)

    def _look_elsewhere(self, ticket: Ticket, now: float) -> list[Action]:
        request, key = ticket.request, ticket.next_key
        if request.wait and key in self.writers:
            return self._park(ticket)
        if request.source is not None and ticket.source_failed is None:
            if self.fetches.fetching(key):
                return self._park(ticket)
            left = max(0.0, ticket.deadline - now)
            missing = [k for k in request.keys[ticket.position :] if self.blocks.get(k) is None]
            return self._park(ticket) + self.fetches.start(request.source, missing, request.wait, left)
        if request.wait and request.source is None:
            return self._park(ticket)
        return self._end(ticket, ticket.source_failed or Miss.NOT_FOUND)

    def _grant(self, ticket: Ticket, block: Block, now: float) -> list[Action]:
        self._next_lease += 1
        lease = self._next_lease
        self.blocks.lease(block, now)
        self.leases[lease] = Lease(block.key, ticket.client)
        self.clients[ticket.client].leases.add(lease)
        self.counters["hits"] += 1
        message: dict[str, Any] = {
            "op": "granted",
            "ticket": ticket.request.ticket,
            "position": ticket.position,
            "key": block.key,
            "lease": lease,
            "slot": block.slot,
            "epoch": self.slots.epoch(block.slot),
            "tokens": block.tokens,
            "length": block.length,
            "checksum": block.checksum,
            "meta": block.meta,
            "parent": block.parent,
            "private": block.expires is not None,
            "remote": self.fetches.came_from_peer(block.key),
        }
        ticket.position += 1
        if ticket.request.payload:
            return [SendBlock(ticket.client, message, block.slot, block.length, lease)]
        return [Send(ticket.client, message)]

    def _end(self, ticket: Ticket, miss: Miss | None) -> list[Action]:
        if miss is not None:
            self.counters["misses"] += len(ticket.request.keys) - ticket.position
            self.counters["late"] += miss is Miss.LATE
        actions = self._drop_ticket(ticket.id)
        return [*actions, Send(ticket.client, ended(ticket.request.ticket, ticket.position, miss))]

    def _drop_ticket(self, ticket_id: tuple[str, int]) -> list[Action]:
        """Forget a ticket; a fetch that nobody waits for any more is called off."""
        ticket = self.tickets.pop(ticket_id, None)
        if ticket is None:
            return []
        client = self.clients.get(ticket.client)
        if client is not None:
            client.tickets.discard(ticket.request.ticket)
        self._unpark(ticket)
        if ticket.request.source is None:
            return []
        orphans = [f for f in self.fetches.of_peer(ticket.request.source) if not self._anyone_waits(f)]
        actions: list[Action] = []
        for fetch in orphans:
            self.fetches.end(fetch.id)
            actions.append(CancelFetch(fetch.id, fetch.peer))
        return actions

    def _anyone_waits(self, fetch: Fetch) -> bool:
        return any(self._parked.get(key) for key in fetch.keys)

    def _park(self, ticket: Ticket) -> list[Action]:
        self._parked.setdefault(ticket.next_key, set()).add(ticket.id)
        return []

    def _unpark(self, ticket: Ticket) -> None:
        if ticket.position < len(ticket.request.keys):
            parked = self._parked.get(ticket.next_key)
            if parked is not None:
                parked.discard(ticket.id)
                if not parked:
                    del self._parked[ticket.next_key]

    def _parked_on(self, keys: tuple[BlockKey, ...]) -> list[Ticket]:
        ids = sorted({ticket_id for key in keys for ticket_id in self._parked.get(key, ())})
        return [self.tickets[ticket_id] for ticket_id in ids]

    def _release(self, client: str, release: Release) -> list[Action]:
        lease = self.leases.get(release.lease)
        if lease is None or lease.client != client:
            return []  # released twice, or taken back meanwhile: nothing to do
        return self._end_lease(release.lease, consume=release.consume)

    def _end_lease(self, number: int, *, consume: bool, client: Client | None = None) -> list[Action]:
        lease = self.leases.pop(number, None)
        if lease is None:
            return []
        holder = client or self.clients.get(lease.client)
        if holder is not None:
            holder.leases.discard(number)
        return self.blocks.unlease(lease.key, consume=consume)

    # --- views --------------------------------------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float | None:
        """When :meth:`tick` has something to do at the latest, but for expiries and silent clients."""
        times = [t.deadline for t in self.tickets.values()] + [w.deadline for w in self._waiting_reserves]
        return min(times, default=None)

    def check(self) -> None:
        """Assert what must always hold (used by tests after every event)."""
        counts = self.slots.counts()
        assert sum(counts.values()) == self.slots.count
        assert counts[SlotState.COMMITTED] == len(self.blocks)
        assert counts[SlotState.RESERVED] == len(self.reservations) == len(self.writers)
        assert counts[SlotState.QUARANTINED] == len(self.quarantined)
        assert counts[SlotState.FREE] == self.slots.free
        for number, lease in self.leases.items():
            assert number in self.clients[lease.client].leases
        for key, waiting in self._parked.items():
            assert waiting
            assert all(self.tickets[i].next_key == key for i in waiting)


def ended(ticket: int, available: int, miss: Miss | None) -> dict[str, Any]:
    return {"op": "ended", "ticket": ticket, "available": available, "miss": None if miss is None else miss.value}
