"""Which prompt goes next at a worker: by :func:`~prefill_worker.task.precedence`, with what is left in the worker's own
seconds."""

from __future__ import annotations

from typing import Final

from prefill_worker.state import Prompt
from prefill_worker.task import Order, precedence

FIRST_GUESS_S: Final = 1 / 400
"""Seconds per token before any was computed."""
WEIGHT: Final = 0.2
"""Of the newest piece in the moving average."""


class InOrder:
    """The smallest precedence first. Learns how long a token takes."""

    def __init__(self, order: Order) -> None:
        self._order: Order = order
        self._seconds_per_token = FIRST_GUESS_S
        self.piece_s = 0.0

    def key(self, prompt: Prompt) -> tuple[float, float, tuple[str, int]]:
        """Sorts prompts; the first is the one to go."""
        left_s = prompt.work * self._seconds_per_token
        return precedence(self._order, prompt.arrived, left_s, prompt.task.priority), prompt.arrived, prompt.id

    def observe(self, tokens: int, seconds: float) -> None:
        """A piece of ``tokens`` tokens took ``seconds``."""
        if tokens > 0 and 0.0 < seconds < float("inf"):
            self._seconds_per_token += WEIGHT * (seconds / tokens - self._seconds_per_token)
            self.piece_s += (WEIGHT if self.piece_s else 1.0) * (seconds - self.piece_s)
