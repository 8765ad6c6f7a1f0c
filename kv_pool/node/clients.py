"""Who talks to the node, and what each of them holds. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    leases: set[int] = field(default_factory=set[int])
    reservations: set[int] = field(default_factory=set[int])
    tickets: set[int] = field(default_factory=set[int])
    blocks_on_the_way: int = 0
    starved: dict[TicketId, None] = field(default_factory=dict[TicketId, None])
    """Pulls that wait for a credit, in order."""
