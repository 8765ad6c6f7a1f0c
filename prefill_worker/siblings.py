"""How much two prompts have in common. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kv_pool.keys import BlockKey


def common_blocks(a: Sequence[BlockKey], b: Sequence[BlockKey]) -> int:
    """Length of the common prefix. A key names its block and all before it, so that halving will do."""
    low, high = 0, min(len(a), len(b))
    if not high or a[0] != b[0]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
