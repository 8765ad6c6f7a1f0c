"""What goes wrong in a simulated cluster, and when.

==============  =====================================================================================================
kind            for ``for_s`` seconds
==============  =====================================================================================================
kill            a worker's process is gone; then another incarnation of it starts, with nothing
kill_node       a pool node and the workers attached to it are gone, with all blocks in its DRAM and on its SSD
mute            a member works but its heartbeats are lost
lose_events     a node's event batches are lost, each with probability ``amount``
repeat_events   they arrive twice, the second time late and out of order
slow_link       a node's NIC has 1 / ``amount`` of its bandwidth
slow_worker     a worker computes ``amount`` times slower
freeze          a worker does nothing, not even beat; then it goes on where it was, with what was true before
slow_disk       a node's SSD has 1 / ``amount`` of its bandwidth
dead_disk       a node's SSD is gone, or full for somebody else's files; then an empty one is there
==============  =====================================================================================================
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

from kv_pool.events.types import EventBatch

if TYPE_CHECKING:
    from cluster.simulator.cluster import Simulation

Kind = Literal[
    "kill", "kill_node", "mute", "lose_events", "repeat_events", "slow_link", "slow_worker", "freeze", "slow_disk", "dead_disk"
]  # fmt: skip
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
AT_NODES: Final[tuple[Kind, ...]] = ("kill_node", "lose_events", "repeat_events", "slow_link", "slow_disk", "dead_disk")
"""Their targets are nodes; the others' are workers."""


@dataclass(frozen=True, slots=True)
class Fault:
    """``target`` is a worker or node id; times are seconds from the first arrival."""

    kind: Kind
    target: str
    at_s: float
    for_s: float
    amount: float = 4.0


def random_faults(
    seed: int, workers: tuple[str, ...], nodes: tuple[str, ...], duration_s: float, count: int
) -> tuple[Fault, ...]:
    """``count`` faults, repeatably."""
    draw = random.Random(seed)  # noqa: S311 - a seed is the point
    faults: list[Fault] = []
    for _ in range(count):
        kind = draw.choice(KINDS)
        target = draw.choice(nodes if kind in AT_NODES else workers)
        amount = 0.3 if kind == "lose_events" else draw.uniform(2, 20)
        faults.append(Fault(kind, target, draw.uniform(0, duration_s), draw.uniform(0.2, 20.0), amount))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


class Faults:
    """Who is down, silent or lossy at the moment."""

    def __init__(self, faults: tuple[Fault, ...], seed: int) -> None:
        self._draw = random.Random(seed)  # noqa: S311
        self._down: dict[str, int] = {}
        self._mute: dict[str, int] = {}
        self._lossy: dict[str, list[Fault]] = {}
        self._no_disk: dict[str, int] = {}
        self._restarts = 0

    def is_down(self, member: str) -> bool:
        return member in self._down

    def is_silent(self, member: str) -> bool:
        return member in self._down or member in self._mute

    def deliveries(self, batch: EventBatch, now: float) -> tuple[float, ...]:
        """When ``batch`` arrives, in seconds from now: never, once or twice."""
        if batch.node_id in self._down:
            return ()
        for fault in self._lossy.get(batch.node_id, ()):
            if fault.kind == "lose_events" and self._draw.random() < fault.amount:
                return ()
            if fault.kind == "repeat_events":
                return self._draw.uniform(0, 2), self._draw.uniform(0, 2)
        return (0.0,)

    def begin(self, simulation: Simulation, fault: Fault) -> None:
        kernel, world = simulation.kernel, simulation.world
        match fault.kind:
            case "kill":
                self._kill(simulation, fault.target)
            case "kill_node":
                for worker in (*simulation.prefill.values(), *simulation.decode.values()):
                    if worker.node.id == fault.target:
                        self._kill(simulation, worker.id)
                self._count(self._down, fault.target, 1)
                self._restarts += 1
                world.nodes[fault.target].restart(str(self._restarts))
                if fault.target in self._no_disk:
                    world.nodes[fault.target].disk_down()
            case "mute":
                self._count(self._mute, fault.target, 1)
            case "lose_events" | "repeat_events":
                self._lossy.setdefault(fault.target, []).append(fault)
            case "slow_link":
                node = world.nodes[fault.target]
                for port in (node.nic_out, node.nic_in):
                    simulation.network.set_speed(port, port.bytes_per_s / fault.amount)
            case "slow_disk":
                node = world.nodes[fault.target]
                for port in (node.ssd_read, node.ssd_write):
                    simulation.network.set_speed(port, port.bytes_per_s / fault.amount)
            case "dead_disk":
                self._count(self._no_disk, fault.target, 1)
                world.nodes[fault.target].disk_down()
            case "freeze":
                self._count(self._down, fault.target, 1)
                clock = simulation.clocks[fault.target]
                clock.frozen_until = max(clock.frozen_until, kernel.now + fault.for_s)
            case "slow_worker":
                worker = simulation.prefill.get(fault.target) or simulation.decode[fault.target]
                worker.slowness *= fault.amount
        kernel.after(fault.for_s, self._end, simulation, fault)

    def _end(self, simulation: Simulation, fault: Fault) -> None:
        world = simulation.world
        match fault.kind:
            case "kill" | "freeze":
                self._count(self._down, fault.target, -1)
            case "kill_node":
                self._count(self._down, fault.target, -1)
                for worker in (*simulation.prefill.values(), *simulation.decode.values()):
                    if worker.node.id == fault.target:
                        self._count(self._down, worker.id, -1)
            case "mute":
                self._count(self._mute, fault.target, -1)
            case "lose_events" | "repeat_events":
                self._lossy[fault.target].remove(fault)
            case "slow_link":
                node = world.nodes[fault.target]
                for port in (node.nic_out, node.nic_in):
                    simulation.network.set_speed(port, port.bytes_per_s * fault.amount)
            case "slow_disk":
                node = world.nodes[fault.target]
                for port in (node.ssd_read, node.ssd_write):
                    simulation.network.set_speed(port, port.bytes_per_s * fault.amount)
            case "dead_disk":
                self._count(self._no_disk, fault.target, -1)
                if fault.target not in self._no_disk:
                    world.nodes[fault.target].disk_up()
            case "slow_worker":
                worker = simulation.prefill.get(fault.target) or simulation.decode[fault.target]
                worker.slowness /= fault.amount

    def _kill(self, simulation: Simulation, worker_id: str) -> None:
        self._count(self._down, worker_id, 1)
        worker = simulation.prefill.get(worker_id) or simulation.decode[worker_id]
        self._restarts += 1
        worker.incarnation = str(self._restarts)
        worker.fence = 0
        if worker_id in simulation.clocks:
            simulation.clocks[worker_id].frozen_until = simulation.kernel.now  # the process that was frozen is gone
        worker.die()

    @staticmethod
    def _count(members: dict[str, int], member: str, change: int) -> None:
        count = members.get(member, 0) + change
        if count:
            members[member] = count
        else:
            members.pop(member, None)
