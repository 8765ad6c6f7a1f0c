"""The committed blocks of a node: chains, leases, and which of them may go. Pure.

::

    chain    k0 <- k1 <- k2          k0 and k1 have a child here: only k2 may be evicted
                      ^-- k3 (being written) pins k2 as a child does

A public block stays until it is evicted (or has moved to the SSD), a private one (a request's tail) until its reader consumes
it or it expires. One that is removed while somebody reads it vanishes from sight at once and gives its slot back with its last
lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from kv_pool.events.types import DRAM, BlockRemoved, BlockStored
from kv_pool.keys import BlockKey
from kv_pool.node.slots import Slots
from kv_pool.node.stimuli import Action, Publish, SetEpoch
from kv_pool.policy.eviction import EvictionPolicy

ELSEWHERE_S: Final = 1e9
"""So much older a block counts that is elsewhere too: than any other, and still in the order of use among its like."""


@dataclass(slots=True, eq=False)
class Block:
    """One committed block. ``expires`` is None for a public one, ``row`` is what every grant of it says
    (:func:`~kv_pool.node.messages.grant_row`). ``leases`` counts its readers, and the node itself while it writes it to the
    SSD."""

    key: BlockKey
    slot: int
    parent: BlockKey | None
    tokens: int
    length: int
    checksum: int
    meta: bytes
    last_used: float
    row: bytes
    retention: int = 0
    expires: float | None = None
    leases: int = 0
    removed: bool = False

    @property
    def private(self) -> bool:
        return self.expires is not None

    @property
    def elsewhere(self) -> bool:
        """Whether another node has pulled it since it was used last (:meth:`Blocks.yields`)."""
        return self.last_used < -ELSEWHERE_S / 2


class Blocks:
    """Owns all committed blocks. Methods that change what exists return the actions this causes. ``left`` is told of each
    public block that has gone, and says what else goes with it."""

    def __init__(self, slots: Slots, policy: EvictionPolicy, left: Callable[[BlockKey], list[Action]] = lambda _: []) -> None:
        self._slots = slots
        self._policy = policy
        self._left = left
        self._blocks: dict[BlockKey, Block] = {}
        self._children: dict[BlockKey, int] = {}
        """Blocks here, and writers at work, that follow a key (which need not be here itself)."""
        self._private: dict[BlockKey, Block] = {}
        self._idle = 0
        self.lingering = 0
        """Removed blocks that somebody still reads."""
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def idle(self) -> int:
        """Public blocks that nobody leases: no more than this many can be evicted."""
        return self._idle

    def get(self, key: BlockKey) -> Block | None:
        return self._blocks.get(key)

    def public_keys(self) -> list[BlockKey]:
        """Of all blocks that others may know of, in order of commit."""
        return [key for key, block in self._blocks.items() if not block.private]

    def all(self) -> Iterable[Block]:
        return self._blocks.values()

    def loops(self, key: BlockKey, parent: BlockKey | None) -> bool:
        """Whether a block ``key`` that follows ``parent`` would follow itself, so that none of the loop could ever be evicted.
        Keys are digests of what they follow, so only a broken client can ask for this."""
        while parent is not None and parent != key:
            block = self._blocks.get(parent) if key in self._children else None
            parent = None if block is None else block.parent
        return parent is not None

    # --- come and go --------------------------------------------------------------------------------------------------------

    def store(self, block: Block) -> list[Action]:
        """Make a block visible, whose slot is committed already. Its key must be new."""
        assert block.key not in self._blocks
        self._blocks[block.key] = block
        if block.parent is not None:
            self.pin(block.parent)
        if block.private:
            self._private[block.key] = block
            return []
        self._idle += 1
        self._policy.stored(block.key)
        self._reconsider(block.key)
        return [Publish(BlockStored((block.key,), block.parent, block.tokens, DRAM))]

    def victim(self) -> Block | None:
        """The block that the policy would have go first, unknown to the policy from now on: evict it, :meth:`lease` it, or
        :meth:`spare` it. None where nothing may go."""
        while (key := self._policy.pop()) is not None:
            if self.evictable(key):
                return self._blocks[key]
        return None

    def spare(self, block: Block) -> None:
        """A victim may stay after all."""
        self._reconsider(block.key)

    def evict_one(self) -> list[Action] | None:
        """Remove the block that the policy names; None where nothing may go."""
        block = self.victim()
        return None if block is None else self.evict(block)

    def evict(self, block: Block) -> list[Action]:
        assert self.evictable(block.key)
        self.evictions += 1
        return self.remove(block)

    def expire(self, now: float) -> list[Action]:
        """Remove private blocks whose reader never came."""
        actions: list[Action] = []
        for block in [b for b in self._private.values() if b.expires is not None and b.expires <= now]:
            actions += self.remove(block)
        return actions

    def remove(self, block: Block) -> list[Action]:
        """Take a block out of sight; its slot is free as soon as nobody reads it."""
        assert not block.removed
        block.removed = True
        del self._blocks[block.key]
        if not block.private:
            self._policy.removed(block.key)
        if block.parent is not None:
            self.unpin(block.parent)
        actions: list[Action] = []
        if block.private:
            del self._private[block.key]
        else:
            self._idle -= block.leases == 0
            actions.append(Publish(BlockRemoved((block.key,), DRAM)))
            actions += self._left(block.key)
        if block.leases:
            self.lingering += 1
            return actions
        return actions + self._free(block)

    def yields(self, block: Block) -> None:
        """Another node has it too: where room is needed, this copy goes before all that is nowhere else, until it is used again.
        So the nodes' DRAM together holds more different blocks."""
        if not block.private and not block.removed and not block.elsewhere:
            block.last_used -= ELSEWHERE_S
            self._reconsider(block.key)

    # --- leases and pins ----------------------------------------------------------------------------------------------------

    def lease(self, block: Block, now: float) -> None:
        """Somebody reads it. The policy finds out only when it names the block (:meth:`victim`): leases must be cheap."""
        assert not block.removed
        if not block.leases and block.expires is None:
            self._idle -= 1
        block.leases += 1
        block.last_used = now
        if block.expires is None:
            self._policy.touched(block.key)

    def pin_for_write(self, block: Block) -> None:
        """The node itself reads it: no use that would count."""
        assert not block.removed
        self._idle -= block.leases == 0 and not block.private
        block.leases += 1

    def unlease(self, block: Block) -> list[Action]:
        assert block.leases > 0
        block.leases -= 1
        if block.leases:
            return []
        if block.removed:
            self.lingering -= 1
            return self._free(block)
        self._idle += not block.private
        self._reconsider(block.key)
        return []

    def pin(self, parent: BlockKey) -> None:
        """Something follows ``parent``: keep it."""
        self._children[parent] = self._children.get(parent, 0) + 1
        self._reconsider(parent)

    def unpin(self, parent: BlockKey) -> None:
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
        else:
            del self._children[parent]
            self._reconsider(parent)

    def evictable(self, key: BlockKey) -> bool:
        """A public leaf that nobody reads."""
        block = self._blocks.get(key)
        return block is not None and block.leases == 0 and not block.private and key not in self._children

    def _reconsider(self, key: BlockKey) -> None:
        if self.evictable(key):
            self._policy.add(key, self._blocks[key].last_used)
        else:
            self._policy.discard(key)

    def _free(self, block: Block) -> list[Action]:
        self._slots.give_back(block.slot)
        return [SetEpoch(block.slot, self._slots.epoch(block.slot))]

    # --- for tests ----------------------------------------------------------------------------------------------------------

    def check(self, pins_of_writers: dict[BlockKey, int]) -> None:
        """Assert that the counters are what a recount gives."""
        children = dict(pins_of_writers)
        for block in self._blocks.values():
            if block.parent is not None:
                children[block.parent] = children.get(block.parent, 0) + 1
        assert children == self._children
        assert self._idle == sum(b.leases == 0 and not b.private for b in self._blocks.values())
        assert self._private == {k: b for k, b in self._blocks.items() if b.private}
