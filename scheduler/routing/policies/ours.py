"""The pair that costs everybody the least time.

For every prefill worker the ways to get the prefix (:mod:`~scheduler.routing.price`) are compared where they matter, at the end::

    TTFT(P, way) = max(wait(P), load) + compute + handoff          the load is hidden behind the wait
    wait(P)      = open work that P's own order puts before this request     (shortest first, aged: not the whole queue)
    cost(P, way) = TTFT + compute · (requests that it goes before + PRESSURE · load of the fleet) + decode(D)

The second term of ``cost`` is what the request does to others: each that it goes before waits ``compute`` longer, and so do those
that will come while there is a queue. It is what makes a cached prefix worth a longer wait exactly as far as the recompute that
it saves is worth to the rest, with no threshold to tune: affinity is one cost among others, request by request. Hot prefixes
replicate because a busy holder's queue and its sender's wait grow until a pull is cheaper; a burst of new siblings stays with the
one or two workers that were promised their common blocks first (``promises.py``), until computing them again elsewhere is sooner.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from scheduler.routing import price
from scheduler.routing.pick import choice, least
from scheduler.routing.policy import Policy
from scheduler.routing.price import Ways
from scheduler.routing.view import Choice, Need, Obstacle, View

PRESSURE: Final = 1.0


class Ours(Policy):
    def __init__(self, *, colocated: bool = False) -> None:
        self._colocated = colocated

    def choose(self, need: Need, view: View) -> Choice | Obstacle:
        blocked = price.obstacle(need, view)
        if blocked is not None:
            return blocked
        prefill = view.prefill
        found = price.ways(need, view, price.soonest_source(need, view))
        shortest_s = (found.load_s + found.compute_s).min(axis=0)
        wait_s, behind = price.waits(need, view, shortest_s)
        wait_of_way = np.empty_like(found.load_s)
        wait_of_way[:] = wait_s
        # Promised blocks are there once all that was given to the worker before is done.
        promised = found.blocks[price.PROMISED] > found.blocks[price.OWN]
        wait_of_way[price.PROMISED] = np.where(promised, prefill.queue_s, wait_s)
        busy_s = float(prefill.queue_s[prefill.able].mean())
        others = behind + PRESSURE * busy_s / (busy_s + float(shortest_s[prefill.able].mean()) + 1e-9)
        ready_s = np.maximum(wait_of_way, found.load_s) + found.compute_s
        cost = ready_s + found.compute_s * others
        way = np.argmin(cost, axis=0)
        rows = np.arange(len(way))
        return self._pair(need, view, found, way, cost[way, rows], wait_of_way[way, rows])

    def _pair(
        self, need: Need, view: View, found: Ways, way: np.ndarray, cost: np.ndarray, wait_s: np.ndarray
    ) -> Choice | Obstacle:  # fmt: skip
        """Given P, only the best decode worker at P's own node and the best overall can win: no product of the two fleets."""
        prefill, decode = view.prefill, view.decode
        pressure = price.pressures(need, view)
        slots = len(view.sending_s)
        near = np.full(slots, np.inf)
        np.minimum.at(near, decode.nodes, pressure)
        near_s = near[prefill.nodes] + price.HANDOFF_S
        far_s = np.full(len(cost), np.inf) if self._colocated else float(pressure.min()) + price.handoffs(need, view)
        total = np.where(prefill.able, cost + np.minimum(near_s, far_s), np.inf)
        row = least(total)
        if not np.isfinite(total[row]):
            return Obstacle("decode_full")
        if near_s[row] <= far_s[row]:
            pressure = np.where(decode.nodes == prefill.nodes[row], pressure, np.inf)
        chosen = choice(need, view, row, least(pressure), int(way[row]), found, float(wait_s[row]), overlap=True)
        return self._fill_the_wait(need, view, found, chosen)

    @staticmethod
    def _fill_the_wait(need: Need, view: View, found: Ways, chosen: Choice) -> Choice:
        """Load what the wait hides, beyond the way that was chosen; and say where the worker is to stop, if there is more."""
        row, terms = chosen.prefill, chosen.terms
        own = int(found.blocks[price.OWN, row])
        if chosen.cached_blocks >= own:
            return chosen
        left = own - chosen.cached_blocks
        per_block_s = (float(found.load_s[price.OWN, row]) - terms.load_s) / left
        blocks = price.hidden_blocks(need, terms.queue_s, chosen.cached_blocks, own, per_block_s, terms.load_s)
        load_s = terms.load_s + per_block_s * (blocks - chosen.cached_blocks)
        past = blocks * need.block_tokens
        rest = need.tokens - past
        a, b = float(view.prefill.per_token[row]), float(view.prefill.per_token_position[row])
        compute_s = rest * (a + b * (rest + 2 * past))
        terms = replace(terms, load_s=load_s, compute_s=compute_s, overlap_s=min(terms.queue_s, load_s))
        return replace(chosen, cached_blocks=blocks, terms=terms, load_max_blocks=None if blocks == own else blocks)
