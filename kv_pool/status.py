"""What a node says of itself, as plain values."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from kv_pool.node.slots import SlotState
from kv_pool.node.state import NodeState
from kv_pool.settings import PoolSettings


def counters(state: NodeState) -> dict[str, int | float]:
    """Counters and gauges. May be called from another thread than the node's: each figure is right, not all of the same
    moment."""
    slots = state.slots.counts()
    return {
        "pid": os.getpid(),
        "slots_total": state.slots.count,
        "slots_free": slots[SlotState.FREE],
        "slots_reserved": slots[SlotState.RESERVED],
        "slots_committed": slots[SlotState.COMMITTED],
        "slots_quarantined": slots[SlotState.QUARANTINED],
        "blocks_idle": state.blocks.idle,
        "leases": state.readers.leases,
        "clients": len(state.clients),
        "clients_lost": state.clients_lost,
        "acquires_waiting": len(state.readers.tickets),
        "fetches": len(state.readers.fetches),
        "commits": state.commits,
        "evictions": state.blocks.evictions,
        "hits": state.readers.hits,
        "misses": state.readers.misses,
        "late": state.readers.late,
        "refused": state.writers.refused,
        "corrupt": state.corrupt + state.ssd_reads.corrupt,
        "ssd_loads": len(state.ssd_reads.loads),
        "ssd_blocks_read": state.ssd_reads.blocks_read,
        "ssd_blocks_written": state.demotion.blocks_written,
        "ssd_blocks_refused": state.demotion.blocks_refused,
    }


def ssd(state: NodeState, settings: PoolSettings, disk: dict[str, Any] | None, wall_now: float) -> dict[str, Any] | None:
    """The SSD tier; None where the node has none. ``disk`` is what the I/O half says of itself."""
    if state.log is None or disk is None:
        return None
    names = list(settings.retention_classes)
    stats = state.log.stats(wall_now)
    log = asdict(stats) | {
        "segments": {each.value: count for each, count in stats.segments.items()},
        "retentions": {names[number]: count for number, count in stats.retentions.items() if number < len(names)},
    }
    return {"disk": disk, "log": log}
