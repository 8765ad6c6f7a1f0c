"""The paged K/V cache of a worker: blocks of a fixed number of tokens in tensors on the worker's device.

Layer-major: where all layers agree, one tensor ``[layers, 2, blocks, block_tokens, kv_heads, head_dim]``, else a K and a V
tensor ``[blocks, block_tokens, kv_heads, dim]`` per layer. The K of a run of neighbouring blocks of a layer is thereby one view
``[tokens, kv_heads, head_dim]``, and a block goes to the pool's form (``kv_pool.layout``) and back in one strided copy.

One thread allocates (the engine's); another may export and import blocks that are held, meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cache.blocks import BlockAllocator, OutOfBlocksError, is_run
from kv_pool.keys import BlockKey
from kv_pool.layout import BlockLayout

__all__ = ["OutOfBlocksError", "PagedCache"]


class PagedCache:
    """``blocks`` blocks of ``layout`` on ``device``, and who holds them (see :class:`BlockAllocator` for the rules).

    ``keys[l]`` and ``values[l]`` are layer ``l``'s slots, ``[blocks * block_tokens, kv_heads, dim]``: token ``t`` of a block
    ``b`` lies in slot ``b * block_tokens + t``.
    """

    def __init__(self, layout: BlockLayout, blocks: int, device: str | torch.device) -> None:
        self.layout = layout
        self.device = torch.device(device)
        self._blocks = BlockAllocator(blocks)
        dtype = getattr(torch, layout.dtype)
        size = layout.block_tokens
        if layout.uniform:
            shape = layout.layers[0]
            whole = torch.zeros(len(layout.layers), 2, blocks, size, shape.kv_heads, shape.k_dim, dtype=dtype, device=device)
            slots = whole.flatten(2, 3)
            self.keys: list[Tensor] = list(slots[:, 0].unbind())
            self.values: list[Tensor] = list(slots[:, 1].unbind())
            planes = [whole.movedim(2, 0)]
        else:
            planes = [
                torch.zeros(blocks, size, s.kv_heads, dim, dtype=dtype, device=device)
                for s in layout.layers
                for dim in (s.k_dim, s.v_dim)
            ]
            self.keys = [plane.flatten(0, 1) for plane in planes[0::2]]
            self.values = [plane.flatten(0, 1) for plane in planes[1::2]]
        # Views with the block in front; plane after plane, [block] is a block's bytes in the pool's order.
        self._planes = [plane.view(torch.uint8) for plane in planes]

    @property
    def block_count(self) -> int:
        return self._blocks.count

    @property
    def free_count(self) -> int:
        """Blocks that can be allocated now: free ones and cached ones that nobody holds."""
        return self._blocks.available

    def allocate(self, count: int, *, room: int = 0) -> list[int]:
        return self._blocks.allocate(count, room=room)

    def extend(self, blocks: Sequence[int], count: int) -> list[int]:
        """The new blocks only; the caller appends them."""
        return self._blocks.extend(blocks, count)

    def retain(self, blocks: Iterable[int]) -> None:
        self._blocks.retain(blocks)

    def free(self, blocks: Sequence[int]) -> None:
        self._blocks.free(blocks)

    def register(self, key: BlockKey, block: int, parent: BlockKey | None) -> None:
        self._blocks.register(key, block, parent)

    def lookup(self, keys: Sequence[BlockKey]) -> list[int]:
        return self._blocks.lookup(keys)

    def is_run(self, blocks: Sequence[int]) -> bool:
        return is_run(blocks)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """K/V of block ``source[i]`` to block ``target[i]``; the two may not overlap."""
        if len(source) != len(target):
            raise ValueError(f"{len(source)} blocks can't be copied to {len(target)}")
        for a, b, n in _common_runs(source, target):
            for plane in self._planes:
                plane[b : b + n] = plane[a : a + n]

    def export_block(self, block: int, buffer: memoryview) -> None:
        """K/V of ``block`` into the first ``layout.block_bytes`` of ``buffer``, in the pool's form."""
        row = self._row(buffer)
        at = 0
        for plane in self._planes:
            here = plane[block]
            torch.from_numpy(row[at : at + here.numel()]).view(here.shape).copy_(here)
            at += here.numel()

    def import_block(self, buffer: memoryview, block: int) -> None:
        """The inverse of :meth:`export_block`; ``buffer`` may be read-only."""
        row = self._row(buffer)
        at = 0
        for plane in self._planes:
            here = plane[block]
            there = row[at : at + here.numel()].reshape(here.shape)
            if here.is_cpu:
                np.copyto(here.numpy(), there)  # torch makes no tensor of read-only memory without a warning
            else:
                here.copy_(torch.from_numpy(there.copy()))
            at += here.numel()

    def _row(self, buffer: memoryview) -> NDArray[np.uint8]:
        size = self.layout.block_bytes
        if buffer.nbytes < size:
            raise ValueError(f"a block has {size} bytes, the buffer {buffer.nbytes}")
        return np.frombuffer(buffer, dtype=np.uint8, count=size)


def _common_runs(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Split two equally long lists into the longest pieces that are runs in both: ``(source start, target start, length)``."""
    begin = 0
    for i in range(1, len(source) + 1):
        if i == len(source) or source[i] != source[i - 1] + 1 or target[i] != target[i - 1] + 1:
            yield source[begin], target[begin], i - begin
            begin = i
