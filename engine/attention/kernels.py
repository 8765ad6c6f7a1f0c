"""Attention of one sequence over K and V that are already in hand. No cache, no batch.

Shapes: q ``[1, q_heads, n, k_dim]``, k ``[1, kv_heads, s, k_dim]``, v ``[1, kv_heads, s, v_dim]``, out ``[1, q_heads, n,
v_dim]``; masks are additive, ``[n, s]``, of q's dtype. Consecutive query heads share a K/V head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.options import AttentionOptions

# The CPU kernel behind scaled_dot_product_attention. Called by its own name it also gives the logarithm of the softmax's
# denominator, which merges parts and adds sinks; the name is not public, so everything works without it, only slower.
_flash_on_cpu = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def has_flash(q: Tensor, v: Tensor) -> bool:
    """Can :func:`flash` serve these?"""
    return _flash_on_cpu is not None and q.is_cpu and q.shape[-1] == v.shape[-1]


def flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The output, and the log of the sum of exponentials ``[1, q_heads, n]`` float32. Causal wants n == s."""
    assert _flash_on_cpu is not None
    return _flash_on_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys from attention over each (FlashDecoding's reduction)."""
    weight = torch.sigmoid(second[1] - first[1]).unsqueeze(-1)
    out = torch.lerp(first[0], second[0], weight.to(first[0].dtype))
    return out, torch.logaddexp(first[1], second[1])


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """``out`` as it would be had each head one more key of score ``sinks[head]`` and value zero."""
    return out * torch.sigmoid(lse - sinks.to(lse.dtype).view(1, -1, 1)).unsqueeze(-1).to(out.dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, causal: bool = False, mask: Tensor | None = None
) -> Tensor:
    """Any options; the window is the caller's part. Causal wants n == s and no mask."""
    if options.softcap is None:
        if options.sinks is None:
            grouped = q.shape[1] != k.shape[1]
            return scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=options.scale, enable_gqa=grouped
            )
        if has_flash(q, v):
            out, lse = flash(q, k, v, options.scale, causal=causal, mask=mask)
            return add_sinks(out, lse, options.sinks)
    return explicit(q, k, v, options, mask=causal_mask(q.shape[2], q) if causal else mask)


def explicit(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, mask: Tensor | None) -> Tensor:
    """Matrix products and a softmax in float32, in the order of transformers' eager attention: what no fused kernel offers."""
    _, q_heads, n, k_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(1, kv_heads, q_heads // kv_heads * n, k_dim)
    scale = 1.0 / math.sqrt(k_dim) if options.scale is None else options.scale
    scores = torch.matmul(grouped, k.transpose(2, 3)).view(1, q_heads, n, -1) * scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores + mask
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(1, q_heads, n, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    if options.sinks is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights.reshape(1, kv_heads, -1, k.shape[2]), v).view(1, q_heads, n, v.shape[-1])


def causal_mask(n: int, like: Tensor) -> Tensor:
    return window_mask(0, n, 0, None, like)


def window_mask(past: int, n: int, first: int, window: int | None, like: Tensor) -> Tensor:
    """Mask of queries at positions ``past .. past + n - 1`` over keys at ``first .. past + n - 1``: no future, and of the past
    the last ``window`` positions. ``[n, past + n - first]``, dtype and device of ``like``."""
    queries = torch.arange(past, past + n, device=like.device).unsqueeze(1)
    keys = torch.arange(first, past + n, device=like.device).unsqueeze(0)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)
