"""How long one routing decision takes, with an index full of other people's blocks. Run alone, it prints a small table."""

from __future__ import annotations

import hashlib
import statistics
import time

from decode_worker.task import DecodeLoad
from kv_pool.events.types import BlockStored, EventBatch
from kv_pool.keys import BlockKey
from prefill_worker.task import PrefillLoad
from scheduler.messages import BlocksChanged, NodeLoad, NodeReport, RequestEnded, SnapshotArrived, WorkerReport
from scheduler.plan import Plan, RouteRequest, SchedulerSettings
from scheduler.state import SchedulerState

BLOCK_TOKENS = 64
PROMPT_BLOCKS = 128
DOCUMENTS = 64
REPEATS = 300


class _EmptySnapshot:
    sequence = -1
    incarnation = "a"

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.keys_by_medium: dict[str, tuple[BlockKey, ...]] = {}


def document(number: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(hashlib.blake2b(b"%d:%d" % (number, i), digest_size=16).digest()) for i in range(PROMPT_BLOCKS))


def cluster(workers: int, now: float) -> SchedulerState:
    """Half prefill, half decode, one pair a node; each node holds a different number of blocks of every document."""
    state = SchedulerState(SchedulerSettings(classes=("default=ttft 1000h",)))
    nodes = max(1, workers // 2)
    for i in range(nodes):
        state.handle(NodeReport(f"n{i}", "a", NodeLoad(f"tcp://n{i}", f"tcp://e{i}", 10_000, 10, 1_000_000, f"unix:@n{i}")), now)
        state.handle(SnapshotArrived(_EmptySnapshot(f"n{i}")), now)
        events = tuple(
            BlockStored(document(d)[: (i * 7 + d * 13) % PROMPT_BLOCKS], None, BLOCK_TOKENS, "dram") for d in range(DOCUMENTS)
        )
        state.handle(BlocksChanged(EventBatch(0, f"n{i}", "a", 0.0, events)), now)
    for _ in range(2):  # a worker gets work once it has heard of its node
        for i in range(nodes):
            prefill, decode = PrefillLoad(0, 0, 0), DecodeLoad(0, 0, 100_000, 100_000, 0.02)
            state.handle(WorkerReport(f"p{i}", "a", f"p{i}", f"n{i}", 0, prefill), now)
            state.handle(WorkerReport(f"d{i}", "a", f"d{i}", f"n{i}", 0, decode), now)
    return state


def route_speed(sizes: tuple[int, ...] = (10, 100, 1000)) -> dict[str, float]:
    """Microseconds per ``route`` of a prompt of 128 blocks: ``route_<workers>_p50_us`` and ``_p99_us`` for each cluster size."""
    figures: dict[str, float] = {}
    for workers in sizes:
        now = 1000.0
        state = cluster(workers, now)
        prompts = [document(d) for d in range(DOCUMENTS)]
        taken: list[float] = []
        for i in range(REPEATS):
            keys = prompts[i % DOCUMENTS]
            request = RouteRequest(f"r{i}", 0, keys, PROMPT_BLOCKS * BLOCK_TOKENS + 10, 200)
            started = time.perf_counter()
            answer = state.route(request, now)
            taken.append((time.perf_counter() - started) * 1e6)
            assert isinstance(answer, Plan), answer
            if i >= 100:  # a hundred are always under way
                state.handle(RequestEnded(f"r{i - 100}", 0), now)
        figures[f"route_{workers}_p50_us"] = round(statistics.median(taken), 1)
        figures[f"route_{workers}_p99_us"] = round(sorted(taken)[int(0.99 * len(taken))], 1)
    return figures


if __name__ == "__main__":
    for name, value in route_speed().items():
        print(f"{name:24} {value:10.1f}")
