"""What the scheduler is asked and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.serving.addresses import BlockSource
from kv_pool.keys import BlockKey


class SchedulerSettings(BaseModel):
    """The ``scheduler:`` section of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    heartbeat_s: Annotated[float, Field(gt=0, le=10, description="Period of every worker's and node's heartbeat.")] = 0.5
    suspect_after_s: Annotated[float, Field(gt=0, description="Silence after which a worker gets no new work.")] = 1.5
    dead_after_s: Annotated[
        float, Field(gt=0, description="Silence after which a worker is fenced and its requests run again elsewhere.")
    ] = 3.0
    classes: Annotated[
        tuple[str, ...],
        Field(
            description="Service classes, one row each: 'interactive=ttft 2s tpot 100ms priority 10'. A request names its class"
            " in the header x-request-class; the first row is the default."
        ),
    ] = ("default=ttft 120s",)
    admission: Annotated[
        Literal["none", "early", "predictive"],
        Field(
            description="What is held against a class's targets before a request is taken: the time to first token only; and the"
            " decode load now; or the decode load when its prefill will end. In each mode the decode worker looks once more when"
            " the prefill has ended, and refuses what would make its batch too slow."
        ),
    ] = "predictive"
    prefill_tokens_per_s: Annotated[
        float, Field(gt=0, description="First guess of a worker's prefill speed, corrected by what workers report.")
    ] = 400.0
    expected_output_tokens: Annotated[
        int,
        Field(ge=1, description="Answer length for which decode room is kept; few answers use all of the tokens they may have."),
    ] = 256
    request_life_s: Annotated[
        float,
        Field(
            gt=0, description="Time after which a request of which no end was heard no longer counts; longer than any may take."
        ),
    ] = 900.0
    link_bytes_per_s: Annotated[
        float, Field(gt=0, description="First guess of the speed at which one node pulls blocks from another.")
    ] = 1.0e9
    dram_bytes_per_s: Annotated[
        float, Field(gt=0, description="First guess of the speed at which a worker loads blocks from its own node's DRAM.")
    ] = 4.0e9
    ssd_bytes_per_s: Annotated[
        float,
        Field(
            gt=0,
            description="First guess of the speed at which a worker loads blocks from its own node's SSD. One that is much too"
            " low is never corrected, since then nothing is loaded from there.",
        ),
    ] = 1.0e9
    policy: Annotated[
        Literal["random", "round_robin", "least_loaded", "local_cache_aware", "mooncake", "ours"],
        Field(description="How a request gets its workers; all but 'ours' are there to compare with."),
    ] = "ours"
    seed: Annotated[int, Field(ge=0, description="Of the policy 'random'.")] = 0
    journal: Annotated[
        str,
        Field(
            description="File in which the scheduler keeps all that it is told and decides, for `moonpool simulate --journal`."
            " An earlier one is kept as NAME.old. Empty: none."
        ),
    ] = ""
    speeds_file: Annotated[
        str,
        Field(
            description="File in which the scheduler keeps what it has learnt of the workers' speeds, to begin with next time."
            " 'auto': one for each model, in the state folder of the user. Empty: none."
        ),
    ] = "auto"
    balancing_threshold: Annotated[
        float, Field(ge=1, description="Policy 'mooncake': best over own match above which the prefix is pulled.")
    ] = 2.0
    colocated: Annotated[bool, Field(description="Decode at the node that prefills: coupled serving, to compare with.")] = False


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """``keys`` are the request's full blocks in order, ``tokens`` their tokens plus the tail. ``max_new_tokens`` is what is
    left to generate. ``attempt`` counts from 0; ``avoid`` are worker ids that failed this request before."""

    request_id: str
    attempt: int
    keys: tuple[BlockKey, ...]
    tokens: int
    max_new_tokens: int
    priority: int = 0
    avoid: tuple[str, ...] = ()
    request_class: str = ""
    """Name of its service class; empty or unknown: the first one configured."""
    slo_ttft_s: float | None = None
    """Asked for by the request itself; None: what its class has."""
    slo_tpot_s: float | None = None
    admitted: bool = False
    """It was planned before: whatever happened since, it is not turned away for its targets."""


@dataclass(frozen=True, slots=True)
class PlanTerms:
    """The predicted seconds behind a plan, logged with it and later held against the truth."""

    queue_s: float
    load_s: float
    compute_s: float
    handoff_s: float
    overlap_s: float = 0.0
    """As much of the load as happens while the request would wait anyway."""

    @property
    def ttft_s(self) -> float:
        """The prefill worker sends the first token itself, so the handoff is not in it."""
        return self.queue_s + self.load_s - self.overlap_s + self.compute_s


@dataclass(frozen=True, slots=True)
class Plan:
    """Which pair serves the request. ``prefill_source`` holds the first ``cached_blocks`` blocks (None: the prefill worker's own
    node). ``decode_source`` is the prefill worker's node where the decode worker is attached to another one, else None."""

    request_id: str
    attempt: int
    prefill_worker: str
    decode_worker: str
    cached_blocks: int
    prefill_source: BlockSource | None
    decode_source: BlockSource | None
    terms: PlanTerms
    load_max_blocks: int | None = None
    """Blocks after these are computed even if they are cached, since that is sooner. None: load all that there are."""
    priority: int = 0
    """For the workers' queues: the request's, or that of its class."""
    tpot_max_s: float | None = None
    """For the decode worker to check when the request joins its batch; None: it was checked before, or has no limit."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """No plan: ``reason`` is ``overloaded`` (429) or ``no_worker`` (503); try again after ``retry_after_s``."""

    request_id: str
    attempt: int
    reason: str
    retry_after_s: float
    detail: str = ""
