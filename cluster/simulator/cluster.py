"""A simulated cluster: the production scheduler, worker and pool code around a simulated world.

::

    trace -> Gateway -> SchedulerState.route -> PrefillWorker (PrefillState) --blocks--> DecodeWorker (DecodeState)
                ^                ^                    PoolNode (Blocks, Demotion, SsdLog)        |
                |                +--- reports, KV events, ticks, ends -----------------------------+
                +--- first tokens, ends, failures

What things really take is in the profile and the network; what the scheduler believes it learns from the reports, as in life.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from cluster.simulator.accelerator import Accelerator
from cluster.simulator.decode import DecodeWorker
from cluster.simulator.faults import Fault, Faults
from cluster.simulator.gateway import Gateway
from cluster.simulator.kernel import Kernel
from cluster.simulator.links import Network
from cluster.simulator.pausable import PausableClock, PausableDoor, PausableNetwork
from cluster.simulator.pool_node import PoolNode
from cluster.simulator.prefill import PrefillWorker
from cluster.simulator.profile import Profile
from cluster.simulator.records import RunResult, Sample
from cluster.simulator.trace import Trace, TraceRequest, key_of
from cluster.simulator.world import World
from decode_worker.task import DecodeSettings
from kv_pool.events.types import EventBatch
from kv_pool.keys import BlockKey, cache_root
from kv_pool.settings import PoolSettings
from prefill_worker.task import PrefillSettings
from scheduler.messages import (
    Action,
    BlocksChanged,
    Event,
    FetchSnapshot,
    NodeLoad,
    NodeReport,
    Notice,
    Reply,
    RequestEnded,
    SnapshotArrived,
    SnapshotFailed,
    Tick,
    WorkerFailed,
    WorkerReport,
)
from scheduler.plan import Plan, Rejection, RouteRequest, SchedulerSettings
from scheduler.state import SchedulerState

TICK_S: Final = 0.25
HEARTBEAT_S: Final = 1.0
"""Of the command's runs: the slower end of what is usual, for speed."""
WARM_UP_S: Final = 2.0
"""Before the first arrival: members join."""
SETTLE_S: Final = 10.0
"""After the last end: last reports come in."""
SNAPSHOT_S: Final = 0.05
HOT_REFERENCES: Final = 5
HOT_BLOCKS: Final = 100
PROGRESS_EVERY: Final = 64
SAMPLES_MAX: Final = 4096
"""When there are as many, every second one is kept, and they are taken half as often."""


def worker_settings(order: str) -> PrefillSettings:
    """Of prefill workers whose device memory is the only limit to how many prompts they have in hand."""
    return PrefillSettings.model_validate(
        {"waiting_max": 1_000_000, "running_max": 64, "load_timeout_s": 30.0, "order": order}
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """``prefill`` and ``decode`` workers, each with a pool node of its own; with ``scheduler.colocated`` ``prefill`` nodes that
    do both. Blocks are the trace's."""

    profile: Profile
    prefill: int
    decode: int
    dram_blocks: int
    ssd_blocks: int = 0
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    pool: PoolSettings = field(default_factory=PoolSettings)
    prefill_worker: PrefillSettings = field(default_factory=lambda: worker_settings("shortest"))
    decode_worker: DecodeSettings = field(default_factory=lambda: DecodeSettings(waiting_max=1_000_000))
    seed: int = 0
    sample_s: float = 10.0
    ttft_target_s: float = 30.0
    tpot_target_s: float = 0.1
    """For the loads in the samples only."""
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True)
class _Snapshot:
    node_id: str
    incarnation: str
    sequence: int
    keys_by_medium: dict[str, list[BlockKey]]


def first_guesses(settings: SchedulerSettings, profile: Profile) -> SchedulerSettings:
    """``settings`` with the speeds that an operator of this hardware would write down, within a factor: the rest is learned."""
    speed = 1 / profile.prefill_s_per_token
    guesses = {
        "prefill_tokens_per_s": speed,
        "link_bytes_per_s": profile.nic_bytes_per_s,
        "dram_bytes_per_s": profile.device_copy_bytes_per_s,
        "ssd_bytes_per_s": profile.ssd_read_bytes_per_s,
    }
    return settings.model_copy(update=guesses)


def simulate(
    trace: Trace, settings: SimulationSettings, *, progress: Callable[[int, float], None] | None = None
) -> RunResult:  # fmt: skip
    """Replay ``trace``. ``progress`` is told the number of ended requests and the simulated time now and then. Equal arguments
    give equal results."""
    return Simulation(trace, settings).run(progress)


class Simulation:
    """One run. ``check`` after it: whatever happened, nothing is left over."""

    def __init__(self, trace: Trace, settings: SimulationSettings) -> None:
        self._trace = trace
        self._settings = settings
        self.kernel = Kernel()
        self.network = Network(self.kernel)
        self.clocks: dict[str, PausableClock] = {}
        """Of the workers that a fault will freeze."""
        self.world = World(self.kernel, self.network, settings.profile, trace.block_tokens)
        self.state = SchedulerState(settings.scheduler, order=settings.prefill_worker.order)
        self.gateway = Gateway(self.world, trace, cache_root((("trace", trace.name),)))
        self.gateway.scheduler = self
        self.gateway.node_of = lambda worker_id: self.prefill[worker_id].node.id
        self.prefill: dict[str, PrefillWorker] = {}
        self.decode: dict[str, DecodeWorker] = {}
        self._faults = Faults(settings.faults, settings.seed)
        self._samples: list[Sample] = []
        self._sample_s = settings.sample_s
        self._references: dict[int, int] = {}
        self._hot: dict[int, None] = {}
        self._arrived = 0
        self._build()

    # --- what the gateway asks of the scheduler -------------------------------------------------------------------------

    def route(self, request: RouteRequest) -> Plan | Rejection:
        return self.state.route(request, self.kernel.now)

    def tell(self, event: RequestEnded | WorkerFailed) -> None:
        self.kernel.after(self.world.profile.latency_s, self._told, event)

    # --- running --------------------------------------------------------------------------------------------------------

    def run(self, progress: Callable[[int, float], None] | None = None) -> RunResult:
        kernel, requests = self.kernel, self._trace.requests
        self._next_arrival(0)
        kernel.at(WARM_UP_S, self._sample)
        ended_at: float | None = None
        while kernel.step():
            if self._arrived == len(requests) and not self.gateway.open:
                if ended_at is None:
                    ended_at = kernel.now
                if kernel.now > ended_at + SETTLE_S:
                    break
            if progress is not None and kernel.calls % (PROGRESS_EVERY * 64) == 0:
                progress(self._arrived - self.gateway.open, kernel.now - WARM_UP_S)
        return self._result(ended_at or kernel.now)

    def check(self) -> None:
        """Every request ended once, no book of the scheduler has anything open, no lease and no handoff is left."""
        assert len(self.gateway.records) == len(self._trace.requests)
        assert all(record.finished_s is not None for record in self.gateway.records)
        assert len(self.state.assignments) == 0, "the scheduler still counts requests"
        assert all(worker.in_flight == 0 for worker in self.state.fleet.workers())
        assert not self.world.handoffs
        for node in self.world.nodes.values():
            node.check()
        for worker in (*self.prefill.values(), *self.decode.values()):
            assert not worker.leftovers, f"{worker.id} still has {worker.leftovers}"

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        settings, world = self._settings, self.world
        colocated = settings.scheduler.colocated
        for number in range(settings.prefill):
            node = self._new_node(f"p{number:03}" if not colocated else f"n{number:03}")
            accelerator = Accelerator()
            worker_id = f"prefill-{number:03}"
            self.prefill[worker_id] = PrefillWorker(
                worker_id, node, self._world_of(worker_id), settings.prefill_worker, self.gateway, accelerator
            )  # fmt: skip
            if colocated:
                worker_id = f"decode-{number:03}"
                self.decode[worker_id] = DecodeWorker(
                    worker_id, node, self._world_of(worker_id), settings.decode_worker, self.gateway, accelerator
                )  # fmt: skip
        for number in range(0 if colocated else settings.decode):
            node = self._new_node(f"d{number:03}")
            worker_id = f"decode-{number:03}"
            self.decode[worker_id] = DecodeWorker(
                worker_id, node, self._world_of(worker_id), settings.decode_worker, self.gateway, Accelerator()
            )
        clocks = self.clocks
        for doors, workers in ((self.gateway.prefill, self.prefill), (self.gateway.decode, self.decode)):
            doors |= {name: PausableDoor(worker, clocks[name]) if name in clocks else worker for name, worker in workers.items()}
        members = [*world.nodes, *self.prefill, *self.decode]
        period = settings.scheduler.heartbeat_s
        for place, member in enumerate(members):
            beat = self._node_beat if member in world.nodes else self._worker_beat
            self.kernel.at(period * place / len(members), beat, member)
        self.kernel.at(0.0, self._tick)
        for fault in settings.faults:
            self.kernel.at(WARM_UP_S + fault.at_s, partial(self._faults.begin, self, fault))

    def _world_of(self, worker_id: str) -> World:
        """The world as the worker sees it: it stands still while the worker is frozen."""
        if not any(fault.kind == "freeze" and fault.target == worker_id for fault in self._settings.faults):
            return self.world
        clock = self.clocks[worker_id] = PausableClock(self.kernel)
        return replace(self.world, kernel=clock, network=PausableNetwork(self.network, clock))

    def _new_node(self, node_id: str) -> PoolNode:
        settings = self._settings
        node = PoolNode(
            node_id, self.kernel, self.network, settings.profile, dram_blocks=settings.dram_blocks,
            ssd_blocks=settings.ssd_blocks, block_tokens=self._trace.block_tokens, pool=settings.pool, told=self._events,
        )  # fmt: skip
        self.world.nodes[node_id] = node
        return node

    def _next_arrival(self, index: int) -> None:
        requests = self._trace.requests
        if index < len(requests):
            self.kernel.at(WARM_UP_S + requests[index].arrived_s, self._arrive, requests[index])

    def _arrive(self, request: TraceRequest) -> None:
        self._arrived += 1
        for block in self._trace.full_blocks(request):
            count = self._references.get(block, 0) + 1
            self._references[block] = count
            if count == HOT_REFERENCES:
                self._hot[block] = None
        self.gateway.arrive(request)
        self._next_arrival(self._arrived)

    # --- the scheduler's shell ------------------------------------------------------------------------------------------

    def _told(self, event: Event) -> None:
        self._tell(event)

    def _tell(self, event: Event) -> list[Action]:
        actions = self.state.handle(event, self.kernel.now)
        for action in actions:
            match action:
                case Notice("down", worker_id, _):
                    self.kernel.after(self.world.profile.latency_s, self.gateway.worker_down, worker_id)
                case FetchSnapshot():
                    self.kernel.after(SNAPSHOT_S, self._snapshot, action)
                case _:
                    pass
        return actions

    def _events(self, batch: EventBatch) -> None:
        for delay_s in self._faults.deliveries(batch, self.kernel.now):
            self.kernel.after(self.world.profile.latency_s + delay_s, self._blocks_changed, batch)

    def _blocks_changed(self, batch: EventBatch) -> None:
        self._tell(BlocksChanged(batch))

    def _snapshot(self, asked: FetchSnapshot) -> None:
        node = self.world.nodes[asked.node_id]
        if node.incarnation != asked.incarnation or self._faults.is_down(node.id):
            self._tell(SnapshotFailed(asked.node_id, asked.incarnation))
            return
        self._tell(SnapshotArrived(_Snapshot(node.id, node.incarnation, node.flushed(), node.keys_by_medium())))

    def _tick(self) -> None:
        self._tell(Tick())
        self.kernel.after(TICK_S, self._tick)

    # --- heartbeats -----------------------------------------------------------------------------------------------------

    def _node_beat(self, node_id: str) -> None:
        self.kernel.after(self._settings.scheduler.heartbeat_s, self._node_beat, node_id)
        if self._faults.is_silent(node_id):
            return
        node = self.world.nodes[node_id]
        pulls, node.pulls = tuple(node.pulls[-256:]), []
        load = NodeLoad(
            f"sim://{node_id}", f"sim://{node_id}/events", node.slots_total, node.slots_free, node.block_bytes,
            f"sim://{node_id}", False, node.sequence, pulls,
        )  # fmt: skip
        self._tell(NodeReport(node_id, node.incarnation, load))

    def _worker_beat(self, worker_id: str) -> None:
        self.kernel.after(self._settings.scheduler.heartbeat_s, self._worker_beat, worker_id)
        worker = self.prefill.get(worker_id) or self.decode[worker_id]
        if self._faults.is_down(worker_id):
            return
        worker.tick()
        if self._faults.is_silent(worker_id):
            return
        report = WorkerReport(worker_id, worker.incarnation, worker_id, worker.node.id, worker.fence, worker.report())
        for action in self._tell(report):
            if isinstance(action, Reply) and action.fence > worker.fence:
                worker.fenced(action.fence)

    # --- sampling -------------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        settings, now = self._settings, self.kernel.now
        if len(self._samples) >= SAMPLES_MAX:
            self._samples, self._sample_s = self._samples[::2], 2 * self._sample_s
        self.kernel.after(self._sample_s, self._sample)
        queues = [worker.queue.seconds(now) for worker in self.state.fleet.prefill.values()]
        steps = [worker.step_s for worker in self.decode.values()]
        references = self._references
        hot = heapq.nlargest(HOT_BLOCKS, self._hot, key=lambda block: (references[block], -block))
        nodes = list(self.world.nodes.values())
        self._samples.append(
            Sample(
                round(now - WARM_UP_S, 6),
                tuple(worker.state.queued_tokens for worker in self.prefill.values()),
                tuple(worker.batch for worker in self.decode.values()),
                tuple(node.dram_used for node in nodes),
                tuple(node.ssd_used for node in nodes),
                sum(queues) / max(1, len(queues)) / settings.ttft_target_s,
                sum(steps) / max(1, len(steps)) / settings.tpot_target_s,
                tuple(sum(node.has_dram(key_of(block)) for node in nodes) for block in hot),
            )
        )

    def _result(self, ended_at: float) -> RunResult:
        gaps = sorted(self.gateway.gaps.counts.items())
        for record in self.gateway.records:
            record.arrived_s -= WARM_UP_S
            if record.finished_s is not None:
                record.finished_s -= WARM_UP_S
        nodes = self.world.nodes.values()
        self.world.moved_bytes["ssd_write"] = sum(node.ssd_write.moved for node in nodes)
        counters = dict(sorted(self.state.counters.items()))
        counters |= {
            "retries": self.gateway.retries,
            "evictions": sum(node.blocks.evictions for node in nodes),
            "flows": self.network.flows,
            "calls": self.kernel.calls,
        }
        workers = (*self.prefill.values(), *self.decode.values())
        return RunResult(
            self.gateway.records, self._samples, tuple(self.prefill), tuple(self.decode), tuple(self.world.nodes),
            ended_at - WARM_UP_S, self._trace.block_tokens, np.array([tenths / 1e4 for tenths, _ in gaps]),
            np.array([count for _, count in gaps], np.int64), dict(self.world.moved_bytes),
            {worker.id: worker.busy_s for worker in workers}, counters, self.state.truth.view(),
        )  # fmt: skip
