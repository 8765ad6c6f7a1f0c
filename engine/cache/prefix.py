"""Which cached block holds which prefix. Pure bookkeeping: no tensor, no clock.

Ages are ticks of a counter: larger is younger. Among blocks that nobody holds, a parent is always younger than its children
(``touch`` keeps it so), hence "oldest first" is also "leaves first", and all that are older than some age can go without
leaving a block behind whose ancestor is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kv_pool.keys import BlockKey


class PrefixIndex:
    """Key -> block of the device cache, with the parent links of the chain."""

    def __init__(self) -> None:
        self._block_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        self._parent_of: dict[BlockKey, BlockKey | None] = {}
        self._children_of: dict[BlockKey, set[BlockKey]] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def holds(self, block: int) -> bool:
        """Does ``block`` hold the K/V of a key?"""
        return block in self._key_of

    def add(self, key: BlockKey, block: int, parent: BlockKey | None) -> bool:
        """``block`` holds ``key``; False, and nothing changes, where the key has a block or the block has a key."""
        if key in self._block_of or block in self._key_of:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        self._parent_of[key] = parent
        if parent is not None:
            self._children_of.setdefault(parent, set()).add(key)
        return True

    def remove(self, block: int) -> None:
        key = self._key_of.pop(block)
        del self._block_of[key]
        parent = self._parent_of.pop(key)
        if parent is not None:
            siblings = self._children_of[parent]
            siblings.remove(key)
            if not siblings:
                del self._children_of[parent]

    def longest_prefix(self, keys: Sequence[BlockKey]) -> list[int]:
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def ancestors(self, block: int) -> Iterator[int]:
        """Blocks of the keys before ``block``'s, nearest first, as far as they are here."""
        key = self._parent_of[self._key_of[block]]
        while key is not None and (ancestor := self._block_of.get(key)) is not None:
            yield ancestor
            key = self._parent_of[key]

    def descendants(self, block: int) -> Iterator[int]:
        """Blocks of all keys that continue ``block``'s, in no order."""
        waiting = [self._key_of[block]]
        while waiting:
            for child in self._children_of.get(waiting.pop(), ()):
                yield self._block_of[child]
                waiting.append(child)
