"""Indexes with a million blocks, in a process of their own so that their memory can be told.

``python -m benchmarks.index_child scheduler|ssd|node BLOCKS`` -> ``{"ready": true, "bytes_per_block": b}``: resident memory that
the cluster's index (blocks on ``NODES`` nodes), the index of a node's SSD, or a node's table of blocks in DRAM took, keys
included, without what the C library holds in reserve.

The first one answers ``{"do": "prefix", "chain": n, "times": k}`` -> ``{"microseconds": [...]}``: the longest prefix of ``k``
chains of ``n`` blocks, drawn from all that are there.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

from benchmarks.peers.lines import answers_to_own_stdout, serve
from kv_pool.events.types import DRAM, BlockStored, EventBatch
from kv_pool.keys import KEY_BYTES, BlockKey
from kv_pool.node.messages import Commit, Hello, Reserve, SlotsReserved
from kv_pool.node.state import NodeState
from kv_pool.node.stimuli import Asked, Send
from kv_pool.policy.lru import LeastRecentlyUsed
from kv_pool.policy.segments import ExpiredThenDeadThenOldest
from kv_pool.settings import PoolSettings
from kv_pool.ssd.budget import WriteBudget
from kv_pool.ssd.log import SsdLog
from kv_pool.ssd.plan import Candidate
from kv_pool.ssd.records import PAGE, batch_bytes
from scheduler.index import BlockIndex

NODES: Final = 8
CHAIN: Final = 128
BLOCK_TOKENS: Final = 64
DAY_S: Final = 86400.0
SEGMENT_PAGES: Final = (256 << 20) // PAGE
NO_LIMIT: Final = 1 << 60


class _Empty:
    """A snapshot of a node that holds nothing."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.incarnation = "a"
        self.sequence = -1
        self.keys_by_medium: dict[str, tuple[BlockKey, ...]] = {}


def chain_of(number: int) -> tuple[BlockKey, ...]:
    """The keys of one document; always new objects, as from the wire."""
    data = random.Random(number).randbytes(CHAIN * KEY_BYTES)
    return tuple(BlockKey(data[i : i + KEY_BYTES]) for i in range(0, len(data), KEY_BYTES))


def parents(keys: tuple[BlockKey, ...]) -> Iterator[tuple[BlockKey, BlockKey | None]]:
    return zip(keys, (None, *keys[:-1]), strict=True)


def resident_bytes() -> int:
    gc.collect()
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def scheduler_index(blocks: int) -> BlockIndex:
    """Chains dealt out to ``NODES`` nodes, each batch of events one chain."""
    index = BlockIndex()
    for node in range(NODES):
        index.node_up(f"n{node}", "a")
        index.load(_Empty(f"n{node}"))
    sequence = [0] * NODES
    for number in range(blocks // CHAIN):
        node = number % NODES
        stored = BlockStored(chain_of(number), None, BLOCK_TOKENS, DRAM)
        index.apply(EventBatch(sequence[node], f"n{node}", "a", 0.0, (stored,)))
        sequence[node] += 1
    return index


def ssd_index(blocks: int) -> SsdLog:
    """Written chain by chain, every batch acknowledged at once. Blocks of one page: their size does not matter here."""
    log = SsdLog(
        segments=2 + 3 * blocks // SEGMENT_PAGES,
        segment_pages=SEGMENT_PAGES,
        ttl_s=(DAY_S,),
        budget=WriteBudget(NO_LIMIT),
        batches_in_flight_max=4,
        batch_bytes_max=1 << 20,
        policy=ExpiredThenDeadThenOldest(),
    )
    now = 1e9
    log.recover((), now)
    for number in range(blocks // CHAIN):
        chain = [Candidate(key, parent, 0, BLOCK_TOKENS, PAGE, 0, 0, b"") for key, parent in parents(chain_of(number))]
        batches, _ = log.write(chain, now)
        for batch in [*batches, *log.flush(now)]:
            log.written(batch.id, True, batch_bytes(batch), now)
    return log


def node_table(blocks: int) -> NodeState:
    """As a worker writes them."""
    state = NodeState(
        node_id="n", slots=blocks, slot_bytes=PAGE, block_tokens=None, settings=PoolSettings(), policy=LeastRecentlyUsed()
    )
    state.handle(Asked("w", Hello(1, 1)), 0.0)
    for number in range(blocks // CHAIN):
        keys = chain_of(number)
        actions = state.handle(Asked("w", Reserve(number + 1, keys, None, 1.0, False)), 0.0)
        slots = next(a.answer.slots for a in actions if isinstance(a, Send) and isinstance(a.answer, SlotsReserved))
        for slot, (key, parent) in zip(slots, parents(keys), strict=True):
            assert slot is not None
            state.handle(Asked("w", Commit(slot, key, parent, BLOCK_TOKENS, PAGE, 0, b"")), 0.0)
    return state


def longest_prefixes(index: BlockIndex, chain: int, times: int, seed: int) -> list[float]:
    """Microseconds of each."""
    draw = random.Random(seed)
    known = index.entries // CHAIN
    taken: list[float] = []
    for _ in range(times):
        keys = chain_of(draw.randrange(known))[:chain]
        started = time.perf_counter()
        found, _ = index.prefixes(keys)
        taken.append(1e6 * (time.perf_counter() - started))
        if set(found.tolist()) != {0, chain}:
            raise RuntimeError(f"a chain of {chain} that is there was found as {found}")
    return taken


def main() -> None:
    answer = answers_to_own_stdout()
    kind, blocks = sys.argv[1], int(sys.argv[2])
    before = resident_bytes()
    match kind:
        case "scheduler":
            index = scheduler_index(blocks)
            held = index.entries
        case "ssd":
            index = ssd_index(blocks)
            held = len(index)
        case "node":
            index = node_table(blocks)
            held = len(index.blocks)
        case _:
            raise SystemExit(f"no such index: {kind}")
    taken = resident_bytes() - before
    if held < blocks - CHAIN:
        raise SystemExit(f"only {held} of {blocks} blocks are in the index")
    asked = 0

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        assert isinstance(index, BlockIndex)
        return {"microseconds": longest_prefixes(index, question["chain"], question["times"], asked)}

    serve(answer, handle, bytes_per_block=taken / held)


if __name__ == "__main__":
    main()
