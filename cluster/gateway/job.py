"""One answer to make, as the HTTP layer hands it to the dispatcher; and the model that all of them are for."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from cluster.gateway.service_wish import ServiceWish
from engine.sampling.params import SamplingParams
from kv_pool.keys import BlockKey, CacheRoot


class ServedModel(BaseModel):
    """The cluster's model as the gateway must know it. All workers agree on ``identity`` (their ``describe()``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    identity: tuple[tuple[str, str], ...]
    block_tokens: int
    context_max: int
    bitwise: bool = False
    """``reuse: bitwise``: cached blocks count at chunk borders only, and generated blocks are not shared."""
    created: int = 0
    """Unix seconds, shown by ``/v1/models``."""


@dataclass(frozen=True, slots=True)
class Job:
    """One sub-request: one prompt, one choice. Times are seconds of the gateway's monotonic clock.

    ``request_id`` is made by the gateway (128 random bits), never taken from the client. ``keys`` name the full blocks of
    ``prompt_ids`` under ``root``. ``max_new_tokens >= 1``, and prompt and answer together fit the context.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    root: CacheRoot
    keys: tuple[BlockKey, ...]
    max_new_tokens: int
    sampling: SamplingParams
    stop: tuple[str, ...]
    arrived: float
    deadline: float
    wish: ServiceWish = field(default_factory=ServiceWish)
