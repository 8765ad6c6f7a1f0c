"""Picking the least of a column, the same way everywhere. Pure."""

from __future__ import annotations

import numpy as np

from scheduler.plan import PlanTerms
from scheduler.routing import price
from scheduler.routing.price import Ways
from scheduler.routing.view import Choice, Floats, Need, View


def least(cost: Floats) -> int:
    """The row of the least cost, of several that which joined first."""
    return int(np.argmin(cost))


def decode_for(need: Need, view: View, prefill: int, cost: Floats, *, colocated: bool = False) -> int:
    """The decode worker of least ``cost`` plus handoff for prefill worker ``prefill``; with ``colocated`` only at its node (-1:
    no room there)."""
    here = view.decode.nodes == view.prefill.nodes[prefill]
    total = cost + np.where(here, price.HANDOFF_S, price.handoffs(need, view)[prefill])
    if colocated:
        total = np.where(here, total, np.inf)
    row = least(total)
    return row if np.isfinite(total[row]) else -1


def handoff_s(need: Need, view: View, prefill: int, decode: int) -> float:
    if view.decode.nodes[decode] == view.prefill.nodes[prefill]:
        return price.HANDOFF_S
    return float(price.handoffs(need, view, slice(prefill, prefill + 1))[0])


def choice(need: Need, view: View, prefill: int, decode: int, way: int, found: Ways, queue_s: float, *, overlap: bool) -> Choice:
    """The plan's figures for one pair and one way to get the prefix."""
    load_s = float(found.load_s[way, prefill])
    terms = PlanTerms(
        queue_s,
        load_s,
        float(found.compute_s[way, prefill]),
        handoff_s(need, view, prefill, decode),
        min(queue_s, load_s) if overlap else 0.0,
    )
    pulled = way == price.PULLED and found.blocks[way, prefill] > found.blocks[price.OWN, prefill]
    return Choice(
        prefill, decode, int(found.blocks[way, prefill]), found.source if pulled else None,
        terms, pull_s=float(found.pull_s[prefill]) if pulled else 0.0,
    )  # fmt: skip
