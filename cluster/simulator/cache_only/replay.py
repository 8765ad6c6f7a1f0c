"""Hit rates without time: the trace's blocks against a cache of so many, request by request.

A request hits the longest prefix of its blocks that is there; then all of its blocks are touched, by default from the last to the
first, so that a root is always younger than what follows it, and no policy evicts the middle of a chain before its end.
``policy`` is one of the nodes' own (:mod:`kv_pool.policy.registry`), given every block as one that may go, or ``belady``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from cluster.simulator.cache_only.belady import Belady
from cluster.simulator.trace import Trace, TraceRequest, key_of
from kv_pool.keys import BlockKey
from kv_pool.policy.eviction import EvictionPolicy
from kv_pool.policy.registry import EVICTION_POLICIES, make_eviction_policy

Touch = Literal["back_to_front", "front_to_back"]
POLICIES: Final = (*EVICTION_POLICIES, "belady")


class UnknownPolicyError(ValueError):
    """The text lists the policies that there are."""


@dataclass(slots=True)
class CacheOnlyResult:
    """Counts of one replay. ``hit_tokens`` are input tokens under hit blocks."""

    requests: int = 0
    block_references: int = 0
    block_hits: int = 0
    blocks_present: int = 0
    """As ``block_hits``, with what lies behind a hole, which no engine could use: what bounds in the literature count."""
    input_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0

    @property
    def block_hit_rate(self) -> float:
        return self.block_hits / self.block_references if self.block_references else 0.0

    @property
    def present_rate(self) -> float:
        return self.blocks_present / self.block_references if self.block_references else 0.0

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


class Contents:
    """What a cache of ``capacity`` blocks holds under a policy of the pool."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self._policy = policy
        self._capacity = capacity
        self.here: set[BlockKey] = set()
        self._clock = 0.0
        self.evictions = 0

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Use ``keys`` one after the other; what is not here comes in, and the policy says what goes for it."""
        here, now, policy, capacity = self.here, self._clock, self._policy, self._capacity
        add, touched, stored, pop, removed = policy.add, policy.touched, policy.stored, policy.pop, policy.removed
        for key in keys:
            now += 1.0
            if key in here:
                touched(key)
            else:
                if len(here) >= capacity:
                    victim = pop()
                    if victim is None:
                        continue
                    here.discard(victim)
                    removed(victim)
                    self.evictions += 1
                here.add(key)
                stored(key)
            add(key, now)
        self._clock = now


def replay(
    trace: Trace,
    policy: str,
    capacity: int,
    *,
    touch: Touch = "back_to_front",
    partial_counts: bool = False,
    progress: Callable[[int], None] | None = None,
) -> CacheOnlyResult:
    """Replay ``trace`` against one cache. ``partial_counts``: the last block counts though it is not full (engines do not cache
    it; published figures often count it). Raises UnknownPolicyError; ``capacity`` must be at least 1."""
    chains = chains_of(trace, partial_counts=partial_counts)
    if policy == "belady":
        contents: Contents | Belady = Belady(_flat(chains, touch), capacity)
    else:
        contents = Contents(_policy(policy), capacity)
    result = CacheOnlyResult()
    for request, chain in zip(trace.requests, chains, strict=True):
        hits = hits_of(contents, chain)
        _count(result, request, chain, hits, trace.block_tokens)
        result.blocks_present += hits + sum(map(contents.here.__contains__, chain[hits + 1 :]))
        contents.touch(reversed(chain) if touch == "back_to_front" else chain)
        if progress is not None and request.index % 1024 == 0:
            progress(request.index)
    result.evictions = contents.evictions
    return result


def replay_nodes(
    trace: Trace, policy: str, capacity: int, nodes: int, *, shared: bool, touch: Touch = "back_to_front"
) -> CacheOnlyResult:
    """``nodes`` nodes of ``capacity`` blocks each, requests to one after the other: each with a cache of its own, or (``shared``)
    all of them as one."""
    chains = chains_of(trace, partial_counts=False)
    caches = [Contents(_policy(policy), capacity * nodes if shared else capacity) for _ in range(1 if shared else nodes)]
    result = CacheOnlyResult()
    for request, chain in zip(trace.requests, chains, strict=True):
        contents = caches[request.index % len(caches)]
        _count(result, request, chain, hits_of(contents, chain), trace.block_tokens)
        contents.touch(reversed(chain) if touch == "back_to_front" else chain)
    result.evictions = sum(contents.evictions for contents in caches)
    return result


def flattened_hits(trace: Trace, policy: str, capacity: int) -> tuple[int, int]:
    """Hits and references with every block for itself, front to back, the partial one counted: what a general cache simulator
    sees. Its use of a missing block is not a use more, so a hit means exactly ``touched``."""
    contents = Contents(_policy(policy), capacity)
    hits = references = 0
    for chain in chains_of(trace, partial_counts=True):
        for key in chain:
            hits += key in contents.here
            references += 1
            contents.touch((key,))
    return hits, references


def chains_of(trace: Trace, *, partial_counts: bool) -> list[tuple[BlockKey, ...]]:
    """Each request's blocks as keys, equal ids as one object."""
    key = _Keys().__getitem__
    return [tuple(map(key, r.block_ids if partial_counts else trace.full_blocks(r))) for r in trace.requests]


class _Keys(dict[int, BlockKey]):
    def __missing__(self, block_id: int) -> BlockKey:
        key = self[block_id] = key_of(block_id)
        return key


def hits_of(contents: Contents | Belady, chain: Sequence[BlockKey]) -> int:
    """Blocks of the longest prefix of ``chain`` that is there."""
    here, hits = contents.here, 0
    for key in chain:
        if key not in here:
            break
        hits += 1
    return hits


def _count(result: CacheOnlyResult, request: TraceRequest, chain: Sequence[BlockKey], hits: int, block_tokens: int) -> None:
    result.requests += 1
    result.block_references += len(chain)
    result.block_hits += hits
    result.input_tokens += request.input_tokens
    result.hit_tokens += min(hits * block_tokens, request.input_tokens)


def _flat(chains: Sequence[tuple[BlockKey, ...]], touch: Touch) -> list[BlockKey]:
    step = -1 if touch == "back_to_front" else 1
    return [key for chain in chains for key in chain[::step]]


def _policy(name: str) -> EvictionPolicy:
    try:
        return make_eviction_policy(name)
    except ValueError:
        raise UnknownPolicyError(f"policy: there is no {name!r}; known are: {', '.join(POLICIES)}") from None
