"""One worker after the other, in the order in which they joined."""

from __future__ import annotations

import numpy as np

from scheduler.routing import price
from scheduler.routing.pick import choice
from scheduler.routing.policy import Policy
from scheduler.routing.view import Bools, Choice, Need, Obstacle, View


class RoundRobin(Policy):
    def __init__(self, *, colocated: bool = False) -> None:
        self._colocated = colocated
        self._prefill = -1
        self._decode = -1

    def choose(self, need: Need, view: View) -> Choice | Obstacle:
        blocked = price.obstacle(need, view)
        if blocked is not None:
            return blocked
        fits, able = price.fits(need, view.decode), view.prefill.able
        if self._colocated:
            able = able & np.isin(view.prefill.nodes, view.decode.nodes[fits])
            if not able.any():
                return Obstacle("decode_full")
        self._prefill = prefill = _after(self._prefill, able)
        if self._colocated:
            decode = _after(-1, fits & (view.decode.nodes == view.prefill.nodes[prefill]))
        else:
            self._decode = decode = _after(self._decode, fits)
        found = price.ways(need, view, -1)
        return choice(need, view, prefill, decode, price.OWN, found, float(view.prefill.queue_s[prefill]), overlap=False)


def _after(last: int, allowed: Bools) -> int:
    """The next allowed row behind ``last``, going round."""
    rows = np.flatnonzero(allowed)
    place = int(np.searchsorted(rows, last, side="right"))
    return int(rows[place % len(rows)])
