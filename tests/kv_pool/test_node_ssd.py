"""The node's decisions about its SSD, one story each (``test_node_ssd_machine.py`` has them all in any order)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_pool.events.types import SSD, BlockRemoved, BlockStored
from kv_pool.keys import BlockKey
from kv_pool.node.messages import Commit, Keepalive, Miss, Tier
from kv_pool.node.state import NodeState
from kv_pool.node.stimuli import Action, Drain, ProcessGone, Publish, Tick
from kv_pool.policy.lru import LeastRecentlyUsed
from kv_pool.settings import SsdSettings
from kv_pool.ssd.records import (
    BatchWritten,
    DiskDown,
    DiskUp,
    Fault,
    FooterEntry,
    ReadRecord,
    Record,
    RecordRead,
    RecoveredSegment,
    WriteBatch,
    batch_bytes,
)
from kv_pool.transport.codec import META_BYTES_MAX, encode
from kv_pool.transport.local import MESSAGE_BYTES_MAX
from tests.kv_pool.node_scene import (
    BLOCK_TOKENS,
    LIMITS,
    PEER,
    SLOT_BYTES,
    Scene,
    denied,
    ended,
    fetches,
    grants,
    key,
    keys,
    stored,
)

SETTINGS = SsdSettings(
    directory="played", capacity="256KiB", segment="32KiB", batch="16KiB", dwpd=1000.0, writes_in_flight=2, reads_in_flight=2,
    free_target=0.4,
)  # fmt: skip


class SsdScene(Scene):
    """A node with a disk that does what the story says."""

    def __init__(self, slots: int = 4, **changes: object) -> None:
        self.writes: list[WriteBatch] = []
        self.reads: list[ReadRecord] = []
        self.records: dict[BlockKey, Record] = {}
        super().__init__(slots)
        self.state = NodeState(
            node_id="node-a",
            slots=slots,
            slot_bytes=SLOT_BYTES,
            block_tokens=BLOCK_TOKENS,
            settings=LIMITS,
            policy=LeastRecentlyUsed(),
            ssd=SETTINGS.model_copy(update=changes),
            wall_offset=1000.0,
        )
        super().greet()
        self.happens(DiskUp((), None, "00"))

    def happens(self, event: object) -> list[Action]:
        actions = super().happens(event)  # type: ignore[arg-type]
        self.writes += [a for a in actions if isinstance(a, WriteBatch)]
        self.reads += [a for a in actions if isinstance(a, ReadRecord)]
        return actions

    def disk_writes(self, *, ok: bool = True) -> list[Action]:
        """The disk answers all batches, also those that follow."""
        actions: list[Action] = []
        while self.writes:
            batch = self.writes.pop(0)
            self.records |= {write.record.key: write.record for write in batch.records} if ok else {}
            actions += self.happens(BatchWritten(batch.id, ok, batch_bytes(batch) if ok else 0))
        return actions

    def disk_reads(self, fault: Fault | None = None) -> list[Action]:
        actions: list[Action] = []
        while self.reads:
            read = self.reads.pop(0)
            actions += self.happens(RecordRead(read.id, None if fault else self.records[read.key], fault))
        return actions

    def move_down(self, *numbers: int) -> None:
        """These blocks are on the SSD, and not in DRAM any more."""
        self.put(*numbers)
        self.disk_writes()
        for filler in range(900, 912):
            self.put(filler)
            self.disk_writes()
        assert not any(self.has(number) for number in numbers)

    def on_ssd(self) -> set[BlockKey]:
        return set(self.state.ssd_keys())


def announced(actions: list[Action]) -> list[BlockKey]:
    return [
        k for a in actions if isinstance(a, Publish) and isinstance(a.event, BlockStored) and a.event.medium == SSD
        for k in a.event.keys
    ]  # fmt: skip


def withdrawn(actions: list[Action]) -> list[BlockKey]:
    return [
        k for a in actions if isinstance(a, Publish) and isinstance(a.event, BlockRemoved) and a.event.medium == SSD
        for k in a.event.keys
    ]  # fmt: skip


def test_a_chain_is_written_root_first_and_its_leaf_leaves_first():
    scene = SsdScene(slots=4)
    scene.put(1, 2, 3)
    chain = list(keys(1, 2, 3))
    begun = [write.record.key for batch in scene.writes for write in batch.records]
    assert begun
    assert begun == chain[: len(begun)]
    assert announced(scene.disk_writes()) == chain
    gone = [number for number in (1, 2, 3) if not scene.has(number)]
    assert gone
    assert gone == [1, 2, 3][-len(gone) :]


def test_a_hit_on_the_ssd_is_read_once_for_all_and_says_where_it_was():
    scene = SsdScene()
    scene.move_down(1, 2)
    first, second = scene.acquire(1, 2), scene.acquire(1, 2, client="w")
    assert not grants(first + second)
    assert [read.key for read in scene.reads] == list(keys(1, 2))
    actions = scene.disk_reads()
    assert [grant.tier for grant in grants(actions)] == [Tier.SSD] * 4
    assert [(e.available, e.miss) for e in ended(actions)] == [(2, None)] * 2


@pytest.mark.parametrize(("fault", "miss", "stays"), [("corrupt", Miss.CORRUPT, False), ("io", Miss.NOT_FOUND, True)])
def test_what_cannot_be_read_is_a_typed_miss_and_only_a_corrupt_record_is_given_up(fault: Fault, miss: Miss, stays: bool):
    scene = SsdScene()
    scene.move_down(1, 2)
    scene.acquire(1, 2)
    actions = scene.disk_reads(fault)
    assert [e.miss for e in ended(actions)] == [miss]
    assert ({key(1), key(2)} <= scene.on_ssd()) is stays
    assert scene.state.ssd_reads.corrupt == (0 if stays else 2)
    assert set(withdrawn(actions)) == (set() if stays else {key(1), key(2)})


def test_what_the_ssd_does_not_give_is_asked_of_the_peer():
    scene = SsdScene()
    scene.move_down(1, 2)
    scene.acquire(1, 2, source=PEER)
    (fetch,) = fetches(scene.disk_reads("corrupt"))
    assert fetch.keys[0] == key(1)


def test_a_record_that_expires_while_it_is_read_is_not_granted():
    scene = SsdScene()
    scene.move_down(1)
    scene.acquire(1, timeout_s=4.0)
    scene.records[key(1)] = replace(scene.records[key(1)], expires_at=1000.0 + scene.now)
    actions = scene.disk_reads()
    assert [e.miss for e in ended(actions)] == [Miss.EXPIRED]
    assert not scene.has(1)


def test_an_expired_record_is_a_miss_that_says_so():
    scene = SsdScene()
    scene.move_down(1)
    scene.now = 86_401.0 - 1.0
    scene.do("r", Keepalive())
    scene.now = 86_500.0
    scene.greet()
    assert [e.miss for e in ended(scene.acquire(1))] == [Miss.EXPIRED]


def test_a_clock_that_was_set_counts_from_the_next_tick():
    scene = SsdScene()
    scene.move_down(1)
    scene.happens(Tick(1000.0 + 90_000.0))
    assert key(1) not in scene.on_ssd()


def test_those_that_queue_for_a_read_look_elsewhere_when_the_disk_goes():
    scene = SsdScene(reads_in_flight=1)
    scene.move_down(1, 2)
    scene.acquire(1)
    assert len(scene.reads) == 1
    scene.acquire(2, source=PEER, client="w")
    actions = scene.happens(DiskDown("hung"))
    assert [e.miss for e in ended(actions)] == [Miss.NOT_FOUND]
    assert [fetch.keys for fetch in fetches(actions)] == [keys(2)]
    assert len(scene.state.writers.quarantined) == 1


def test_a_slot_that_the_disk_may_still_write_to_is_nobodys_until_it_lets_go():
    scene = SsdScene(slots=4)
    scene.move_down(1)
    scene.acquire(1)
    (read,) = scene.reads
    scene.happens(DiskDown("hung"))
    scene.happens(ProcessGone(0, 0))  # of nobody here
    assert read.slot in scene.state.writers.quarantined
    scene.happens(RecordRead(read.id, None, "io"))
    assert not scene.state.writers.quarantined


def test_while_the_disk_is_busy_no_message_pays_for_it(monkeypatch: pytest.MonkeyPatch):
    scene = SsdScene(slots=8, writes_in_flight=1, batch="4KiB")
    scene.put(*range(1, 8))
    looked: list[BlockKey] = []
    assert scene.state.log is not None
    wants = scene.state.log.wants
    monkeypatch.setattr(scene.state.log, "wants", lambda k, retention, now: looked.append(k) or wants(k, retention, now))
    scene.do("r", Keepalive())
    assert not looked
    scene.disk_writes()
    assert looked


def test_a_private_block_never_reaches_the_ssd():
    scene = SsdScene(slots=4)
    (tail,) = scene.reserve(1, private=True)
    scene.commit(tail, key(1))
    for number in (2, 3):
        (slot,) = scene.reserve(number)
        scene.commit(slot, key(number), key(1))
    scene.disk_writes()
    assert scene.on_ssd()
    assert key(1) not in scene.on_ssd()


def test_the_retention_class_travels_with_a_pulled_block():
    scene = SsdScene()
    (fetch,) = fetches(scene.acquire(1, source=PEER))
    scene.arrives(fetch.fetch, 1, retention=3)
    block = scene.state.blocks.get(key(1))
    assert block is not None
    assert block.retention == 3


UNKNOWN = 200
"""A retention class that is not configured here."""


def retention_of(scene: SsdScene, number: int) -> int:
    block = scene.state.blocks.get(key(number))
    assert block is not None
    return block.retention


def test_a_pulled_block_of_a_class_that_is_not_configured_here_becomes_one_of_the_first_and_is_written_as_such():
    scene = SsdScene(slots=4)
    (fetch,) = fetches(scene.acquire(1, source=PEER))
    (grant,) = grants(scene.arrives(fetch.fetch, 1, retention=UNKNOWN))
    assert (grant.retention, retention_of(scene, 1)) == (0, 0)
    scene.release(grant)
    scene.put(2, 3, 4)  # so that it has to make room
    scene.disk_writes()
    assert scene.records[key(1)].retention == 0
    scene.acquire(1)
    assert [grant.key for grant in grants(scene.disk_reads())] == [key(1)]


def test_a_record_of_a_class_that_is_configured_no_more_is_loaded_as_one_of_the_first_and_leaves_dram_again():
    """The node was started anew with fewer classes on the directory it had."""
    scene = SsdScene(slots=4)
    expires = 1000.0 + 80_000.0
    entry = FooterEntry(key(1), None, True, page=1, length=10, tokens=BLOCK_TOKENS, expires_at=expires)
    scene.happens(DiskDown("gone"))
    scene.happens(DiskUp((RecoveredSegment(0, 1, UNKNOWN, sealed=True, used_pages=3, entries=(entry,)),), None, "00"))
    scene.records[key(1)] = Record(key(1), None, True, BLOCK_TOKENS, 10, 7, UNKNOWN, 1000.0, expires, b"")
    scene.acquire(1)
    (grant,) = grants(scene.disk_reads())
    assert (grant.retention, retention_of(scene, 1)) == (0, 0)
    scene.release(grant)
    for filler in range(900, 906):  # whether it is to be written is asked for each that may leave
        scene.put(filler)
        scene.disk_writes()
    assert not scene.has(1)
    assert key(1) in scene.on_ssd()
    scene.acquire(1)
    assert [grant.key for grant in grants(scene.disk_reads())] == [key(1)]


def test_a_drain_moves_all_to_the_ssd_and_refuses_those_that_waited_for_room():
    scene = SsdScene(slots=4)
    scene.put(1, 2, 3)
    leased = [scene.lease(number) for number in (1, 2, 3)]
    assert scene.ask_reserve(keys(7, 8, 9)) == []
    actions = scene.happens(Drain(enable=True))
    assert denied(actions) == ["the node is being drained"]
    for grant in leased:
        scene.release(grant)
    scene.disk_writes()
    assert scene.state.empty
    assert scene.on_ssd() == {key(1), key(2), key(3)}
    assert denied(scene.ask_reserve(keys(7))) == ["the node is being drained"]
    scene.happens(Drain(enable=False))
    assert scene.reserve(7) != (None,)


def test_a_drain_ends_where_the_disk_takes_nothing():
    scene = SsdScene(slots=4, dwpd=1e-9)
    scene.put(1, 2, 3)
    scene.happens(Drain(enable=True))
    assert scene.state.empty
    assert not scene.on_ssd()


def test_grants_with_long_metas_are_sent_in_messages_that_fit():
    scene = SsdScene(slots=160)
    (numbers, wanted) = range(1, 130), keys(*range(1, 130))
    slots = scene.reserve(*numbers)
    for slot, k in zip(slots, wanted, strict=True):
        assert slot is not None
        scene.do("w", Commit(slot, k, None, BLOCK_TOKENS, 10, 7, b"m" * META_BYTES_MAX))
    actions = scene.acquire(*numbers)
    assert [grant.key for grant in grants(actions)] == list(wanted)
    sizes = [len(encode(a.answer, "i")) for a in actions if hasattr(a, "answer")]
    assert len(sizes) > 1
    assert max(sizes) < MESSAGE_BYTES_MAX
    assert not stored(actions)
