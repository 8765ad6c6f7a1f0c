"""A leased block in its reader's hands: copied, and checked on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import xxhash

from kv_pool.arena import Arena
from kv_pool.client_events import COPY_BYTES, LeasedBlock
from kv_pool.node.messages import Granted, Tier, grant_row
from tests.kv_pool.pool_world import content, key

SLOT, EPOCH = 1, 9
LENGTHS = [0, 1, COPY_BYTES - 1, COPY_BYTES, COPY_BYTES + 1, 2 * COPY_BYTES + 7]
UNTOUCHED = 0xEE

Lease = Callable[[int], LeasedBlock]


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(2, max(LENGTHS))
    yield arena
    arena.close()


@pytest.fixture
def lease(arena: Arena) -> Lease:
    def committed(length: int) -> LeasedBlock:
        stored = content(key(1), length)
        arena.slot(SLOT)[:length] = stored
        arena.set_epoch(SLOT, EPOCH)
        digest = xxhash.xxh3_64_intdigest(stored)
        row = grant_row(key(1), None, SLOT, EPOCH, 16, length, digest, private=False)
        return LeasedBlock(arena, Granted(1, 0, 40, row, bytes([Tier.DRAM])), 0)

    return committed


@pytest.mark.parametrize("length", LENGTHS)
def test_a_copy_has_the_bytes_that_were_stored_and_no_more(lease: Lease, length: int):
    target = bytearray([UNTOUCHED]) * (length + 5)
    assert lease(length).copy_to(memoryview(target))
    assert target[:length] == content(key(1), length)
    assert target[length:] == bytes([UNTOUCHED]) * 5


@pytest.mark.parametrize("at", [0, COPY_BYTES, -1])
def test_a_byte_that_is_not_as_it_was_stored_makes_the_copy_a_miss(arena: Arena, lease: Lease, at: int):
    length = COPY_BYTES + 1000
    block = lease(length)
    arena.slot(SLOT)[at % length] ^= 1
    assert not block.copy_to(memoryview(bytearray(length)))
    assert block.still_held()


def test_right_bytes_of_a_slot_that_is_anothers_are_a_miss(arena: Arena, lease: Lease):
    block = lease(100)
    arena.set_epoch(SLOT, EPOCH + 1)
    target = bytearray(100)
    assert not block.copy_to(memoryview(target))
    assert target == content(key(1), 100)


def test_a_slot_that_changes_hands_while_it_is_copied_makes_the_copy_a_miss(
    arena: Arena, lease: Lease, monkeypatch: pytest.MonkeyPatch
):
    block = lease(100)
    digest = xxhash.xxh3_64

    class ChangesHands:
        """The checksum of a copy during which the node gives the slot to another."""

        def __init__(self) -> None:
            self._digest = digest()

        def update(self, piece: memoryview) -> None:
            self._digest.update(piece)
            arena.set_epoch(SLOT, EPOCH + 1)

        def intdigest(self) -> int:
            return self._digest.intdigest()

    monkeypatch.setattr("kv_pool.client_events.xxhash.xxh3_64", ChangesHands)
    assert not block.copy_to(memoryview(bytearray(100)))


def test_a_target_that_is_too_short_is_refused(lease: Lease):
    with pytest.raises(ValueError):
        lease(100).copy_to(memoryview(bytearray(99)))
