"""The allocator's habits, for a process that receives pieces of blocks all day."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
LARGEST_FROM_HEAP: Final = 32 * 1024 * 1024
"""The most that glibc takes."""
KEPT_FREE: Final = 64 * 1024 * 1024


def keep_freed_memory() -> None:
    """Have malloc use the memory of freed messages again (mallopt(3)), at most ``KEPT_FREE`` bytes per heap.

    By itself it gives each back to the kernel, which has to find and zero the pages of the next one: a third of what receiving a
    block costs. For the whole process; without glibc nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_FROM_HEAP)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_FREE)
