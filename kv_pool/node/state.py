"""One pool node's decisions. :meth:`NodeState.handle` is the only door: an event and the time go in, actions come out. Pure.

Life of a block: reserved (a slot, one writer, nobody sees it) -> committed (visible, may be leased) -> gone (evicted as an
unleased leaf, consumed, expired). Two phases, so nothing half-written is ever visible. ``writers.py`` has the first half,
``readers.py`` the second, ``blocks.py`` what lies between.
"""

from __future__ import annotations

from kv_pool.events.types import SSD, BlockRemoved
from kv_pool.keys import BlockKey
from kv_pool.node.blocks import Blocks
from kv_pool.node.clients import Client
from kv_pool.node.demotion import Demotion
from kv_pool.node.messages import (
    Abandon,
    Acquire,
    Alive,
    Cancel,
    Commit,
    ErrorCode,
    Goodbye,
    Hello,
    Keepalive,
    Miss,
    Pull,
    Refusal,
    Release,
    Request,
    Reserve,
)
from kv_pool.node.readers import Readers
from kv_pool.node.slots import Slots, SlotState
from kv_pool.node.ssd_reads import SsdReads
from kv_pool.node.stimuli import (
    Action,
    Asked,
    BlockArrived,
    BlockLanded,
    ClientGone,
    Drain,
    Event,
    FetchEnded,
    FetchStalled,
    Greet,
    Land,
    ProcessGone,
    Publish,
    Send,
    Tick,
)
from kv_pool.node.wall_clock import WallClock
from kv_pool.node.writers import Writers
from kv_pool.policy.eviction import EvictionPolicy
from kv_pool.settings import PoolSettings, SsdSettings
from kv_pool.ssd.make import make_log
from kv_pool.ssd.records import BatchWritten, DiskDown, DiskUp, RecordRead

CLIENTS_MAX = 4096
BUDGET_SAVE_PERIOD_S = 30.0


class NodeState:
    """Not thread-safe; one owner, who carries out the actions in order and before the next event. ``ssd`` is None where the
    node has no SSD tier; ``wall_offset`` is what to add to ``now`` for wall-clock time."""

    def __init__(
        self,
        *,
        node_id: str,
        slots: int,
        slot_bytes: int,
        block_tokens: int | None,
        settings: PoolSettings,
        policy: EvictionPolicy,
        ssd: SsdSettings | None = None,
        wall_offset: float = 0.0,
    ) -> None:
        self._settings = settings
        self.log = log = None if ssd is None else make_log(settings, ssd, self._resident)
        ssd = ssd or SsdSettings()
        self.slots = Slots(slots)
        self.blocks = Blocks(self.slots, policy, self._left_dram)
        self.writers = Writers(self.slots, self.blocks, settings, slot_bytes=slot_bytes, block_tokens=block_tokens)
        self._clock = clock = WallClock(wall_offset)
        self.ssd_reads = SsdReads(log, self.writers, slot_bytes=slot_bytes, in_flight_max=ssd.reads_in_flight, clock=clock)
        self.demotion = Demotion(self.slots, self.blocks, log, free_target=ssd.free_target, clock=clock)
        self.readers = Readers(node_id, self.blocks, settings, self.writers.writing, self.ssd_reads)
        self.clients: dict[str, Client] = {}
        self.commits = 0
        self.corrupt = 0
        self.clients_lost = 0
        self._budget_saved_at = -BUDGET_SAVE_PERIOD_S

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about ``event`` at ``now`` (seconds, monotonic)."""
        # Whatever happened may have made room for those that wait for it, or taken what should be kept free.
        actions = self._react(event, now)
        actions += self.writers.serve()
        return actions + self.demotion.run(now) if self.log is not None else actions

    def last_words(self, now: float) -> list[Action]:
        """What is to be kept when the node ends in good order."""
        return self.demotion.save_budget(now, at_once=True)

    def next_deadline(self) -> float | None:
        """When a Tick is due at the latest, but for private blocks and silent clients."""
        return min((d for d in (self.writers.next_deadline(), self.readers.next_deadline()) if d is not None), default=None)

    @property
    def empty(self) -> bool:
        """Whether the process may end without taking anything along that somebody uses or that is on its way to the SSD."""
        return self.slots.free == self.slots.count

    def ssd_keys(self) -> list[BlockKey]:
        return [] if self.log is None else self.log.keys()

    def _react(self, event: Event, now: float) -> list[Action]:
        match event:
            case Asked(client, request):
                return self._asked(client, request, now)
            case ClientGone(client):
                return self._forget(client, now, may_write=True)
            case ProcessGone(pid, started):
                return self._process_gone(pid, started, now)
            case BlockArrived():
                return self._block_arrived(event, now)
            case BlockLanded():
                return self._block_landed(event, now)
            case FetchStalled(fetch):
                return self.readers.fetch_stalled(fetch, now)
            case FetchEnded(fetch, miss):
                return self.readers.fetch_ended(fetch, miss, now)
            case RecordRead():
                return self._record_read(event, now)
            case BatchWritten():
                return [*self.demotion.written(event, now), *self.demotion.save_budget(now, at_once=False)]
            case DiskUp():
                return self.demotion.disk_up(event, now)
            case DiskDown():
                return self._disk_down(now)
            case Drain(enable):
                self.demotion.draining = enable
                return self.writers.drain(enable=enable)
            case Tick(wall_offset):
                if wall_offset is not None:
                    self._clock.offset = wall_offset
                return self._tick(now)

    # --- requests -----------------------------------------------------------------------------------------------------------

    def _asked(self, name: str, request: Request, now: float) -> list[Action]:
        if isinstance(request, Hello):
            return self._hello(name, request, now)
        client = self.clients.get(name)
        if client is None:
            # Given up as dead, or never met. A silent writer that speaks has finished writing: its slots are free again.
            return [*self.writers.client_spoke(name), Send(name, Refusal(ErrorCode.UNKNOWN_CLIENT))]
        client.heard_at = now
        match request:
            case Reserve() | Acquire() | Pull():
                if request.ticket <= client.last_ticket:
                    return [Send(name, Refusal(ErrorCode.REPLAYED))]
                client.last_ticket = request.ticket
                if isinstance(request, Reserve):
                    return self.writers.reserve(client, request, now)
                return self.readers.ask(client, request, now)
            case Commit():
                key, actions = self.writers.commit(client, request, now)
                return actions if key is None else actions + self._visible(key, now)
            case Abandon():
                key, actions = self.writers.abandon(client, request)
                return actions if key is None else actions + self.readers.writer_gone(key, now)
            case Cancel(ticket):
                return self.readers.cancel(client, ticket)
            case Release():
                return self.readers.release(client, request, now)
            case Keepalive():
                client.renewed_at = now
                return [Send(name, Alive())]
            case Goodbye():
                return self._forget(name, now, may_write=False)

    def _hello(self, name: str, hello: Hello, now: float) -> list[Action]:
        client = self.clients.get(name)
        if client is None:
            if len(self.clients) >= CLIENTS_MAX:
                return [Send(name, Refusal(ErrorCode.TOO_MANY_CLIENTS))]
            client = self.clients[name] = Client(name, hello.pid, hello.started, heard_at=now, renewed_at=now)
        client.heard_at = client.renewed_at = now
        return [*self.writers.client_spoke(name), Greet(name)]

    def _visible(self, key: BlockKey, now: float) -> list[Action]:
        self.commits += 1
        return self.readers.committed(key, now)

    # --- ends ---------------------------------------------------------------------------------------------------------------

    def _forget(self, name: str, now: float, *, may_write: bool) -> list[Action]:
        """Take back everything that the client held."""
        client = self.clients.pop(name, None)
        if client is None:
            return []
        actions = self.readers.forget(client)
        orphaned, more = self.writers.forget(client, may_write=may_write)
        actions += more
        for key in orphaned:
            actions += self.readers.writer_gone(key, now)
        return actions

    def _process_gone(self, pid: int, started: int, now: float) -> list[Action]:
        actions = self.writers.process_gone(pid, started)
        for name in [n for n, c in self.clients.items() if (c.pid, c.started) == (pid, started)]:
            self.clients_lost += 1
            actions += self._forget(name, now, may_write=False)
        return actions

    def _tick(self, now: float) -> list[Action]:
        actions = self.blocks.expire(now)
        actions += self._ssd_tick(now)
        actions += self.readers.expire(now)
        actions += self.writers.expire(now)
        silent, unrenewed = now - self._settings.client_dead_s, now - self._settings.lease_s
        for name in [n for n, c in self.clients.items() if c.heard_at < silent or c.renewed_at < unrenewed]:
            self.clients_lost += 1
            actions += self._forget(name, now, may_write=True)
        return actions

    # --- blocks from peers --------------------------------------------------------------------------------------------------

    def _block_arrived(self, event: BlockArrived, now: float) -> list[Action]:
        key = event.commit.key
        if not self.readers.wants(event.fetch, key):
            return []
        if self.writers.writing(key):
            return self.readers.not_landed(key, Miss.REFUSED, now)
        slot, actions = self.writers.land(event.commit, private=event.private, tier=event.tier, retention=event.retention)
        if slot is None:
            return actions + self.readers.not_landed(key, Miss.REFUSED, now)
        return [*actions, Land(slot)]

    def _block_landed(self, event: BlockLanded, now: float) -> list[Action]:
        key, tier, actions = self.writers.landed(event.slot, sound=event.sound, now=now)
        if event.sound:
            return actions + self.readers.arrived(key, tier, now)
        if event.lost:  # its fetch has ended, or ends next, and says why
            return actions + self.readers.writer_gone(key, now)
        self.corrupt += 1
        return actions + self.readers.not_landed(key, Miss.CORRUPT, now)

    # --- the SSD ------------------------------------------------------------------------------------------------------------

    def _resident(self, key: BlockKey) -> bool:
        return self.blocks.get(key) is not None

    def _left_dram(self, key: BlockKey) -> list[Action]:
        """What followed a block on the SSD is worthless once it is on neither tier."""
        dropped = () if self.log is None else tuple(self.log.left_dram(key))
        return [Publish(BlockRemoved(dropped, SSD))] if dropped else []

    def _record_read(self, event: RecordRead, now: float) -> list[Action]:
        load, miss, actions = self.ssd_reads.done(event, now)
        if load is not None and miss is None:
            actions += self.readers.committed(load.key, now)
        elif load is not None and miss is not None:
            actions += self.readers.not_loaded(load.key, miss, now)
        return actions + self.readers.feed(now)

    def _disk_down(self, now: float) -> list[Action]:
        """The node goes on with its DRAM. Whoever waited for the disk looks elsewhere."""
        actions = self.demotion.disk_down(now)
        for key in self.ssd_reads.disk_down():
            actions += self.readers.not_loaded(key, Miss.NOT_FOUND, now)
        return actions + self.readers.starve(now)

    def _ssd_tick(self, now: float) -> list[Action]:
        actions = self.demotion.expire(now)
        if now - self._budget_saved_at >= BUDGET_SAVE_PERIOD_S:
            self._budget_saved_at = now
            actions += self.demotion.save_budget(now, at_once=True)
        return actions

    # --- for tests ----------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert what must always hold: every slot is in exactly one place, and all tables tell the same."""
        counts = self.slots.counts()
        assert sum(counts.values()) == self.slots.count
        assert counts[SlotState.FREE] == self.slots.free
        assert counts[SlotState.COMMITTED] == len(self.blocks) + self.blocks.lingering
        assert counts[SlotState.RESERVED] == len(self.writers.reservations)
        assert counts[SlotState.QUARANTINED] == len(self.writers.quarantined)
        self.blocks.check(self.writers.pins())
        self.writers.check()
        self.readers.check()
        held: dict[int, int] = {}  # by identity: a removed block that is still read may have a successor of the same key
        for client in self.clients.values():
            assert client.on_the_way <= client.leases.keys()
            for block in client.leases.values():
                held[id(block)] = held.get(id(block), 0) + 1
        for block in self.demotion.pinned():
            held[id(block)] = held.get(id(block), 0) + 1
        for block in self.blocks.all():
            assert block.leases == held.get(id(block), 0)
        for reservation in self.writers.reservations.values():
            assert reservation.client is None or self.clients[reservation.client.name] is reservation.client
