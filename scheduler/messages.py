"""What the scheduler's state is told (events) and what it wants done (actions). Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.task import DecodeLoad
from kv_pool.events.types import EventBatch
from prefill_worker.task import PrefillLoad
from scheduler.index import NodeSnapshot
from scheduler.speeds import Speeds


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """A pool node's report. ``sequence`` is that of its last published event batch, None where it does not tell. ``pulls`` are
    (source node, bytes, seconds) of finished pulls since the last report."""

    endpoint: str
    events: str
    slots_total: int
    slots_free: int
    slot_bytes: int
    local: str = ""
    """Where the workers of its machine connect."""
    draining: bool = False
    sequence: int | None = None
    pulls: tuple[tuple[str, int, float], ...] = ()


# --- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One heartbeat of a worker: who (``actor`` is its Ray name), at which pool node, under which fence, and its load."""

    worker_id: str
    incarnation: str
    actor: str
    node_id: str
    fence: int
    load: PrefillLoad | DecodeLoad


@dataclass(frozen=True, slots=True)
class NodeReport:
    node_id: str
    incarnation: str
    load: NodeLoad


@dataclass(frozen=True, slots=True)
class BlocksChanged:
    batch: EventBatch


@dataclass(frozen=True, slots=True)
class SnapshotArrived:
    snapshot: NodeSnapshot


@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    node_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The gateway says that the attempt no longer occupies its pair. ``ttft_s`` is the time from the plan to the first token,
    None where there was none; ``output_tokens`` is the whole answer's length if it is complete, else None."""

    request_id: str
    attempt: int
    ttft_s: float | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The gateway says that a worker did not do what it should."""

    worker_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. Expected a few times a second; a much longer gap counts as the scheduler's own stall."""


@dataclass(frozen=True, slots=True)
class SpeedsRecalled:
    """What an earlier scheduler had learnt, told before anything else."""

    speeds: Speeds


Event = (
    WorkerReport
    | NodeReport
    | BlocksChanged
    | SnapshotArrived
    | SnapshotFailed
    | RequestEnded
    | WorkerFailed
    | Tick
    | SpeedsRecalled
)


# --- actions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to the report just handled. A worker whose fence is lower drops its work and adopts ``fence``."""

    fence: int
    node_endpoint: str | None = None
    node_incarnation: str | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """``kind`` is ``down`` or ``up``."""

    kind: str
    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Follow:
    """Subscribe to a node's events."""

    events_endpoint: str


@dataclass(frozen=True, slots=True)
class Unfollow:
    events_endpoint: str


@dataclass(frozen=True, slots=True)
class FetchSnapshot:
    """Ask the node; answer with ``SnapshotArrived`` or ``SnapshotFailed``."""

    node_id: str
    incarnation: str
    endpoint: str


Action = Reply | Notice | Follow | Unfollow | FetchSnapshot
