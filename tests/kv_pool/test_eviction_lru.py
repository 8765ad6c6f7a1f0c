"""LRU against the obvious list, and what it costs."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_pool.node.blocks import Block, Blocks
from kv_pool.node.slots import Slots
from kv_pool.policy.lru import LeastRecentlyUsed
from tests.kv_pool.node_scene import key

operations = st.lists(
    st.tuples(st.sampled_from(["add", "discard", "pop"]), st.integers(0, 9), st.sampled_from([0, 0, 0, 1, 2, 9])), max_size=300
)


@given(operations)
def test_it_does_what_the_obvious_list_does(steps: list[tuple[str, int, int]]):
    policy = LeastRecentlyUsed()
    twin: dict[int, float] = {}
    for now, (what, i, back) in enumerate(steps):
        match what:
            case "add":
                twin[i] = now - back * math.pi  # no two are equal
                policy.add(key(i), twin[i])
            case "discard":
                policy.discard(key(i))
                twin.pop(i, None)
            case _:
                oldest = min(twin, key=lambda k: twin[k]) if twin else None
                assert policy.pop() == (None if oldest is None else key(oldest))
                twin.pop(oldest, None) if oldest is not None else None


@pytest.mark.parametrize("late_s", [0.0, 100.0])
def test_using_one_block_for_ever_keeps_the_policy_small(late_s: float):
    """Also where all but the newest are added with a time that is past."""
    policy = LeastRecentlyUsed()
    policy.add(key(99), 10_000.0)
    for now in range(10_000):
        policy.add(key(now % 3), now - late_s)
    assert len(policy._heap) < 200
    assert [policy.pop() for _ in range(5)] == [key(1), key(2), key(0), key(99), None]


def test_an_eviction_costs_the_same_among_many_blocks_as_among_few():
    """Ten times the blocks must not be near ten times the time per eviction: no scans."""

    def per_eviction_s(blocks: int) -> float:
        slots = Slots(blocks)
        pool = Blocks(slots, LeastRecentlyUsed())
        for i in range(blocks):
            slot = slots.take()
            slots.commit(slot)
            pool.store(Block(key(i), slot, key(i - 1) if i % 32 else None, 16, 10, 7, b"", float(i), b""))
        start = time.perf_counter()
        for _ in range(blocks):
            assert pool.evict_one()
        assert pool.evict_one() is None
        return (time.perf_counter() - start) / blocks

    few = min(per_eviction_s(2_000) for _ in range(3))
    many = min(per_eviction_s(20_000) for _ in range(3))
    assert many < 4 * few
