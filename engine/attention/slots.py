"""Where a sequence's K/V lies in a layer's slots ``[blocks * block_tokens, kv_heads, dim]``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.cache.blocks import is_run


class SequenceSlots:
    """The slots of one sequence: one run (read as a view), or anywhere (read by a gather of whole blocks).

    Both reads give ``[tokens, kv_heads, dim]`` with the same numbers and the same strides within a token, so the kernels behind
    compute the same bits.
    """

    __slots__ = ("_block_tokens", "_blocks", "_device", "_table", "start")

    def __init__(self, blocks: Sequence[int], block_tokens: int, device: torch.device) -> None:
        self.start: int | None = blocks[0] * block_tokens if is_run(blocks) else None
        self._block_tokens = block_tokens
        self._blocks = blocks
        self._device = device
        self._table: Tensor | None = None

    def read(self, slots: Tensor, first: int, last: int) -> Tensor:
        """K or V of the positions ``first .. last - 1``."""
        if self.start is not None:
            return slots[self.start + first : self.start + last]
        size = self._block_tokens
        if self._table is None:  # once per step, not per layer
            self._table = torch.tensor(self._blocks, device=self._device)
        first_block = first // size
        rows = slots.view(-1, size * slots.shape[1], slots.shape[2]).index_select(0, self._table[first_block : -(-last // size)])
        offset = first_block * size
        return rows.view(-1, *slots.shape[1:])[first - offset : last - offset]

    def slot_of(self, position: int) -> int:
        size = self._block_tokens
        return self._blocks[position // size] * size + position % size
