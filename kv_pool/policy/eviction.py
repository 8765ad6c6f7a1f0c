"""What the node asks of an eviction policy. The node decides what *may* go (unleased leaves), the policy what goes first."""

from __future__ import annotations

from typing import Protocol

from kv_pool.keys import BlockKey


class EvictionPolicy(Protocol):
    """Owns no block and no clock. Every method must cost O(log n) or less, amortised."""

    def add(self, key: BlockKey, last_used: float) -> None:
        """``key`` may be evicted from now on; called again when ``last_used`` changes."""
        ...

    def discard(self, key: BlockKey) -> None:
        """``key`` may not be evicted any more (leased, followed, gone). Unknown keys are ignored."""
        ...

    def pop(self) -> BlockKey | None:
        """The next victim, no longer known to the policy; None where nothing may go."""
        ...
