"""Addresses inside the cluster that a task carries. They come from the scheduler and the gateway, never from a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenSink:
    """Where a worker sends a request's token frames: a gateway of this cluster, never an address from a request."""

    gateway_id: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class BlockSource:
    """A pool node that is believed to hold blocks (or will, once they are computed)."""

    node_id: str
    endpoint: str
