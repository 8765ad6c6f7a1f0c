"""A simulated decode worker: the live worker's state machine, with a profile in place of a model.

Decoding is not simulated step by step. Between two changes of the batch all steps are alike but for the context, which grows by
one token a sequence: a *run* of ``k`` steps takes ``k·s + k·(k - 1)/2 · g`` seconds (``s`` the first step, ``g`` what one more
token in every sequence adds). A run is planned up to the next end or block border; whoever wants to join waits for the end of the
step that is under way, and the run is cut there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial

from cluster.simulator.accelerator import Accelerator
from cluster.simulator.decode_run import DecodeRun, GapLog
from cluster.simulator.links import Flow
from cluster.simulator.pool_node import PoolNode
from cluster.simulator.world import Gateway, Handoff, RequestId, World
from decode_worker.state import (
    Action,
    Admit,
    CancelLoad,
    DecodeState,
    Fail,
    Finish,
    Load,
    Phase,
    Release,
    Sequence,
    WriteBack,
)
from decode_worker.task import DecodeLoad, DecodeSettings, DecodeTask
from kv_pool.node.blocks import Block

REPORTED_MAX = 256
STEPS_REPORTED_MAX = 64


@dataclass(slots=True, eq=False)
class _Pull:
    """A sequence whose blocks are arriving: ``arrived`` of its keys are here."""

    sequence: Sequence
    handoff: Handoff
    arrived: int = 0
    flow: Flow | None = None
    leased: tuple[Block, ...] = ()
    over: bool = False


class DecodeWorker:
    """``slowness`` > 1 makes it step so much slower than its profile says."""

    def __init__(
        self, worker_id: str, node: PoolNode, world: World, settings: DecodeSettings, gateway: Gateway, accelerator: Accelerator
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
        accelerator.decode_yields = self._cut
        self._open()

    def _open(self) -> None:
        profile, size = self._world.profile, self._world.block_tokens
        self._total_blocks = profile.device_tokens // size
        self.state = DecodeState(
            block_tokens=size,
            total_blocks=self._total_blocks,
            waiting_max=self._settings.waiting_max,
            batch_max=profile.batch_max,
            handoff_timeout_s=self._settings.handoff_timeout_s,
        )
        self._free_blocks = self._total_blocks
        self._held: dict[RequestId, int] = {}
        self._pulls: dict[RequestId, _Pull] = {}
        self._joining: list[_Pull] = []
        self._aborts: list[RequestId] = []
        self._tick_due = False
        self._run: DecodeRun | None = None
        self._generation = getattr(self, "_generation", 0) + 1
        self._gap_log = GapLog()
        self._finished: deque[RequestId] = deque(maxlen=REPORTED_MAX)
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=STEPS_REPORTED_MAX)

    # --- what others ask of it ------------------------------------------------------------------------------------------

    def submit(self, task: DecodeTask) -> None:
        self._do(self.state.submitted(task, self._world.kernel.now))

    def abort(self, request: RequestId) -> None:
        self._aborts.append(request)
        self._at_border()

    def tick(self) -> None:
        if self._run is None:
            self._do(self.state.tick(self._world.kernel.now))
        elif self.state.overdue(self._world.kernel.now):
            self._tick_due = True
            self._cut()

    def report(self) -> DecodeLoad:
        running = self.state.running
        load = DecodeLoad(
            self.state.waiting, len(running), self._free_blocks, self._total_blocks, self._run.first_s if self._run else 0.0,
            tuple(self._finished), self._world.profile.batch_max, sum(s.length for s in running), tuple(self._steps),
            self.state.loading,
        )  # fmt: skip
        self._finished.clear()
        self._steps.clear()
        return load

    @property
    def leftovers(self) -> int:
        """Requests, pulls and device blocks that somebody still holds."""
        return len(self.state.sequences) + len(self._pulls) + len(self._held)

    @property
    def batch(self) -> int:
        return len(self._run.batch) if self._run is not None else 0

    @property
    def step_s(self) -> float:
        return self._run.first_s if self._run is not None else 0.0

    def fenced(self, fence: int) -> None:
        self.fence = fence
        self._aborts.extend(self.state.sequences)
        self._at_border()

    def die(self) -> None:
        for request in self.state.sequences:
            self._gateway.stopped(request)
        for pull in self._pulls.values():
            self._stop(pull)
        running = self._run is not None
        self._run = None
        self._open()
        if running:
            self._accelerator.free()

    # --- actions --------------------------------------------------------------------------------------------------------

    def _do(self, actions: Items[Action]) -> None:
        waiting = deque(actions)
        blocked = False
        while waiting:
            action = waiting.popleft()
            match action:
                case Admit(sequence, blocks, _):
                    # The first that finds no room blocks those behind it; one that was named twice is in already.
                    missing = self._free_blocks < blocks + self.state.growth_reserve
                    blocked = blocked or (sequence.phase is Phase.WAITING and missing)
                    if sequence.phase is Phase.WAITING and not blocked:
                        self._free_blocks -= blocks
                        self._held[sequence.id] = blocks
                        waiting.extend(self.state.admitted(sequence, 0))
                case Load(sequence, _):
                    self._load(sequence)
                case CancelLoad(sequence):
                    pull = self._pulls.pop(sequence.id, None)
                    if pull is not None:
                        self._stop(pull)
                        self._world.kernel.after(0.0, self._load_ended, self.state, sequence, False, "cancelled")
                case WriteBack():
                    pass  # a trace does not say what its answers were: tasks do not ask for it
                case Release(sequence):
                    self._free_blocks += self._held.pop(sequence.id)
                    self._gap_log.left(sequence.id)
                case Finish(sequence, _):
                    self._finished.append(sequence.id)
                    self._gateway.finished(sequence.id, self._gap_log.gaps(sequence.id))
                case Fail(sequence, cause, detail):
                    self._finished.append(sequence.id)
                    self._gateway.failed(sequence.id, self.id, cause, detail)
        self._start()

    # --- loading --------------------------------------------------------------------------------------------------------

    def _load(self, sequence: Sequence) -> None:
        handoff = self._world.handoffs.get(sequence.id)
        if handoff is None:
            self._world.kernel.after(0.0, self._load_ended, self.state, sequence, False, "nobody hands it over")
            return
        pull = self._pulls[sequence.id] = _Pull(sequence, handoff)
        handoff.changed = partial(self._advance, pull)
        self._world.kernel.after(0.0, self._advance, pull)

    def _advance(self, pull: _Pull) -> None:
        """Fetch what has been published meanwhile; with the tail, the sequence is ready."""
        if pull.over or pull.flow is not None:
            return
        handoff, keys, node = pull.handoff, pull.handoff.keys, self.node
        here = handoff.node is node
        while pull.arrived < handoff.published and (here or node.has_dram(keys[pull.arrived])):
            pull.arrived += 1
        if pull.arrived < handoff.published:
            wanted = keys[pull.arrived : handoff.published]
            blocks, to_read = handoff.node.prefix(wanted)
            if len(blocks) + len(to_read) < len(wanted):
                self._pull_ended(pull, False, "a block is gone")
                return
            handoff.node.lease(blocks)
            pull.leased = tuple(blocks)
            size = len(wanted) * node.block_bytes
            self._world.moved_bytes["network"] += size
            ports = [handoff.node.nic_out, node.nic_in]
            if to_read:
                ports.insert(0, handoff.node.ssd_read)
                self._world.moved_bytes["ssd_read"] += len(to_read) * node.block_bytes
            losses = _losses(handoff.node, bool(to_read))
            done = partial(self._arrived, pull, len(wanted), self._world.kernel.now, size, losses, bool(to_read))
            pull.flow = self._world.network.start(ports, size, done, latency_s=self._world.profile.latency_s)
        elif handoff.tail:
            pull.over = True
            self._world.kernel.after(self._world.profile.latency_s, self._ready, self.state, pull)

    def _arrived(
        self, pull: _Pull, count: int, started: float, size: int, losses: tuple[int, int], from_ssd: bool
    ) -> None:  # fmt: skip
        keys, now = pull.handoff.keys, self._world.kernel.now
        pull.handoff.node.unlease(pull.leased)
        pull.leased, pull.flow = (), None
        if losses != _losses(pull.handoff.node, from_ssd):
            self._pull_ended(pull, False, "a block is gone")
            return
        first = pull.arrived
        self.node.pulls.append((pull.handoff.node.id, size, now - started))
        self.node.store(keys[first : first + count], keys[first - 1] if first else None)
        pull.handoff.node.pulled(keys[first : first + count], self.node)
        pull.arrived += count
        self.state.loaded(pull.sequence, now)
        self._advance(pull)

    def _ready(self, state: DecodeState, pull: _Pull) -> None:
        if state is self.state and self._pulls.get(pull.sequence.id) is pull:
            self._joining.append(pull)
            self._at_border()

    def _pull_ended(self, pull: _Pull, ok: bool, detail: str) -> None:
        self._stop(pull)
        self._pulls.pop(pull.sequence.id, None)
        self._world.kernel.after(0.0, self._load_ended, self.state, pull.sequence, ok, detail)

    def _load_ended(self, state: DecodeState, sequence: Sequence, ok: bool, detail: str) -> None:
        if state is self.state:
            self._do(state.load_ended(sequence, ok, detail))

    def _stop(self, pull: _Pull) -> None:
        pull.over = True
        if pull.handoff.changed is not None:
            pull.handoff.changed = None
        if pull.flow is not None:
            self._world.network.cancel(pull.flow)
            pull.flow = None
        pull.handoff.node.unlease(pull.leased)
        pull.leased = ()

    # --- running --------------------------------------------------------------------------------------------------------

    def _at_border(self) -> None:
        """Something waits for the end of the step that is under way."""
        if self._run is None:
            self._border()
        else:
            self._cut()

    def _cut(self) -> None:
        """End the run with the step that is under way."""
        run = self._run
        if run is None:
            return
        steps = run.steps_until(self._world.kernel.now - run.started)
        if steps < run.steps:
            self._run = DecodeRun(run.started, run.batch, steps, run.first_s, run.growth_s)
            self._generation += 1
            self._world.kernel.at(run.started + run.seconds(steps), self._run_ended, self._generation)

    def _start(self) -> None:
        if self._run is None and any(s.phase is Phase.RUNNING for s in self.state.sequences.values()):
            self._accelerator.decode(partial(self._begin, self.state))

    def _begin(self, state: DecodeState) -> None:
        if state is not self.state or self._run is not None:
            self._accelerator.free()
            return
        batch = tuple(state.running)
        rooms = [self._room(sequence) for sequence in batch]
        if not batch or min(rooms) <= 0:
            self._accelerator.free()
            # Blocks on their way back arrive at this same moment, and start it again: nobody else must give way for them.
            if batch and not state.blocks_on_their_way_back:
                self._do(state.out_of_blocks())
            return
        steps = min(min(room, s.task.max_new_tokens - s.answer_index) for s, room in zip(batch, rooms, strict=True))
        profile = self._world.profile
        context = sum(sequence.length for sequence in batch)
        first_s = profile.step_s(len(batch), context) * self.slowness
        growth_s = profile.decode_s_per_context_token * len(batch) * self.slowness
        now = self._world.kernel.now
        self._run = run = DecodeRun(now, batch, steps, first_s, growth_s)
        self._steps.append((len(batch), context, first_s))
        self._generation += 1
        self._world.kernel.at(now + run.seconds(steps), self._run_ended, self._generation)
        if self._accelerator.prefill_waits:
            self._cut()

    def _room(self, sequence: Sequence) -> int:
        """Steps that the sequence's blocks allow, one more block taken if it needs one; 0 where there is none."""
        size = self._world.block_tokens
        room = self._held[sequence.id] * size - sequence.length + 1
        if room <= 0 and self._free_blocks > 0:
            self._free_blocks -= 1
            self._held[sequence.id] += 1
            room += size
        return room

    def _run_ended(self, generation: int) -> None:
        run = self._run
        if run is None or generation != self._generation:
            return
        now = self._world.kernel.now
        self._run = None
        self.busy_s += now - run.started
        self._gap_log.ran(run, now)
        self._accelerator.free()
        drawn = (0,) * run.steps
        actions: list[Action] = []
        for sequence in run.batch:
            actions += self.state.drew_many(sequence, drawn)
        self._do_at_border(actions)

    def _border(self) -> None:
        self._do_at_border([])

    def _do_at_border(self, actions: list[Action]) -> None:
        now = self._world.kernel.now
        for request in self._aborts:
            actions += self.state.aborted(request)
        self._aborts.clear()
        if self._tick_due:
            self._tick_due = False
            actions += self.state.tick(now)
        joining, self._joining = self._joining, []
        for pull in joining:
            sequence = pull.sequence
            if self._pulls.pop(sequence.id, None) is not pull:
                continue
            pull.handoff.changed = None
            actions += self.state.load_ended(sequence, True, "")
            if sequence.phase is not Phase.LOADING:
                continue
            running = self.state.running
            profile = self._world.profile
            context = sum(s.length for s in running)
            present_s = profile.step_s(len(running), context) * self.slowness
            step_s = profile.step_s(len(running) + 1, context + sequence.length + 1) * self.slowness
            self._gap_log.joined(sequence.id, pull.handoff.first_token_at, now)
            actions += self.state.joined(sequence, 0, now, step_s, present_s)
        if self._run is None and not self.state.running:
            self._gap_log.idle(now)
        self._do(actions)
        self._gap_log.forget()


def _losses(node: PoolNode, from_ssd: bool) -> tuple[int, int]:
    """How often what is read there has lost everything."""
    return node.restarts, node.disk_losses if from_ssd else 0
