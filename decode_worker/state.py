"""The decode worker's decisions: who gets blocks, who joins the batch, who gives way, what ends.

Pure: events and the time in, actions out. One sequence lives through these phases:

=========  ===========================================================================  =======================================
phase      meaning                                                                      where its blocks are
=========  ===========================================================================  =======================================
WAITING    accepted, no device blocks yet (admission by free blocks)                    none
LOADING    blocks arrive from the pool while prefill still computes                     device, being written by the transfer
RUNNING    one token a step                                                             device
ENDING     over, while a transfer still touches its blocks                              device, until the transfer lets go
=========  ===========================================================================  =======================================

Positions of a running sequence (``bt`` = block_tokens)::

    |------ prompt (+ answered before) ------|-- drawn here --|
    |-- token_ids[: kv] have K/V -----------------------------|x|      x = last drawn token: its K/V comes with the next step
    blocks cover kv + 1 tokens before each step
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

from decode_worker.task import DecodeTask
from engine.serving.token_stream import FailureCause, FinishReason

RequestId = tuple[str, int]
"""(request_id, attempt)."""

GROWTH_BLOCKS = 4
"""Free blocks that admission tries to leave behind a new sequence, so that it grows in place and stays one contiguous run."""


class Phase(StrEnum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    ENDING = "ending"


@dataclass(slots=True, eq=False)
class Sequence:
    """One accepted task and the tokens drawn for it here, prefill's first."""

    task: DecodeTask
    arrived: float
    drawn: list[int] = field(default_factory=list[int])
    phase: Phase = Phase.WAITING
    transfers: int = 0
    """Loads that still write to this sequence's blocks: they go back only at 0."""
    last_heard: float = 0.0
    """When the prefill side last delivered; 0 before its first block."""
    joined: float = 0.0

    @property
    def id(self) -> RequestId:
        return self.task.request_id, self.task.attempt

    @property
    def prompt_tokens(self) -> int:
        """Tokens that prefill computed, those answered on earlier attempts included."""
        return len(self.task.token_ids)

    @property
    def answer_index(self) -> int:
        """Index in the answer of the next token to draw."""
        return self.task.answered + len(self.drawn)

    @property
    def length(self) -> int:
        """Tokens in all: the prompt's and those drawn."""
        return self.prompt_tokens + len(self.drawn)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose K/V is in the cache: all but the last drawn one."""
        return self.length - 1

    @property
    def deadline(self) -> float:
        return self.arrived + self.task.budget_s


# --- actions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admit:
    """Find ``blocks`` device blocks, with ``room`` free behind them if possible; answer with ``admitted``, or leave it
    waiting."""

    sequence: Sequence
    blocks: int
    room: int


@dataclass(frozen=True, slots=True)
class Load:
    """Fetch blocks ``first ..`` and then the tail, waiting for those that prefill has not published yet."""

    sequence: Sequence
    first: int


@dataclass(frozen=True, slots=True)
class CancelLoad:
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class WriteBack:
    """Store the generated full block ``block`` under its chained key. The shell keeps the block alive meanwhile; stored or not,
    the sequence does not wait for it."""

    sequence: Sequence
    block: int


@dataclass(frozen=True, slots=True)
class Release:
    """Give the sequence's device blocks back: nothing touches them any more."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Finish:
    """Tell the gateway that the answer is complete."""

    sequence: Sequence
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the gateway that this attempt is over without an end."""

    sequence: Sequence
    cause: FailureCause
    detail: str


Action = Admit | Load | CancelLoad | WriteBack | Release | Finish | Fail


@dataclass(slots=True)
class DecodeState:
    """All sequences of one worker. Every public method is an event; each returns the actions it causes."""

    block_tokens: int
    total_blocks: int
    waiting_max: int
    batch_max: int
    handoff_timeout_s: float
    sequences: dict[RequestId, Sequence] = field(default_factory=dict[RequestId, Sequence])

    # --- events ---------------------------------------------------------------------------------------------------------

    def submitted(self, task: DecodeTask, now: float) -> list[Action]:
        """A new task. Raises ValueError on one that contradicts itself (our own bug upstream), naming the field."""
        if len(task.keys) != len(task.token_ids) // self.block_tokens:
            raise ValueError(f"keys: {len(task.keys)} for {len(task.token_ids)} tokens in blocks of {self.block_tokens}")
        if task.max_new_tokens <= task.answered:
            raise ValueError(f"max_new_tokens: {task.max_new_tokens} leaves nothing to decode after {task.answered}")
        sequence = Sequence(task, now)
        if sequence.id in self.sequences:
            return []
        if self.waiting >= self.waiting_max:
            return [Fail(sequence, FailureCause.REFUSED, "the worker's queue is full")]
        longest = sequence.prompt_tokens + task.max_new_tokens - task.answered
        if self._blocks(longest) > self.total_blocks:
            return [Fail(sequence, FailureCause.REFUSED, f"{longest} tokens do not fit the worker's KV cache")]
        self.sequences[sequence.id] = sequence
        return self._admissions()

    def admitted(self, sequence: Sequence, device_blocks: int) -> list[Action]:
        """The shell found room; the first ``device_blocks`` blocks came from the device cache."""
        assert sequence.phase is Phase.WAITING
        sequence.phase = Phase.LOADING
        sequence.transfers += 1
        return [Load(sequence, device_blocks)]

    def loaded(self, sequence: Sequence, now: float) -> None:
        """One more block is in place."""
        sequence.last_heard = now

    def load_ended(self, sequence: Sequence, ok: bool, detail: str) -> list[Action]:
        """The load is over. ``ok``: every block and the tail are right and in place; the caller joins the sequence next."""
        sequence.transfers -= 1
        if sequence.phase is Phase.ENDING:
            return self._settle(sequence)
        if ok:
            return []
        return [Fail(sequence, FailureCause.HANDOFF, detail), *self._end(sequence)]

    def joined(
        self, sequence: Sequence, first_token: int, now: float, step_s: float = 0.0, present_s: float = math.inf
    ) -> list[Action]:  # fmt: skip
        """Prefill drew ``first_token``: the sequence takes part in the next step, unless its answer ends right here. ``step_s``
        is how long that step is going to take, ``present_s`` how long it would without this sequence (inf: not known, and then
        nobody in the batch is protected). See :meth:`_too_slow` for who is turned away, though its prefill was for nothing."""
        assert sequence.phase is Phase.LOADING
        if self._too_slow(sequence, step_s, present_s):
            return [Fail(sequence, FailureCause.TOO_SLOW, f"a step would take {step_s:.3f} s"), *self._end(sequence)]
        sequence.phase = Phase.RUNNING
        sequence.joined = now
        return self._drew(sequence, first_token, report_end=False)

    def drew(self, sequence: Sequence, token: int) -> list[Action]:
        """A step drew ``token``; the K/V of the token before it is now in the cache."""
        actions: list[Action] = []
        kv = sequence.kv_tokens + 1
        if sequence.task.write_back and kv % self.block_tokens == 0 and kv > sequence.prompt_tokens:
            actions.append(WriteBack(sequence, kv // self.block_tokens - 1))
        return actions + self._drew(sequence, token, report_end=True)

    def drew_many(self, sequence: Sequence, tokens: Collection[int]) -> list[Action]:
        """As :meth:`drew` for each of ``tokens``, of which none but the last may end the answer: for a simulator, which knows,
        and for which a call per token would be what it spends its time on."""
        if not tokens:
            return []
        *before, last = tokens
        first_kv = sequence.kv_tokens + 1
        sequence.drawn += before
        actions: list[Action] = []
        if sequence.task.write_back:
            begin = max(first_kv, sequence.prompt_tokens + 1)
            blocks = range(-(-begin // self.block_tokens), sequence.kv_tokens // self.block_tokens + 1)
            actions.extend(WriteBack(sequence, block - 1) for block in blocks)
        return actions + self.drew(sequence, last)

    def out_of_blocks(self) -> list[Action]:
        """No block for the next token: the youngest that holds blocks gives way, whether it runs or still loads. What it has
        computed is in the pool, so going on elsewhere (or here, later) costs a load. The oldest always gets through, so there
        is progress."""
        holders = [s for s in self.sequences.values() if s.phase in (Phase.RUNNING, Phase.LOADING)]
        victim = max(holders, key=lambda s: (s.arrived, s.id))
        return [Fail(victim, FailureCause.PREEMPTED, "the KV cache is full"), *self._end(victim)]

    def aborted(self, request: RequestId) -> list[Action]:
        sequence = self.sequences.get(request)
        return [] if sequence is None else self._end(sequence)

    def tick(self, now: float) -> list[Action]:
        """Deadlines and silent prefill sides, then admission of what waits."""
        actions: list[Action] = []
        for sequence in self.overdue(now):
            if now >= sequence.deadline:
                actions += [Fail(sequence, FailureCause.DEADLINE, f"while {sequence.phase}"), *self._end(sequence)]
            else:
                detail = f"no block for {self.handoff_timeout_s:g} s"
                actions += [Fail(sequence, FailureCause.HANDOFF, detail), *self._end(sequence)]
        return actions + self._admissions()

    def overdue(self, now: float) -> list[Sequence]:
        """Past their deadline, or without a word from their prefill side for too long."""
        silent = now - self.handoff_timeout_s
        return [
            s for s in self.sequences.values()
            if s.phase is not Phase.ENDING
            and (now >= s.deadline or (s.phase is Phase.LOADING and s.last_heard and s.last_heard < silent))
        ]  # fmt: skip

    def fenced(self) -> list[Action]:
        """The scheduler gave this worker up: everything is running elsewhere by now."""
        return [action for sequence in list(self.sequences.values()) for action in self._end(sequence)]

    # --- views ----------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Sequence]:
        """The next step's batch, oldest first."""
        batch = [s for s in self.sequences.values() if s.phase is Phase.RUNNING]
        return sorted(batch, key=lambda s: (s.joined, s.id))

    @property
    def blocks_on_their_way_back(self) -> bool:
        """A sequence that gave way while it loaded still holds its blocks, until the transfer lets go of them."""
        return any(s.phase is Phase.ENDING for s in self.sequences.values())

    @property
    def growth_reserve(self) -> int:
        """Blocks that stay free when somebody is admitted, one for each that runs: a newcomer must not push out what is under
        way."""
        return sum(s.phase is Phase.RUNNING for s in self.sequences.values())

    @property
    def loading(self) -> int:
        return sum(s.phase is Phase.LOADING for s in self.sequences.values())

    @property
    def waiting(self) -> int:
        return sum(s.phase is Phase.WAITING for s in self.sequences.values())

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def _admissions(self) -> list[Action]:
        """First come, first served, so that a large one is not passed for ever."""
        active = sum(s.phase in (Phase.LOADING, Phase.RUNNING) for s in self.sequences.values())
        actions: list[Action] = []
        for sequence in self.sequences.values():
            if sequence.phase is Phase.WAITING and active < self.batch_max:
                active += 1
                left = sequence.task.max_new_tokens - sequence.task.answered
                blocks = self._blocks(sequence.prompt_tokens + 1)
                whole = self._blocks(sequence.prompt_tokens + left)
                actions.append(Admit(sequence, blocks, min(GROWTH_BLOCKS, whole - blocks)))
        return actions

    def _too_slow(self, sequence: Sequence, step_s: float, present_s: float) -> bool:
        """Whether the newcomer may not join: its own limit would be broken, or it would push one that runs over its limit. One
        that is over its limit already (its context grew) loses nothing by the newcomer's fault and shuts nobody out. An answer
        that has begun on an earlier attempt was taken, and goes on."""
        if sequence.task.answered:
            return False
        limits = [s.task.tpot_max_s for s in self.sequences.values() if s.phase is Phase.RUNNING]
        own = sequence.task.tpot_max_s
        pushed = any(limit is not None and present_s <= limit < step_s for limit in limits)
        return pushed or (own is not None and step_s > own)

    def _drew(self, sequence: Sequence, token: int, *, report_end: bool) -> list[Action]:
        sequence.drawn.append(token)
        task = sequence.task
        reason = None
        if token in task.eos_token_ids and not task.sampling.ignore_eos:
            reason = FinishReason.STOP
        elif sequence.answer_index >= task.max_new_tokens:
            reason = FinishReason.LENGTH
        if reason is None:
            return []
        return ([Finish(sequence, reason)] if report_end else []) + self._end(sequence)

    def _end(self, sequence: Sequence) -> list[Action]:
        """Stop working on ``sequence``; its blocks go back once no transfer touches them."""
        phase, sequence.phase = sequence.phase, Phase.ENDING
        if phase is Phase.WAITING:
            del self.sequences[sequence.id]
            return self._admissions()
        return ([CancelLoad(sequence)] if phase is Phase.LOADING and sequence.transfers else []) + self._settle(sequence)

    def _settle(self, sequence: Sequence) -> list[Action]:
        if sequence.transfers or sequence.phase is not Phase.ENDING:
            return []
        del self.sequences[sequence.id]
        return [Release(sequence), *self._admissions()]
