"""The terms of a first token, in seconds, for every worker at once. Pure; the policies put them together.

For a prompt of ``T`` tokens of which ``k`` blocks are taken from caches at prefill worker P, and decode worker D::

    compute(P, k) = n·(a + b·(n + 2p))        p = k · block_tokens, n = T - p; a, b as P reports (prefill_speed.py)
    load(P, k)    = DRAM blocks · size · dram_s_per_byte + SSD blocks · size · ssd_s_per_byte        at P's own node
                    + PULL_LATENCY_S + wait(source) + blocks not here · size / link(source, P)       where some are pulled
    handoff(P, D) = HANDOFF_S, and where D is at another node the last blocks once more over the link
    decode(D)     = expected answer · step(D with this request) + SEQUENCE_S · (sequences + 1) / max(ROOM_SHARE_MIN, room left)

``compute`` falls ever faster in ``k`` (later tokens attend to more) and ``load`` is straight between the places where the medium
changes, so their sum is least at such a place: nothing, the blocks in DRAM before the first on the SSD, all that P's node has,
all that it is promised to have (``promises.py``), all that any node has. Those are the :class:`Ways` compared. Where the request
waits for its turn anyway, the load that this hides is free, and :func:`hidden_blocks` finds a ``k`` between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from prefill_worker.task import precedence
from scheduler.routing.view import Bools, DecodeView, Floats, Ints, Need, Obstacle, View

PULL_LATENCY_S: Final = 0.002
HANDOFF_S: Final = 0.01
"""From the end of prefill to the first decode step on the same node."""
EXPOSED_TOKENS: Final = 256
"""Tokens whose blocks cannot travel while prefill still computes: the last piece, or as much of a short prompt's prefix."""
SEQUENCE_S: Final = 0.01
ROOM_SHARE_MIN: Final = 0.1

NOTHING, DRAM_ONLY, OWN, PROMISED, PULLED = range(5)
"""Rows of :class:`Ways`."""


@dataclass(frozen=True, slots=True)
class Ways:
    """Ways to get the start of the prompt, [5, prefill workers]: blocks taken, seconds to load them, seconds to compute the rest.
    ``source``: the slot that PULLED pulls from, -1 where nobody has more than the own node."""

    blocks: Ints
    load_s: Floats
    compute_s: Floats
    source: int
    pull_s: Floats
    """Seconds of the source's link that PULLED takes."""


def obstacle(need: Need, view: View) -> Obstacle | None:
    if not view.prefill.able.any():
        return Obstacle("no_prefill")
    if not view.decode.able.any():
        return Obstacle("no_decode")
    return None if fits(need, view.decode).any() else Obstacle("decode_full")


def fits(need: Need, decode: DecodeView) -> Bools:
    """Decode workers that have the room."""
    return decode.able & (decode.room_blocks >= need.decode_blocks)


def ways(need: Need, view: View, source: int) -> Ways:
    """All ways, for all prefill workers."""
    prefill, prefixes = view.prefill, view.prefixes
    size = need.block_bytes
    own = np.minimum(prefixes.blocks[prefill.nodes], need.reusable_blocks)
    dram_first = np.minimum(prefixes.dram_first[prefill.nodes], own)
    promised = np.maximum(own, np.minimum(prefixes.promised[prefill.nodes], need.reusable_blocks))
    copy_s = size * prefill.dram_s_per_byte
    own_s = dram_first * copy_s + (own - dram_first) * size * prefill.ssd_s_per_byte
    blocks = np.empty((5, len(own)), np.int64)
    load_s = np.empty((5, len(own)))
    blocks[NOTHING], load_s[NOTHING] = 0, 0.0
    blocks[DRAM_ONLY], load_s[DRAM_ONLY] = dram_first, dram_first * copy_s
    blocks[OWN], load_s[OWN] = own, own_s
    blocks[PROMISED], load_s[PROMISED] = promised, own_s + (promised - own) * copy_s
    pull_s = np.zeros(len(own))
    blocks[PULLED], load_s[PULLED] = own, own_s
    if source >= 0:
        there = min(int(prefixes.blocks[source]), need.reusable_blocks)
        missing = np.maximum(0, there - own)
        link = view.links.from_slot(source, len(view.sending_s))
        pull_s = missing * size / link[prefill.nodes]
        from_ssd = np.minimum(missing, max(0, there - int(prefixes.dram_first[source])))
        pulled_s = PULL_LATENCY_S + view.sending_s[source] + pull_s + from_ssd * size * prefill.ssd_s_per_byte
        blocks[PULLED] = own + missing
        load_s[PULLED] = own_s + missing * copy_s + np.where(missing > 0, pulled_s, 0.0)
    past = blocks * need.block_tokens
    rest = need.tokens - past
    compute_s = rest * (prefill.per_token + prefill.per_token_position * (rest + 2 * past))
    return Ways(blocks, load_s, compute_s, source, pull_s)


def longest_source(need: Need, view: View) -> int:
    """The slot with the most leading blocks, of several the one that is least busy sending; -1 where nobody has any."""
    blocks = np.where(view.sources, np.minimum(view.prefixes.blocks, need.reusable_blocks), 0)
    most = int(blocks.max(initial=0))
    if not most:
        return -1
    holders = np.flatnonzero(blocks == most)
    return int(holders[np.argmin(view.sending_s[holders])])


def soonest_source(need: Need, view: View) -> int:
    """The slot from which the prompt would be ready soonest at a typical worker: a shorter prefix at a node that is not busy may
    beat the longest; -1 where nobody has any."""
    blocks = np.where(view.sources, np.minimum(view.prefixes.blocks, need.reusable_blocks), 0)
    if not blocks.any():
        return -1
    typical = int(np.argmax(view.prefill.able))  # the first that may get work
    a, b = float(view.prefill.per_token[typical]), float(view.prefill.per_token_position[typical])
    past = blocks * need.block_tokens
    rest = need.tokens - past
    ssd = np.maximum(0, blocks - view.prefixes.dram_first) * float(view.prefill.ssd_s_per_byte[typical])
    cost = rest * (a + b * (rest + 2 * past)) + view.sending_s + need.block_bytes * (blocks / view.links.out(len(blocks)) + ssd)
    return int(np.argmin(np.where(blocks > 0, cost, np.inf)))


def waits(need: Need, view: View, compute_s: Floats) -> tuple[Floats, Ints]:
    """For a request that computes ``compute_s`` at each prefill worker: seconds that it waits for the work that goes before it
    there, and how many open requests it goes before."""
    work = view.prefill.work
    mine = precedence(view.order, view.now, compute_s, need.priority)
    before = work.precedence <= np.reshape(mine, (-1, 1))
    ahead = (work.seconds * before).sum(axis=1) - work.done_s
    behind = np.isfinite(work.precedence).sum(axis=1) - before.sum(axis=1)
    # Of the piece that is under way half is left on the average, whoever it belongs to.
    wait_s = np.minimum(np.maximum(ahead, 0.0) + 0.5 * work.piece_s, view.prefill.queue_s)
    return wait_s, behind


def handoffs(need: Need, view: View, rows: slice = slice(None)) -> Floats:
    """Seconds from the end of prefill to the first step of a decode worker at another node, for each prefill worker in
    ``rows``."""
    exposed = -(-min(need.tokens, EXPOSED_TOKENS) // need.block_tokens) * need.block_bytes
    out = view.links.out(len(view.sending_s))
    return HANDOFF_S + PULL_LATENCY_S + exposed / out[view.prefill.nodes[rows]]


def step_with(need: Need, decode: DecodeView) -> Floats:
    """Seconds of a step at each decode worker once the request has joined."""
    return (
        decode.step_s
        + decode.step_s_per_sequence * (decode.sequences + 1)
        + decode.step_s_per_token * (decode.context_tokens + need.tokens)
    )


def pressures(need: Need, view: View) -> Floats:
    """What each decode worker costs, in seconds; infinite where there is no room."""
    decode = view.decode
    left = (decode.room_blocks - need.decode_blocks) / np.maximum(1, decode.total_blocks)
    crowd = SEQUENCE_S * (decode.sequences + 1) / np.maximum(ROOM_SHARE_MIN, left)
    slower = decode.sequences * decode.step_s_per_sequence  # for those that are there already
    cost = need.expected_output * (step_with(need, decode) + slower) + crowd
    return np.where(fits(need, decode), cost, np.inf)


def hidden_blocks(need: Need, wait_s: float, cheapest: int, most: int, load_s_per_block: float, before_s: float) -> int:
    """How many blocks, from ``cheapest`` up to ``most``, load within ``wait_s`` when ``cheapest`` of them take ``before_s`` and
    each further one ``load_s_per_block``."""
    if load_s_per_block <= 0.0:
        return most
    return min(most, cheapest + max(0, int((wait_s - before_s) / load_s_per_block)))
