"""What is copied in all rows of the pool and its peers: sizes and numbers of blocks."""

from __future__ import annotations

from typing import Final

MIB: Final = 2**20
SIZES_MIB: Final = (1, 4, 16)
BLOCK_BYTES_MAX: Final = max(SIZES_MIB) * MIB
ROUND_BYTES: Final = 256 * MIB
BATCH: Final = 16
"""Blocks a call where several go in one."""
ROUNDS: Final = 5


def blocks_of(size_mib: int) -> int:
    """Blocks of one series: ``ROUND_BYTES`` in all, never fewer than a batch."""
    return max(BATCH, ROUND_BYTES // (size_mib * MIB))


def gigabytes_per_s(size_mib: int, seconds: float) -> float:
    """Of one series."""
    return size_mib * MIB * blocks_of(size_mib) / seconds / 1e9
