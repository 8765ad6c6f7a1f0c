"""The cluster's block index with a million blocks, in a process of its own so that its memory can be told.

``python -m benchmarks.index_child ENTRIES NODES`` -> ``{"ready": true, "bytes_per_block": b}``: resident memory that the index
took, its keys included. ``{"do": "prefix", "chain": n, "times": k}`` -> ``{"microseconds": [...]}``: the longest prefix of ``k``
chains of ``n`` blocks, drawn from all that are there.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from typing import Any, Final

from benchmarks.peers.lines import answers_to_own_stdout, serve
from kv_pool.events.types import DRAM, BlockStored, EventBatch
from kv_pool.keys import KEY_BYTES, BlockKey
from scheduler.index import BlockIndex

CHAIN: Final = 128
BLOCK_TOKENS: Final = 64


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


def resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def build(entries: int, nodes: int) -> BlockIndex:
    """Chains dealt out to ``nodes`` nodes, ``entries`` blocks in all."""
    index = BlockIndex()
    for node in range(nodes):
        index.node_up(f"n{node}", "a")
        index.load(_Empty(f"n{node}"))
    sequence = [0] * nodes
    for number in range(entries // CHAIN):
        node = number % nodes
        stored = BlockStored(chain_of(number), None, BLOCK_TOKENS, DRAM)
        index.apply(EventBatch(sequence[node], f"n{node}", "a", 0.0, (stored,)))
        sequence[node] += 1
    return index


def longest_prefixes(index: BlockIndex, chain: int, times: int, seed: int) -> list[float]:
    """Microseconds of each."""
    draw = random.Random(seed)
    known = index.entries // CHAIN
    taken: list[float] = []
    for _ in range(times):
        keys = chain_of(draw.randrange(known))[:chain]
        started = time.perf_counter()
        found = index.longest_prefix(keys)
        taken.append(1e6 * (time.perf_counter() - started))
        if set(found.values()) != {chain}:
            raise RuntimeError(f"a chain of {chain} that is there was found as {found}")
    return taken


def main() -> None:
    answer = answers_to_own_stdout()
    entries, nodes = int(sys.argv[1]), int(sys.argv[2])
    before = resident_bytes()
    index = build(entries, nodes)
    taken = resident_bytes() - before
    asked = 0

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return {"microseconds": longest_prefixes(index, question["chain"], question["times"], asked)}

    serve(answer, handle, bytes_per_block=taken / index.entries)


if __name__ == "__main__":
    main()
