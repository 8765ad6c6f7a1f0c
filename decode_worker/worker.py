"""The decode worker around its pure state: continuous batching, block arrival, write-back. One engine thread owns all of it."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Final

import msgpack
from torch import Tensor

from decode_worker.state import Action, Admit, CancelLoad, DecodeState, Fail, Finish, Load, Phase, Release, Sequence, WriteBack
from decode_worker.task import Abort, DecodeLoad, DecodeSettings, DecodeTask
from engine.cache.paged import OutOfBlocksError
from engine.engine import Engine, SequenceStep
from engine.sampling.sampler import Drawn, NonFiniteLogitsError, sample
from engine.serving.host import Fenced, WorkerHost
from engine.serving.step_time import StepTime
from engine.serving.token_stream import DecodeStarted, Failed, FailureCause, Finished, Tokens
from engine.serving.transfer import BlockLoaded, CancelOrder, LoadEnded, LoadOrder, PublishedBlock, PublishEnded, PublishOrder
from kv_pool.keys import BlockChain

log = logging.getLogger(__name__)

FINISHED_REPORTED_MAX: Final = 256
WRITE_BACK_TIMEOUT_S: Final = 2.0
STEP_SMOOTHING: Final = 0.1
STEPS_REPORTED_MAX: Final = 64
"""In one heartbeat: the newest."""


@dataclass(slots=True)
class _Work:
    """What the shell knows of an admitted sequence beyond its state."""

    blocks: list[int]
    device_blocks: int
    chain: BlockChain
    load_order: int | None = None
    tail_meta: bytes = b""
    computed_at: float = 0.0
    started: bool = False


class DecodeWorker:
    """A :class:`~engine.serving.host.WorkerCore`."""

    def __init__(self, engine: Engine, settings: DecodeSettings, host: WorkerHost) -> None:
        self._engine = engine
        self._settings = settings
        self._host = host
        self.state = DecodeState(
            block_tokens=engine.layout.block_tokens,
            total_blocks=engine.cache.block_count,
            waiting_max=settings.waiting_max,
            batch_max=settings.batch_max,
            handoff_timeout_s=settings.handoff_timeout_s,
        )
        self._work: dict[tuple[str, int], _Work] = {}
        self._orders: dict[int, Sequence] = {}
        self._write_backs: dict[int, int] = {}
        self._order_ids = itertools.count(1)
        self._report_lock = threading.Lock()
        self._finished: deque[tuple[str, int]] = deque(maxlen=FINISHED_REPORTED_MAX)
        self._load = DecodeLoad(0, 0, engine.cache.free_count, engine.cache.block_count, 0.0)
        self._step_s = 0.0
        self._step_time = StepTime(0.0)
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=STEPS_REPORTED_MAX)
        self.counters = {"steps": 0, "tokens": 0, "sequences": 0, "failed": 0, "preempted": 0, "written_back": 0}

    # --- WorkerCore -----------------------------------------------------------------------------------------------------

    def handle(self, item: object, now: float) -> None:
        match item:
            case DecodeTask():
                self._submitted(item, now)
            case Abort():
                self._do(self.state.aborted((item.request_id, item.attempt)), now)
            case BlockLoaded():
                self._block_loaded(item, now)
            case LoadEnded():
                self._load_ended(self._orders.pop(item.order), item, now)
            case PublishEnded():
                self.counters["written_back"] += item.ok
                self._engine.cache.free([self._write_backs.pop(item.order)])
            case Fenced():
                self._do(self.state.fenced(), now)
            case _:
                raise TypeError(f"unknown inbox item {type(item).__name__}")
        self._update_report()

    def tick(self, now: float) -> None:
        self._do(self.state.tick(now), now)
        self._update_report()

    def step(self, now: float) -> bool:
        batch = self._batch_with_room(now)
        if not batch:
            self._step_s = 0.0
            return False
        self._run(batch)
        self._update_report()
        return bool(self.state.running)

    def load_report(self) -> dict[str, Any]:
        with self._report_lock:
            finished, steps = tuple(self._finished), tuple(self._steps)
            self._finished.clear()
            self._steps.clear()
            load = self._load
        return replace(load, finished=finished, steps=steps, batch_max=self._settings.batch_max).to_wire()

    def submit_allowed(self) -> bool:
        """A quick look for the caller's refusal; the state decides again when the task arrives."""
        return self._load.waiting < self._settings.waiting_max

    def _submitted(self, task: DecodeTask, now: float) -> None:
        try:
            self._do(self.state.submitted(task, now), now)
        except ValueError as error:  # a task that contradicts itself: its gateway must hear of it, or it waits for nothing
            log.exception("task refused")
            self._host.sender.add(task.sink, Failed(task.request_id, task.attempt, FailureCause.INTERNAL, str(error)))

    # --- doing what the state says ----------------------------------------------------------------------------------------

    def _do(self, actions: list[Action], now: float) -> None:
        queue = deque(actions)
        blocked = False
        while queue:
            action = queue.popleft()
            match action:
                case Admit(sequence, blocks, room):
                    # The first that finds no room blocks those behind it, or a long one would be passed for ever.
                    blocked = blocked or not self._admit(sequence, blocks, room, queue)
                case Load(sequence, first):
                    self._order_load(sequence, first, now)
                case CancelLoad(sequence):
                    order = self._work[sequence.id].load_order
                    if order is not None:
                        self._host.transfer.order(CancelOrder(order))
                case WriteBack(sequence, block):
                    self._order_write_back(sequence, block)
                case Release(sequence):
                    self._engine.cache.free(self._work.pop(sequence.id).blocks)
                    with self._report_lock:
                        self._finished.append(sequence.id)
                case Finish(sequence, reason):
                    task = sequence.task
                    self._host.sender.add(task.sink, Finished(task.request_id, task.attempt, reason))
                case Fail(sequence, cause, detail):
                    task = sequence.task
                    self.counters["failed"] += 1
                    self.counters["preempted"] += cause is FailureCause.PREEMPTED
                    self._host.sender.add(task.sink, Failed(task.request_id, task.attempt, cause, detail))

    def _admit(self, sequence: Sequence, blocks: int, room: int, queue: deque[Action]) -> bool:
        if sequence.phase is not Phase.WAITING:
            return True
        cache, task = self._engine.cache, sequence.task
        if cache.free_count < blocks + self.state.growth_reserve:
            return False
        shared = cache.lookup(task.keys)
        try:
            mine = self._place(shared, blocks, room)
        except OutOfBlocksError:
            # Held for us, the shared blocks may be what is missing. Let go they can be evicted for room, and come from the pool.
            cache.free(shared)
            shared = []
            try:
                mine = self._place(shared, blocks, room)
            except OutOfBlocksError:
                return False
        tail = task.token_ids[len(task.keys) * self._engine.layout.block_tokens :]
        chain = BlockChain.resumed(task.root, self._engine.layout.block_tokens, task.keys, tail)
        self._work[sequence.id] = _Work(mine, len(shared), chain)
        self.counters["sequences"] += 1
        queue.extend(self.state.admitted(sequence, len(shared)))
        return True

    def _place(self, shared: list[int], blocks: int, room: int) -> list[int]:
        """Blocks of a new sequence, the first ones holding the K/V of ``shared``. On a CPU they are one contiguous run with a
        copy of the shared ones (attention then reads views, not gathers); with a block table the shared ones serve where they
        are."""
        cache = self._engine.cache
        if not shared:
            return cache.allocate(blocks, room=room)
        if self._engine.reads_block_tables:
            return [*shared, *cache.allocate(blocks - len(shared), room=room)]
        mine = cache.allocate(blocks, room=room)
        cache.copy(shared, mine[: len(shared)])
        cache.free(shared)
        return mine

    def _order_load(self, sequence: Sequence, first: int, now: float) -> None:
        task, work = sequence.task, self._work[sequence.id]
        work.load_order = self._new_order(sequence)
        full = len(task.keys)
        tail = len(task.token_ids) % self._engine.layout.block_tokens
        targets = (*work.blocks[first:full], work.blocks[full] if tail else None)
        self._host.transfer.order(
            LoadOrder(
                work.load_order, (*task.keys[first:], task.tail_key), targets, wait=True, source=task.source,
                timeout_s=max(0.1, sequence.deadline - now), consume=frozenset((task.tail_key,)),
            )
        )  # fmt: skip

    def _block_loaded(self, item: BlockLoaded, now: float) -> None:
        sequence = self._orders[item.order]
        task, work = sequence.task, self._work[sequence.id]
        self.state.loaded(sequence, now)
        index = work.device_blocks + item.position
        if index < len(task.keys):
            self._engine.cache.register(task.keys[index], work.blocks[index], task.keys[index - 1] if index else None)
        else:
            work.tail_meta = item.meta

    def _load_ended(self, sequence: Sequence, ended: LoadEnded, now: float) -> None:
        work = self._work[sequence.id]
        work.load_order = None
        expected = len(sequence.task.keys) - work.device_blocks + 1
        first_token = -1
        ok = ended.available == expected
        if ok:
            try:
                meta = msgpack.unpackb(work.tail_meta)
                first_token, work.computed_at = int(meta["first_token"]), float(meta["computed_at"])
            except (ValueError, KeyError, TypeError, msgpack.UnpackException):
                ok = False
        actions = self.state.load_ended(sequence, ok, f"{ended.available} of {expected} blocks ({ended.miss or 'bad tail'})")
        self._do(actions, now)
        if ok and sequence.phase is Phase.LOADING:
            work.chain.extend((first_token,))
            running = self.state.running
            context = sum(s.length for s in running)
            present_s = self._step_time.seconds(len(running), context)
            step_s = self._step_time.seconds(len(running) + 1, context + sequence.length + 1)
            self._do(self.state.joined(sequence, first_token, now, step_s, present_s), now)

    def _order_write_back(self, sequence: Sequence, block: int) -> None:
        work = self._work[sequence.id]
        key, parent = work.chain.keys[block], work.chain.keys[block - 1] if block else None
        self._engine.cache.register(key, work.blocks[block], parent)
        stored = PublishedBlock(key, parent, work.blocks[block], tokens=self._engine.layout.block_tokens)
        # The sequence may end, move or be preempted meanwhile: the write-back holds the block for itself until it is out.
        self._engine.cache.retain([work.blocks[block]])
        order = next(self._order_ids)
        self._write_backs[order] = work.blocks[block]
        self._host.transfer.order(PublishOrder(order, (stored,), WRITE_BACK_TIMEOUT_S))

    def _new_order(self, sequence: Sequence) -> int:
        order = next(self._order_ids)
        self._orders[order] = sequence
        return order

    # --- the step -------------------------------------------------------------------------------------------------------

    def _batch_with_room(self, now: float) -> list[Sequence]:
        """The batch, each sequence with a block for its next token. Where the cache is full the youngest give way; those that
        lack a block meanwhile sit this step out."""
        size = self._engine.layout.block_tokens
        while True:
            ready: list[Sequence] = []
            starved = False
            for sequence in self.state.running:
                blocks = self._work[sequence.id].blocks
                missing = -(-sequence.length // size) - len(blocks)
                try:
                    if missing > 0:
                        self._grow(blocks, missing)
                    ready.append(sequence)
                except OutOfBlocksError:
                    starved = True
            if not starved or self.state.blocks_on_their_way_back:
                return ready
            self._do(self.state.out_of_blocks(), now)  # one less each time round: this ends

    def _grow(self, blocks: list[int], count: int) -> None:
        """More blocks at the end: in place, or by moving a broken run into a whole one where one is free."""
        cache = self._engine.cache
        blocks.extend(cache.extend(blocks, count))
        if self._engine.reads_block_tables or cache.is_run(blocks):
            return
        try:
            whole = cache.allocate(len(blocks), room=0)
        except OutOfBlocksError:
            return
        if not cache.is_run(whole):
            cache.free(whole)
            return
        cache.copy(blocks[:-count], whole[:-count])
        cache.free(blocks)
        blocks[:] = whole

    def _run(self, batch: list[Sequence]) -> None:
        started = time.monotonic()
        steps = [SequenceStep((s.drawn[-1],), s.kv_tokens, self._work[s.id].blocks) for s in batch]
        for sequence in batch:
            work = self._work[sequence.id]
            if not work.started:
                work.started = True
                task = sequence.task
                handoff_s = max(0.0, time.time() - work.computed_at)
                self._host.sender.add(task.sink, DecodeStarted(task.request_id, task.attempt, handoff_s))
        try:
            logits = self._engine.forward(steps)
            batch, drawn = self._draw(batch, logits)
        except Exception as error:
            log.exception("decode step failed")
            self._fail_all(batch, type(error).__name__)
            return
        now = time.monotonic()
        for sequence, token in zip(batch, drawn, strict=True):
            self._emit(sequence, token)
            self._work[sequence.id].chain.extend((token.token_id,))
            self._do(self.state.drew(sequence, token.token_id), now)
        self.counters["steps"] += 1
        self.counters["tokens"] += len(batch)
        seconds = now - started
        self._step_s = seconds if not self._step_s else self._step_s + STEP_SMOOTHING * (seconds - self._step_s)
        context = sum(s.length for s in batch)
        self._step_time.observe(len(batch), context, seconds)
        with self._report_lock:
            self._steps.append((len(batch), context, seconds))

    def _draw(self, batch: list[Sequence], logits: Tensor) -> tuple[list[Sequence], list[Drawn]]:
        """Draw for every sequence; one whose logits are not finite fails alone. Returns the sequences left and their tokens."""
        try:
            return batch, sample(logits, [s.task.sampling for s in batch], [s.answer_index for s in batch])
        except NonFiniteLogitsError as error:
            bad = set(error.rows)
        log.error("decode step: %d of %d sequences have logits that are not finite", len(bad), len(batch))
        self._fail_all([s for i, s in enumerate(batch) if i in bad], NonFiniteLogitsError.__name__)
        good = [i for i in range(len(batch)) if i not in bad]
        left = [batch[i] for i in good]
        if not left:
            return [], []
        return left, sample(logits[good], [s.task.sampling for s in left], [s.answer_index for s in left])

    def _fail_all(self, sequences: list[Sequence], detail: str) -> None:
        for sequence in sequences:
            task = sequence.task
            self.counters["failed"] += 1
            self._host.sender.add(task.sink, Failed(task.request_id, task.attempt, FailureCause.INTERNAL, detail))
            self._do(self.state.aborted(sequence.id), time.monotonic())

    def _emit(self, sequence: Sequence, drawn: Drawn) -> None:
        task = sequence.task
        logprobs = None if drawn.logprob is None else (drawn.logprob,)
        event = Tokens(task.request_id, task.attempt, sequence.answer_index, (drawn.token_id,), logprobs)
        self._host.sender.add(task.sink, event)

    def _update_report(self) -> None:
        running = self.state.running
        cache = self._engine.cache
        with self._report_lock:
            self._load = DecodeLoad(
                self.state.waiting, len(running), cache.free_count, cache.block_count, self._step_s,
                context_tokens=sum(s.length for s in running), loading=self.state.loading,
            )  # fmt: skip
