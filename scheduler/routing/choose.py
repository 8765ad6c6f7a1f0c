"""Which pair of workers serves a request, in seconds. Pure: ``choose(need, view) -> Choice | Obstacle``.

Filter, price, pick the cheapest. For every prefill worker P and decode worker D::

    TTFT(P, D) = queue(P) + load(P) + compute(P) + handoff(P, D)
    cost(P, D) = TTFT(P, D) + pressure(D)

* ``queue``: seconds of prefill work already given to P and not done yet;
* ``load`` + ``compute``: the cheapest of computing all, of taking the prefix that P's own node has, and of pulling the longest
  prefix that any node has. ``load = bytes pulled / link + bytes copied / LOCAL_BYTES_PER_S``; ``compute`` is P's own speed over
  what is not cached, at its position;
* ``handoff``: HANDOFF_S, and where D is at another node the last blocks once more over the link;
* ``pressure``: SEQUENCE_S for each sequence in D's batch, more as its blocks run out:
  ``SEQUENCE_S · (sequences + 1) / max(ROOM_SHARE_MIN, share of blocks left after this request)``. It leans to empty batches and
  roomy caches, and spreads requests whose TTFT would be the same.

Affinity is a cost like any other, per request: a hot worker loses only the requests for which another is cheaper. Ties go to the
smallest (prefill id, decode id). The sum over pairs is never formed: given P only the best D at P's own node and the best D
overall can win, so the work is (prefill workers + decode workers), not their product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from scheduler.plan import PlanTerms
from scheduler.routing.links import LinkSpeeds
from scheduler.routing.prefill_speed import PrefillSpeed

LOCAL_BYTES_PER_S: Final = 4e9
"""Shared memory to a worker's device cache."""
PULL_LATENCY_S: Final = 0.002
HANDOFF_S: Final = 0.01
"""From the end of prefill to the first decode step on the same node."""
EXPOSED_TOKENS: Final = 256
"""Tokens whose blocks cannot travel while prefill still computes: the last piece, or as much of a short prompt's prefix."""
SEQUENCE_S: Final = 0.01
ROOM_SHARE_MIN: Final = 0.1


class PrefillCandidate(NamedTuple):
    worker_id: str
    node_id: str
    queue_s: float
    speed: PrefillSpeed


class DecodeCandidate(NamedTuple):
    """``room_blocks`` of ``total_blocks`` are not spoken for; ``sequences`` are decoded or on their way here."""

    worker_id: str
    node_id: str
    room_blocks: int
    total_blocks: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Need:
    """What a request takes. ``reusable_blocks`` is how many leading blocks a cache may supply (at least one token is always
    computed); ``decode_blocks`` covers the prompt and the expected answer."""

    tokens: int
    block_tokens: int
    block_bytes: int
    reusable_blocks: int
    decode_blocks: int


@dataclass(frozen=True, slots=True)
class View:
    """The cluster at this moment. ``prefixes``: node id to the number of leading blocks it has."""

    prefill: Sequence[PrefillCandidate]
    decode: Sequence[DecodeCandidate]
    prefixes: Mapping[str, int]
    links: LinkSpeeds


@dataclass(frozen=True, slots=True)
class Choice:
    """``source`` is the node that the first ``cached_blocks`` are pulled from, None where the prefill worker's has them."""

    prefill: PrefillCandidate
    decode: DecodeCandidate
    cached_blocks: int
    source: str | None
    terms: PlanTerms


@dataclass(frozen=True, slots=True)
class Obstacle:
    """No pair: ``no_prefill``, ``no_decode`` (nobody to ask) or ``decode_full`` (nobody with the room)."""

    reason: str


class Prefix(NamedTuple):
    """One way to get the start of a prompt: seconds to load ``blocks`` blocks and to compute the rest."""

    blocks: int
    source: str | None
    load_s: float
    compute_s: float


def choose(need: Need, view: View) -> Choice | Obstacle:
    """The cheapest pair (module docstring). Deterministic; changes nothing."""
    if not view.prefill:
        return Obstacle("no_prefill")
    if not view.decode:
        return Obstacle("no_decode")
    priced = [(pressure_s(need, d), d) for d in view.decode if d.room_blocks >= need.decode_blocks]
    if not priced:
        return Obstacle("decode_full")
    overall, at_node = _best_decode(priced)
    longest = longest_prefix(need, view.prefixes)
    best: tuple[float, str, str] | None = None
    chosen: tuple[PrefillCandidate, DecodeCandidate, Prefix, float] | None = None
    for candidate in view.prefill:
        if best is not None and candidate.queue_s > best[0]:
            continue
        prefix = cheapest_prefix(need, candidate, view, longest)
        ready_s = candidate.queue_s + prefix.load_s + prefix.compute_s
        near = at_node.get(candidate.node_id)
        for pressure, decode in (overall,) if near is None or near is overall else (overall, near):
            handoff = handoff_s(need, candidate.node_id, decode.node_id, view.links)
            cost = (ready_s + handoff + pressure, candidate.worker_id, decode.worker_id)
            if best is None or cost < best:
                best, chosen = cost, (candidate, decode, prefix, handoff)
    assert chosen is not None
    prefill, decode, prefix, handoff = chosen
    terms = PlanTerms(prefill.queue_s, prefix.load_s, prefix.compute_s, handoff)
    return Choice(prefill, decode, prefix.blocks, prefix.source, terms)


def pressure_s(need: Need, decode: DecodeCandidate) -> float:
    """What one more sequence costs those at ``decode``, in seconds. ``room_blocks >= decode_blocks`` must hold."""
    left = (decode.room_blocks - need.decode_blocks) / max(1, decode.total_blocks)
    return SEQUENCE_S * (decode.sequences + 1) / max(ROOM_SHARE_MIN, left)


def longest_prefix(need: Need, prefixes: Mapping[str, int]) -> tuple[int, str]:
    """The most leading blocks that any node has, and which (the smallest id of several); (0, "") where none has any."""
    best = (0, "")
    for node_id, blocks in prefixes.items():
        usable = min(blocks, need.reusable_blocks)
        if usable > best[0] or (usable == best[0] > 0 and node_id < best[1]):
            best = (usable, node_id)
    return best


def cheapest_prefix(need: Need, candidate: PrefillCandidate, view: View, longest: tuple[int, str]) -> Prefix:
    """Compute all, take what is local, or pull the longest prefix: whichever has the first token soonest. Ties go to the first of
    these."""
    tokens, block_tokens, seconds = need.tokens, need.block_tokens, candidate.speed.seconds
    copy_s = need.block_bytes / LOCAL_BYTES_PER_S
    blocks, source, load_s, compute_s = 0, None, 0.0, seconds(tokens)
    local = min(view.prefixes.get(candidate.node_id, 0), need.reusable_blocks)
    if local:
        past = local * block_tokens
        here = local * copy_s, seconds(tokens - past, past)
        if here[0] + here[1] < load_s + compute_s:
            blocks, load_s, compute_s = local, *here
    if longest[0] > local:
        past = longest[0] * block_tokens
        pull_s = (longest[0] - local) * need.block_bytes / view.links.bytes_per_s(longest[1], candidate.node_id)
        there = longest[0] * copy_s + PULL_LATENCY_S + pull_s, seconds(tokens - past, past)
        if there[0] + there[1] < load_s + compute_s:
            blocks, source, load_s, compute_s = longest[0], longest[1], *there
    return Prefix(blocks, source, load_s, compute_s)


def handoff_s(need: Need, prefill_node: str, decode_node: str, links: LinkSpeeds) -> float:
    """Seconds from the end of prefill to the first decode step."""
    if prefill_node == decode_node:
        return HANDOFF_S
    size = -(-min(need.tokens, EXPOSED_TOKENS) // need.block_tokens) * need.block_bytes
    return HANDOFF_S + PULL_LATENCY_S + size / links.bytes_per_s(prefill_node, decode_node)


Priced = tuple[float, DecodeCandidate]


def _best_decode(priced: Iterable[Priced]) -> tuple[Priced, dict[str, Priced]]:
    """The decode worker under the least pressure: overall, and at each node."""
    at_node: dict[str, Priced] = {}
    for entry in priced:
        known = at_node.get(entry[1].node_id)
        if known is None or (entry[0], entry[1].worker_id) < (known[0], known[1].worker_id):
            at_node[entry[1].node_id] = entry
    return min(at_node.values(), key=lambda entry: (entry[0], entry[1].worker_id)), at_node
