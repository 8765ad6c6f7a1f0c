"""How many KV blocks a decode worker can still promise. Pure.

Each request on its way is charged for its prompt and its expected answer. Of two lower bounds of the room the larger counts:

* all blocks less all charges (right where we know of every sequence there);
* blocks reported free, less the growth still to come of the reported sequences, less the whole charge of those that the report
  may not show yet.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from decode_worker.task import DecodeLoad
from scheduler.admission.forecast import Stay
from scheduler.prefill_queue import IN_TRANSIT_S, RequestAttempt

RATE_S: Final = 30.0
RATE_REQUESTS: Final = 256


@dataclass(slots=True)
class Charge(Stay):
    """A request's stay at the worker: blocks of its prompt and of its expected answer, and when it was given to it."""

    prompt_blocks: int
    growth_blocks: int
    assigned: float

    @property
    def blocks(self) -> int:
        return self.prompt_blocks + self.growth_blocks


class DecodeRoom:
    """Charges of one worker. Before its first report it has no room."""

    def __init__(self) -> None:
        self.open: dict[RequestAttempt, Charge] = {}
        self.total_blocks = 0
        self.batch_max = 1
        self.blocks = 0
        """Blocks that can still be promised."""
        self.sequences = 0
        """In the batch or on their way."""
        self.context_tokens = 0
        """Of all of these: what was reported or, where that is more, what they were taken to have."""
        self.running = 0
        """In the batch, as reported."""
        self._given: deque[float] = deque(maxlen=RATE_REQUESTS)
        self.reported_context = 0
        self._charged_context = 0
        self._reported_sequences = 0
        self._charged = 0
        self._beside_report = 0
        """Blocks free by the report and not spoken for."""

    def rate(self, now: float) -> float:
        """Requests a second that it was given, over the last ``RATE_S`` or ``RATE_REQUESTS``."""
        while self._given and self._given[0] < now - RATE_S:
            self._given.popleft()
        if len(self._given) < self._given.maxlen:  # type: ignore[operator]
            return len(self._given) / RATE_S
        return len(self._given) / max(1e-3, now - self._given[0])

    def assign(self, request: RequestAttempt, charge: Charge) -> None:
        self._given.append(charge.assigned)
        self.open[request] = charge
        self._charged += charge.blocks
        self._charged_context += charge.context_tokens
        self._beside_report -= charge.blocks
        self._sum_up()

    def prefilled(self, request: RequestAttempt, now: float) -> None:
        """Its prefill has ended: what was forecast of its stay moves to where it is."""
        charge = self.open.get(request)
        if charge is not None:
            charge.ends_at += now - charge.starts_at
            charge.starts_at = now
            charge.under_way = True

    def end(self, request: RequestAttempt) -> None:
        """The request's blocks are free; unknown ones are ignored. The report that shows it is still to come, so the second bound
        gets back only what was set aside for growth."""
        charge = self.open.pop(request, None)
        if charge is not None:
            self._charged -= charge.blocks
            self._charged_context -= charge.context_tokens
            self._beside_report += charge.growth_blocks
            self._reported_sequences = max(0, self._reported_sequences - 1)
            self._sum_up()

    def report(self, load: DecodeLoad, now: float) -> None:
        """Take over what the worker says; the caller has ended what it reports as finished."""
        self.total_blocks = load.total_blocks
        self.batch_max = load.batch_max
        self._reported_sequences = load.sequences
        self.running = load.running
        self.reported_context = load.context_tokens
        young = sum(charge.assigned > now - IN_TRANSIT_S for charge in self.open.values())
        # Sequences that wait there have no blocks yet: they are taken for the newest ones.
        shown = len(self.open) - max(young, load.waiting)
        self._beside_report = load.free_blocks - sum(
            charge.growth_blocks if position < shown else charge.blocks for position, charge in enumerate(self.open.values())
        )
        self._sum_up()

    def _sum_up(self) -> None:
        strangers = self._reported_sequences > len(self.open)
        ours = self.total_blocks - self._charged
        self.blocks = self._beside_report if strangers else max(self._beside_report, ours)
        self.sequences = max(len(self.open), self._reported_sequences)
        self.context_tokens = max(self._charged_context, self.reported_context)
        if self.sequences >= self.batch_max:
            self.blocks = min(self.blocks, 0)  # one more would wait there without a word
