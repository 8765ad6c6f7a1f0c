"""How long one routing decision takes, with an index full of other people's blocks. Run alone, it prints a small table.

Half of the workers prefill, half decode, one pair a node. Every document begins with the same system prompt, which all nodes
have; the rest of each lies at ``HOLDERS`` nodes, at some only a part of it."""

from __future__ import annotations

import hashlib
import statistics
import time
from typing import Final

from decode_worker.task import DecodeLoad
from kv_pool.keys import BlockKey
from prefill_worker.task import PrefillLoad
from scheduler.messages import NodeLoad, NodeReport, RequestEnded, SnapshotArrived, WorkerReport
from scheduler.plan import Plan, RouteRequest, SchedulerSettings
from scheduler.state import SchedulerState

BLOCK_TOKENS: Final = 64
DOCUMENT_BLOCKS: Final = 256
SYSTEM_BLOCKS: Final = 16
HOLDERS: Final = 4
REPEATS: Final = 1000
UNDER_WAY: Final = 100
ASKED_FOR: Final = 512
"""Documents of the requests; the index has all others too."""


class _Snapshot:
    sequence = -1
    incarnation = "a"

    def __init__(self, node_id: str, keys: list[BlockKey]) -> None:
        self.node_id = node_id
        self.keys_by_medium = {"dram": keys}


def key(number: int, place: int) -> BlockKey:
    return BlockKey(hashlib.blake2b(b"%d:%d" % (number, place), digest_size=16).digest())


def document(number: int, blocks: int = DOCUMENT_BLOCKS) -> tuple[BlockKey, ...]:
    return tuple(key(-1 if place < SYSTEM_BLOCKS else number, place) for place in range(blocks))


def cluster(workers: int, blocks: int, now: float) -> SchedulerState:
    """A scheduler that knows ``workers`` workers and ``blocks`` different blocks."""
    state = SchedulerState(SchedulerSettings(classes=("default=ttft 1000h",)))
    nodes = max(1, workers // 2)
    for i in range(nodes):
        load = NodeLoad(f"tcp://n{i}", f"tcp://e{i}", 10_000, 10, 1_000_000, f"unix:@n{i}")
        state.handle(NodeReport(f"n{i}", "a", load), now)
    held: list[list[BlockKey]] = [list(document(0, SYSTEM_BLOCKS)) for _ in range(nodes)]
    for number in range(max(1, blocks // (DOCUMENT_BLOCKS - SYSTEM_BLOCKS))):
        keys = document(number)[SYSTEM_BLOCKS:]
        for holder in range(HOLDERS):
            part = len(keys) if holder < 2 else (number * 31 + holder * 57) % len(keys)
            held[(number * 7 + holder * 13) % nodes].extend(keys[:part])
    for i, keys in enumerate(held):
        state.handle(SnapshotArrived(_Snapshot(f"n{i}", keys)), now)
    steps = tuple((n, n * 1000, 0.02 + 0.001 * n) for n in range(1, 9))
    for _ in range(2):  # a worker gets work once it has heard of its node
        for i in range(nodes):
            prefill, decode = PrefillLoad(0, 0, 0), DecodeLoad(0, 0, 100_000, 100_000, 0.02, steps=steps)
            state.handle(WorkerReport(f"p{i}", "a", f"p{i}", f"n{i}", 0, prefill), now)
            state.handle(WorkerReport(f"d{i}", "a", f"d{i}", f"n{i}", 0, decode), now)
    return state


def decisions(state: SchedulerState, blocks: int, now: float) -> tuple[float, float]:
    """Microseconds of one ``route`` of a prompt of ``blocks`` blocks: median and 99th percentile."""
    known = state.index.entries // (HOLDERS * DOCUMENT_BLOCKS)
    prompts = [document(number * 17 % known, blocks) for number in range(ASKED_FOR)]
    taken: list[float] = []
    for i in range(REPEATS):
        name = f"b{blocks}-{i}"
        request = RouteRequest(name, 0, prompts[i % ASKED_FOR], blocks * BLOCK_TOKENS + 10, 200)
        started = time.perf_counter()
        answer = state.route(request, now)
        taken.append((time.perf_counter() - started) * 1e6)
        assert isinstance(answer, Plan), answer
        if i >= UNDER_WAY:  # so many are always under way
            state.handle(RequestEnded(f"b{blocks}-{i - UNDER_WAY}", 0), now)
    for i in range(REPEATS - UNDER_WAY, REPEATS):
        state.handle(RequestEnded(f"b{blocks}-{i}", 0), now)
    return statistics.median(taken), sorted(taken)[int(0.99 * len(taken))]


if __name__ == "__main__":
    for workers in (10, 100, 1000):
        scheduler = cluster(workers, 200_000, 1000.0)
        for length in (32, 128, 256):
            p50, p99 = decisions(scheduler, length, 1000.0)
            print(f"{workers:5} workers, {length:4} blocks: p50 {p50:8.1f} us, p99 {p99:8.1f} us")
