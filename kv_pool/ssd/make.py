"""The log as the settings want it."""

from __future__ import annotations

from collections.abc import Callable

from kv_pool.keys import BlockKey
from kv_pool.policy.segments import ExpiredThenDeadThenOldest
from kv_pool.settings import PoolSettings, SsdSettings
from kv_pool.sizes import parse_size
from kv_pool.ssd.budget import WriteBudget
from kv_pool.ssd.log import SsdLog
from kv_pool.ssd.records import PAGE


def segment_bytes(ssd: SsdSettings) -> int:
    """Whole pages."""
    return parse_size(ssd.segment) // PAGE * PAGE


def segment_count(ssd: SsdSettings) -> int:
    return parse_size(ssd.capacity) // segment_bytes(ssd)


def make_log(pool: PoolSettings, ssd: SsdSettings, resident: Callable[[BlockKey], bool]) -> SsdLog:
    """Raises ValueError for settings that make no sense together."""
    capacity = segment_count(ssd) * segment_bytes(ssd)
    return SsdLog(
        segments=segment_count(ssd),
        segment_pages=segment_bytes(ssd) // PAGE,
        ttl_s=tuple(pool.retention_classes.values()),
        budget=WriteBudget(int(capacity * ssd.dwpd)),
        batches_in_flight_max=ssd.writes_in_flight,
        batch_bytes_max=parse_size(ssd.batch),
        policy=ExpiredThenDeadThenOldest(),
        resident=resident,
    )
