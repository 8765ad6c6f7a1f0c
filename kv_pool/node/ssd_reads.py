"""Blocks on their way from the SSD into DRAM. Pure. What is not in the log, or cannot be read soundly, is a typed miss."""

from __future__ import annotations

from kv_pool.events.types import SSD, BlockRemoved
from kv_pool.keys import BlockKey
from kv_pool.node.loads import Load, Loads
from kv_pool.node.messages import Commit, Miss
from kv_pool.node.stimuli import Action, Publish
from kv_pool.node.wall_clock import WallClock
from kv_pool.node.writers import Writers
from kv_pool.ssd.log import Missing, SsdLog
from kv_pool.ssd.records import Place, ReadRecord, RecordRead


class SsdReads:
    """``log`` is None where the node has no SSD tier. ``now`` is monotonic everywhere; the log counts in wall-clock time
    (``clock``)."""

    def __init__(self, log: SsdLog | None, writers: Writers, *, slot_bytes: int, in_flight_max: int, clock: WallClock) -> None:
        self._log = log
        self._writers = writers
        self._slot_bytes = slot_bytes
        self._clock = clock
        self.loads = Loads(in_flight_max)
        self.blocks_read = 0
        self.corrupt = 0
        self.io_errors = 0

    @property
    def full(self) -> bool:
        return self.loads.full

    def find(self, key: BlockKey, now: float) -> Place | Missing:
        return Missing.ABSENT if self._log is None else self._log.find(key, self._clock.at(now))

    def start(self, key: BlockKey, now: float) -> list[Action] | None:
        """Read ``key``; None where it is not there any more, or no slot can be had for it."""
        found = self.find(key, now)
        if self._log is None or not isinstance(found, Place) or found.length > self._slot_bytes or self._writers.writing(key):
            return None
        slot, actions = self._writers.take_for_load(key)
        if slot is None:
            return None
        # Making room may have cost the very record: ask again.
        if not isinstance(self.find(key, now), Place):
            return [*actions, *self._writers.not_loaded(slot)]
        load = self.loads.start(key, self._log.begin_read(key), slot)
        return [*actions, ReadRecord(load.id, load.place, key, slot)]

    def done(self, event: RecordRead, now: float) -> tuple[Load | None, Miss | None, list[Action]]:
        """A read has ended. Its load, and why its block is not visible now (None: it is); no load for one that was called off."""
        load = self.loads.end(event.id)
        if load is None or self._log is None:
            return None, None, []
        self._log.end_read(load.place)
        if load.called_off:
            return None, None, self._writers.disk_let_go(load.slot)
        record = event.record
        miss = self._unsound(load, event, now)
        if record is None or miss is not None:
            forgotten = self.forget(load.key) if miss is Miss.CORRUPT else []
            return load, miss, [*self._writers.not_loaded(load.slot), *forgotten]
        commit = Commit(load.slot, load.key, record.parent, record.tokens, record.length, record.checksum, record.meta)
        self._log.touch(load.key, self._clock.at(now))
        self.blocks_read += 1
        return load, None, self._writers.loaded(commit, record.retention, now)

    def _unsound(self, load: Load, event: RecordRead, now: float) -> Miss | None:
        record = event.record
        if event.fault == "io":  # it may pass: the record is not given up for it
            self.io_errors += 1
            return Miss.NOT_FOUND
        if record is None or record.key != load.key or record.length > self._slot_bytes:
            return Miss.CORRUPT
        return Miss.EXPIRED if record.expires_at <= self._clock.at(now) else None

    def forget(self, key: BlockKey) -> list[Action]:
        """The record cannot be trusted: it and what follows it on the SSD are gone."""
        self.corrupt += 1
        dropped = () if self._log is None else tuple(self._log.drop(key))
        return [Publish(BlockRemoved(dropped, SSD))] if dropped else []

    def disk_down(self) -> list[BlockKey]:
        """Nothing will come any more; the keys that were on their way. Their slots wait for the threads that hang."""
        for load in self.loads.live():
            self._writers.load_hangs(load.slot)
        return self.loads.call_off()
