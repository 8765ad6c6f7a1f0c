"""A simulated decode worker alone: what it does when blocks run out, and deadlines while it is busy."""

from __future__ import annotations

from cluster.simulator.accelerator import Accelerator
from cluster.simulator.decode import DecodeWorker
from cluster.simulator.kernel import Kernel
from cluster.simulator.links import Network
from cluster.simulator.pool_node import PoolNode
from cluster.simulator.profile import load_profile
from cluster.simulator.trace import key_of
from cluster.simulator.world import Gaps, Handoff, RequestId, World
from decode_worker.task import DecodeSettings, DecodeTask
from engine.sampling.params import SamplingParams
from engine.serving.addresses import TokenSink
from engine.serving.token_stream import FailureCause
from kv_pool.keys import cache_root
from kv_pool.settings import PoolSettings

BLOCK = 512


class Scene:
    """One decode worker of ``blocks`` device blocks; stands in for the gateway, too."""

    def __init__(self, blocks: int) -> None:
        profile = load_profile("llama3-70b-a800x8").model_copy(update={"device_tokens": BLOCK * blocks})
        self.kernel = Kernel()
        network = Network(self.kernel)
        self.world = World(self.kernel, network, profile, BLOCK)
        for name in ("prefill", "decode"):
            self.world.nodes[name] = PoolNode(
                name, self.kernel, network, profile, dram_blocks=100, ssd_blocks=0, block_tokens=BLOCK, pool=PoolSettings(),
                told=lambda batch: None,
            )  # fmt: skip
        self.ended: list[tuple[str, str]] = []
        self.worker = DecodeWorker(
            "d",
            self.world.nodes["decode"],
            self.world,
            DecodeSettings(waiting_max=100),
            self,
            Accelerator(),  # type: ignore[arg-type]
        )

    def failed(self, request: RequestId, worker_id: str, cause: FailureCause, detail: str) -> None:
        self.ended.append((request[0], cause.value))

    def finished(self, request: RequestId, gaps: Gaps) -> None:
        self.ended.append((request[0], "finished"))

    def submit(self, number: int, tokens: int, answer: int, budget_s: float = 3600.0, *, ready: bool = False) -> None:
        request = (f"r{number}", 0)
        handoff = self.world.handoffs[request] = Handoff((), self.world.nodes["prefill"])
        self.worker.submit(
            DecodeTask(
                *request, range(tokens), 0, (), key_of(10**9 + number), None, cache_root((("t", "x"),)), answer,  # type: ignore[arg-type]
                SamplingParams(), (), TokenSink("a", "b"), budget_s, write_back=False,
            )
        )  # fmt: skip
        if ready:
            handoff.tail = True
            handoff.tell()

    def run_until(self, moment: float) -> None:
        while self.kernel.now < moment and self.kernel.step():
            pass


def test_one_missing_block_costs_one_sequence_and_the_oldest_goes_on():
    """One runs and needs a block, four that hold one each still wait for their prefill: the youngest gives way, nobody else."""
    scene = Scene(blocks=6)
    scene.submit(0, 500, 600, ready=True)
    for number in range(1, 7):
        scene.kernel.at(0.001 * number, scene.submit, number, 100, 10)
    scene.run_until(40.0)
    assert scene.ended == [("r4", "preempted"), ("r0", "finished")]


def test_a_busy_worker_keeps_deadlines_too():
    scene = Scene(blocks=60)
    scene.submit(0, 500, 3000, ready=True)
    scene.kernel.at(1.0, scene.submit, 1, 100, 10, 5.0)

    def beat() -> None:
        scene.worker.tick()
        scene.kernel.after(1.0, beat)

    scene.kernel.at(0.5, beat)
    scene.run_until(10.0)
    assert scene.ended == [("r1", "deadline")]
