"""Any worker that may get work. The floor that every other policy is measured from."""

from __future__ import annotations

import random

import numpy as np

from scheduler.routing import price
from scheduler.routing.pick import choice
from scheduler.routing.policy import Policy
from scheduler.routing.view import Choice, Need, Obstacle, View


class Random(Policy):
    """``seed`` makes it repeatable."""

    def __init__(self, *, seed: int = 0, colocated: bool = False) -> None:
        self._draw = random.Random(seed)  # noqa: S311 - a seed is the point
        self._colocated = colocated

    def choose(self, need: Need, view: View) -> Choice | Obstacle:
        blocked = price.obstacle(need, view)
        if blocked is not None:
            return blocked
        fits = price.fits(need, view.decode)
        able = view.prefill.able
        if self._colocated:
            able = able & np.isin(view.prefill.nodes, view.decode.nodes[fits])
            if not able.any():
                return Obstacle("decode_full")
        prefill = self._draw.choice(np.flatnonzero(able).tolist())
        if self._colocated:
            fits = fits & (view.decode.nodes == view.prefill.nodes[prefill])
        decode = self._draw.choice(np.flatnonzero(fits).tolist())
        found = price.ways(need, view, -1)
        return choice(need, view, prefill, decode, price.OWN, found, float(view.prefill.queue_s[prefill]), overlap=False)
