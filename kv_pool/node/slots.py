"""Where each slot of the arena is in its life. Pure.

============  ====================================================  ===============================================
state         meaning                                               leaves it by
============  ====================================================  ===============================================
free          nobody's                                              ``take``
reserved      one writer has it, no reader knows of it              ``commit``, ``give_back``, ``quarantine``
committed     holds a block                                         ``give_back`` (evicted, consumed, expired)
quarantined   its writer fell silent: it may still wake and write   ``give_back`` (its process is gone, or it spoke)
============  ====================================================  ===============================================
"""

from __future__ import annotations

from enum import IntEnum


class SlotState(IntEnum):
    FREE = 0
    RESERVED = 1
    COMMITTED = 2
    QUARANTINED = 3


FREE, RESERVED, COMMITTED, QUARANTINED = map(int, SlotState)
"""As plain numbers: slots change state for every block that comes or goes."""
STATES = len(SlotState)
_ALLOWED = bytes(
    (before, after)
    in {
        (FREE, RESERVED),
        (RESERVED, COMMITTED),
        (RESERVED, FREE),
        (RESERVED, QUARANTINED),
        (COMMITTED, FREE),
        (QUARANTINED, FREE),
    }
    for before in range(STATES)
    for after in range(STATES)
)


class InvalidSlotTransition(Exception):  # noqa: N818 - a bug of ours, not an error of the world
    """Raised before anything has changed."""


class Slots:
    """``count`` slots, all free. A slot's epoch changes with each change of owner."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._state = bytearray(count)
        self._epoch = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._counts = [count, 0, 0, 0]

    @property
    def free(self) -> int:
        return len(self._free)

    def state(self, slot: int) -> SlotState:
        return SlotState(self._state[slot])

    def epoch(self, slot: int) -> int:
        return self._epoch[slot]

    def take(self) -> int:
        """A free slot, reserved from now on, with a new epoch. There must be one."""
        slot = self._free[-1]
        self._move(slot, RESERVED)
        self._free.pop()
        self._epoch[slot] += 1
        return slot

    def commit(self, slot: int) -> None:
        self._move(slot, COMMITTED)

    def quarantine(self, slot: int) -> None:
        self._move(slot, QUARANTINED)

    def give_back(self, slot: int) -> None:
        """Free it. The epoch moves on at once, so that a reader whose lease ran out notices."""
        self._move(slot, FREE)
        self._epoch[slot] += 1
        self._free.append(slot)

    def counts(self) -> dict[SlotState, int]:
        """Slots by state; they always add up to ``count``."""
        return {state: self._counts[state] for state in SlotState}

    def _move(self, slot: int, to: int) -> None:
        before = self._state[slot]
        if not _ALLOWED[before * STATES + to]:
            raise InvalidSlotTransition(f"slot {slot}: {SlotState(before).name} -> {SlotState(to).name}")
        self._counts[before] -= 1
        self._counts[to] += 1
        self._state[slot] = to
