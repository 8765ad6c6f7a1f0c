"""Reads from the SSD that are under way, each into a slot that is reserved for it. Pure. One key is read once, however many
acquires wait for it (they are parked on the key)."""

from __future__ import annotations

from dataclasses import dataclass

from kv_pool.keys import BlockKey
from kv_pool.ssd.records import Place


@dataclass(slots=True)
class Load:
    """``called_off``: the disk is down; whoever waited is gone, only the slot waits for the thread that may still write to it."""

    id: int
    key: BlockKey
    place: Place
    slot: int
    called_off: bool = False


class Loads:
    def __init__(self, in_flight_max: int) -> None:
        self._in_flight_max = in_flight_max
        self._loads: dict[int, Load] = {}
        self._by_key: dict[BlockKey, Load] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._loads)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._by_key

    @property
    def full(self) -> bool:
        return len(self._loads) >= self._in_flight_max

    def start(self, key: BlockKey, place: Place, slot: int) -> Load:
        assert key not in self._by_key
        self._next += 1
        load = Load(self._next, key, place, slot)
        self._loads[load.id] = self._by_key[key] = load
        return load

    def end(self, load_id: int) -> Load | None:
        load = self._loads.pop(load_id, None)
        if load is not None and self._by_key.get(load.key) is load:
            del self._by_key[load.key]
        return load

    def call_off(self) -> list[BlockKey]:
        """All of them; returns their keys."""
        keys = list(self._by_key)
        for load in self._by_key.values():
            load.called_off = True
        self._by_key.clear()
        return keys

    def live(self) -> list[Load]:
        """Those that were not called off."""
        return list(self._by_key.values())
