"""One simulated pool node: the live node's own code for what is kept where, with a simulated drive under it.

What stays, what goes and what moves to the SSD is decided by :class:`~kv_pool.node.blocks.Blocks`, the configured eviction
policy, :class:`~kv_pool.node.demotion.Demotion` and the SSD log, exactly as in a live node; events are numbered as it numbers
them. Not run here are the node's doors (client protocol, tickets, credits): their time is the profile's latency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from cluster.simulator.kernel import Kernel
from cluster.simulator.links import Network, Port
from cluster.simulator.profile import Profile
from kv_pool.events.types import DRAM, SSD, BlockEvent, BlockRemoved, BlockStored, EventBatch
from kv_pool.keys import BlockKey
from kv_pool.node.blocks import Block, Blocks
from kv_pool.node.demotion import Demotion
from kv_pool.node.slots import Slots
from kv_pool.node.stimuli import Action, Publish
from kv_pool.node.wall_clock import WallClock
from kv_pool.policy.registry import make_eviction_policy
from kv_pool.settings import PoolSettings, SsdSettings
from kv_pool.ssd.log import SsdLog
from kv_pool.ssd.make import make_log
from kv_pool.ssd.records import BatchWritten, DiskUp, Place, WriteBatch, batch_bytes

EVENT_PERIOD_S = 0.02
"""Events of this long travel as one batch."""


class PoolNode:
    """``told`` takes each event batch, when it leaves. ``ssd_blocks`` 0: no SSD tier."""

    def __init__(
        self,
        node_id: str,
        kernel: Kernel,
        network: Network,
        profile: Profile,
        *,
        dram_blocks: int,
        ssd_blocks: int,
        block_tokens: int,
        pool: PoolSettings,
        told: Callable[[EventBatch], None],
    ) -> None:
        self.id = node_id
        self.incarnation = "0"
        self.block_bytes = block_tokens * profile.kv_bytes_per_token
        self.nic_out, self.nic_in = Port(profile.nic_bytes_per_s), Port(profile.nic_bytes_per_s)
        self.copy = Port(profile.device_copy_bytes_per_s)
        self.ssd_read, self.ssd_write = Port(profile.ssd_read_bytes_per_s), Port(profile.ssd_write_bytes_per_s)
        self.sequence = -1
        self.pulls: list[tuple[str, int, float]] = []
        """(source node, bytes, seconds) since the last report."""
        self._kernel = kernel
        self._network = network
        self._block_tokens = block_tokens
        self._dram_blocks = dram_blocks
        self._pool = pool
        self._ssd = _ssd_settings(ssd_blocks, self.block_bytes) if ssd_blocks else None
        self._told = told
        self._events: list[tuple[type[BlockEvent], str, list[BlockKey], BlockKey | None]] = []
        """Kind, medium, keys and parent of what is to be sent."""
        self._sending = False
        self.restarts = 0
        self.disk_losses = 0
        """How often its DRAM and its SSD lost everything: whoever reads it notes both before and after."""
        self._open()

    # --- questions ------------------------------------------------------------------------------------------------------

    @property
    def dram_used(self) -> int:
        return len(self.blocks)

    @property
    def ssd_used(self) -> int:
        return 0 if self.log is None else len(self.log)

    @property
    def slots_free(self) -> int:
        return self.slots.free

    @property
    def slots_total(self) -> int:
        return self.slots.count

    def prefix(self, keys: Sequence[BlockKey]) -> tuple[list[Block], list[BlockKey]]:
        """The blocks of the longest prefix of ``keys`` that are in DRAM, and the keys of it that have to be read from the SSD."""
        found: list[Block] = []
        to_read: list[BlockKey] = []
        for key in keys:
            block = self.blocks.get(key)
            if block is not None:
                found.append(block)
            elif self._on_ssd(key):
                to_read.append(key)
            else:
                break
        return found, to_read

    def keys_by_medium(self) -> dict[str, list[BlockKey]]:
        return {DRAM: self.blocks.public_keys(), SSD: [] if self.log is None else self.log.keys()}

    def flushed(self) -> int:
        """Send what waits; the sequence of the last batch, which what is here now corresponds to."""
        self._send()
        return self.sequence

    # --- changes --------------------------------------------------------------------------------------------------------

    def lease(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.blocks.lease(block, self._kernel.now)

    def unlease(self, blocks: Sequence[Block]) -> None:
        """End leases, leaves first, so that the chain's root is the youngest for eviction. A node that restarted knows them no
        more."""
        for block in reversed(blocks):
            if self.blocks.get(block.key) is block or (block.removed and block.leases):
                self._publish(self.blocks.unlease(block))
        self._demote()

    def store(self, keys: Sequence[BlockKey], parent: BlockKey | None) -> int:
        """Put ``keys``, a chain that follows ``parent``, in DRAM, as far as there is room. Returns how many are there then."""
        get = self.blocks.get
        first = next((place for place, key in enumerate(keys) if get(key) is None), len(keys))
        if first == len(keys):
            return first
        holder = get(keys[first - 1]) if first else None if parent is None else get(parent)
        if holder is not None:
            self.blocks.pin_for_write(holder)  # making room must not cost what the new ones follow
        missing = sum(get(key) is None for key in keys[first:])
        while self.slots.free < missing:
            evicted = self.blocks.evict_one()
            if evicted is None:
                break
            self._publish(evicted)
        stored = first
        for place in range(first, len(keys)):
            if get(keys[place]) is None:
                if not self.slots.free:
                    break
                self._put(keys[place], keys[place - 1] if place else parent)
            stored += 1
        if holder is not None:
            self._publish(self.blocks.unlease(holder))
        self._demote()
        return stored

    def pulled(self, keys: Sequence[BlockKey], by: PoolNode) -> None:
        """``by`` has pulled ``keys`` and, as far as it has room, kept them."""
        if self._pool.pulled_copy == "goes_first":
            for key in keys:
                block = self.blocks.get(key)
                if block is not None and by.has_dram(key):
                    self.blocks.yields(block)

    def read(self, keys: Sequence[BlockKey]) -> None:
        """``keys`` have just been read from the SSD."""
        for key in keys:
            if self.log is not None:
                self.log.touch(key, self._kernel.now)

    def restart(self, incarnation: str) -> None:
        """The process died and is there again, with nothing."""
        self.incarnation = incarnation
        self.restarts += 1
        self.disk_losses += 1
        self.sequence = -1
        self.pulls.clear()
        self._events.clear()
        self._open()

    def disk_down(self) -> None:
        """The SSD is gone, or full for somebody else's files: the node goes on with its DRAM."""
        if self.log is not None and self.demotion.up:
            self.disk_losses += 1
            self._publish(self.demotion.disk_down(self._kernel.now))

    def disk_up(self) -> None:
        """An empty SSD is there."""
        if self.log is not None and not self.demotion.up:
            self._publish(self.demotion.disk_up(DiskUp((), None, ""), self._kernel.now))
            self._demote()

    def check(self) -> None:
        """Assert that the tables agree and that nobody holds a lease but the drive."""
        self.blocks.check({})
        pinned = {id(block) for block in self.demotion.pinned()}
        for block in self.blocks.all():
            assert block.leases == (id(block) in pinned), f"{self.id}: a lease was leaked"
        assert self.slots.count == self.slots.free + len(self.blocks) + self.blocks.lingering

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.slots = Slots(self._dram_blocks)
        self.log: SsdLog | None = None if self._ssd is None else make_log(self._pool, self._ssd, lambda key: self.has_dram(key))
        self.blocks = Blocks(self.slots, make_eviction_policy(self._pool.eviction), self._left_dram)
        ssd = self._ssd or SsdSettings()
        self.demotion = Demotion(self.slots, self.blocks, self.log, free_target=ssd.free_target, clock=WallClock(0.0))
        if self.log is not None:
            self._publish(self.demotion.disk_up(DiskUp((), None, ""), self._kernel.now))

    def has_dram(self, key: BlockKey) -> bool:
        return self.blocks.get(key) is not None

    def _on_ssd(self, key: BlockKey) -> bool:
        return self.log is not None and isinstance(self.log.find(key, self._kernel.now), Place)

    def _put(self, key: BlockKey, parent: BlockKey | None) -> None:
        slot = self.slots.take()
        self.slots.commit(slot)
        block = Block(key, slot, parent, self._block_tokens, self.block_bytes, 0, b"", self._kernel.now, b"")
        self._publish(self.blocks.store(block))

    def _left_dram(self, key: BlockKey) -> list[Action]:
        dropped = () if self.log is None else tuple(self.log.left_dram(key))
        return [Publish(BlockRemoved(dropped, SSD))] if dropped else []

    def _demote(self) -> None:
        if self.log is not None:
            self._publish(self.demotion.run(self._kernel.now))

    def _publish(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if type(action) is Publish:
                self._note(action.event)
            elif type(action) is WriteBatch:
                size = batch_bytes(action)
                self._network.start([self.ssd_write], size, partial(self._written, action, size, self.disk_losses))
            # Epochs and budgets are for what runs in other processes.
        if self._events and not self._sending:
            self._sending = True
            self._kernel.after(EVENT_PERIOD_S, self._send)

    def _note(self, event: BlockEvent) -> None:
        """An event to send. Those of one kind and medium that follow each other travel as one."""
        last = self._events[-1] if self._events else None
        if last is not None and type(event) is last[0] and event.medium == last[1]:  # type: ignore[union-attr]
            last[2].extend(event.keys)  # type: ignore[union-attr]
        elif isinstance(event, BlockStored):
            self._events.append((BlockStored, event.medium, list(event.keys), event.parent))
        elif isinstance(event, BlockRemoved):
            self._events.append((BlockRemoved, event.medium, list(event.keys), None))

    def _written(self, batch: WriteBatch, size: int, disk_losses: int) -> None:
        if disk_losses == self.disk_losses:
            self._publish(self.demotion.written(BatchWritten(batch.id, True, size), self._kernel.now))
            self._demote()

    def _send(self) -> None:
        self._sending = False
        if self._events:
            self.sequence += 1
            events = tuple(
                BlockStored(tuple(keys), parent, self._block_tokens, medium)
                if kind is BlockStored
                else BlockRemoved(tuple(keys), medium)
                for kind, medium, keys, parent in self._events
            )
            self._events.clear()
            self._told(EventBatch(self.sequence, self.id, self.incarnation, self._kernel.now, events))


def _ssd_settings(blocks: int, block_bytes: int) -> SsdSettings:
    """A log that holds ``blocks`` blocks with their headers, in segments of at least 16."""
    record = block_bytes + 8192
    segment = max(record * min(max(4, blocks // 16), 64), 2**20)
    return SsdSettings(
        directory="simulated", capacity=str(max(blocks * record, 8 * segment)), segment=str(segment),
        dwpd=1000.0, batch=str(max(32 * 2**20, 4 * record)),
    )  # fmt: skip
