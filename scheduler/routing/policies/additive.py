"""What the policies of the comparison have in common: they add up their terms and take the least, and then the decode worker with
the shortest step. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np

from scheduler.routing import price
from scheduler.routing.pick import choice, decode_for, least
from scheduler.routing.price import Ways
from scheduler.routing.view import Choice, Floats, Need, Obstacle, View

TIE_S: Final = 1e-6
"""Among steps of equal length (none was reported yet) the smaller batch."""


def least_pair(
    need: Need, view: View, cost: Floats, way: int | np.ndarray, found: Ways, *, colocated: bool
) -> Choice | Obstacle:  # fmt: skip
    """The able prefill worker of least ``cost`` and the decode worker whose step would be shortest. ``way``: of the prefix, for
    all or by prefill worker."""
    cost = np.where(view.prefill.able, cost, np.inf)
    steps: Floats = np.where(price.fits(need, view.decode), price.step_with(need, view.decode), np.inf)
    steps = steps + TIE_S * view.decode.sequences
    while True:
        prefill = least(cost)
        if not np.isfinite(cost[prefill]):
            return Obstacle("decode_full")
        decode = decode_for(need, view, prefill, steps, colocated=colocated)
        if decode >= 0:
            break
        cost[prefill] = np.inf
    taken = int(way if isinstance(way, int) else way[prefill])
    return choice(need, view, prefill, decode, taken, found, float(view.prefill.queue_s[prefill]), overlap=False)
