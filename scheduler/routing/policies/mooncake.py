"""Algorithm 1 of the Mooncake paper (FAST'25, section 4): cache-aware prefill choice with a balancing threshold.

For each prefill worker, with ``best`` the longest prefix that any node has and ``own`` what its node has::

    best / own > threshold    pull best - own blocks and keep a copy: TTFT = transfer + queue + compute after best
    otherwise                 TTFT = queue + compute after own

The least TTFT wins; terms are strictly added, queues are sums of all predicted work. ``own = 0`` makes the ratio infinite: then
whatever prefix there is gets pulled. Decode goes by load. The paper publishes no threshold; 2.0 is ours.
"""

from __future__ import annotations

import numpy as np

from scheduler.routing import price
from scheduler.routing.policies.additive import least_pair
from scheduler.routing.policy import Policy
from scheduler.routing.view import Choice, Need, Obstacle, View


class Mooncake(Policy):
    def __init__(self, *, threshold: float, colocated: bool = False) -> None:
        self._threshold = threshold
        self._colocated = colocated

    def choose(self, need: Need, view: View) -> Choice | Obstacle:
        blocked = price.obstacle(need, view)
        if blocked is not None:
            return blocked
        source = price.longest_source(need, view)
        found = price.ways(need, view, source)
        own = found.blocks[price.OWN]
        best = int(min(view.prefixes.blocks[source], need.reusable_blocks)) if source >= 0 else 0
        pulls = best > own * self._threshold
        way = np.where(pulls, price.PULLED, price.OWN)
        rows = np.arange(len(own))
        cost = view.prefill.queue_s + found.load_s[way, rows] + found.compute_s[way, rows]
        return least_pair(need, view, cost, way, found, colocated=self._colocated)
