"""Shared memory: layout, two mappings of one segment, nothing left behind."""

from __future__ import annotations

import os
import time

import pytest

from kv_pool import arena as arena_module
from kv_pool.arena import SLOT_ALIGN, Arena, arena_bytes


def resident_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_two_mappings_see_the_same_slots_and_epochs():
    ours = Arena.create(4, 5000)
    theirs = Arena.attach(ours.fd, 4, 5000)
    for i in range(4):
        ours.slot(i)[:] = bytes([i + 1]) * 5000
        ours.set_epoch(i, 2**60 + i)
    assert [bytes(theirs.slot(i)) for i in range(4)] == [bytes([i + 1]) * 5000 for i in range(4)]
    assert [theirs.epoch(i) for i in range(4)] == [2**60 + i for i in range(4)]
    theirs.close()
    ours.close()


def test_slots_are_aligned_and_the_segment_is_as_large_as_announced():
    arena = Arena.create(3, 5000)
    assert os.fstat(arena.fd).st_size == arena.bytes == arena_bytes(3, 5000) == SLOT_ALIGN + 3 * 2 * SLOT_ALIGN
    arena.close()


def test_a_reader_cannot_write_and_nobody_gets_a_slot_that_is_not_there():
    arena = Arena.create(4, 100)
    with pytest.raises(TypeError):
        arena.slot_read_only(0)[0] = 1
    for index in (-1, 4):
        with pytest.raises(IndexError):
            arena.slot(index)
    arena.close()


def test_attaching_to_a_smaller_segment_or_to_nothing_is_an_error():
    arena = Arena.create(4, 4096)
    with pytest.raises(OSError, match="were announced"):
        Arena.attach(arena.fd, 5, 4096)
    arena.close()
    with pytest.raises(OSError):
        Arena.attach(10**6, 4, 4096)


def test_more_than_the_machine_has_is_refused_before_anybody_dies_of_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arena_module, "_available_bytes", lambda: 2**20)
    with pytest.raises(OSError, match="memory available"):
        Arena.create(4, 2**20)


def test_prefault_backs_every_page_and_touches_no_content():
    arena = Arena.create(8, 2**20)
    arena.slot(5)[:4] = b"kept"
    before = resident_bytes(arena.fd)
    arena.start_prefault()
    deadline = time.monotonic() + 20
    while arena.prefaulting:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert before < resident_bytes(arena.fd) == arena.bytes
    assert bytes(arena.slot(5)[:5]) == b"kept\0"
    arena.close()


def test_closing_waits_for_nobody_who_still_looks_and_leaves_no_descriptor():
    before = set(os.listdir("/proc/self/fd"))
    arena = Arena.create(4, 4096)
    view = arena.slot(0)
    arena.start_prefault()
    arena.close()
    view[:] = b"x" * 4096  # still mapped for whoever holds it
    del view
    assert set(os.listdir("/proc/self/fd")) <= before


def test_nobody_can_pull_the_memory_from_under_the_others():
    arena = Arena.create(4, 4096)
    for size in (0, 2 * arena.bytes):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    arena.close()
