"""The two things a forward pass may be: a piece of one prompt, or one token of each of many sequences.

A step holds what all layers share (slots, masks, runs) and is built once. ``attend`` is called once by each layer: it writes the
new tokens' K/V to the cache, then attends. q ``[1, q_heads, t, k_dim]``, k ``[1, kv_heads, t, k_dim]``, v ``[1, kv_heads, t,
v_dim]`` are the new tokens', rotated already; the result is ``[1, t, q_heads, v_dim]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.attention import kernels
from engine.attention.options import AttentionOptions
from engine.attention.slots import SequenceSlots
from engine.cache.paged import PagedCache


@dataclass(slots=True)
class SequenceStep:
    """The next ``token_ids`` of a sequence that has ``past`` tokens in the cache. ``blocks`` are the sequence's, in order, and
    cover ``past + len(token_ids)`` tokens."""

    token_ids: Sequence[int]
    past: int
    blocks: Sequence[int]


class AttentionStep(Protocol):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor: ...


class PieceStep:
    """``count`` new tokens of one sequence behind ``past`` cached ones.

    positions   0 ........ past ........... past + count
                | in cache |  new, causal   |
    """

    def __init__(self, cache: PagedCache, step: SequenceStep) -> None:
        self._cache = cache
        self._past = past = step.past
        self._total = past + len(step.token_ids)
        self._slots = SequenceSlots(step.blocks, cache.layout.block_tokens, cache.device)
        self._masks: dict[int | None, Tensor] = {}
        self._new_slots: Tensor | None = None
        if self._slots.start is None:
            new = [self._slots.slot_of(position) for position in range(past, self._total)]
            self._new_slots = torch.tensor(new, device=cache.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        self._write(keys, k)
        self._write(values, v)
        window = options.window if options.window is not None and options.window < self._total else None
        if window is None and self._past == 0:
            return kernels.attention(q, k, v, options, causal=True).transpose(1, 2)
        first = 0 if window is None else max(0, self._past - window + 1)
        if window is None and options.softcap is None and kernels.has_flash(q, v):
            # The past needs no mask and the new tokens a causal one: two fast calls instead of one with a mask.
            past = kernels.flash(q, *self._read(keys, values, 0, self._past), options.scale)
            out, lse = kernels.merge(past, kernels.flash(q, k, v, options.scale, causal=True))
            if options.sinks is not None:
                out = kernels.add_sinks(out, lse, options.sinks)
            return out.transpose(1, 2)
        mask = self._masks.get(window)
        if mask is None:
            count = self._total - self._past
            mask = self._masks[window] = kernels.window_mask(self._past, count, first, window, q)
        return kernels.attention(q, *self._read(keys, values, first, self._total), options, mask=mask).transpose(1, 2)

    def _write(self, slots: Tensor, new: Tensor) -> None:
        rows = new[0].transpose(0, 1)
        if self._new_slots is not None:
            slots.index_copy_(0, self._new_slots, rows)
        else:
            start = self._slots.start or 0
            slots[start + self._past : start + self._total] = rows

    def _read(self, keys: Tensor, values: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        k = self._slots.read(keys, first, last).transpose(0, 1).unsqueeze(0)
        v = self._slots.read(values, first, last).transpose(0, 1).unsqueeze(0)
        return k, v


class DecodeStep:
    """One new token of each sequence, at position ``past``: no mask anywhere, and nothing in a sequence's attention depends on
    its company. Of ``rows`` rows those after the sequences' are padding: nothing is written for them, their output is zero."""

    def __init__(self, cache: PagedCache, steps: Sequence[SequenceStep], rows: int) -> None:
        size = cache.layout.block_tokens
        self._cache = cache
        self._totals = [step.past + 1 for step in steps]
        self._padding = rows - len(steps)
        self._sequences = [SequenceSlots(step.blocks, size, cache.device) for step in steps]
        new = [slots.slot_of(step.past) for slots, step in zip(self._sequences, steps, strict=True)]
        self._new_slots = torch.tensor(new, device=cache.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        count, kv_heads = len(self._totals), k.shape[1]
        keys.index_copy_(0, self._new_slots, k[0].transpose(0, 1)[:count])
        values.index_copy_(0, self._new_slots, v[0].transpose(0, 1)[:count])
        rows = q[0].transpose(0, 1)[:count]  # [count, q_heads, k_dim]
        seen = self._seen(keys, values, options.window)
        if options.softcap is None and kernels.has_flash(q, v):
            out = _flash_rows(rows.unflatten(1, (kv_heads, -1)), seen, options)
        else:
            each = [kernels.attention(row.view(1, -1, 1, q.shape[3]), *kv, options) for row, kv in zip(rows, seen, strict=True)]
            out = torch.cat(each).squeeze(2)
        if self._padding:
            out = torch.cat([out, out.new_zeros(self._padding, *out.shape[1:])])
        return out.unsqueeze(0)

    def _seen(self, keys: Tensor, values: Tensor, window: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Per sequence the K and V that its token sees, ``[1, kv_heads, s, dim]``."""
        for slots, total in zip(self._sequences, self._totals, strict=True):
            first = 0 if window is None else max(0, total - window)
            k = slots.read(keys, first, total).transpose(0, 1).unsqueeze(0)
            v = slots.read(values, first, total).transpose(0, 1).unsqueeze(0)
            yield k, v


def _flash_rows(q: Tensor, seen: Iterable[tuple[Tensor, Tensor]], options: AttentionOptions) -> Tensor:
    """One query per sequence, q ``[sequences, kv_heads, group, dim]``: the query heads of a K/V head become the rows of one small
    matrix product instead of copies of K and V. ``[sequences, q_heads, dim]``."""
    group = q.shape[2]
    if group % 2:
        # The kernel's matrix product is up to 1.4 (float32, 3 rows) or 2 times (bfloat16, 1 row) slower on an odd number.
        q = pad(q, (0, 0, 0, 1))
    parts = [kernels.flash(row.unsqueeze(0), k, v, options.scale) for row, (k, v) in zip(q, seen, strict=True)]
    out = torch.cat([part for part, _ in parts])[:, :, :group].flatten(1, 2)
    if options.sinks is not None:
        lse = torch.cat([part for _, part in parts])[:, :, :group].flatten(1, 2)
        out = kernels.add_sinks(out.unsqueeze(2), lse.unsqueeze(2), options.sinks).squeeze(2)
    return out
