"""One acquire or pull that is under way. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_pool.keys import BlockKey
from kv_pool.node.clients import Client, TicketId
from kv_pool.node.messages import Acquire, Miss, Peer, Pull, Tier


@dataclass(slots=True)
class Ticket:
    """``position`` is the next key to grant; ``sources`` are the nodes that may still have more, never this one; ``miss`` says
    why the last place that was asked had no more. ``came_from`` has the blocks that were brought here for it."""

    client: Client
    request: Acquire | Pull
    sources: tuple[Peer, ...]
    deadline: float
    position: int = 0
    miss: Miss | None = None
    fetches: set[int] = field(default_factory=set[int])
    came_from: dict[BlockKey, Tier] = field(default_factory=dict[BlockKey, Tier])
    failed: dict[BlockKey, Miss] = field(default_factory=dict[BlockKey, Miss])
    """Reads ordered ahead for it that came to nothing."""

    @property
    def id(self) -> TicketId:
        return self.client.name, self.request.ticket

    @property
    def done(self) -> bool:
        return self.position == len(self.request.keys)

    @property
    def next_key(self) -> BlockKey:
        return self.request.keys[self.position]

    @property
    def source(self) -> Peer | None:
        """The node to ask now."""
        return self.sources[0] if self.sources else None

    @property
    def patient(self) -> bool:
        """Whether the source may wait for keys to come. Only the last one may: the others would keep it from being asked."""
        return self.request.wait and len(self.sources) == 1

    def settle(self, miss: Miss) -> None:
        """The source has had its say."""
        self.miss = miss
        self.sources = self.sources[1:]
