"""What the node asks of an eviction policy. The node decides what *may* go (unleased leaves), the policy what goes first.

::

    stored ──▶ known ──add──▶ may go ──pop──▶ named ──removed──▶ forgotten
                 ▲              │               │
                 ├───discard────┘               │
                 └───────── add puts it back ───┘        (touched: at any time in between)

Chains stay whole because only leaves are ever offered: a parent is added when its last child has gone.
"""

from __future__ import annotations

from typing import Protocol

from kv_pool.keys import BlockKey


class EvictionPolicy(Protocol):
    """Owns no block and no clock. Every method must cost O(log n) or less, amortised, and memory must stay in proportion to the
    blocks that are known."""

    def stored(self, key: BlockKey) -> None:
        """``key`` has come into the pool, evictable or not: its place in any order of arrival. A policy that was not told takes
        the first ``touched`` or ``add`` for it."""
        ...

    def touched(self, key: BlockKey) -> None:
        """Somebody leased the block, whether it may be evicted or not. Called once per lease."""
        ...

    def add(self, key: BlockKey, last_used: float) -> None:
        """``key`` may be evicted from now on. Called again for one that may go already when ``last_used`` (seconds, of the
        node's clock) has changed, and to put back one that ``pop`` named."""
        ...

    def discard(self, key: BlockKey) -> None:
        """``key`` may not be evicted for now (leased, followed); it stays known. Unknown keys are ignored. The node may leave
        this call out, a policy may take it late: see ``pop``."""
        ...

    def pop(self) -> BlockKey | None:
        """The next victim; None where nothing may go. It is not named again before the node adds it again, so it must either be
        ``removed`` or, where it turns out not to be evictable any more, added as soon as it is."""
        ...

    def removed(self, key: BlockKey) -> None:
        """The block has left the pool for good: as a victim if ``pop`` has named it and nobody has used it since (it may have
        been added again meanwhile, while it was written to the SSD), else for another reason. Unknown keys are ignored."""
        ...
