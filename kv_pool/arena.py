"""The DRAM tier's memory: fixed slots in shared memory, mapped by the node and by the workers of its machine.

Memory layout (slot starts aligned to ``SLOT_ALIGN``)::

    | epoch words, u64 each | padding | slot 0 | slot 1 | ...

The segment is an anonymous ``memfd``; a worker opens it through ``/proc/<node pid>/fd/<n>``. It has no name, so nothing can be
left behind
in /dev/shm, whatever is killed, and a container's /dev/shm size does not limit it (docs/decisions/0003-arena-memfd.md).

A slot's *epoch* changes whenever the slot gets another owner. A reader that finds the epoch of its lease after it copied knows
that the
bytes were those of its block all the time (a seqlock with one writer, the node).
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from typing import Final

SLOT_ALIGN: Final = 4096
EPOCH_BYTES: Final = 8
MADV_POPULATE_WRITE: Final = 23
PREFAULT_BYTES: Final = 4 * 1024 * 1024
"""Populated at a time: small, since the call holds the interpreter."""


def _aligned(size: int) -> int:
    return -(-size // SLOT_ALIGN) * SLOT_ALIGN


class Arena:
    """One mapping of the segment. Made by :meth:`create` (the node) or :meth:`attach` (a worker)."""

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._stride = _aligned(slot_bytes)
        self._first = _aligned(slots * EPOCH_BYTES)
        self.bytes = self._first + slots * self._stride
        self.fd = fd
        self._map = mmap.mmap(fd, self.bytes)
        self._view = memoryview(self._map)
        self._stopping = threading.Event()

    @classmethod
    def create(cls, slots: int, slot_bytes: int) -> Arena:
        """A new segment, all zero. Raises OSError (ENOMEM) where the machine has no room for it."""
        fd = os.memfd_create("moonpool-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, _aligned(slots * EPOCH_BYTES) + slots * _aligned(slot_bytes))
        return cls(fd, slots, slot_bytes)

    @classmethod
    def attach(cls, pid: int, fd: int, slots: int, slot_bytes: int) -> Arena:
        """Map the segment of the node with ``pid``. Raises OSError where that process is gone, foreign, or its segment is
        smaller."""
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            needed = _aligned(slots * EPOCH_BYTES) + slots * _aligned(slot_bytes)
            if os.fstat(own).st_size < needed:
                raise OSError(f"the arena has {os.fstat(own).st_size} bytes, {needed} were announced")
            return cls(own, slots, slot_bytes)
        except BaseException:
            os.close(own)
            raise

    def slot(self, index: int) -> memoryview:
        """The slot's bytes, writable. Its owner may write them; everyone else takes :meth:`slot_read_only`."""
        start = self._first + index * self._stride
        return self._view[start : start + self.slot_bytes]

    def slot_read_only(self, index: int) -> memoryview:
        return self.slot(index).toreadonly()

    def epoch(self, index: int) -> int:
        return struct.unpack_from("<Q", self._map, index * EPOCH_BYTES)[0]

    def set_epoch(self, index: int, epoch: int) -> None:
        """The node only."""
        struct.pack_into("<Q", self._map, index * EPOCH_BYTES, epoch)

    def prefault(self) -> None:
        """Have the kernel back every page now, so that no first write pays for it (1.4 GB/s against 6). Content is not
        touched, so this
        may run beside everything else; returns early on :meth:`close`, and does nothing where the kernel does not know the
        advice."""
        for start in range(0, self.bytes, PREFAULT_BYTES):
            if self._stopping.is_set():
                return
            try:
                self._map.madvise(MADV_POPULATE_WRITE, start, min(PREFAULT_BYTES, self.bytes - start))
            except (OSError, ValueError):
                return

    def close(self) -> None:
        """Unmap and close. Views that somebody still holds keep their pages until they go."""
        self._stopping.set()
        try:
            self._view.release()
            self._map.close()
        except BufferError:
            pass
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
