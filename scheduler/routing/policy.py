"""What a routing policy is. Pure."""

from __future__ import annotations

from typing import Protocol

from scheduler.routing.view import Choice, Need, Obstacle, View


class Policy(Protocol):
    """Chooses a pair of workers and where the prefix comes from. Deterministic; changes nothing but its own memory."""

    def choose(self, need: Need, view: View) -> Choice | Obstacle: ...
