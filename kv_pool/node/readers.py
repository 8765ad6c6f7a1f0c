"""Acquires and pulls: what is granted, what they wait for, and the leases they leave. Pure.

An acquire under way is a *ticket* of a client::

    keys    k0  k1  k2 | k3  k4  k5
            granted    | the next one is looked for here, in a fetch under way, at the source, or (wait) from a writer to come

It ends when all keys are granted, or with a typed miss; what was granted stays leased until released. A ticket that cannot go on
is *parked* on its next key, or *starved* where a pull has no credit left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kv_pool.keys import BlockKey
from kv_pool.node.blocks import Block, Blocks
from kv_pool.node.clients import Client, TicketId
from kv_pool.node.fetches import Fetch, Fetches
from kv_pool.node.messages import Acquire, Ended, Grant, Granted, Miss, Peer, Pull, Release, Stalled
from kv_pool.node.slots import Slots
from kv_pool.node.stimuli import Action, CancelFetch, Send, SendBlock, StartFetch
from kv_pool.settings import PoolSettings

GRANTS_PER_MESSAGE_MAX: Final = 64


@dataclass(slots=True)
class Lease:
    block: Block
    client: Client
    on_the_way: bool
    """The bytes travel to another node: the lease holds a credit."""


@dataclass(slots=True)
class Ticket:
    """``position`` is the next key to grant; ``settled`` says why the source will give no more. ``source`` is never this node."""

    client: Client
    request: Acquire | Pull
    source: Peer | None
    deadline: float
    position: int = 0
    settled: Miss | None = None
    fetches: set[int] = field(default_factory=set[int])

    @property
    def id(self) -> TicketId:
        return self.client.name, self.request.ticket

    @property
    def done(self) -> bool:
        return self.position == len(self.request.keys)

    @property
    def next_key(self) -> BlockKey:
        return self.request.keys[self.position]


class Readers:
    """``writing(key)`` says whether somebody here is about to commit ``key``."""

    def __init__(
        self, node_id: str, slots: Slots, blocks: Blocks, settings: PoolSettings, writing: Callable[[BlockKey], bool]
    ) -> None:
        self._node_id = node_id
        self._slots = slots
        self._blocks = blocks
        self._settings = settings
        self._writing = writing
        self.leases: dict[int, Lease] = {}
        self.tickets: dict[TicketId, Ticket] = {}
        self.fetches = Fetches()
        self._parked: dict[BlockKey, dict[TicketId, None]] = {}
        self._next_lease = 0
        self.hits = 0
        self.misses = 0
        self.late = 0

    # --- doors ----------------------------------------------------------------------------------------------------------------

    def ask(self, client: Client, request: Acquire | Pull, now: float) -> list[Action]:
        source = request.source if isinstance(request, Acquire) else None
        if source is not None and source.node_id == self._node_id:
            source = None
        return self._advance(Ticket(client, request, source, now + request.timeout_s), now)

    def cancel(self, client: Client, ticket: int) -> list[Action]:
        found = self.tickets.get((client.name, ticket))
        return [] if found is None else self._drop(found)

    def release(self, client: Client, release: Release, now: float) -> list[Action]:
        """One released twice, or taken back meanwhile, is nothing to do."""
        if release.lease not in client.leases:
            return []
        lease = self.leases[release.lease]
        actions: list[Action] = []
        if release.consume and lease.block.private and not lease.block.removed:
            actions += self._blocks.remove(lease.block)
        actions += self._end_lease(release.lease)
        for ticket_id in list(client.starved):
            actions += self._advance(self.tickets[ticket_id], now)
        return actions

    def expire(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for ticket in [t for t in self.tickets.values() if t.deadline <= now]:
            actions += self._end(ticket, Miss.LATE)
        return actions

    def next_deadline(self) -> float | None:
        return min((t.deadline for t in self.tickets.values()), default=None)

    def forget(self, client: Client) -> list[Action]:
        """Drop all that a client waits for and reads."""
        actions: list[Action] = []
        for number in sorted(client.tickets):
            actions += self._drop(self.tickets[client.name, number])
        for number in sorted(client.leases):
            actions += self._end_lease(number)
        return actions

    def committed(self, key: BlockKey, now: float, *, remote: bool = False) -> list[Action]:
        """``key`` is visible now."""
        actions: list[Action] = []
        for ticket in self._parked_on(key):
            actions += self._advance(ticket, now, arrived=key if remote else None)
        return actions

    def writer_gone(self, key: BlockKey, now: float) -> list[Action]:
        """Nobody here will commit ``key`` after all: its waiters look elsewhere."""
        return [action for ticket in self._parked_on(key) for action in self._advance(ticket, now)]

    # --- fetches --------------------------------------------------------------------------------------------------------------

    def wants(self, fetch_id: int, key: BlockKey) -> bool:
        """Whether a block that has arrived is one that was asked for and is not here yet."""
        fetch = self.fetches.get(fetch_id)
        if fetch is None or self.fetches.of_key(key) is not fetch:
            return False
        fetch.stalled = False
        return self._blocks.get(key) is None

    def not_landed(self, key: BlockKey, miss: Miss, now: float) -> list[Action]:
        """A fetched block could not be kept (no room, not sound): whoever waits for that fetch gets ``miss``."""
        fetch = self.fetches.of_key(key)
        actions: list[Action] = []
        for ticket in self._parked_on(key):
            if fetch is not None and ticket.source == fetch.peer:
                ticket.settled = miss
            actions += self._advance(ticket, now)
        return actions

    def fetch_stalled(self, fetch_id: int) -> list[Action]:
        """The peer waits for a key itself: those that do not want to wait have what there is."""
        fetch = self.fetches.get(fetch_id)
        if fetch is None:
            return []
        fetch.stalled = True
        waiters = [self.tickets[ticket_id] for ticket_id in sorted(fetch.waiters)]
        impatient = [t for t in waiters if not t.request.wait and self.fetches.of_key(t.next_key) is fetch]
        return [action for ticket in impatient for action in self._end(ticket, Miss.NOT_FOUND)]

    def fetch_ended(self, fetch_id: int, miss: Miss | None, now: float) -> list[Action]:
        """Its waiters look again; for those that asked as it did, the source has had its say."""
        fetch = self.fetches.end(fetch_id)
        if fetch is None:
            return []
        keys = set(fetch.keys)
        actions: list[Action] = []
        for ticket_id in sorted(fetch.waiters):
            ticket = self.tickets[ticket_id]
            ticket.fetches.discard(fetch.id)
            if ticket.next_key not in keys:
                continue
            # All came, and yet the next one is not here: it was dropped, which asking again would not change.
            why = miss or Miss.REFUSED
            promised = ticket.request.wait and self._writing(ticket.next_key)
            if (
                ticket.source == fetch.peer
                and not promised
                and fetch.settles(why, wait=ticket.request.wait, deadline=ticket.deadline)
            ):
                ticket.settled = why
            actions += self._advance(ticket, now)
        return actions

    # --- a ticket's way -------------------------------------------------------------------------------------------------------

    def _advance(self, ticket: Ticket, now: float, *, arrived: BlockKey | None = None) -> list[Action]:
        """Grant what can be granted now; then park, starve, or end. ``arrived`` came from a peer for this ticket."""
        self._unpark(ticket)
        first = ticket.position
        actions: list[Action] = []
        grants: list[Grant] = []
        while not ticket.done and (block := self._blocks.get(ticket.next_key)) is not None:
            if isinstance(ticket.request, Pull):
                if ticket.client.blocks_on_the_way >= min(ticket.request.credits, self._settings.fetch_inflight_blocks):
                    return [*actions, *self._wait(ticket, starved=True)]
                granted = Granted(ticket.request.ticket, ticket.position, (self._grant(ticket, block, now, on_the_way=True),))
                actions.append(SendBlock(ticket.client.name, granted, block.slot, block.length))
            else:
                grants.append(self._grant(ticket, block, now, remote=block.key == arrived))
            ticket.position += 1
        for start in range(0, len(grants), GRANTS_PER_MESSAGE_MAX):
            batch = tuple(grants[start : start + GRANTS_PER_MESSAGE_MAX])
            actions.append(Send(ticket.client.name, Granted(ticket.request.ticket, first + start, batch)))
        return actions + (self._end(ticket, None) if ticket.done else self._look_elsewhere(ticket, now))

    def _look_elsewhere(self, ticket: Ticket, now: float) -> list[Action]:
        wait, key = ticket.request.wait, ticket.next_key
        if wait and self._writing(key):
            return self._wait(ticket)
        if ticket.source is not None and ticket.settled is None:
            fetch = self.fetches.of_key(key)
            if fetch is not None and fetch.stalled and not wait:
                return self._end(ticket, Miss.NOT_FOUND)
            parked = self._wait(ticket)
            if ticket.id not in self.tickets:
                return parked
            if fetch is None:
                fetch, started = self._start_fetch(ticket, ticket.source, now)
                parked.append(started)
            fetch.waiters.add(ticket.id)
            ticket.fetches.add(fetch.id)
            return parked
        if wait and ticket.source is None:
            return self._wait(ticket)
        return self._end(ticket, ticket.settled or Miss.NOT_FOUND)

    def _start_fetch(self, ticket: Ticket, peer: Peer, now: float) -> tuple[Fetch, StartFetch]:
        """Ask for what the ticket still lacks, up to the first key that is under way already."""
        keys: list[BlockKey] = []
        for key in ticket.request.keys[ticket.position :]:
            if self.fetches.of_key(key) is not None:
                break
            if self._blocks.get(key) is None:
                keys.append(key)
        fetch = self.fetches.start(peer, tuple(keys), wait=ticket.request.wait, deadline=ticket.deadline)
        return fetch, StartFetch(fetch.id, peer, fetch.keys, fetch.wait, max(0.0, ticket.deadline - now))

    def _grant(self, ticket: Ticket, block: Block, now: float, *, remote: bool = False, on_the_way: bool = False) -> Grant:
        self._next_lease += 1
        lease = self._next_lease
        self._blocks.lease(block, now)
        self.leases[lease] = Lease(block, ticket.client, on_the_way)
        ticket.client.leases.add(lease)
        ticket.client.blocks_on_the_way += on_the_way
        self.hits += 1
        return Grant(
            block.key, block.parent, lease, block.slot, self._slots.epoch(block.slot), block.tokens, block.length,
            block.checksum, block.meta, block.private, remote,
        )  # fmt: skip

    def _end(self, ticket: Ticket, miss: Miss | None) -> list[Action]:
        if miss is not None:
            self.misses += len(ticket.request.keys) - ticket.position
            self.late += miss is Miss.LATE
        ended = Send(ticket.client.name, Ended(ticket.request.ticket, ticket.position, miss))
        return [*self._drop(ticket), ended]

    def _drop(self, ticket: Ticket) -> list[Action]:
        """Forget a ticket; a fetch that nobody waits for any more is called off."""
        self._unpark(ticket)
        self.tickets.pop(ticket.id, None)
        ticket.client.tickets.discard(ticket.request.ticket)
        actions: list[Action] = []
        for number in sorted(ticket.fetches):
            fetch = self.fetches.get(number)
            if fetch is not None:
                fetch.waiters.discard(ticket.id)
                if not fetch.waiters:
                    self.fetches.end(number)
                    actions.append(CancelFetch(number, fetch.peer))
        ticket.fetches.clear()
        return actions

    def _wait(self, ticket: Ticket, *, starved: bool = False) -> list[Action]:
        """Park or starve a ticket, or end it where too many wait already."""
        if ticket.id not in self.tickets:
            if len(self.tickets) >= self._settings.waiting_acquires_max:
                return self._end(ticket, Miss.REFUSED)
            self.tickets[ticket.id] = ticket
            ticket.client.tickets.add(ticket.request.ticket)
        if starved:
            ticket.client.starved[ticket.id] = None
            return []
        self._parked.setdefault(ticket.next_key, {})[ticket.id] = None
        if isinstance(ticket.request, Pull):
            return [Send(ticket.client.name, Stalled(ticket.request.ticket))]
        return []

    def _unpark(self, ticket: Ticket) -> None:
        ticket.client.starved.pop(ticket.id, None)
        if ticket.done:
            return
        parked = self._parked.get(ticket.next_key)
        if parked is not None:
            parked.pop(ticket.id, None)
            if not parked:
                del self._parked[ticket.next_key]

    def _parked_on(self, key: BlockKey) -> list[Ticket]:
        return [self.tickets[ticket_id] for ticket_id in self._parked.get(key, ())]

    def _end_lease(self, number: int) -> list[Action]:
        lease = self.leases.pop(number)
        lease.client.leases.discard(number)
        lease.client.blocks_on_the_way -= lease.on_the_way
        return self._blocks.unlease(lease.block)

    # --- for tests ------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that all tables tell the same."""
        for number, lease in self.leases.items():
            assert number in lease.client.leases
            assert lease.block.leases > 0
        waiting = {i for parked in self._parked.values() for i in parked}
        starved = {i for ticket in self.tickets.values() for i in ticket.client.starved}
        assert waiting | starved == set(self.tickets)
        assert not waiting & starved
        for key, parked in self._parked.items():
            assert parked
            assert all(self.tickets[i].next_key == key for i in parked)
            assert self._blocks.get(key) is None
        joined = {(n, t.id) for t in self.tickets.values() for n in t.fetches}
        assert joined == self.fetches.memberships()
        assert len(self.tickets) <= self._settings.waiting_acquires_max
