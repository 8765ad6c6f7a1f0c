"""Who talks to the node, and what each of them holds. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_pool.node.blocks import Block

TicketId = tuple[str, int]
"""(client, its ticket number)."""


@dataclass(slots=True)
class Client:
    """``pid`` and ``started`` are 0 for a client on another machine, which can only pull. ``renewed_at`` is its last hello or
    keepalive: leases and reservations live ``lease_s`` from then, all of them together."""

    name: str
    pid: int
    started: int
    heard_at: float
    renewed_at: float
    last_ticket: int = 0
    leases: dict[int, Block] = field(default_factory=dict[int, Block])
    reservations: set[int] = field(default_factory=set[int])
    tickets: set[int] = field(default_factory=set[int])
    on_the_way: set[int] = field(default_factory=set[int])
    """Leases whose bytes travel to another node: each holds a credit."""
    starved: dict[TicketId, None] = field(default_factory=dict[TicketId, None])
    """Pulls that wait for a credit, in order."""
