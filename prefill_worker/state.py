"""The prefill worker's decisions: who loads, who computes which piece next, what is published, when blocks go back.

Pure: events and the time in, actions out. One prompt lives through these phases:

=============  ===============================================================  ==========================================
phase          meaning                                                          where its blocks are
=============  ===============================================================  ==========================================
WAITING        accepted, no device blocks yet                                   none
LOADING        cached prefix on its way from the pool                           device, being written by the transfer
COMPUTING      pieces run, one at a time, interleaved with other prompts        device
HANDING_OVER   all computed, first token sent, last blocks on their way out     device, being read by the transfer
ENDING         failed or aborted while a transfer still touches its blocks      device, until the transfer lets go
=============  ===============================================================  ==========================================

Cursors, in tokens::

    0 <= cached <= computed <= total
    |--- reused ---|--- computed here ---|--- still to do ---|
    computed starts at cached and moves to absolute multiples of chunk_tokens, then to total.

Siblings: a waiting prompt whose next block is being loaded or computed by one that was admitted before it (its leader) is held
back until that block is in place on the device, instead of doing the same again. It stays WAITING, so it has no device blocks
and nothing waits for it: no circle can form. It keeps its place among those that may be admitted while somebody computes (else
others go on in its place, so that the device is not idle), and lends its leader its precedence. It goes on by itself when its
leader ends in any way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from operator import itemgetter
from typing import Protocol

from engine.serving.token_stream import FailureCause
from prefill_worker.siblings import common_blocks
from prefill_worker.task import PrefillTask

RequestId = tuple[str, int]
"""(request_id, attempt)."""


class Phase(StrEnum):
    WAITING = "waiting"
    LOADING = "loading"
    COMPUTING = "computing"
    HANDING_OVER = "handing_over"
    ENDING = "ending"


@dataclass(slots=True, eq=False)
class Prompt:
    """One accepted task and its cursors (module docstring)."""

    task: PrefillTask
    arrived: float
    phase: Phase = Phase.WAITING
    foreseen: int = 0
    """Tokens that the plan believes cached; what is really there is known once the load is over."""
    cached: int = 0
    computed: int = 0
    blocks_in_place: int = 0
    """Leading blocks that others can share on the device now."""
    published_blocks: int = 0
    transfers: int = 0
    """Transfers that still read or write this prompt's blocks: they go back only at 0."""
    load_started: float = 0.0
    compute_started: float = 0.0
    compute_s: float = 0.0

    @property
    def id(self) -> RequestId:
        return self.task.request_id, self.task.attempt

    @property
    def total(self) -> int:
        return len(self.task.token_ids)

    @property
    def deadline(self) -> float:
        return self.arrived + self.task.budget_s

    @property
    def remaining(self) -> int:
        return self.total - self.computed

    @property
    def work(self) -> int:
        """Tokens that are left to compute as far as is known: the scheduler orders by the same."""
        return self.total - (self.computed if self.phase is Phase.COMPUTING else max(self.computed, self.foreseen))


# --- actions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admit:
    """Find device blocks for the whole prompt, reuse what the device holds; answer with ``admitted``, or leave it waiting."""

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Load:
    """Fetch blocks ``first .. last - 1`` from the pool; answer with ``load_ended``."""

    prompt: Prompt
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class CancelLoad:
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Publish:
    """Store full blocks ``first .. last - 1``; answer with ``published``."""

    prompt: Prompt
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """Store the tail and the first token under the private key; answer with ``published``."""

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Release:
    """Give the prompt's device blocks back: nothing touches them any more."""

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the gateway."""

    prompt: Prompt
    cause: FailureCause
    detail: str


Action = Admit | Load | CancelLoad | Publish | HandOver | Release | Fail


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens ``start .. end - 1`` of one prompt, to run alone in one forward."""

    prompt: Prompt
    start: int
    end: int

    @property
    def last(self) -> bool:
        return self.end == self.prompt.total


class QueueOrder(Protocol):
    """Who goes first (``policy/``): to be admitted, and to compute the next piece."""

    piece_s: float
    """Mean time of recent pieces, 0 before the first."""

    def key(self, prompt: Prompt) -> tuple[float, float, RequestId]:
        """Sorts prompts; the first is the one to go."""
        ...

    def observe(self, tokens: int, seconds: float) -> None:
        """A piece of ``tokens`` tokens took ``seconds``."""
        ...


@dataclass(slots=True)
class PrefillState:
    """All prompts of one worker. Every public method is an event; each returns the actions it causes."""

    block_tokens: int
    chunk_tokens: int
    waiting_max: int
    running_max: int
    order: QueueOrder
    prompts: dict[RequestId, Prompt] = field(default_factory=dict[RequestId, Prompt])
    held: list[tuple[Prompt, Prompt]] = field(default_factory=list[tuple[Prompt, Prompt]])
    """Those that would be admitted now but for a leader, with that leader. Made anew by each look at who waits."""

    # --- events ---------------------------------------------------------------------------------------------------------

    def submitted(self, task: PrefillTask, now: float) -> list[Action]:
        """A new task. Raises ValueError on one that contradicts itself (our own bug upstream), naming the field."""
        if not task.token_ids:
            raise ValueError("token_ids: a prefill task needs at least one token")
        if len(task.keys) != len(task.token_ids) // self.block_tokens:
            raise ValueError(f"keys: {len(task.keys)} for {len(task.token_ids)} tokens in blocks of {self.block_tokens}")
        prompt = Prompt(task, arrived=now)
        if prompt.id in self.prompts:
            return []
        if self.waiting >= self.waiting_max:
            return [Fail(prompt, FailureCause.REFUSED, "the worker's queue is full")]
        prompt.foreseen = self.block_tokens * min(max(0, task.cached_blocks), self.reusable_blocks(prompt))
        self.prompts[prompt.id] = prompt
        return self._admissions()

    def admitted(self, prompt: Prompt, device_blocks: int, now: float) -> list[Action]:
        """The shell found room; the first ``device_blocks`` blocks were in the device cache."""
        assert prompt.phase is Phase.WAITING
        prompt.load_started = now
        prompt.blocks_in_place = device_blocks
        first, last = device_blocks, self.reusable_blocks(prompt)
        if first < last:
            prompt.phase = Phase.LOADING
            prompt.transfers += 1
            return [Load(prompt, first, last)]
        return self._start_computing(prompt, device_blocks, now)

    def load_ended(self, prompt: Prompt, blocks: int, now: float) -> list[Action]:
        """The load is over: the first ``blocks`` blocks of the prompt (device hits included) are right and in place."""
        prompt.transfers -= 1
        if prompt.phase is Phase.ENDING:
            return self._ended(prompt)
        return self._start_computing(prompt, blocks, now)

    def next_piece(self) -> Piece | None:
        """The piece to run now. Ends at the next absolute multiple of ``chunk_tokens``, or at the prompt's end."""
        keys = [(self.order.key(p), p) for p in self.prompts.values() if p.phase is Phase.COMPUTING]
        if not keys:
            return None
        keys += [(self.order.key(held), leader) for held, leader in self.held if leader.phase is Phase.COMPUTING]
        prompt = min(keys, key=itemgetter(0))[1]
        end = min(prompt.total, (prompt.computed // self.chunk_tokens + 1) * self.chunk_tokens)
        return Piece(prompt, prompt.computed, end)

    def computed(self, piece: Piece, seconds: float) -> list[Action]:
        """The piece's K/V is in the device cache. Its full blocks go out at once, while the next piece runs."""
        prompt = piece.prompt
        assert prompt.phase is Phase.COMPUTING
        assert piece.start == prompt.computed
        prompt.computed = piece.end
        prompt.blocks_in_place = max(prompt.blocks_in_place, piece.end // self.block_tokens)
        prompt.compute_s += seconds
        self.order.observe(piece.end - piece.start, seconds)
        actions = self._publish(prompt)
        if piece.last:
            prompt.phase = Phase.HANDING_OVER
            if prompt.task.hand_over:
                prompt.transfers += 1
                actions.append(HandOver(prompt))
            actions += self._settle(prompt)
        return actions + self._held_admissions()

    def published(self, prompt: Prompt, ok: bool, detail: str) -> list[Action]:
        """One publish (or the hand-over) ended. A block that did not get out means that decode cannot start: plan again."""
        prompt.transfers -= 1
        if ok or prompt.phase is Phase.ENDING or not prompt.task.hand_over:
            return self._settle(prompt)
        return [Fail(prompt, FailureCause.HANDOFF, detail), *self._end(prompt)]

    def aborted(self, request: RequestId) -> list[Action]:
        prompt = self.prompts.get(request)
        return [] if prompt is None else self._end(prompt)

    def tick(self, now: float) -> list[Action]:
        """Deadlines, then admission of what waits."""
        actions: list[Action] = []
        for prompt in list(self.prompts.values()):
            if prompt.phase is not Phase.ENDING and now >= prompt.deadline:
                actions += [Fail(prompt, FailureCause.DEADLINE, f"while {prompt.phase}"), *self._end(prompt)]
        return actions + self._admissions()

    def fenced(self) -> list[Action]:
        """The scheduler gave this worker up: everything is running elsewhere by now."""
        return [action for prompt in list(self.prompts.values()) for action in self._end(prompt)]

    # --- views ----------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return sum(p.phase is Phase.WAITING for p in self.prompts.values())

    @property
    def queued_tokens(self) -> int:
        return sum(p.remaining for p in self.prompts.values() if p.phase is not Phase.ENDING)

    @property
    def active(self) -> int:
        """Prompts that load or compute."""
        return sum(p.phase in (Phase.LOADING, Phase.COMPUTING) for p in self.prompts.values())

    @property
    def can_compute(self) -> bool:
        return any(p.phase is Phase.COMPUTING for p in self.prompts.values())

    def sharable_blocks(self, prompt: Prompt) -> int:
        """Blocks that the device cache may supply: at least one token is always computed, for its logits."""
        return self._usable(prompt, (prompt.total - 1) // self.block_tokens) // self.block_tokens

    def reusable_blocks(self, prompt: Prompt) -> int:
        """Blocks that the pool may supply: of the sharable ones no more than the plan says. (What the device holds costs nothing
        and is used whatever the plan says.)"""
        blocks, limit = self.sharable_blocks(prompt), prompt.task.load_max_blocks
        return blocks if limit is None else self._usable(prompt, min(blocks, max(0, limit))) // self.block_tokens

    def blocks_of_siblings(self, prompt: Prompt) -> int:
        """Leading blocks of ``prompt`` that others here have in place: a device cache finds at least these."""
        keys, others = prompt.task.keys, [p for p in self.prompts.values() if p.blocks_in_place]
        most = max((min(common_blocks(keys, p.task.keys), p.blocks_in_place) for p in others), default=0)
        return min(most, self.sharable_blocks(prompt))

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _usable(self, prompt: Prompt, blocks: int) -> int:
        """Tokens of ``blocks`` cached blocks that count: in bitwise mode only whole chunks do (DESIGN: canonical chunks)."""
        tokens = blocks * self.block_tokens
        if prompt.task.reusable_only_at_chunks:
            tokens -= tokens % self.chunk_tokens
        return tokens

    def _admissions(self) -> list[Action]:
        self.held = []
        room = self.running_max - self.active
        if room <= 0:
            return []
        busy = self.can_compute
        waiting = [p for p in self.prompts.values() if p.phase is Phase.WAITING]
        waiting.sort(key=self.order.key)
        ahead = [p for p in self.prompts.values() if p.phase in (Phase.LOADING, Phase.COMPUTING, Phase.HANDING_OVER)]
        actions: list[Action] = []
        for prompt in waiting:
            if room <= 0 or len(self.held) >= self.running_max:
                break
            leader = self._leader(prompt, ahead)
            if leader is not None:
                self.held.append((prompt, leader))
                room -= busy  # its place is kept, but not while that would leave the device idle
            else:
                ahead.append(prompt)
                actions.append(Admit(prompt))
                room -= 1
        return actions

    def _held_admissions(self) -> list[Action]:
        """A leader has come further, or has ended."""
        return self._admissions() if self.held else []

    def _leader(self, prompt: Prompt, ahead: list[Prompt]) -> Prompt | None:
        """Whoever of those ``ahead`` will have more of the blocks of ``prompt`` in place than there are now; None: nobody."""
        keys, there, coming, leader = prompt.task.keys, 0, 0, None
        for other in ahead:
            common = common_blocks(keys, other.task.keys)
            there = max(there, min(common, other.blocks_in_place))
            if common > coming:
                coming, leader = common, other
        sharable = self.sharable_blocks(prompt)
        gain = self._usable(prompt, min(coming, sharable)) - self._usable(prompt, min(there, sharable))
        return leader if gain > 0 else None

    def _start_computing(self, prompt: Prompt, blocks: int, now: float) -> list[Action]:
        prompt.phase = Phase.COMPUTING
        prompt.compute_started = now
        prompt.cached = prompt.computed = self._usable(prompt, blocks)
        prompt.blocks_in_place = blocks
        return self._publish(prompt) + self._held_admissions()

    def _publish(self, prompt: Prompt) -> list[Action]:
        """Full blocks not yet offered to the pool. Reused ones are offered too: the device may hold what the pool has dropped,
        and decode must find them; for a block that the pool has, that costs one key in a message."""
        first, last = prompt.published_blocks, prompt.computed // self.block_tokens
        if first == last:
            return []
        prompt.published_blocks = last
        prompt.transfers += 1
        return [Publish(prompt, first, last)]

    def _settle(self, prompt: Prompt) -> list[Action]:
        if prompt.transfers == 0 and prompt.phase in (Phase.HANDING_OVER, Phase.ENDING):
            return self._ended(prompt)
        return []

    def _end(self, prompt: Prompt) -> list[Action]:
        """Stop working on ``prompt``; its blocks go back once no transfer touches them."""
        was_loading = prompt.phase is Phase.LOADING
        had_blocks = prompt.phase is not Phase.WAITING
        prompt.phase = Phase.ENDING
        if not had_blocks:
            del self.prompts[prompt.id]
            return self._admissions()
        actions: list[Action] = [CancelLoad(prompt)] if was_loading else []
        return actions + (self._held_admissions() if prompt.transfers else self._ended(prompt))

    def _ended(self, prompt: Prompt) -> list[Action]:
        if prompt.transfers:
            return []
        del self.prompts[prompt.id]
        return [Release(prompt), *self._admissions()]
