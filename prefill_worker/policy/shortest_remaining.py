"""Which prompt computes its next piece: shortest remaining first, aged so that none starves."""

from __future__ import annotations

from prefill_worker.state import Prompt

AGING_TOKENS_PER_S = 200.0
"""A prompt gains this many tokens of precedence for each second since it came. About half of what a CPU worker prefills in a
second: a 2,000-token prompt is overtaken by short ones for about ten seconds, then runs."""


def shortest_remaining(ready: list[Prompt], now: float) -> Prompt:
    """``min(remaining - AGING_TOKENS_PER_S x age)`` within the highest priority present.

    Mean time to first token is least when the shortest remaining work goes first (SRPT); aging bounds the wait of the long.
    Mutates nothing. ``ready`` is not empty.
    """
    top = max(prompt.task.priority for prompt in ready)
    first = [prompt for prompt in ready if prompt.task.priority == top]
    return min(first, key=lambda p: (p.remaining - AGING_TOKENS_PER_S * (now - p.arrived), p.arrived, p.id))
