"""Blocks on their way from DRAM to the SSD. Pure. Nobody waits for it: where it cannot keep up, blocks just leave DRAM.

::

    free slots below the target?
        -> the eviction policy names a leaf        k2, of the chain k0 <- k1 <- k2
        -> what of its chain the SSD lacks is written, root first, in portions that fit the batches in flight
        -> when k2 itself is on the SSD, it leaves DRAM (if it is still an unleased leaf, and room is still short)

So whatever the SSD holds has its ancestors on the SSD or here, and what leaves DRAM in time is not lost.
"""

from __future__ import annotations

from typing import Final

from kv_pool.events.types import SSD, BlockRemoved, BlockStored
from kv_pool.keys import BlockKey
from kv_pool.node.blocks import Block, Blocks
from kv_pool.node.slots import Slots
from kv_pool.node.stimuli import Action, Publish, SaveBudget
from kv_pool.node.wall_clock import WallClock
from kv_pool.ssd.log import SsdLog
from kv_pool.ssd.plan import Candidate, Refusal
from kv_pool.ssd.records import BatchWritten, DiskUp, SsdFormatError

PORTION_MAX: Final = 64
"""Blocks offered to the log at a time."""
PAUSE_S: Final = 0.25
"""After the log has refused for a reason that only time heals."""
CHAIN_MAX: Final = 65_536


class Demotion:
    """``log`` is None where the node has no SSD tier: then nothing here does anything."""

    def __init__(self, slots: Slots, blocks: Blocks, log: SsdLog | None, *, free_target: float, clock: WallClock) -> None:
        self._slots = slots
        self._blocks = blocks
        self._log = log
        self._low = max(1, round(slots.count * free_target))
        self._high = min(2 * self._low, slots.count)
        self._filling_up = False
        self._clock = clock
        self._written: dict[BlockKey, Block] = {}
        """Held in DRAM while they are being written."""
        self._leaving: dict[BlockKey, None] = {}
        """Those of them that were named as victims."""
        self._paused_until = float("-inf")
        self._blocked = False
        """Nothing can be done before the disk has answered: not to be tried again at every message meanwhile."""
        self.budgets_lost = 0
        self.draining = False
        self.up = False
        self.blocks_written = 0
        self.blocks_refused = 0
        """Victims that the log would not take: they leave DRAM for good when their turn comes."""

    def pinned(self) -> list[Block]:
        """Blocks that the disk reads now."""
        return list(self._written.values())

    def run(self, now: float) -> list[Action]:
        """Start what is needed to have room again. Cheap where there is enough."""
        actions: list[Action] = []
        if self._log is None:
            return actions
        while self._short() and not self._blocked and (self.draining or (self.up and now >= self._paused_until)):
            victim = self._blocks.victim()
            if victim is None:
                break
            started = self._demote(victim, now)
            if started is None:
                break
            actions += started
        return actions + self._flush(now)

    def written(self, event: BatchWritten, now: float) -> list[Action]:
        """A batch is on the medium, or has failed."""
        assert self._log is not None
        self._blocked = False
        result = self._log.written(event.id, event.ok, event.bytes_written, self._clock.at(now))
        actions: list[Action] = []
        for key, parent, tokens in result.stored:
            self.blocks_written += 1
            actions.append(Publish(BlockStored((key,), parent, tokens, SSD)))
        actions += _removed(result.dropped)
        for key in [*(key for key, _, _ in result.stored), *result.failed]:
            actions += self._settled(key)
        return actions

    def disk_up(self, event: DiskUp, now: float) -> list[Action]:
        """The log is what the medium holds."""
        assert self._log is not None
        self.up = True
        self._blocked = False
        self._paused_until = float("-inf")
        if event.budget is not None:
            try:
                self._log.restore_budget(event.budget)
            except SsdFormatError:
                self.budgets_lost += 1
        recovered = self._log.recover(event.segments, self._clock.at(now))
        return [Publish(BlockStored((key,), parent, tokens, SSD)) for key, parent, tokens in recovered]

    def disk_down(self, now: float) -> list[Action]:
        assert self._log is not None
        if not self.up:
            return []
        self.up = self._blocked = False
        lost = self._log.down(self._clock.at(now))
        actions = _removed(lost.dropped)
        for key in lost.failed:
            actions += self._settled(key)
        return actions

    def expire(self, now: float) -> list[Action]:
        """Segments whose time is over die."""
        return [] if self._log is None else _removed(self._log.expire(self._clock.at(now)))

    def save_budget(self, now: float, *, at_once: bool) -> list[Action]:
        """Have the budget's history kept, if there is anything new. Not ``at_once``: only if too much is new."""
        if self._log is None or not self.up:
            return []
        if not (self._log.budget_is_stale or (at_once and self._log.bytes_written > self._log.budget_packed_at)):
            return []
        return [SaveBudget(self._log.pack_budget(self._clock.at(now)))]

    # --- inside -------------------------------------------------------------------------------------------------------------

    def _short(self) -> bool:
        """Whether more must go: from below the low watermark until the high one is reached, so that many leave together."""
        free = self._slots.free + len(self._leaving)
        self._filling_up = free < (self._high if self._filling_up else self._low)
        return self.draining or self._filling_up

    def _demote(self, victim: Block, now: float) -> list[Action] | None:
        """One step with a victim; None where no more can be done now."""
        assert self._log is not None
        wall = self._clock.at(now)
        portion = None if victim.elsewhere or not self.up else self._portion(victim, wall)
        if portion is None:
            # It is on the SSD already, or at another node, or there is no SSD to move it to and the node is to be emptied.
            return self._blocks.evict(victim)
        if not portion:  # all of its chain that is missing is under way
            self._blocks.spare(victim)
            self._blocked = True
            return None
        refusal = self._log.refusal(portion, wall)
        while refusal is Refusal.TOO_LONG and len(portion) > 1:
            portion = portion[: len(portion) // 2]
            refusal = self._log.refusal(portion, wall)
        if refusal is not None:
            return self._refused(victim, refusal, now)
        batches, dropped = self._log.write(portion, wall)
        for candidate in portion:
            block = self._blocks.get(candidate.key)
            if block is not None and self._log.pending(candidate.key) and candidate.key not in self._written:
                self._blocks.pin_for_write(block)
                self._written[candidate.key] = block
        if victim.key in self._written:
            self._leaving[victim.key] = None
        else:
            self._blocks.spare(victim)
        return [*batches, *_removed(dropped)]

    def _portion(self, victim: Block, wall: float) -> list[Candidate] | None:
        """The next part of the victim's chain to write, root first; empty where all is under way, None where all is there."""
        assert self._log is not None
        chain: list[Block] = []
        block: Block | None = victim
        while block is not None and not block.private and len(chain) < CHAIN_MAX:
            chain.append(block)
            block = None if block.parent is None else self._blocks.get(block.parent)
        chain.reverse()
        # What a first write still reads is not written once more, even if the log has given that write up.
        missing = [
            i for i, each in enumerate(chain) if self._log.wants(each.key, each.retention, wall) and each.key not in self._written
        ]
        if not missing:
            return [] if self._log.pending(victim.key) or victim.key in self._written else None
        if any(each.key in self._written and not self._log.pending(each.key) for each in chain[: missing[0]]):
            return []  # its ancestor's write was given up: first let the disk let go
        return [_candidate(each) for each in chain[missing[0] : missing[0] + PORTION_MAX]]

    def _refused(self, victim: Block, refusal: Refusal, now: float) -> list[Action] | None:
        if self._written and refusal in (Refusal.BUSY, Refusal.NO_SEGMENT):
            self._blocks.spare(victim)  # a batch that comes back makes room
            self._blocked = True
            return None
        if self.draining or refusal in (Refusal.BAD_CHAIN, Refusal.TOO_LONG):
            self.blocks_refused += 1
            return self._blocks.evict(victim)
        self._blocks.spare(victim)
        self._paused_until = now + PAUSE_S
        return None

    def _settled(self, key: BlockKey) -> list[Action]:
        """The disk has let go of a block."""
        block = self._written.pop(key, None)
        if block is None:
            return []
        leaving = key in self._leaving
        self._leaving.pop(key, None)
        actions = self._blocks.unlease(block)
        on_ssd = self._log is not None and self._log.holds(key)
        if leaving and on_ssd and self._blocks.evictable(key) and (self.draining or self._slots.free < self._high):
            actions += self._blocks.evict(block)
        return actions

    def _flush(self, now: float) -> list[Action]:
        """What waits to fill a batch goes now: nobody knows when more will come."""
        assert self._log is not None
        return list(self._log.flush(self._clock.at(now))) if self.up else []


def _candidate(block: Block) -> Candidate:
    return Candidate(
        block.key, block.parent, block.slot, block.tokens, block.length, block.checksum, block.retention, block.meta
    )  # fmt: skip


def _removed(keys: list[BlockKey]) -> list[Action]:
    return [Publish(BlockRemoved(tuple(keys), SSD))] if keys else []
