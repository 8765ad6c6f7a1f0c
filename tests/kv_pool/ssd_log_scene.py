"""An SSD log of three small segments, and chains of small blocks for it."""

from __future__ import annotations

from typing import Any

from kv_pool.keys import BlockKey
from kv_pool.policy.segments import ExpiredThenDeadThenOldest
from kv_pool.ssd.budget import WriteBudget
from kv_pool.ssd.log import SsdLog
from kv_pool.ssd.plan import Candidate
from kv_pool.ssd.records import PAGE, WriteBatch, batch_bytes
from tests.kv_pool.ssd_twin import key_of

NOW = 1_790_000_000.0
DAY = 86_400.0
PLENTY = 1 << 60


def new_log(**changed: Any) -> SsdLog:
    """Three segments that hold four records of one page each."""
    arguments: dict[str, Any] = {
        "segments": 3,
        "segment_pages": 11,
        "ttl_s": [1000.0, 100.0],
        "budget": WriteBudget(PLENTY),
        "batches_in_flight_max": 8,
        "batch_bytes_max": 1 << 20,
        "policy": ExpiredThenDeadThenOldest(),
    }
    log = SsdLog(**(arguments | changed))
    log.recover([], NOW)
    return log


def block(number: int, parent: int | None = None, *, retention: int = 0, length: int = PAGE) -> Candidate:
    above = None if parent is None else key_of(parent)
    return Candidate(key_of(number), above, number, 16, length, number, retention, b"")


def chain(*numbers: int, retention: int = 0) -> list[Candidate]:
    return [block(n, above, retention=retention) for above, n in zip([None, *numbers], numbers, strict=False)]


def store(log: SsdLog, blocks: list[Candidate], now: float = NOW) -> list[WriteBatch]:
    """Write, flush, and answer all batches."""
    assert log.refusal(blocks, now) is None
    batches = log.write(blocks, now)[0] + log.flush(now)
    for batch in batches:
        log.written(batch.id, True, batch_bytes(batch), now)
    return batches


def numbers(keys: list[BlockKey]) -> list[int]:
    return sorted(int.from_bytes(key, "big") for key in keys)
