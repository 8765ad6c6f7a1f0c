"""The block allocator against a slow twin that keeps a set for everything, under random operations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from engine.cache.blocks import BlockAllocator, OutOfBlocksError, is_run
from kv_pool.keys import BlockKey

BLOCKS = 12


def key(path: tuple[int, ...]) -> BlockKey:
    return BlockKey(repr(path).encode())


class Twin:
    """Who holds what, and which key is where; it decides nothing, it follows and checks."""

    def __init__(self) -> None:
        self.references = dict.fromkeys(range(BLOCKS), 0)
        self.path_of: dict[int, tuple[int, ...]] = {}

    @property
    def available(self) -> int:
        return sum(count == 0 for count in self.references.values())

    def longest_run(self) -> int:
        best = run = 0
        for block in range(BLOCKS):
            run = run + 1 if self.references[block] == 0 else 0
            best = max(best, run)
        return best

    def took(self, blocks: list[int]) -> None:
        assert len(set(blocks)) == len(blocks)
        for block in blocks:
            assert self.references[block] == 0
            self.references[block] = 1
            self.path_of.pop(block, None)

    def forget_unreachable(self, allocator: BlockAllocator) -> None:
        """Cached blocks whose ancestor was evicted just now are gone too."""
        for block, path in list(self.path_of.items()):
            if self.references[block] == 0 and not allocator._index.holds(block):
                assert any(path[:n] not in self.path_of.values() for n in range(1, len(path))), "evicted with its chain whole"
                del self.path_of[block]


class AllocatorMachine(RuleBasedStateMachine):
    held = Bundle("held")

    @initialize()
    def start(self) -> None:
        self.real, self.twin = BlockAllocator(BLOCKS), Twin()

    @rule(target=held, count=st.integers(1, 6), room=st.integers(0, 4))
    def allocate(self, count: int, room: int) -> list[int]:
        if count > self.twin.available:
            with pytest.raises(OutOfBlocksError):
                self.real.allocate(count, room=room)
            return []
        possible = self.twin.longest_run() >= count
        blocks = self.real.allocate(count, room=room)
        assert is_run(blocks) == possible or count == 1
        self.twin.took(blocks)
        self.twin.forget_unreachable(self.real)
        return blocks

    @rule(target=held, blocks=consumes(held), count=st.integers(1, 3))
    def extend(self, blocks: list[int], count: int) -> list[int]:
        if count > self.twin.available:
            with pytest.raises(OutOfBlocksError):
                self.real.extend(blocks, count)
            return blocks
        behind = range(blocks[-1] + 1, blocks[-1] + 1 + count) if blocks else ()
        in_place = bool(blocks) and all(self.twin.references.get(block) == 0 for block in behind)
        grown = self.real.extend(blocks, count)
        if in_place:
            assert grown == list(behind)
        self.twin.took(grown)
        self.twin.forget_unreachable(self.real)
        return blocks + grown

    @rule(blocks=consumes(held), family=st.integers(0, 2), keep=st.integers(0, 6))
    def register_and_free(self, blocks: list[int], family: int, keep: int) -> None:
        """The first ``keep`` blocks hold a chain; a chain of the same family shares its first blocks."""
        for depth, block in enumerate(blocks[:keep], start=1):
            path = (0, *(family for _ in range(depth - 1)))
            self.real.register(key(path), block, key(path[:-1]) if depth > 1 else None)
            if path not in self.twin.path_of.values() and block not in self.twin.path_of:
                self.twin.path_of[block] = path
        self.real.free(blocks)
        for block in blocks:
            self.twin.references[block] -= 1

    @rule(target=held, family=st.integers(0, 2), length=st.integers(1, 6))
    def lookup(self, family: int, length: int) -> list[int]:
        paths = [(0, *(family for _ in range(depth))) for depth in range(length)]
        blocks = self.real.lookup([key(path) for path in paths])
        where = {path: block for block, path in self.twin.path_of.items()}
        expected = []
        for path in paths:
            if path not in where:
                break
            expected.append(where[path])
        assert blocks == expected
        for block in blocks:
            self.twin.references[block] += 1
        return blocks

    @invariant()
    def same_count(self) -> None:
        assert self.real.available == self.twin.available


AllocatorMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestAllocator = AllocatorMachine.TestCase


def chain(allocator: BlockAllocator, name: int, blocks: list[int]) -> list[BlockKey]:
    keys = [key((name, i)) for i in range(len(blocks))]
    for i, block in enumerate(blocks):
        allocator.register(keys[i], block, keys[i - 1] if i else None)
    return keys


def test_a_run_with_room_behind_is_preferred() -> None:
    allocator = BlockAllocator(10)
    first = allocator.allocate(2)
    middle = allocator.allocate(1)
    allocator.free(first)  # free: 0 1 | 3 .. 9
    assert middle == [2]
    assert allocator.allocate(2, room=3) == [3, 4]
    assert allocator.allocate(2) == [0, 1]


def test_the_least_recently_used_chain_goes_first_and_leaves_before_roots() -> None:
    allocator = BlockAllocator(6)
    old, new = allocator.allocate(3), allocator.allocate(3)
    old_keys, new_keys = chain(allocator, 0, old), chain(allocator, 1, new)
    allocator.free(old)
    allocator.free(new)
    taken = allocator.allocate(2)
    assert set(taken) == set(old[1:])
    assert allocator.lookup(old_keys) == old[:1]
    assert allocator.lookup(new_keys) == new


def test_a_lookup_makes_a_chain_young_again() -> None:
    allocator = BlockAllocator(4)
    a, b = allocator.allocate(2), allocator.allocate(2)
    a_keys, b_keys = chain(allocator, 0, a), chain(allocator, 1, b)
    allocator.free(a)
    allocator.free(b)
    allocator.free(allocator.lookup(a_keys))
    assert set(allocator.allocate(2)) == set(b)
    assert allocator.lookup(b_keys) == []
    assert allocator.lookup(a_keys) == a


def test_a_parent_outlives_a_child_that_is_freed_after_it() -> None:
    allocator = BlockAllocator(3)
    parent, child = allocator.allocate(1), allocator.allocate(1)
    keys = chain(allocator, 0, parent + child)
    allocator.free(parent)
    allocator.free(child)
    spare = allocator.allocate(1)
    assert allocator.allocate(1) == child
    assert allocator.lookup(keys) == parent
    assert spare == [2]


def test_a_refused_allocation_changes_nothing() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(3)
    keys = chain(allocator, 0, blocks)
    allocator.free(blocks)
    with pytest.raises(OutOfBlocksError):
        allocator.allocate(5)
    assert allocator.available == 4
    assert allocator.lookup(keys) == blocks


def test_a_key_keeps_its_first_block() -> None:
    allocator = BlockAllocator(2)
    first, second = allocator.allocate(1), allocator.allocate(1)
    name = key((0,))
    allocator.register(name, first[0], None)
    allocator.register(name, second[0], None)
    allocator.free(second)
    assert allocator.available == 1
    assert allocator.lookup([name]) == first
