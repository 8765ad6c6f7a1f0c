"""Answers as plain objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. ``cached_tokens`` of the ``prompt_tokens`` came from a cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Details:
    """Where the time of one answer went, as the server saw it (asked for with ``details=True``). Seconds; None: not known.

    ``cached_by_tier``: prompt tokens by where they came from: ``device`` (the prefill worker's own cache), ``dram`` (its pool
    node), ``remote`` (another node). ``attempts`` is over 1 where a worker was lost on the way.
    """

    attempts: int
    cached_by_tier: Mapping[str, int]
    queue_s: float | None
    load_s: float | None
    prefill_s: float | None
    handoff_s: float | None
    ttft_s: float | None
    tbt_s: float | None


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer. ``finish_reason`` is ``stop`` or ``length``. ``raw`` is the response as it came."""

    text: str
    finish_reason: str
    usage: Usage
    model: str
    request_id: str
    details: Details | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)
