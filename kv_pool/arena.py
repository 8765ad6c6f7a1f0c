"""The DRAM tier's memory: fixed slots in shared memory, mapped by the node and by the workers of its machine.

Memory layout (slot starts aligned to ``SLOT_ALIGN``)::

    | epoch words, u64 each | padding | slot 0 | slot 1 | ...

The segment is an anonymous ``memfd``; a worker gets its descriptor with the node's welcome. It has no name, so nothing can be
left behind in /dev/shm, whatever is killed, and a container's /dev/shm size does not limit it
(docs/decisions/0003-arena-memfd.md).

A slot's *epoch* changes whenever the slot changes its owner. A reader that finds the epoch of its lease after it copied knows
that the bytes were those of its block all the time (a seqlock whose only writer is the node).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from typing import Final

SLOT_ALIGN: Final = 4096
EPOCH_BYTES: Final = 8
MADV_POPULATE_WRITE: Final = 23
PREFAULT_BYTES: Final = 4 * 1024 * 1024
"""Populated at a time. Small, because the call that maps pages holds the interpreter."""


def _aligned(size: int) -> int:
    return -(-size // SLOT_ALIGN) * SLOT_ALIGN


def arena_bytes(slots: int, slot_bytes: int) -> int:
    """Size of the whole segment."""
    return _aligned(slots * EPOCH_BYTES) + slots * _aligned(slot_bytes)


def _available_bytes() -> int | None:
    """Memory that the kernel could give without swapping; None where it does not say."""
    try:
        with open("/proc/meminfo", "rb") as file:
            for line in file:
                if line.startswith(b"MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


class Arena:
    """One mapping of the segment. Made by :meth:`create` (the node) or :meth:`attach` (a worker)."""

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        self.fd = fd
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.bytes = arena_bytes(slots, slot_bytes)
        self._stride = _aligned(slot_bytes)
        self._first = _aligned(slots * EPOCH_BYTES)
        self._map: mmap.mmap | None = mmap.mmap(fd, self.bytes)
        self._view = memoryview(self._map)
        # Cast: an aligned 8-byte item is read and written whole, byte-wise packing could tear.
        self._epochs = self._view[: slots * EPOCH_BYTES].cast("Q")
        self._stopping = threading.Event()
        self._prefaulting = threading.Thread(target=self._prefault, name="arena-prefault", daemon=True)

    @classmethod
    def create(cls, slots: int, slot_bytes: int) -> Arena:
        """A new segment, all zero. Raises OSError (ENOMEM) where the machine has less memory available than that."""
        needed, available = arena_bytes(slots, slot_bytes), _available_bytes()
        if available is not None and needed > available:
            # A memfd promises more than there is, and the writer that touches too much dies of it: refuse now.
            raise OSError(errno.ENOMEM, f"an arena of {needed} bytes does not fit the {available} bytes of memory available")
        fd = os.memfd_create("moonpool-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, needed)
            # Nobody who maps it can pull the memory from under the others.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(fd, slots, slot_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, slots: int, slot_bytes: int) -> Arena:
        """Map the segment that ``fd`` stands for (it stays the caller's). Raises OSError where it is smaller than announced."""
        own = os.dup(fd)
        try:
            found, needed = os.fstat(own).st_size, arena_bytes(slots, slot_bytes)
            if found < needed:
                raise OSError(errno.EINVAL, f"the arena has {found} bytes, {needed} were announced")
            return cls(own, slots, slot_bytes)
        except BaseException:
            os.close(own)
            raise

    def slot(self, index: int) -> memoryview:
        """The slot's ``slot_bytes`` bytes, writable: for its owner only. Raises IndexError."""
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} of {self.slots}")
        start = self._first + index * self._stride
        return self._view[start : start + self.slot_bytes]

    def slot_pages(self, index: int) -> memoryview:
        """The slot and what fills its last page: whole pages, for direct I/O. Raises IndexError."""
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} of {self.slots}")
        start = self._first + index * self._stride
        return self._view[start : start + self._stride]

    def slot_read_only(self, index: int) -> memoryview:
        return self.slot(index).toreadonly()

    def epoch(self, index: int) -> int:
        return self._epochs[index]

    def set_epoch(self, index: int, epoch: int) -> None:
        """The node only, before anything else is done with the slot."""
        self._epochs[index] = epoch

    def start_prefault(self) -> None:
        """Have the kernel back and map every page, beside everything else, so that no first write pays for it (1.4 GB/s against
        6). Content is not touched."""
        self._prefaulting.start()

    @property
    def prefaulting(self) -> bool:
        return self._prefaulting.is_alive()

    def close(self) -> None:
        """Unmap and close. Views that somebody still holds keep the mapping until they go; no new ones can be had."""
        self._stopping.set()
        if self._prefaulting.is_alive():
            self._prefaulting.join()  # within one piece
        self._epochs.release()
        self._view.release()
        mapping, self._map = self._map, None
        if mapping is not None:
            with contextlib.suppress(BufferError):  # unmapped with the last view
                mapping.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _prefault(self) -> None:
        mapping = self._map
        if mapping is None:
            return
        for start in range(0, self.bytes, PREFAULT_BYTES):
            if self._stopping.is_set():
                return
            size = min(PREFAULT_BYTES, self.bytes - start)
            try:
                os.posix_fallocate(self.fd, start, size)  # the slow part, and it lets other threads run
                mapping.madvise(MADV_POPULATE_WRITE, start, size)
            except (OSError, ValueError):
                return  # too old a kernel, or no memory left: the first write pays
