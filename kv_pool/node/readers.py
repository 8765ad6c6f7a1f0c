"""Acquires and pulls: what is granted, what they wait for, and the leases they leave. Pure.

An acquire under way is a *ticket* of a client::

    keys    k0  k1  k2 | k3  k4  k5
            granted    | the next one is looked for in DRAM, from a writer at work (wait), on the SSD, at one source after the
                       | other, or (wait) from a writer to come

It ends when all keys are granted, or with a typed miss; what was granted stays leased until released. A ticket that cannot go
on is *parked* on its next key, or *starved* where a pull has no credit left. One that is *hungry* has keys on the SSD for which
no read was free yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kv_pool.keys import BlockKey
from kv_pool.node.blocks import Block, Blocks
from kv_pool.node.clients import Client, TicketId
from kv_pool.node.fetches import Fetch, Fetches
from kv_pool.node.messages import Acquire, Ended, Granted, Miss, Peer, Pull, Release, Stalled, Tier
from kv_pool.node.ssd_reads import SsdReads
from kv_pool.node.stimuli import Action, CancelFetch, Send, SendBlock, StartFetch
from kv_pool.node.tickets import Ticket
from kv_pool.settings import PoolSettings
from kv_pool.ssd.log import Missing

GRANTS_PER_MESSAGE_MAX: Final = 256
META_BYTES_PER_MESSAGE_MAX: Final = 128 * 1024
"""With the rows well below what a message may have."""
DRAM_TIERS: Final = bytes(GRANTS_PER_MESSAGE_MAX)


class Readers:
    """``writing(key)`` says whether somebody here is about to commit ``key``."""

    def __init__(
        self,
        node_id: str,
        blocks: Blocks,
        settings: PoolSettings,
        writing: Callable[[BlockKey], bool],
        ssd: SsdReads,
    ) -> None:
        self._node_id = node_id
        self._blocks = blocks
        self._settings = settings
        self._writing = writing
        self._ssd = ssd
        self.tickets: dict[TicketId, Ticket] = {}
        self.fetches = Fetches()
        self._parked: dict[BlockKey, dict[TicketId, None]] = {}
        self._hungry: dict[TicketId, None] = {}
        self._next_lease = 0
        self.leases = 0
        self.hits = 0
        self.misses = 0
        self.late = 0

    # --- doors ----------------------------------------------------------------------------------------------------------------

    def ask(self, client: Client, request: Acquire | Pull, now: float) -> list[Action]:
        sources = request.sources if isinstance(request, Acquire) else ()
        elsewhere = tuple(source for source in sources if source.node_id != self._node_id)
        return self._advance(Ticket(client, request, elsewhere, now + request.timeout_s), now)

    def cancel(self, client: Client, ticket: int) -> list[Action]:
        found = self.tickets.get((client.name, ticket))
        return [] if found is None else self._drop(found)

    def release(self, client: Client, release: Release, now: float) -> list[Action]:
        """One released twice, or taken back meanwhile, is nothing to do."""
        actions: list[Action] = []
        for lease in release.leases:
            block = client.leases.get(lease)
            if block is None:
                continue
            if release.consume and block.private and not block.removed:
                actions += self._blocks.remove(block)
            self._pulled(client, lease)
            actions += self._end_lease(client, lease)
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
            actions += self._end_lease(client, number)
        return actions

    def committed(self, key: BlockKey, now: float) -> list[Action]:
        """``key`` is visible now."""
        return [action for ticket in self._parked_on(key) for action in self._advance(ticket, now)]

    def writer_gone(self, key: BlockKey, now: float) -> list[Action]:
        """Nobody here will commit ``key`` after all: its waiters look elsewhere."""
        return [action for ticket in self._parked_on(key) for action in self._advance(ticket, now)]

    # --- the SSD --------------------------------------------------------------------------------------------------------------

    def not_loaded(self, key: BlockKey, miss: Miss, now: float) -> list[Action]:
        """The SSD does not give ``key`` after all: its waiters look elsewhere."""
        for ticket in self.tickets.values():
            if ticket.came_from.pop(key, None) is not None:
                ticket.failed[key] = miss
        return [action for ticket in self._parked_on(key) for action in self._advance(ticket, now)]

    def starve(self, now: float) -> list[Action]:
        """No read will ever be free again: those that queue for one look elsewhere."""
        hungry, self._hungry = list(self._hungry), {}
        return [action for ticket_id in hungry for action in self._advance(self.tickets[ticket_id], now)]

    def feed(self, now: float) -> list[Action]:
        """A read has ended: those that had to queue for one go on, in order."""
        actions: list[Action] = []
        for ticket_id in list(self._hungry):
            if self._ssd.full:
                break
            del self._hungry[ticket_id]
            actions += self._load_more(self.tickets[ticket_id], now)
        return actions

    # --- fetches --------------------------------------------------------------------------------------------------------------

    def arrived(self, key: BlockKey, tier: Tier, now: float) -> list[Action]:
        """A fetched block is visible now; ``tier`` is where its node had it."""
        fetch = self.fetches.of_key(key)
        if fetch is not None:
            for ticket_id in fetch.waiters:
                self.tickets[ticket_id].came_from[key] = tier.remote
        return self.committed(key, now)

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
                ticket.settle(miss)
            actions += self._advance(ticket, now)
        return actions

    def fetch_stalled(self, fetch_id: int, now: float) -> list[Action]:
        """The peer waits for a key itself: those that do not want to wait have what there is."""
        fetch = self.fetches.get(fetch_id)
        if fetch is None:
            return []
        fetch.stalled = True
        waiters = [self.tickets[ticket_id] for ticket_id in sorted(fetch.waiters)]
        impatient = [t for t in waiters if not t.patient and self.fetches.of_key(t.next_key) is fetch]
        actions: list[Action] = []
        for ticket in impatient:
            if ticket.source == fetch.peer:
                ticket.settle(Miss.NOT_FOUND)
            actions += self._advance(ticket, now)
        return actions

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
            if ticket.source == fetch.peer and not promised and fetch.settles(why, wait=ticket.patient, deadline=ticket.deadline):
                ticket.settle(why)
            actions += self._advance(ticket, now)
        return actions

    # --- a ticket's way -------------------------------------------------------------------------------------------------------

    def _advance(self, ticket: Ticket, now: float) -> list[Action]:
        """Grant what can be granted now; then park, starve, or end."""
        self._unpark(ticket)
        if isinstance(ticket.request, Pull):
            return self._advance_pull(ticket, ticket.request, now)
        actions: list[Action] = []
        while granted := self._grant_run(ticket, now):
            actions.append(Send(ticket.client.name, granted))
            if granted.ended:
                return actions + self._drop(ticket)
        return actions + self._look_elsewhere(ticket, now)

    def _advance_pull(self, ticket: Ticket, pull: Pull, now: float) -> list[Action]:
        """One message a block: the bytes travel with it."""
        client = ticket.client
        credits_left = min(pull.credits, self._settings.fetch_inflight_blocks)
        actions: list[Action] = []
        while not ticket.done and (block := self._blocks.get(ticket.next_key)) is not None:
            if len(client.on_the_way) >= credits_left:
                return [*actions, *self._wait(ticket, starved=True)]
            self._next_lease += 1
            self._lease(client, block, now)
            client.on_the_way.add(self._next_lease)
            tier = ticket.came_from.pop(block.key, Tier.DRAM)
            metas = (block.meta,) if block.meta else ()
            granted = Granted(pull.ticket, ticket.position, self._next_lease, block.row, bytes((tier,)), metas)
            actions.append(SendBlock(client.name, granted, block.slot, block.length))
            ticket.position += 1
        return actions + (self._end(ticket, None) if ticket.done else self._look_elsewhere(ticket, now))

    def _grant_run(self, ticket: Ticket, now: float) -> Granted | None:
        """Lease the blocks that are here, as many as go in a message; None where the next one is not."""
        keys, client, get = ticket.request.keys, ticket.client, self._blocks.get
        first, lease = ticket.position, self._next_lease + 1
        run: list[Block] = []
        meta_bytes = 0
        for key in keys[first : first + GRANTS_PER_MESSAGE_MAX]:
            block = get(key)
            if block is None or meta_bytes > META_BYTES_PER_MESSAGE_MAX:
                break
            meta_bytes += len(block.meta)
            self._next_lease += 1
            self._lease(client, block, now)
            run.append(block)
        if not run:
            return None
        ticket.position += len(run)
        came_from = ticket.came_from
        tiers = bytes(came_from.pop(b.key, Tier.DRAM) for b in run) if came_from else DRAM_TIERS[: len(run)]
        metas = tuple(b.meta for b in run) if any(b.meta for b in run) else ()
        rows = b"".join([b.row for b in run])
        return Granted(ticket.request.ticket, first, lease, rows, tiers, metas, ended=ticket.done)

    def _lease(self, client: Client, block: Block, now: float) -> None:
        self._blocks.lease(block, now)
        client.leases[self._next_lease] = block
        self.leases += 1
        self.hits += 1

    def _look_elsewhere(self, ticket: Ticket, now: float) -> list[Action]:
        wait, key = ticket.request.wait, ticket.next_key
        if key in self._ssd.loads:
            ticket.came_from[key] = Tier.SSD
            return self._wait(ticket, quiet=True)
        if wait and self._writing(key):
            return self._wait(ticket)
        match Missing.ABSENT if key in ticket.failed else self._ssd.find(key, now):
            case Missing.EXPIRED:
                ticket.miss = Miss.EXPIRED
            case Missing.ABSENT:
                ticket.miss = ticket.failed.get(key, ticket.miss)
            case _:
                parked = self._wait(ticket, quiet=True)
                return parked + self._load_more(ticket, now) if ticket.id in self.tickets else parked
        while ticket.source is not None:
            fetch = self.fetches.of_key(key)
            if fetch is not None and fetch.stalled and not ticket.patient:
                if fetch.peer == ticket.source:
                    ticket.settle(Miss.NOT_FOUND)
                    continue
                break
            parked = self._wait(ticket, quiet=True)
            if ticket.id not in self.tickets:
                return parked
            if fetch is None:
                fetch, started = self._start_fetch(ticket, ticket.source, now)
                parked.append(started)
            fetch.waiters.add(ticket.id)
            ticket.fetches.add(fetch.id)
            return parked
        if wait and not (isinstance(ticket.request, Acquire) and self._elsewhere(ticket.request)):
            return self._wait(ticket)
        return self._end(ticket, ticket.miss or Miss.NOT_FOUND)

    def _elsewhere(self, request: Acquire) -> bool:
        return any(source.node_id != self._node_id for source in request.sources)

    def _load_more(self, ticket: Ticket, now: float) -> list[Action]:
        """Order reads for what the ticket needs next and the SSD has. It is parked."""
        actions: list[Action] = []
        for key in ticket.request.keys[ticket.position :]:
            if self._blocks.get(key) is not None:
                continue
            if key not in self._ssd.loads:
                if self._ssd.full:
                    self._hungry[ticket.id] = None
                    break
                read = self._ssd.start(key, now)
                if read is None:
                    break
                actions += read
            ticket.came_from[key] = Tier.SSD
        if ticket.next_key in self._ssd.loads or ticket.id in self._hungry:
            return actions
        # No slot to read into, or it has just gone from the SSD: perhaps another node has it.
        ticket.failed.setdefault(ticket.next_key, Miss.REFUSED)
        return actions + self._advance(ticket, now)

    def _start_fetch(self, ticket: Ticket, peer: Peer, now: float) -> tuple[Fetch, StartFetch]:
        """Ask for what the ticket still lacks, up to the first key that is under way already."""
        keys: list[BlockKey] = []
        for key in ticket.request.keys[ticket.position :]:
            if self.fetches.of_key(key) is not None:
                break
            if self._blocks.get(key) is None:
                keys.append(key)
        fetch = self.fetches.start(peer, tuple(keys), wait=ticket.patient, deadline=ticket.deadline)
        return fetch, StartFetch(fetch.id, peer, fetch.keys, fetch.wait, max(0.0, ticket.deadline - now))

    def _end(self, ticket: Ticket, miss: Miss | None) -> list[Action]:
        if miss is not None:
            self.misses += len(ticket.request.keys) - ticket.position
            self.late += miss is Miss.LATE
        ended = Send(ticket.client.name, Ended(ticket.request.ticket, ticket.position, miss))
        return [*self._drop(ticket), ended]

    def _drop(self, ticket: Ticket) -> list[Action]:
        """Forget a ticket; a fetch that nobody waits for any more is called off."""
        self._unpark(ticket)
        ticket.came_from.clear()
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

    def _wait(self, ticket: Ticket, *, starved: bool = False, quiet: bool = False) -> list[Action]:
        """Park or starve a ticket, or end it where too many wait already. ``quiet``: for bytes that are on their way, of which a
        puller need not know."""
        if ticket.id not in self.tickets:
            if len(self.tickets) >= self._settings.waiting_acquires_max:
                return self._end(ticket, Miss.REFUSED)
            self.tickets[ticket.id] = ticket
            ticket.client.tickets.add(ticket.request.ticket)
        if starved:
            ticket.client.starved[ticket.id] = None
            return []
        self._parked.setdefault(ticket.next_key, {})[ticket.id] = None
        if isinstance(ticket.request, Pull) and not quiet:
            return [Send(ticket.client.name, Stalled(ticket.request.ticket))]
        return []

    def _unpark(self, ticket: Ticket) -> None:
        ticket.client.starved.pop(ticket.id, None)
        self._hungry.pop(ticket.id, None)
        if ticket.done:
            return
        parked = self._parked.get(ticket.next_key)
        if parked is not None:
            parked.pop(ticket.id, None)
            if not parked:
                del self._parked[ticket.next_key]

    def _parked_on(self, key: BlockKey) -> list[Ticket]:
        return [self.tickets[ticket_id] for ticket_id in self._parked.get(key, ())]

    def _end_lease(self, client: Client, number: int) -> list[Action]:
        client.on_the_way.discard(number)
        self.leases -= 1
        return self._blocks.unlease(client.leases.pop(number))

    def _pulled(self, client: Client, number: int) -> None:
        """The other node has the block now."""
        if number in client.on_the_way and self._settings.pulled_copy == "goes_first":
            self._blocks.yields(client.leases[number])

    # --- for tests ------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that all tables tell the same."""
        waiting = {i for parked in self._parked.values() for i in parked}
        starved = {i for ticket in self.tickets.values() for i in ticket.client.starved}
        assert waiting | starved == set(self.tickets)
        assert not waiting & starved
        for key, parked in self._parked.items():
            assert parked
            assert all(self.tickets[i].next_key == key for i in parked)
            assert self._blocks.get(key) is None
        assert set(self._hungry) <= waiting
        joined = {(n, t.id) for t in self.tickets.values() for n in t.fetches}
        assert joined == self.fetches.memberships()
        assert len(self.tickets) <= self._settings.waiting_acquires_max
