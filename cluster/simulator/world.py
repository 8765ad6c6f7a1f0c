"""What the simulated parts of a cluster know of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.simulator.links import Flow, Port
from cluster.simulator.pool_node import PoolNode
from cluster.simulator.profile import Profile
from engine.serving.token_stream import FailureCause
from kv_pool.keys import BlockKey

RequestId = tuple[str, int]
"""(request_id, attempt)."""


@dataclass(slots=True, eq=False)
class Handoff:
    """The blocks of one attempt on their way from prefill to decode: how many are published at the prefill worker's node, and
    whether the tail and the first token are. ``changed`` is the decode side's, None while nobody waits."""

    keys: tuple[BlockKey, ...]
    node: PoolNode
    published: int = 0
    tail: bool = False
    first_token_at: float = 0.0
    changed: Callable[[], None] | None = None

    def tell(self) -> None:
        if self.changed is not None:
            self.changed()


class Clock(Protocol):
    """A :class:`~cluster.simulator.kernel.Kernel`, or one that can be held for one worker."""

    @property
    def now(self) -> float: ...
    def at(self, time: float, call: Callable[..., None], *args: Any) -> None: ...
    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None: ...


class Transfers(Protocol):
    """A :class:`~cluster.simulator.links.Network`, or one that can be held for one worker."""

    def start(self, ports: Sequence[Port], size: int, done: Callable[[], None], *, latency_s: float = 0.0) -> Flow: ...
    def cancel(self, flow: Flow) -> None: ...


class Gateway(Protocol):
    """What workers tell it."""

    def first_token(self, request: RequestId, figures: PrefillFigures) -> None: ...
    def finished(self, request: RequestId, gaps: Gaps) -> None: ...
    def failed(self, request: RequestId, worker_id: str, cause: FailureCause, detail: str) -> None: ...
    def stopped(self, request: RequestId) -> None: ...


@dataclass(frozen=True, slots=True)
class PrefillFigures:
    """Seconds and tokens of one prefill, as the worker measured them."""

    queue_s: float
    load_s: float
    compute_s: float
    dram_tokens: int
    ssd_tokens: int
    remote_tokens: int
    device_tokens: int = 0


@dataclass(slots=True)
class Gaps:
    """Seconds between the tokens of one answer: values, each with how often it came. ``handoff_s``: from the first token to
    joining the batch."""

    values: list[float] = field(default_factory=list[float])
    counts: list[int] = field(default_factory=list[int])
    handoff_s: float = 0.0


@dataclass(slots=True)
class World:
    kernel: Clock
    network: Transfers
    profile: Profile
    block_tokens: int
    nodes: dict[str, PoolNode] = field(default_factory=dict[str, PoolNode])
    handoffs: dict[RequestId, Handoff] = field(default_factory=dict[RequestId, Handoff])
    moved_bytes: dict[str, int] = field(default_factory=lambda: {"local": 0, "network": 0, "ssd_read": 0, "ssd_write": 0})
