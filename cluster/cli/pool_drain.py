"""Waiting until a node that is being drained is empty."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from cluster.client.errors import MoonpoolError

POLL_S: Final = 0.5


def wait_empty(
    node: dict[str, Any],
    ask: Callable[[], dict[str, Any]],
    *,
    timeout_s: float,
    say: Callable[[str], object],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> bool:
    """True once the node is empty and the scheduler plans without it. ``node`` is the answer to the order, ``ask`` gets it anew;
    each change is said. False when the time is over, or when the node is in use again.

    A node or gateway that does not answer for a while is waited for: the drain goes on without us.
    """
    deadline = clock() + timeout_s
    incarnation = (node["status"] or {}).get("incarnation")
    said, begun = "", False
    while True:
        status = node["status"]
        if status is not None and status.get("incarnation") != incarnation:
            say(f"{node['id']} has restarted, so it is in use again")
            return False
        draining = status is not None and bool(status.get("draining"))
        if status is not None and begun and not draining:
            say(f"{node['id']} was taken into use again by somebody else")
            return False
        begun = begun or draining  # the order is carried out a moment after it was taken
        text, empty = _state_of(node)
        if text != said:
            say(text)
            said = text
        if draining and empty:
            return True
        left_s = deadline - clock()
        if left_s <= 0:
            say(f"{node['id']} is not empty after {timeout_s:g} s; it is still being drained")
            return False
        sleep(min(POLL_S, left_s))
        try:
            node = ask()
        except MoonpoolError as error:
            node = {**node, "status": None, "error": str(error)}


def _state_of(node: dict[str, Any]) -> tuple[str, bool]:
    """In words, and whether the node is empty and nothing new will come."""
    status = node["status"]
    if status is None:
        return f"{node['id']}: no answer ({node['error']})", False
    counters = status.get("counters", {})
    planned = not node["scheduler"].get("draining", False)
    empty = bool(status.get("empty"))
    parts = [
        f"{counters.get(field, 0)} {noun}"
        for field, noun in (
            ("slots_committed", "blocks in DRAM"),
            ("slots_reserved", "being written"),
            ("slots_quarantined", "quarantined"),
            ("leases", "leases"),
        )
        if counters.get(field, 0)
    ]
    what = "empty" if empty else ", ".join(parts) or "nearly empty"
    return f"{node['id']}: {what}{'; the scheduler has yet to hear of it' if planned else ''}", empty and not planned
