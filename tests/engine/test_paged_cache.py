"""The tensors of the paged cache: views, copies, and a block's bytes in the pool's form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.cache.paged import PagedCache
from kv_pool.layout import DTYPE_BYTES, BlockLayout, LayerShape

UNIFORM = (LayerShape(2, 8, 8),) * 3
MIXED = (LayerShape(4, 24, 16), LayerShape(2, 8, 8))


def filled(shapes: tuple[LayerShape, ...], dtype: str) -> PagedCache:
    cache = PagedCache(BlockLayout(shapes, 4, dtype), 6, "cpu")
    generator = torch.Generator().manual_seed(0)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def block_bytes(cache: PagedCache, block: int) -> bytes:
    """A block as the layout describes it, put together the slow way."""
    size = cache.layout.block_tokens
    parts = []
    for k, v in zip(cache.keys, cache.values, strict=True):
        parts += [tensor[block * size : (block + 1) * size].contiguous().view(torch.uint8).flatten() for tensor in (k, v)]
    return torch.cat(parts).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("shapes", [UNIFORM, MIXED], ids=["uniform", "mixed"])
class TestBlocks:
    def test_export_has_the_layouts_bytes(self, shapes: Any, dtype: str) -> None:
        cache = filled(shapes, dtype)
        buffer = bytearray(b"\xaa" * (cache.layout.block_bytes + 8))
        cache.export_block(3, memoryview(buffer))
        assert bytes(buffer[:-8]) == block_bytes(cache, 3)
        assert bytes(buffer[-8:]) == b"\xaa" * 8

    def test_import_reads_what_export_wrote_even_from_read_only_memory(self, shapes: Any, dtype: str) -> None:
        source, target = filled(shapes, dtype), PagedCache(BlockLayout(shapes, 4, dtype), 6, "cpu")
        buffer = bytearray(source.layout.block_bytes)
        source.export_block(5, memoryview(buffer))
        target.import_block(memoryview(bytes(buffer)), 2)
        assert block_bytes(target, 2) == bytes(buffer)
        for other in (0, 1, 3, 4, 5):
            assert not any(block_bytes(target, other))

    def test_copy_moves_blocks_in_any_order(self, shapes: Any, dtype: str) -> None:
        cache = filled(shapes, dtype)
        before = [block_bytes(cache, block) for block in range(6)]
        cache.copy([0, 1, 5], [3, 4, 2])
        assert [block_bytes(cache, block) for block in range(6)] == [before[i] for i in (0, 1, 5, 0, 1, 5)]

    def test_a_short_buffer_is_refused(self, shapes: Any, dtype: str) -> None:
        cache = filled(shapes, dtype)
        short = memoryview(bytearray(cache.layout.block_bytes - 1))
        with pytest.raises(ValueError, match="the buffer"):
            cache.export_block(0, short)
        with pytest.raises(ValueError, match="the buffer"):
            cache.import_block(short, 0)


def test_a_uniform_cache_is_one_tensor_in_the_order_of_the_design() -> None:
    cache = filled(UNIFORM, "float32")
    assert len({tensor.untyped_storage().data_ptr() for tensor in (*cache.keys, *cache.values)}) == 1
    whole = np.frombuffer(bytes(cache.keys[0].untyped_storage()), dtype=np.float32).reshape(3, 2, 6, 4, 2, 8)
    assert np.array_equal(whole[1, 0].reshape(24, 2, 8), cache.keys[1].numpy())
    assert np.array_equal(whole[2, 1].reshape(24, 2, 8), cache.values[2].numpy())
