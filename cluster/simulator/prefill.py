"""A simulated prefill worker: the live worker's state machine, with a profile in place of a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from cluster.simulator.accelerator import Accelerator
from cluster.simulator.links import Flow
from cluster.simulator.pool_node import PoolNode
from cluster.simulator.world import Gateway, PrefillFigures, RequestId, World
from engine.serving.token_stream import FailureCause
from kv_pool.keys import BlockKey
from kv_pool.node.blocks import Block
from prefill_worker.policy.in_order import InOrder
from prefill_worker.state import (
    Action,
    Admit,
    CancelLoad,
    Fail,
    HandOver,
    Load,
    Phase,
    Piece,
    PrefillState,
    Prompt,
    Publish,
    Release,
)
from prefill_worker.task import PrefillLoad, PrefillSettings, PrefillTask

REPORTED_MAX = 256


@dataclass(slots=True, eq=False)
class _Loading:
    """One load under way: what is leased where, and the flows that are still open."""

    started: float
    first: int
    own: list[Block]
    to_read: list[BlockKey]
    source: PoolNode | None
    remote: list[Block]
    remote_read: list[BlockKey]
    flows: dict[Flow, None] = field(default_factory=dict[Flow, None])
    remote_done_at: float = 0.0
    losses: tuple[int, int, int] = (0, 0, 0)
    """How often the node's SSD, the source's DRAM and its SSD had lost everything when it began."""

    def losses_now(self, node: PoolNode) -> tuple[int, int, int]:
        source = self.source
        return (node.disk_losses, 0, 0) if source is None else (node.disk_losses, source.restarts, source.disk_losses)

    def lost(self, node: PoolNode) -> bool:
        """Whether something was to be read from what has broken meanwhile."""
        read = (self.to_read, self.remote, self.remote_read)
        return any(keys and then != now for then, now, keys in zip(self.losses, self.losses_now(node), read, strict=True))

    @property
    def total(self) -> int:
        return len(self.own) + len(self.to_read) + len(self.remote) + len(self.remote_read)


class PrefillWorker:
    """``slowness`` > 1 makes it compute so much slower than its profile says."""

    def __init__(
        self, worker_id: str, node: PoolNode, world: World, settings: PrefillSettings, gateway: Gateway, accelerator: Accelerator
    ) -> None:  # fmt: skip
        self.id = worker_id
        self.node = node
        self.incarnation = "0"
        self.fence = 0
        self.slowness = 1.0
        self.busy_s = 0.0
        self._world = world
        self._settings = settings
        self._gateway = gateway
        self._accelerator = accelerator
        self._open()

    def _open(self) -> None:
        self.state = PrefillState(
            block_tokens=self._world.block_tokens,
            chunk_tokens=self._world.profile.chunk_tokens,
            waiting_max=self._settings.waiting_max,
            running_max=self._settings.running_max,
            order=InOrder(self._settings.order),
        )
        self._free_blocks = self._world.profile.device_tokens // self._world.block_tokens
        self._held: dict[RequestId, int] = {}
        self._loading: dict[RequestId, _Loading] = {}
        self._load_s: dict[RequestId, float] = {}
        self._tiers: dict[RequestId, tuple[int, int, int]] = {}
        self._shared: dict[RequestId, int] = {}
        self._piece: Piece | None = None
        self._aborts: list[RequestId] = []
        self._after_piece: list[Callable[[], None]] = []
        self._finished: deque[tuple[str, int, int, int, float]] = deque(maxlen=REPORTED_MAX)
        self._loads: deque[tuple[int, int, int, int, float]] = deque(maxlen=REPORTED_MAX)

    # --- what others ask of it ------------------------------------------------------------------------------------------

    def submit(self, task: PrefillTask) -> None:
        self._do(self.state.submitted(task, self._world.kernel.now))

    def abort(self, request: RequestId) -> None:
        if self._piece is not None and self._piece.prompt.id == request:
            self._aborts.append(request)  # a forward is not interrupted
        else:
            self._do(self.state.aborted(request))

    def tick(self) -> None:
        busy = None if self._piece is None else self._piece.prompt
        if busy is None or busy.deadline > self._world.kernel.now:
            self._do(self.state.tick(self._world.kernel.now))

    def report(self) -> PrefillLoad:
        state = self.state
        load = PrefillLoad(
            state.waiting, state.active, state.queued_tokens, tuple(self._finished), tuple(self._loads),
            state.order.piece_s,
        )  # fmt: skip
        self._finished.clear()
        self._loads.clear()
        return load

    def fenced(self, fence: int) -> None:
        """The scheduler gave it up: it drops its work."""
        self.fence = fence
        if self._piece is not None:
            self._aborts.extend(self.state.prompts)
        else:
            self._do(self.state.fenced())

    def die(self) -> None:
        """The process is gone: what it leased is given back by its node, which notices at once."""
        for loading in self._loading.values():
            self._drop(loading)
        if self._piece is not None:
            self._accelerator.free()
        self._open()

    @property
    def leftovers(self) -> int:
        """Requests, loads and device blocks that somebody still holds."""
        return len(self.state.prompts) + len(self._loading) + len(self._held)

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _do(self, actions: Sequence[Action]) -> None:
        waiting = deque(actions)
        blocked = False
        while waiting:
            action = waiting.popleft()
            match action:
                case Admit(prompt):
                    # The first that finds no room blocks those behind it; one that was named twice is in already.
                    if prompt.phase is Phase.WAITING and not blocked:
                        more = self._admit(prompt)
                        blocked = not more and prompt.phase is Phase.WAITING
                        waiting.extend(more)
                case Load(prompt, first, last):
                    self._load(prompt, first, last)
                case CancelLoad(prompt):
                    self._cancel_load(prompt)
                case Publish(prompt, first, last):
                    self._publish(prompt, first, last)
                case HandOver(prompt):
                    self._world.kernel.after(self._world.profile.latency_s, self._handed_over, prompt)
                case Release(prompt):
                    self._free_blocks += self._held.pop(prompt.id)
                    self._tiers.pop(prompt.id, None)
                    self._shared.pop(prompt.id, None)
                case Fail(prompt, cause, detail):
                    self._gateway.failed(prompt.id, self.id, cause, detail)
        self._compute()

    def _admit(self, prompt: Prompt) -> list[Action]:
        blocks = -(-prompt.total // self._world.block_tokens)
        if blocks > self._free_blocks:
            if not self._held:
                return [Fail(prompt, FailureCause.REFUSED, "the prompt does not fit"), *self.state.aborted(prompt.id)]
            return []
        self._free_blocks -= blocks
        self._held[prompt.id] = blocks
        # The live worker's device cache also finds what siblings hold; the memory counts once more for each (too much rather).
        shared = self.state.blocks_of_siblings(prompt)
        self._shared[prompt.id] = shared
        return self.state.admitted(prompt, shared, self._world.kernel.now)

    # --- loading --------------------------------------------------------------------------------------------------------

    def _load(self, prompt: Prompt, first: int, last: int) -> None:
        world, node, keys = self._world, self.node, prompt.task.keys[first:last]
        own, to_read = node.prefix(keys)
        source, remote, remote_read = None, [], []
        rest = keys[len(own) + len(to_read) :]
        if rest and prompt.task.source is not None:
            source = world.nodes.get(prompt.task.source.node_id)
            if source is not None:
                remote, remote_read = source.prefix(rest)
                source.lease(remote)
        node.lease(own)
        loading = _Loading(world.kernel.now, first, own, to_read, source, remote, remote_read)
        loading.losses = loading.losses_now(node)
        self._loading[prompt.id] = loading
        if not loading.total:
            world.kernel.after(world.profile.latency_s, self._loaded, prompt, loading)
            return
        size = node.block_bytes
        if to_read:
            self._flow(prompt, loading, [node.ssd_read], len(to_read) * size, "ssd_read")
        if source is not None and (remote or remote_read):
            ports = [source.nic_out, node.nic_in]
            if remote_read:
                self._flow(prompt, loading, [source.ssd_read, *ports], len(remote_read) * size, "ssd_read", "network")
            if remote:
                self._flow(prompt, loading, ports, len(remote) * size, "network")
        self._flow(prompt, loading, [node.copy], loading.total * size, "local")
        world.kernel.after(self._settings.load_timeout_s, self._load_late, prompt, loading)

    def _flow(self, prompt: Prompt, loading: _Loading, ports: list, size: int, *ways: str) -> None:
        for way in ways:
            self._world.moved_bytes[way] += size
        holder: list[Flow] = []
        done = partial(self._flow_done, prompt, loading, holder)
        flow = self._world.network.start(ports, size, done, latency_s=self._world.profile.latency_s)
        holder.append(flow)
        loading.flows[flow] = None

    def _flow_done(self, prompt: Prompt, loading: _Loading, holder: list[Flow]) -> None:
        loading.flows.pop(holder[0], None)
        if loading.source is not None and holder[0].ports[-1] is self.node.nic_in:
            loading.remote_done_at = self._world.kernel.now
        if not loading.flows:
            self._loaded(prompt, loading)

    def _loaded(self, prompt: Prompt, loading: _Loading) -> None:
        if self._loading.get(prompt.id) is not loading:
            return
        now, node, size = self._world.kernel.now, self.node, self.node.block_bytes
        del self._loading[prompt.id]
        if loading.lost(node):
            self._cut_short(prompt, loading)
            return
        good = loading.first + loading.total
        keys = prompt.task.keys[loading.first : good]
        node.read(loading.to_read)
        if loading.source is not None:
            loading.source.read(loading.remote_read)
            pulled = (len(loading.remote) + len(loading.remote_read)) * size
            if pulled:
                node.pulls.append((loading.source.id, pulled, loading.remote_done_at - loading.started))
        if len(loading.own) < loading.total:  # what came from the SSD or another node stays here: that is how replicas come to be
            node.store(keys, prompt.task.keys[loading.first - 1] if loading.first else None)
            if loading.source is not None:
                loading.source.pulled([block.key for block in loading.remote], node)
        self._release(loading)
        seconds = now - loading.started
        self._load_s[prompt.id] = seconds
        self._tiers[prompt.id] = len(loading.own), len(loading.to_read), len(loading.remote) + len(loading.remote_read)
        if loading.total:
            sizes = [len(part) * size for part in (loading.own, loading.to_read, loading.remote, loading.remote_read)]
            self._loads.append((sizes[0], sizes[1], sizes[2], sizes[3], seconds))
        self._do(self.state.load_ended(prompt, good, now))

    def _load_late(self, prompt: Prompt, loading: _Loading) -> None:
        """What has not come by now is computed."""
        if self._loading.get(prompt.id) is not loading:
            return
        del self._loading[prompt.id]
        self._cut_short(prompt, loading)

    def _cut_short(self, prompt: Prompt, loading: _Loading) -> None:
        """Go on with the blocks that were in this node's DRAM from the start, as far as they follow each other."""
        self._drop(loading)
        there = 0
        for key, block in zip(prompt.task.keys[loading.first :], loading.own, strict=False):
            if block.key != key:
                break
            there += 1
        self._load_s[prompt.id] = self._world.kernel.now - loading.started
        self._tiers[prompt.id] = (there, 0, 0)
        self._do(self.state.load_ended(prompt, loading.first + there, self._world.kernel.now))

    def _cancel_load(self, prompt: Prompt) -> None:
        loading = self._loading.pop(prompt.id, None)
        if loading is not None:
            self._drop(loading)
            self._world.kernel.after(0.0, self._cancelled, self.state, prompt)

    def _cancelled(self, state: PrefillState, prompt: Prompt) -> None:
        if state is self.state:
            self._do(state.load_ended(prompt, 0, self._world.kernel.now))

    def _drop(self, loading: _Loading) -> None:
        for flow in loading.flows:
            self._world.network.cancel(flow)
        loading.flows.clear()
        self._release(loading)

    def _release(self, loading: _Loading) -> None:
        self.node.unlease(loading.own)
        if loading.source is not None:
            loading.source.unlease(loading.remote)

    # --- publishing -----------------------------------------------------------------------------------------------------

    def _publish(self, prompt: Prompt, first: int, last: int) -> None:
        keys, node = prompt.task.keys, self.node
        missing = sum(not node.has_dram(key) for key in keys[first:last])
        done = partial(self._published, self.state, prompt, first, last)
        if missing:
            size = missing * node.block_bytes
            self._world.moved_bytes["local"] += size
            self._world.network.start([node.copy], size, done)
        else:
            self._world.kernel.after(0.0, done)

    def _published(self, state: PrefillState, prompt: Prompt, first: int, last: int) -> None:
        if state is not self.state:
            return
        if self._piece is not None and self._piece.prompt is prompt:
            self._after_piece.append(partial(self._published, state, prompt, first, last))  # a forward is not interrupted
            return
        keys = prompt.task.keys
        stored = self.node.store(keys[first:last], keys[first - 1] if first else None)
        handoff = self._world.handoffs.get(prompt.id)
        if handoff is not None and stored == last - first:
            handoff.published = max(handoff.published, last)
            handoff.tell()
        self._do(state.published(prompt, stored == last - first, "no slot was free"))

    def _handed_over(self, prompt: Prompt) -> None:
        if self.state.prompts.get(prompt.id) is not prompt:
            return
        handoff = self._world.handoffs.get(prompt.id)
        if handoff is not None:
            handoff.tail = True
            handoff.tell()
        self._do(self.state.published(prompt, True, ""))

    # --- computing ------------------------------------------------------------------------------------------------------

    def _compute(self) -> None:
        if self._piece is None and self.state.can_compute:
            self._accelerator.prefill(partial(self._start, self.state))

    def _start(self, state: PrefillState) -> None:
        piece = state.next_piece() if state is self.state and self._piece is None else None
        if piece is None:
            self._accelerator.free()
            return
        self._piece = piece
        seconds = self._world.profile.prefill_s(piece.end - piece.start, piece.start) * self.slowness
        self.busy_s += seconds
        self._world.kernel.after(seconds, self._computed, state, piece, seconds)

    def _computed(self, state: PrefillState, piece: Piece, seconds: float) -> None:
        if state is not self.state:
            return
        prompt, self._piece = piece.prompt, None
        if piece.last:
            self._first_token(prompt, seconds)
        actions = state.computed(piece, seconds)
        for request in self._aborts:
            actions += state.aborted(request)
        self._aborts.clear()
        waited, self._after_piece = self._after_piece, []
        self._do(actions)
        for call in waited:
            call()
        self._accelerator.free()
        self._compute()

    def _first_token(self, prompt: Prompt, seconds: float) -> None:
        now, size = self._world.kernel.now, self._world.block_tokens
        handoff = self._world.handoffs.get(prompt.id)
        if handoff is not None:
            handoff.first_token_at = now
        compute_s = prompt.compute_s + seconds
        own, ssd, remote = self._tiers.get(prompt.id, (0, 0, 0))
        queue_s, load_s = prompt.load_started - prompt.arrived, self._load_s.pop(prompt.id, 0.0)
        shared = self._shared.get(prompt.id, 0)
        figures = PrefillFigures(queue_s, load_s, compute_s, own * size, ssd * size, remote * size, shared * size)
        self._finished.append((*prompt.id, prompt.total - prompt.cached, prompt.cached, compute_s))
        self._gateway.first_token(prompt.id, figures)
