"""Who will be decoding at a later moment. Pure.

::

    now          t = when this prefill would end
     |-- A ----------|   ends before t: is gone by then                     (has decoded its expected time)
     |-- B ------------------|   counts
           |-- C --------------------|   its prefill ends before t: counts   (is not decoding yet)
                        |-- D --|   starts after t: does not count
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Stay:
    """A request's time at a decode worker as it is expected: from ``starts_at`` to ``ends_at`` (seconds, the scheduler's clock),
    with ``context_tokens`` in its cache half way."""

    starts_at: float
    ends_at: float
    context_tokens: int


def batch_at(stays: Iterable[Stay], t: float) -> tuple[int, int]:
    """Sequences that decode at ``t``, and their context tokens."""
    sequences = context = 0
    for stay in stays:
        if stay.starts_at <= t < stay.ends_at:
            sequences += 1
            context += stay.context_tokens
    return sequences, context


def next_end(stays: Iterable[Stay], now: float) -> float:
    """When the next of ``stays`` that is under way ends; ``now`` where none is."""
    return min((stay.ends_at for stay in stays if stay.starts_at <= now < stay.ends_at), default=now)
