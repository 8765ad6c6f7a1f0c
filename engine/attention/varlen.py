"""Attention on CUDA by block table: ``torch.nn.attention.varlen``, any mix of sequences in one kernel, nothing gathered.

Where its kernel can't serve (float32, soft cap, sinks, pages of another size), the steps of ``engine.attention.steps`` do, on
CUDA as on a CPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn.attention import varlen

from engine.attention.options import AttentionOptions
from engine.attention.steps import SequenceStep
from engine.cache.paged import PagedCache
from kv_pool.layout import BlockLayout

PAGE_TOKENS: Final = 256
"""FlashAttention 2 takes pages of a multiple of this."""
HEAD_DIM_MAX: Final = 256
DTYPES: Final = ("bfloat16", "float16")


def why_not(device: torch.device, layout: BlockLayout, options: Sequence[AttentionOptions]) -> str | None:
    """Why the kernel can't serve this model; None where it can."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if not {"block_table", "seqused_k"} <= inspect.signature(varlen.varlen_attn).parameters.keys():
        return f"torch {torch.__version__} has no block table in varlen_attn"
    if layout.dtype not in DTYPES:
        return f"the dtype is {layout.dtype}"
    if layout.block_tokens % PAGE_TOKENS:
        return f"block_tokens {layout.block_tokens} is not a multiple of {PAGE_TOKENS}"
    if any(shape.k_dim != shape.v_dim or shape.k_dim > HEAD_DIM_MAX or shape.k_dim % 8 for shape in layout.layers):
        return "a layer's head sizes don't suit FlashAttention"
    if any(option.softcap is not None or option.sinks is not None for option in options):
        return "a layer has a soft cap or sinks"
    return None


class VarlenStep:
    """The new tokens of any sequences, packed; of ``rows`` rows those after the sequences' are padding."""

    def __init__(self, cache: PagedCache, steps: Sequence[SequenceStep], rows: int, *, batch_invariant: bool) -> None:
        size = cache.layout.block_tokens
        counts = [len(step.token_ids) for step in steps]
        totals = [step.past + count for step, count in zip(steps, counts, strict=True)]
        tables = [list(step.blocks[: -(-total // size)]) for step, total in zip(steps, totals, strict=True)]
        widest = max(map(len, tables))
        slots = [
            step.blocks[position // size] * size + position % size
            for step, total in zip(steps, totals, strict=True)
            for position in range(step.past, total)
        ]
        device = cache.device
        self._cache = cache
        self._tokens = sum(counts)
        self._rows = rows
        self._new_slots = torch.tensor(slots, device=device)
        self._first_rows = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        self._totals = torch.tensor(totals, dtype=torch.int32, device=device)
        self._tables = torch.tensor([t + [0] * (widest - len(t)) for t in tables], dtype=torch.int32, device=device)
        self._count_max, self._total_max = max(counts), max(totals)
        # Without a fixed split the order of sums follows the longest sequence of the batch.
        self._splits = 1 if batch_invariant else None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        size = self._cache.layout.block_tokens
        count = self._tokens
        keys.index_copy_(0, self._new_slots, k[0].transpose(0, 1)[:count])
        values.index_copy_(0, self._new_slots, v[0].transpose(0, 1)[:count])
        out = varlen.varlen_attn(
            q[0].transpose(0, 1)[:count].contiguous(),
            keys.view(-1, size, *keys.shape[1:]),
            values.view(-1, size, *values.shape[1:]),
            self._first_rows,
            None,
            self._count_max,
            self._total_max,
            scale=options.scale,
            window_size=(-1 if options.window is None else options.window - 1, 0),
            enable_gqa=q.shape[1] != k.shape[1],
            seqused_k=self._totals,
            block_table=self._tables,
            num_splits=self._splits,
        )
        assert isinstance(out, Tensor)
        if count < self._rows:
            out = torch.cat([out, out.new_zeros(self._rows - count, *out.shape[1:])])
        return out.unsqueeze(0)
