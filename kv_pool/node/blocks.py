"""The blocks of a node: committed ones, chains, leases, and which of them may go. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_pool.events.types import DRAM, BlockRemoved, BlockStored
from kv_pool.keys import BlockKey
from kv_pool.node.messages import Action, Publish, SetEpoch
from kv_pool.node.slots import Slots
from kv_pool.policy.eviction import EvictionPolicy


@dataclass(slots=True)
class Block:
    """One committed block. ``expires`` is set for a private one: nobody fetched it by then, it goes."""

    key: BlockKey
    slot: int
    parent: BlockKey | None
    tokens: int
    length: int
    checksum: int
    meta: bytes
    last_used: float
    expires: float | None = None
    leases: int = 0
    doomed: bool = False
    """Consumed or expired while leased: it goes with its last lease."""


@dataclass(slots=True)
class Blocks:
    """Owns all committed blocks. Methods that change what exists return the actions this causes."""

    slots: Slots
    policy: EvictionPolicy
    block_tokens: int
    _blocks: dict[BlockKey, Block] = field(default_factory=dict[BlockKey, Block])
    _children: dict[BlockKey, int] = field(default_factory=dict[BlockKey, int])
    _private: dict[BlockKey, float] = field(default_factory=dict[BlockKey, float])
    evictions: int = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: BlockKey) -> Block | None:
        block = self._blocks.get(key)
        return None if block is None or block.doomed else block

    def keys(self) -> list[BlockKey]:
        """Of all blocks that others may know of: private ones are not among them. Parents come before their children."""
        return [key for key, block in self._blocks.items() if block.expires is None]

    def store(self, block: Block) -> list[Action]:
        """Make a block visible whose slot is committed already. Its key must be new."""
        assert block.key not in self._blocks
        self._blocks[block.key] = block
        if block.parent is not None:
            self._children[block.parent] = self._children.get(block.parent, 0) + 1
            self._reconsider(block.parent)
        self._reconsider(block.key)
        if block.expires is not None:
            self._private[block.key] = block.expires
            return []
        return [Publish(BlockStored((block.key,), block.parent, self.block_tokens, DRAM))]

    def lease(self, block: Block, now: float) -> None:
        block.leases += 1
        block.last_used = now
        self._reconsider(block.key)

    def unlease(self, key: BlockKey, *, consume: bool = False) -> list[Action]:
        """End one lease; ``consume`` also ends a private block, which has one reader only."""
        block = self._blocks[key]
        assert block.leases > 0
        block.leases -= 1
        if consume and block.expires is not None:
            block.doomed = True
        if block.doomed and block.leases == 0:
            return self._remove(block)
        self._reconsider(key)
        return []

    def evict_one(self) -> list[Action] | None:
        """Free the slot of the block that the policy names; None where nothing may go."""
        key = self.policy.pop()
        if key is None:
            return None
        self.evictions += 1
        return self._remove(self._blocks[key])

    def expire(self, now: float) -> list[Action]:
        """Private blocks whose reader never came."""
        actions: list[Action] = []
        for key in [key for key, expires in self._private.items() if expires <= now]:
            block = self._blocks[key]
            del self._private[key]
            if block.leases:
                block.doomed = True
            else:
                actions += self._remove(block)
        return actions

    def evictable(self, key: BlockKey) -> bool:
        """A leaf that nobody reads. A private block waits for its reader or its expiry instead."""
        block = self._blocks.get(key)
        return block is not None and block.leases == 0 and block.expires is None and not self._children.get(key)

    def _reconsider(self, key: BlockKey) -> None:
        if self.evictable(key):
            self.policy.add(key, self._blocks[key].last_used)
        else:
            self.policy.discard(key)

    def _remove(self, block: Block) -> list[Action]:
        del self._blocks[block.key]
        self._private.pop(block.key, None)
        self.policy.discard(block.key)
        if block.parent is not None:
            left = self._children[block.parent] - 1
            if left:
                self._children[block.parent] = left
            else:
                del self._children[block.parent]
                self._reconsider(block.parent)
        self.slots.give_back(block.slot)
        actions: list[Action] = [SetEpoch(block.slot, self.slots.epoch(block.slot))]
        if block.expires is None:
            actions.append(Publish(BlockRemoved((block.key,), DRAM)))
        return actions
