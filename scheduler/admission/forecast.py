"""Who will be decoding at a later moment. Pure.

::

    now          t = when this prefill would end
     |-- A ----------|            is decoding now: still there at t with probability exp(-(t - now) / its expected stay)
           |-- C --------------|  its prefill ends before t: counts with exp(-(t - its start) / its expected stay)
           |-- U --------------|  not known yet: will be planned after now and start before t all the same
                        |-- D     starts after t: does not count

The expected number of sequences, not a count of those whose expected time is not over: answers' lengths have a long tail, and one
that has outlasted its expectation is as likely as any other to go on (a memoryless stay).

``U`` matters as much as the rest: without it a long prompt, whose prefill ends late, looks into a future in which nobody else has
come, and is let in where a short one is not. At ``rate`` starts a second and a mean stay of ``s`` there will be ``rate · s · (1 -
exp(-(t - now) / s))`` of all that start in between, known or not; what is known of them is counted for itself, the rest is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stay:
    """A request's time at a decode worker as it is expected: from ``starts_at`` to ``ends_at`` (seconds, the scheduler's clock),
    with ``context_tokens`` in its cache half way."""

    starts_at: float
    ends_at: float
    context_tokens: int
    under_way: bool = field(default=False, kw_only=True)
    """Its prefill has ended. One that has not cannot be decoding, however late it is."""


def batch_at(stays: Iterable[Stay], t: float, now: float, rate: float = 0.0) -> tuple[float, float]:
    """Expected sequences that decode at ``t`` (not before ``now``), and their expected context tokens. ``rate``: requests a
    second that start there, of late."""
    sequences = context = coming = stay_s = tokens = 0.0
    count = 0
    for stay in stays:
        expected_s = max(stay.ends_at - stay.starts_at, 1e-9)
        count += 1
        stay_s += expected_s
        tokens += stay.context_tokens
        if stay.under_way or (t > now and stay.starts_at <= t):
            there = math.exp(-(t - max(stay.starts_at, now)) / expected_s)
            sequences += there
            context += there * stay.context_tokens
            coming += 0.0 if stay.under_way else there
    if count and rate > 0.0 and t > now:
        mean_s = stay_s / count
        unknown = max(0.0, rate * mean_s * -math.expm1(-(t - now) / mean_s) - coming)
        sequences += unknown
        context += unknown * tokens / count
    return sequences, context


def next_end(stays: Iterable[Stay], now: float) -> float:
    """When the next of ``stays`` that is under way is expected to end; ``now`` where none is, or one is overdue."""
    return max(now, min((stay.ends_at for stay in stays if stay.under_way), default=now))
