"""The prefill worker around its pure state: runs pieces, moves blocks, draws first tokens. One engine thread owns all of it."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgpack
import torch

from engine.cache.paged import OutOfBlocksError
from engine.engine import Engine, SequenceStep
from engine.sampling.sampler import NonFiniteLogitsError, sample
from engine.serving.host import Fenced, WorkerHost
from engine.serving.token_stream import Failed, FailureCause, Finished, FinishReason, PrefillDone, Tokens
from engine.serving.transfer import BlockLoaded, CancelOrder, LoadEnded, LoadOrder, PublishedBlock, PublishEnded, PublishOrder
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
from prefill_worker.task import Abort, PrefillLoad, PrefillSettings, PrefillTask

log = logging.getLogger(__name__)

FINISHED_REPORTED_MAX: Final = 256
TIERS: Final = ("dram", "ssd", "remote_dram", "remote_ssd")


@dataclass(slots=True)
class _Work:
    """What the shell knows of an admitted prompt beyond its state."""

    blocks: list[int]
    device_blocks: int
    came_from: dict[str, int] = field(default_factory=dict[str, int])
    """Blocks loaded, by tier."""
    load_order: int | None = None
    load_s: float = 0.0
    first_token: int = -1


class PrefillWorker:
    """A :class:`~engine.serving.host.WorkerCore`. ``submit_allowed`` is the only method for other threads besides
    ``load_report``."""

    def __init__(self, engine: Engine, settings: PrefillSettings, host: WorkerHost) -> None:
        self._engine = engine
        self._settings = settings
        self._host = host
        self.state = PrefillState(
            block_tokens=engine.layout.block_tokens,
            chunk_tokens=engine.chunk_tokens,
            waiting_max=settings.waiting_max,
            running_max=settings.running_max,
            order=InOrder(settings.order),
        )
        self._work: dict[tuple[str, int], _Work] = {}
        self._orders: dict[int, Prompt] = {}
        self._order_ids = itertools.count(1)
        self._report_lock = threading.Lock()
        self._finished: deque[tuple[str, int, int, int, float]] = deque(maxlen=FINISHED_REPORTED_MAX)
        self._loads: deque[tuple[int, int, int, int, float]] = deque(maxlen=FINISHED_REPORTED_MAX)
        self._load = PrefillLoad(0, 0, 0)
        self.counters = {"pieces": 0, "tokens_computed": 0, "tokens_reused": 0, "prompts": 0, "failed": 0}

    # --- WorkerCore -----------------------------------------------------------------------------------------------------

    def handle(self, item: object, now: float) -> None:
        match item:
            case PrefillTask():
                self._submitted(item, now)
            case Abort():
                self._do(self.state.aborted((item.request_id, item.attempt)), now)
            case BlockLoaded():
                work = self._work[self._orders[item.order].id]
                work.came_from[item.tier] = work.came_from.get(item.tier, 0) + 1
            case LoadEnded():
                self._load_ended(self._orders.pop(item.order), item, now)
            case PublishEnded():
                self._do(self.state.published(self._orders.pop(item.order), item.ok, item.detail), now)
            case Fenced():
                self._do(self.state.fenced(), now)
            case _:
                raise TypeError(f"unknown inbox item {type(item).__name__}")
        self._update_report()

    def tick(self, now: float) -> None:
        self._do(self.state.tick(now), now)
        self._update_report()

    def step(self, now: float) -> bool:
        piece = self.state.next_piece()
        if piece is None:
            return False
        self._run(piece)
        self._update_report()
        return self.state.can_compute

    def load_report(self) -> dict[str, Any]:
        with self._report_lock:
            finished, loads = tuple(self._finished), tuple(self._loads)
            self._finished.clear()
            self._loads.clear()
            load = self._load
        return replace(load, finished=finished, loads=loads).to_wire()

    def submit_allowed(self) -> bool:
        """A quick look for the caller's refusal; the state decides again when the task arrives."""
        return self._load.waiting < self._settings.waiting_max

    def _submitted(self, task: PrefillTask, now: float) -> None:
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
                case Admit(prompt):
                    # The first that finds no room blocks those behind it, or a long prompt would be passed for ever.
                    blocked = blocked or not self._admit(prompt, queue, now)
                case Load(prompt, first, last):
                    self._order_load(prompt, first, last)
                case CancelLoad(prompt):
                    order = self._work[prompt.id].load_order
                    if order is not None:
                        self._host.transfer.order(CancelOrder(order))
                case Publish(prompt, first, last):
                    self._order_publish(prompt, first, last)
                case HandOver(prompt):
                    self._order_hand_over(prompt)
                case Release(prompt):
                    work = self._work.pop(prompt.id)
                    self._engine.cache.free(work.blocks)
                case Fail(prompt, cause, detail):
                    self._fail(prompt, cause, detail)

    def _admit(self, prompt: Prompt, queue: deque[Action], now: float) -> bool:
        if prompt.phase is not Phase.WAITING:
            return True
        cache = self._engine.cache
        size = self._engine.layout.block_tokens
        total = -(-prompt.total // size)
        if total > cache.block_count:
            detail = f"{prompt.total} tokens do not fit the worker's KV cache"
            self._fail(prompt, FailureCause.REFUSED, detail)
            queue.extend(self.state.aborted(prompt.id))
            return True
        reused = cache.lookup(prompt.task.keys[: self.state.sharable_blocks(prompt)])
        try:
            fresh = cache.allocate(total - len(reused))
        except OutOfBlocksError:
            cache.free(reused)
            return False
        self._work[prompt.id] = _Work(blocks=[*reused, *fresh], device_blocks=len(reused))
        queue.extend(self.state.admitted(prompt, len(reused), now))
        return True

    def _order_load(self, prompt: Prompt, first: int, last: int) -> None:
        work = self._work[prompt.id]
        work.load_order = self._new_order(prompt)
        task = prompt.task
        targets = tuple(work.blocks[first:last])
        timeout_s = min(self._settings.load_timeout_s, task.budget_s)
        self._host.transfer.order(
            LoadOrder(work.load_order, task.keys[first:last], targets, wait=False, source=task.source, timeout_s=timeout_s)
        )

    def _load_ended(self, prompt: Prompt, ended: LoadEnded, now: float) -> None:
        work = self._work[prompt.id]
        work.load_order = None
        work.load_s = now - prompt.load_started
        good = work.device_blocks + ended.available
        if ended.available:
            size = self._engine.layout.block_bytes
            came = [work.came_from.get(tier, 0) * size for tier in TIERS]
            with self._report_lock:
                self._loads.append((came[0], came[1], came[2], came[3], work.load_s))
        self._register(prompt, work.device_blocks, good)
        self._do(self.state.load_ended(prompt, good, now), now)

    def _order_publish(self, prompt: Prompt, first: int, last: int) -> None:
        task, work = prompt.task, self._work[prompt.id]
        size = self._engine.layout.block_tokens
        blocks = tuple(
            PublishedBlock(task.keys[i], task.keys[i - 1] if i else None, work.blocks[i], tokens=size) for i in range(first, last)
        )
        order = PublishOrder(self._new_order(prompt), blocks, self._settings.publish_timeout_s)
        self._host.transfer.order(order)

    def _order_hand_over(self, prompt: Prompt) -> None:
        """The tail block (its tokens may be 0) with the first token: what decode waits for last."""
        task, work = prompt.task, self._work[prompt.id]
        tail = prompt.total % self._engine.layout.block_tokens
        meta = msgpack.packb({"first_token": work.first_token, "computed_at": time.time()})
        assert meta is not None
        block = PublishedBlock(task.tail_key, None, work.blocks[-1] if tail else None, tokens=tail, meta=meta)
        order = PublishOrder(self._new_order(prompt), (block,), self._settings.publish_timeout_s, private=True)
        self._host.transfer.order(order)

    def _new_order(self, prompt: Prompt) -> int:
        order = next(self._order_ids)
        self._orders[order] = prompt
        return order

    # --- computing ------------------------------------------------------------------------------------------------------

    def _run(self, piece: Piece) -> None:
        prompt = piece.prompt
        task, work = prompt.task, self._work[prompt.id]
        size = self._engine.layout.block_tokens
        blocks = work.blocks[: -(-piece.end // size)]
        started = time.monotonic()
        try:
            logits = self._engine.forward([SequenceStep(task.token_ids[piece.start : piece.end], piece.start, blocks)])
            if not bool(torch.isfinite(logits.amax())):  # as the sampler judges: a token masked with -inf is no fault, NaN is
                raise NonFiniteLogitsError([0])  # before its K/V gets a name that others find it by
            drawn = sample(logits, [task.sampling], [task.answered])[0] if piece.last else None
        except Exception as error:
            log.exception("prefill piece failed")
            self._fail(prompt, FailureCause.INTERNAL, type(error).__name__)
            self._do(self.state.aborted(prompt.id), time.monotonic())
            return
        now = time.monotonic()
        self.counters["pieces"] += 1
        self.counters["tokens_computed"] += piece.end - piece.start
        self._register(prompt, piece.start // size, piece.end // size)
        if drawn is not None:
            work.first_token = drawn.token_id
            self._answer_first(prompt, work, drawn.logprob, now, started)
        self._do(self.state.computed(piece, now - started), now)

    def _answer_first(self, prompt: Prompt, work: _Work, logprob: Any, now: float, started: float) -> None:
        task = prompt.task
        size = self._engine.layout.block_tokens
        compute_s = prompt.compute_s + now - started
        # Blocks count as reused only as far as the cursor says (bitwise mode rounds down), nearest tier first.
        device = min(work.device_blocks, prompt.cached // size)
        dram = min(work.came_from.get("dram", 0), prompt.cached // size - device)
        ssd = min(work.came_from.get("ssd", 0), prompt.cached // size - device - dram)
        remote = prompt.cached // size - device - dram - ssd
        self._host.sender.add(
            task.sink,
            Tokens(task.request_id, task.attempt, task.answered, (work.first_token,), None if logprob is None else (logprob,)),
        )
        self._host.sender.add(
            task.sink,
            PrefillDone(
                task.request_id, task.attempt, prompt.total, device * size, dram * size, ssd * size, remote * size,
                queue_s=(prompt.load_started or now) - prompt.arrived, load_s=work.load_s, compute_s=compute_s,
            ),
        )  # fmt: skip
        if work.first_token in task.eos_token_ids and not task.sampling.ignore_eos:
            self._host.sender.add(task.sink, Finished(task.request_id, task.attempt, FinishReason.STOP))
        elif not task.hand_over:
            self._host.sender.add(task.sink, Finished(task.request_id, task.attempt, FinishReason.LENGTH))
        self._host.sender.flush()  # the client waits for this one: before the state's other actions
        with self._report_lock:
            self._finished.append((task.request_id, task.attempt, prompt.total - prompt.cached, prompt.cached, compute_s))
        self.counters["prompts"] += 1
        self.counters["tokens_reused"] += prompt.cached

    def _register(self, prompt: Prompt, first: int, last: int) -> None:
        """Name the full blocks ``first .. last - 1`` in the device cache."""
        task, work = prompt.task, self._work[prompt.id]
        for i in range(first, last):
            self._engine.cache.register(task.keys[i], work.blocks[i], task.keys[i - 1] if i else None)

    def _fail(self, prompt: Prompt, cause: FailureCause, detail: str) -> None:
        task = prompt.task
        self._host.sender.add(task.sink, Failed(task.request_id, task.attempt, cause, detail))
        self.counters["failed"] += 1

    def _update_report(self) -> None:
        running = self.state.active
        with self._report_lock:
            piece_s = self.state.order.piece_s
            self._load = PrefillLoad(self.state.waiting, running, self.state.queued_tokens, piece_s=piece_s)
