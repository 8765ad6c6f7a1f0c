"""Queue plus what is left to compute with the blocks that the worker's own node has. Nothing is pulled from elsewhere."""

from __future__ import annotations

from scheduler.routing import price
from scheduler.routing.policies.additive import least_pair
from scheduler.routing.policy import Policy
from scheduler.routing.view import Choice, Need, Obstacle, View


class LocalCacheAware(Policy):
    def __init__(self, *, colocated: bool = False) -> None:
        self._colocated = colocated

    def choose(self, need: Need, view: View) -> Choice | Obstacle:
        blocked = price.obstacle(need, view)
        if blocked is not None:
            return blocked
        found = price.ways(need, view, -1)
        cost = view.prefill.queue_s + found.load_s[price.OWN] + found.compute_s[price.OWN]
        return least_pair(need, view, cost, price.OWN, found, colocated=self._colocated)
