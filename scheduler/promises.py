"""Blocks that a worker has been told to compute and that its node does not have yet. Pure.

Siblings of a burst share a prefix that nobody has stored so far. Without this each of them would count it as uncached, anywhere:
the burst would go to as many workers, each computing the same. With it the worker that computes the prefix first counts as
having it, behind its queue, and the next sibling goes there unless computing it once more elsewhere is sooner.

A promise is kept (the node's event names the block), or broken (the attempt ends otherwise), or lapses ``GRACE_S`` after its
prompt was computed: as long as the event may be on its way. It then costs a recompute, as any other error of the index.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_pool.keys import BlockKey
from scheduler.prefill_queue import RequestAttempt

GRACE_S: Final = 1.0
KEYS_MAX: Final = 1_000_000

Ints = NDArray[np.int64]


class Promises:
    """Who computes which keys, by node slot. At most ``KEYS_MAX`` keys; what comes beyond is not promised."""

    def __init__(self) -> None:
        self._slots_of: dict[BlockKey, tuple[int, ...]] = {}
        """Key to the slots that will have it, one for each attempt that promised it."""
        self._open: dict[RequestAttempt, tuple[int, tuple[BlockKey, ...]]] = {}
        self._lapsing: deque[tuple[float, int, tuple[BlockKey, ...]]] = deque()

    def __len__(self) -> int:
        return len(self._slots_of)

    def add(self, attempt: RequestAttempt, slot: int, keys: tuple[BlockKey, ...]) -> None:
        """``attempt`` will leave ``keys`` at the node in ``slot``."""
        if slot < 0 or not keys or len(self._slots_of) + len(keys) > KEYS_MAX:
            return
        self._open[attempt] = slot, keys
        here, slots_of = (slot,), self._slots_of
        again = {key: slots_of[key] + here for key in keys if key in slots_of}
        slots_of.update(dict.fromkeys(keys, here))
        slots_of.update(again)

    def computed(self, attempt: RequestAttempt, now: float) -> None:
        """The events that name its blocks are on their way."""
        promise = self._open.pop(attempt, None)
        if promise is not None:
            self._lapsing.append((now + GRACE_S, *promise))

    def broken(self, attempt: RequestAttempt) -> None:
        promise = self._open.pop(attempt, None)
        if promise is not None:
            self._drop(*promise)

    def expire(self, now: float) -> None:
        while self._lapsing and self._lapsing[0][0] <= now:
            _, slot, keys = self._lapsing.popleft()
            self._drop(slot, keys)

    def extend(self, blocks: Ints, keys: Sequence[BlockKey]) -> Ints:
        """``blocks`` leading ``keys`` are at each slot: how many will be, with what is promised to follow on without a hole."""
        promised = list(map(self._slots_of.get, keys))
        if not any(promised):
            return blocks
        extended = blocks.copy()
        at: list[int] = extended.tolist()
        for place, slots in enumerate(promised):
            for slot in slots or ():
                if at[slot] == place:
                    at[slot] = extended[slot] = place + 1
        return extended

    def forget(self, slot: int) -> None:
        """The node is gone, and its slot will be another's."""
        for attempt in [a for a, (at, _) in self._open.items() if at == slot]:
            self.broken(attempt)
        gone = [entry for entry in self._lapsing if entry[1] == slot]
        self._lapsing = deque(entry for entry in self._lapsing if entry[1] != slot)
        for _, at, keys in gone:
            self._drop(at, keys)

    def _drop(self, slot: int, keys: tuple[BlockKey, ...]) -> None:
        slots_of = self._slots_of
        for key in keys:
            slots = slots_of.pop(key)
            if len(slots) > 1:
                place = slots.index(slot)
                slots_of[key] = slots[:place] + slots[place + 1 :]
