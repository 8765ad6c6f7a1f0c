"""A cache of whole chains for tests of eviction policies: what the node does with a policy, without the node."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kv_pool.keys import BlockKey
from kv_pool.policy.eviction import EvictionPolicy

CUT = Path(__file__).parents[1] / "data" / "conversation_cut.jsonl"


def conversation() -> list[tuple[int, ...]]:
    """The full blocks of each request of the trace, by number."""
    return [tuple(json.loads(line)["hash_ids"][:-1]) for line in CUT.read_text().splitlines()]


def block(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16))


class ChainCache:
    """``capacity`` blocks. A request hits its longest resident prefix, uses that from back to front, and stores the rest as far
    as there is room behind its own blocks."""

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self.hits = 0
        self.evicted: list[int] = []
        self._capacity = capacity
        self._policy = policy
        self._parents: dict[int, int | None] = {}
        self._children: dict[int, int] = {}
        self._leased: set[int] = set()
        self._now = 0.0
        self._used: dict[int, float] = {}

    def request(self, chain: Sequence[int]) -> None:
        found = 0
        while found < len(chain) and chain[found] in self._parents:
            found += 1
        self.hits += found
        for number in reversed(chain[:found]):
            self._use(number)
        self._leased = set(chain)
        for number in chain[:found]:
            self._policy.discard(block(number))
        parent = chain[found - 1] if found else None
        for number in chain[found:]:
            if not self._make_room():
                break
            self._store(number, parent)
            parent = number
        self._leased = set()
        for number in chain:
            self._offer(number)

    def _use(self, number: int) -> None:
        self._now += 1
        self._used[number] = self._now
        self._policy.touched(block(number))

    def _store(self, number: int, parent: int | None) -> None:
        assert number not in self._parents
        self._now += 1
        self._parents[number], self._used[number] = parent, self._now
        self._policy.stored(block(number))
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
            self._policy.discard(block(parent))
        assert len(self._parents) <= self._capacity

    def _make_room(self) -> bool:
        if len(self._parents) < self._capacity:
            return True
        key = self._policy.pop()
        if key is None:
            return False
        victim = int.from_bytes(key)
        assert victim not in self._leased
        assert not self._children.get(victim), "only leaves were offered"
        self.evicted.append(victim)
        parent = self._parents.pop(victim)
        self._policy.removed(key)
        if parent is not None:
            self._children[parent] -= 1
            self._offer(parent)
        return True

    def _offer(self, number: int) -> None:
        if number in self._parents and number not in self._leased and not self._children.get(number):
            self._policy.add(block(number), self._used[number])


def hits_of(make: Callable[[], EvictionPolicy], capacity: int, chains: Iterable[Sequence[int]]) -> int:
    """Blocks hit."""
    cache = ChainCache(capacity, make())
    for chain in chains:
        cache.request(chain)
    return cache.hits


def belady_hits(capacity: int, chains: Iterable[Sequence[int]]) -> int:
    """Blocks that any cache could have hit, knowing the future and bound to no chain: Belady's MIN with bypass."""
    references = [number for chain in chains for number in chain]
    never, next_use, last_seen = len(references), [0] * len(references), dict[int, int]()
    for i in range(len(references) - 1, -1, -1):
        next_use[i] = last_seen.get(references[i], never)
        last_seen[references[i]] = i
    resident: dict[int, int] = {}
    furthest: list[tuple[int, int]] = []
    hits = 0
    for i, number in enumerate(references):
        hits += number in resident
        resident[number] = next_use[i]
        heapq.heappush(furthest, (-next_use[i], number))
        while len(resident) > capacity:
            negated, victim = heapq.heappop(furthest)
            if resident.get(victim) == -negated:
                del resident[victim]
    return hits
