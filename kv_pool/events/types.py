"""KV events: what became of blocks at one node, in order."""

from __future__ import annotations

from dataclasses import dataclass

from kv_pool.keys import BlockKey

DRAM = "dram"
SSD = "ssd"


@dataclass(frozen=True, slots=True)
class BlockStored:
    """``keys`` follow ``parent`` in one chain and can be acquired from ``medium`` now."""

    keys: tuple[BlockKey, ...]
    parent: BlockKey | None
    block_tokens: int
    medium: str


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    keys: tuple[BlockKey, ...]
    medium: str


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """``sequence`` counts the node's batches without a gap, from 0 in each incarnation."""

    sequence: int
    node_id: str
    incarnation: str
    ts: float
    events: tuple[BlockEvent, ...]
