"""The prefill worker with the least work, and the decode worker with the shortest step. Blind to caches: what the worker's own
node has is used, but not looked for."""

from __future__ import annotations

from scheduler.routing import price
from scheduler.routing.policies.additive import least_pair
from scheduler.routing.policy import Policy
from scheduler.routing.view import Choice, Need, Obstacle, View


class LeastLoaded(Policy):
    def __init__(self, *, colocated: bool = False) -> None:
        self._colocated = colocated

    def choose(self, need: Need, view: View) -> Choice | Obstacle:
        blocked = price.obstacle(need, view)
        if blocked is not None:
            return blocked
        found = price.ways(need, view, -1)
        return least_pair(need, view, view.prefill.queue_s, price.OWN, found, colocated=self._colocated)
