"""The node with an SSD against a dumb twin and a played disk: blocks move down and up while writers, readers and peers go on.

The disk answers in any order, fails, reads damaged records, goes down with everything in flight and comes back with what is on
it. No slot that it still touches may change hands; what is announced on either tier is what is there; and when everybody has
gone, every slot is free or holds a block that may be evicted.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kv_pool.events.types import SSD, BlockRemoved, BlockStored
from kv_pool.keys import BlockKey
from kv_pool.node.messages import Hello
from kv_pool.node.slots import SlotState
from kv_pool.node.state import NodeState
from kv_pool.node.stimuli import Action, Asked, Drain, Publish, SetEpoch, Tick
from kv_pool.policy.registry import make_eviction_policy
from kv_pool.settings import SsdSettings
from kv_pool.ssd.records import BatchWritten, DiskDown, DiskUp, Fault, ReadRecord, Record, RecordRead, WriteBatch, batch_bytes
from tests.kv_pool.node_scene import BLOCK_TOKENS, LIMITS, PIDS, SLOT_BYTES
from tests.kv_pool.ssd_twin import Medium
from tests.kv_pool.test_node_machine import NodeMachine, Twin, parent_of

SMALL = SsdSettings(
    directory="played", capacity="256KiB", segment="32KiB", batch="16KiB", dwpd=1000.0, writes_in_flight=2, reads_in_flight=2,
    free_target=0.4,
)  # fmt: skip
SHORT = LIMITS.model_copy(update={"retention": ("chat=40s", "batch=9s")})


class SsdNodeMachine(NodeMachine):
    @initialize(slots=st.integers(4, 8), policy=st.sampled_from(["lru", "s3fifo"]))
    def begin(self, slots: int, policy: str) -> None:
        self.state = NodeState(
            node_id="node-a",
            slots=slots,
            slot_bytes=SLOT_BYTES,
            block_tokens=BLOCK_TOKENS,
            settings=SHORT,
            policy=make_eviction_policy(policy),
            ssd=SMALL,
            wall_offset=1_000_000.0,
        )
        self.twin = Twin()
        self.now, self.ticket = 0.0, 0
        self.medium = Medium()
        self.on_ssd: set[BlockKey] = set()
        self.writes: dict[int, WriteBatch] = {}
        self.reads: dict[int, ReadRecord] = {}
        self.up = False
        for name, pid in PIDS.items():
            self.happens(Asked(name, Hello(pid, 1)))
        self.disk_comes_up()

    # --- the twin follows ---------------------------------------------------------------------------------------------------

    def touched_by_the_disk(self) -> set[int]:
        written = {write.slot for batch in self.writes.values() for write in batch.records}
        return written | {read.slot for read in self.reads.values()}

    def follow(self, action: Action) -> None:
        match action:
            case Publish(BlockStored(keys=stored, medium=medium)) if medium == SSD:
                assert not self.on_ssd & set(stored)
                self.on_ssd |= set(stored)
            case Publish(BlockRemoved(keys=gone, medium=medium)) if medium == SSD:
                assert set(gone) <= self.on_ssd
                self.on_ssd -= set(gone)
            case SetEpoch(slot, _):
                assert slot not in self.touched_by_the_disk(), "the disk still reads or writes this slot"
                super().follow(action)
            case WriteBatch():
                assert self.up
                assert len(self.writes) < SMALL.writes_in_flight
                self.medium.sent(action)
                for write in action.records:
                    assert self.state.slots.state(write.slot) is SlotState.COMMITTED
                    block = self.state.blocks.get(write.record.key)
                    assert block is not None
                    assert (block.slot, block.parent) == (write.slot, write.record.parent)
                    assert not block.private
                    assert write.slot not in self.touched_by_the_disk(), "written twice at a time"
                self.writes[action.id] = action
            case ReadRecord():
                assert self.up
                assert len(self.reads) < SMALL.reads_in_flight
                assert action.slot not in self.touched_by_the_disk()
                assert self.state.slots.state(action.slot) is SlotState.RESERVED
                self.reads[action.id] = action
            case _:
                super().follow(action)

    # --- what the disk may do -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), works=st.sampled_from([True, True, True, False]))
    def batch_is_answered(self, data: st.DataObject, works: bool) -> None:
        batch = self.writes[data.draw(st.sampled_from(sorted(self.writes)))]
        self.answer(batch, ok=works and self.up)

    def answer(self, batch: WriteBatch, *, ok: bool) -> None:
        """An acknowledgement comes in the order in which batches were given, as the disk does it; a failure too."""
        for earlier in [self.writes[number] for number in sorted(self.writes) if number <= batch.id]:
            del self.writes[earlier.id]
            if ok:
                self.medium.apply(earlier, len(earlier.records))
            self.happens(BatchWritten(earlier.id, ok, batch_bytes(earlier) if ok else 0))

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), fault=st.sampled_from([None, None, None, "corrupt", "io"]))
    def read_is_answered(self, data: st.DataObject, fault: Fault | None) -> None:
        read = self.reads.pop(data.draw(st.sampled_from(sorted(self.reads))))
        segment = self.medium.segments[read.place.segment]
        generation, entry = segment.pages.get(read.place.page, (0, None))
        there = generation == read.place.generation and entry is not None and entry.key == read.key
        if there and fault is None and self.up:
            record = Record(read.key, entry.parent, entry.first, entry.tokens, entry.length, 7, 0, 0.0, entry.expires_at, b"")
            self.happens(RecordRead(read.id, record, None))
        else:
            self.happens(RecordRead(read.id, None, fault if there and fault is not None else "corrupt"))

    @precondition(lambda self: self.up)
    @rule()
    def disk_goes_down(self) -> None:
        self.up = False
        self.happens(DiskDown("played"))
        assert not self.on_ssd

    @precondition(lambda self: not self.up and not self.writes and not self.reads)
    @rule()
    def disk_comes_up(self) -> None:
        """Only when every thread is back."""
        self.up = True
        self.happens(DiskUp(tuple(self.medium.recovered()), None, "00"))

    @rule(enable=st.booleans())
    def drain(self, enable: bool) -> None:
        self.happens(Drain(enable))

    # --- what must always hold ------------------------------------------------------------------------------------------------

    def check_tiers(self) -> None:
        assert set(self.state.ssd_keys()) == self.on_ssd
        assert self.state.log is not None
        self.state.log.check()
        here = set(self.state.blocks.public_keys())
        for k in self.on_ssd:
            parent = parent_of(k)
            assert parent is None or parent in self.on_ssd or parent in here or self.stands_alone(k)

    def stands_alone(self, k: BlockKey) -> bool:
        """It was written without its parent, which was not here then."""
        index = self.state.log._chains.index  # type: ignore[union-attr]
        row = index.row(k)
        return row is not None and index.first(row)

    def happens(self, event: object) -> list[Action]:
        actions = super().happens(event)  # type: ignore[arg-type]
        self.check_tiers()
        return actions

    def teardown(self) -> None:
        """The disk finishes what it has, everybody goes: no slot is lost."""
        if not hasattr(self, "medium"):
            return
        self.happens(Drain(enable=False))
        for _ in range(1000):
            if not self.writes and not self.reads:
                break
            for batch in [self.writes[number] for number in sorted(self.writes)]:
                self.answer(batch, ok=self.up) if batch.id in self.writes else None
            for number in list(self.reads):
                read = self.reads.pop(number)
                self.happens(RecordRead(read.id, None, "io"))
        assert not self.writes
        assert not self.reads
        self.up = False
        self.happens(DiskDown("the end"))
        self.happens(Tick())
        super().teardown()


SsdNodeMachine.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=80,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSsdNodeMachine = SsdNodeMachine.TestCase
