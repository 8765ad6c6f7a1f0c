"""Hit rates without time: golden counts on the cut, the published figures on the whole trace where it is there, and agreement
with a simulator of others where that is installed."""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.simulator.cache_only.belady import Belady
from cluster.simulator.cache_only.replay import (
    POLICIES,
    Contents,
    UnknownPolicyError,
    flattened_hits,
    replay,
    replay_nodes,
)
from cluster.simulator.trace import Trace, TraceRequest, key_of, read_trace
from kv_pool.policy.registry import make_eviction_policy

CUT = Path(__file__).parent.parent / "data" / "conversation_cut.jsonl"
SHARED = Path(__file__).parents[3] / "shared" / "data" / "mooncake" / "conversation_trace.jsonl.xz"
GOLDEN = {
    500: {"lru": 599, "lfu": 599, "s3fifo": 599, "sieve": 599, "gdsf": 599, "belady": 1799},
    3000: {"lru": 1026, "lfu": 1039, "s3fifo": 1039, "sieve": 1039, "gdsf": 1030, "belady": 2775},
}
"""Block hits. Whoever changes a policy changes these on purpose."""


@pytest.mark.parametrize("capacity", GOLDEN)
def test_golden_counts(capacity: int):
    trace = read_trace(CUT)
    assert {name: replay(trace, name, capacity).block_hits for name in POLICIES} == GOLDEN[capacity]


def test_an_infinite_cache_hits_all_but_the_first_time():
    trace = read_trace(CUT)
    seen: set[int] = set()
    again = 0
    for request in trace.requests:
        blocks = trace.full_blocks(request)
        again += sum(block in seen for block in blocks)
        seen.update(blocks)
    results = {name: replay(trace, name, 10**9) for name in POLICIES}
    assert {result.block_hits for result in results.values()} == {again}
    assert all(result.evictions == 0 for result in results.values())


@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True), max_size=40), st.integers(1, 8))
def test_no_policy_beats_belady_and_none_holds_more_than_its_capacity(prompts: list[list[int]], capacity: int):
    flat = [key_of(block) for prompt in prompts for block in prompt]
    best = Belady(flat, capacity)
    bound = 0
    for key in flat:
        bound += key in best.here
        best.touch((key,))
    for name in POLICIES[:-1]:
        contents = Contents(make_eviction_policy(name), capacity)
        hits = 0
        for key in flat:
            hits += key in contents.here
            contents.touch((key,))
            assert len(contents.here) <= capacity
        assert hits <= bound


def test_belady_by_hand():
    """Three blocks in two places: b is used again soonest, then a; c passes."""
    a, b, c = key_of(1), key_of(2), key_of(3)
    future = [a, b, c, b, a, c]
    cache = Belady(future, 2)
    hits = []
    for key in future:
        hits.append(key in cache.here)
        cache.touch((key,))
    assert hits == [False, False, False, True, True, False]


def test_a_prompt_hits_only_up_to_its_first_hole():
    requests = (
        TraceRequest(0, 0.0, 1536, 1, (1, 2, 3)),
        TraceRequest(1, 1.0, 1536, 1, (1, 9, 3)),
    )
    result = replay(Trace("t", 512, requests), "lru", 100)
    assert (result.block_hits, result.hit_tokens) == (1, 512)


def test_the_partial_block_counts_only_if_asked():
    requests = tuple(TraceRequest(i, float(i), 1000, 1, (1, 2)) for i in range(2))
    trace = Trace("t", 512, requests)
    assert replay(trace, "lru", 10).hit_tokens == 512
    with_it = replay(trace, "lru", 10, partial_counts=True)
    assert (with_it.block_hits, with_it.hit_tokens) == (2, 1000)


def test_one_cache_for_all_nodes_beats_one_each():
    trace = read_trace(CUT)
    alone, shared = (replay_nodes(trace, "lru", 2000, 10, shared=each) for each in (False, True))
    assert shared.token_hit_rate > 1.5 * alone.token_hit_rate


def test_an_unknown_policy_names_those_that_are_known():
    with pytest.raises(UnknownPolicyError, match=r"'clock'.*lru, lfu, s3fifo, sieve, gdsf, belady"):
        replay(read_trace(CUT, limit=2), "clock", 10)


@pytest.mark.skipif(not SHARED.is_file(), reason="the whole conversation trace is not on this machine")
def test_the_published_figures():
    """Back to front, the partial block counted; Belady's MIN counts every block that is there, holes or not."""
    trace = read_trace(SHARED)
    lru = [replay(trace, "lru", blocks, partial_counts=True).block_hit_rate for blocks in (1000, 3000, 10_000, 30_000)]
    assert lru == pytest.approx([0.045, 0.065, 0.212, 0.326], abs=0.003)
    least = [replay(trace, "belady", blocks, partial_counts=True).present_rate for blocks in (1000, 3000, 10_000, 30_000)]
    assert least == pytest.approx([0.191, 0.294, 0.366, 0.366], abs=0.003)


def s3fifo_hits(blocks: list[int], capacity: int) -> int:
    """Algorithm 1 of the S3-FIFO paper, by itself: what is new enters the small queue, and leaves it for the main one if it was
    used twice meanwhile. (libcachesim 0.3 fills its main queue first as long as it has never evicted, so its counts on a trace
    this short are others: 1,629 hits of 3,000 blocks where this has 926.)"""
    small: OrderedDict[int, int] = OrderedDict()
    main: OrderedDict[int, int] = OrderedDict()
    ghost: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for block in blocks:
        queue = small if block in small else main if block in main else None
        if queue is not None:
            hits += 1
            queue[block] = min(3, queue[block] + 1)
            continue
        while len(small) + len(main) >= capacity:
            if small and len(small) >= capacity * 0.1:
                victim, uses = small.popitem(last=False)
                if uses > 1:
                    main[victim] = 0
                    continue
                ghost[victim] = None
                while len(ghost) > capacity * 0.9:
                    ghost.popitem(last=False)
            else:
                victim, uses = main.popitem(last=False)
                if uses:
                    main[victim] = uses - 1
        if block in ghost:
            del ghost[block]
            main[block] = 0
        else:
            small[block] = 0
    return hits


@pytest.mark.parametrize("capacity", [500, 1000, 3000, 6000])
def test_s3fifo_is_the_paper_s_algorithm(capacity: int):
    trace = read_trace(CUT)
    blocks = [block for request in trace.requests for block in request.block_ids]
    assert flattened_hits(trace, "s3fifo", capacity) == (s3fifo_hits(blocks, capacity), len(blocks))


@pytest.mark.skipif(importlib.util.find_spec("libcachesim") is None, reason="libcachesim is not installed")
@pytest.mark.parametrize("capacity", [500, 3000])
@pytest.mark.parametrize(("name", "theirs"), [("lru", "LRU"), ("sieve", "Sieve")])
def test_agrees_with_libcachesim(name: str, theirs: str, capacity: int):
    import libcachesim

    trace = read_trace(CUT)
    cache = getattr(libcachesim, theirs)(cache_size=capacity)
    request = libcachesim.Request()
    request.obj_size = 1
    hits = references = 0
    for each in trace.requests:
        for block in each.block_ids:
            request.obj_id = block
            hits += cache.get(request)
            references += 1
    assert flattened_hits(trace, name, capacity) == (hits, references)
