"""Eviction policies by the name that the configuration gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kv_pool.policy.eviction import EvictionPolicy
from kv_pool.policy.gdsf import GreedyDualSizeFrequency
from kv_pool.policy.lfu import LeastFrequentlyUsed
from kv_pool.policy.lru import LeastRecentlyUsed
from kv_pool.policy.s3fifo import S3Fifo
from kv_pool.policy.sieve import Sieve

EVICTION_POLICIES: Final[Mapping[str, Callable[[], EvictionPolicy]]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "s3fifo": S3Fifo,
    "sieve": Sieve,
    "gdsf": GreedyDualSizeFrequency,
}


def make_eviction_policy(name: str) -> EvictionPolicy:
    """A new policy called ``name``. Raises ValueError, naming those that exist, where there is none."""
    try:
        return EVICTION_POLICIES[name]()
    except KeyError:
        raise ValueError(f"there is no eviction policy {name!r}; known are: {', '.join(sorted(EVICTION_POLICIES))}") from None
