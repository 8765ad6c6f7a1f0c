"""The CUDA path. Its metadata is checked on a CPU through a slow kernel of the same signature; the kernel itself on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention import varlen
from engine.attention.options import AttentionOptions
from engine.attention.steps import SequenceStep
from engine.cache.paged import PagedCache
from engine.probe.self_test import self_test
from engine.probe.shapes import probe
from engine.runner import ModelRunner
from kv_pool.layout import BlockLayout, LayerShape
from tests.engine.tiny_models import build, load

CUDA = torch.device("cuda")
PLAIN = [AttentionOptions(scale=0.125)]


def layout(block_tokens: int = 256, dtype: str = "bfloat16", k_dim: int = 64, v_dim: int = 64) -> BlockLayout:
    return BlockLayout((LayerShape(2, k_dim, v_dim),), block_tokens, dtype)


@pytest.mark.parametrize(
    ("device", "shape", "options", "reason"),
    [
        (CUDA, layout(), PLAIN, None),
        (CUDA, layout(512, "float16"), [AttentionOptions(window=100)], None),
        (torch.device("cpu"), layout(), PLAIN, "device is cpu"),
        (CUDA, layout(dtype="float32"), PLAIN, "dtype is float32"),
        (CUDA, layout(64), PLAIN, "block_tokens 64"),
        (CUDA, layout(k_dim=24, v_dim=16), PLAIN, "head sizes"),
        (CUDA, layout(k_dim=512, v_dim=512), PLAIN, "head sizes"),
        (CUDA, layout(), [AttentionOptions(softcap=30.0)], "soft cap"),
        (CUDA, layout(), [AttentionOptions(sinks=torch.zeros(4))], "sinks"),
    ],
)
def test_the_kernel_is_taken_where_it_can_serve(
    device: torch.device, shape: BlockLayout, options: list[AttentionOptions], reason: str | None
) -> None:
    answer = varlen.why_not(device, shape, options)
    assert answer is None if reason is None else answer is not None and reason in answer


def slow_kernel(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Any, max_q: int, max_k: int, *, scale: float | None,
    window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor, num_splits: int | None,
) -> Tensor:  # fmt: skip
    """varlen_attn by its documentation, one query at a time."""
    assert cu_seq_k is None
    assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert max_q == cu_seq_q.diff().max()
    assert max_k == seqused_k.max()
    assert enable_gqa == (query.shape[1] != key.shape[2])
    assert window_size[1] == 0
    out = torch.full((*query.shape[:2], value.shape[-1]), torch.nan)
    for i, total in enumerate(seqused_k.tolist()):
        first, last = cu_seq_q[i : i + 2].tolist()
        k = key[block_table[i].long()].flatten(0, 1)
        v = value[block_table[i].long()].flatten(0, 1)
        for row in range(first, last):
            position = total - (last - row)
            begin = 0 if window_size[0] < 0 else max(0, position - window_size[0])
            seen = slice(begin, position + 1)
            out[row] = torch.nn.functional.scaled_dot_product_attention(
                query[row].unsqueeze(1), k[seen].transpose(0, 1), v[seen].transpose(0, 1), scale=scale, enable_gqa=True
            )[:, 0]
    return out


@pytest.mark.parametrize("bitwise", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_metadata(family: str, bitwise: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole self-test through block tables: uneven pieces, a ragged batch, blocks in no order, padding rows."""
    monkeypatch.setattr(varlen.varlen, "varlen_attn", slow_kernel)
    model = load(build(family), tmp_path)._runner.model
    shapes, options = probe("tiny", model)
    runner = ModelRunner(model, threads=1, bitwise=bitwise, block_tables=True)
    self_test("tiny", runner, BlockLayout(shapes, 8, "float32"), options)


def test_splits_are_fixed_only_where_bits_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []

    def kernel(query: Tensor, *_: Any, num_splits: int | None, **__: Any) -> Tensor:
        seen.append(num_splits)
        return torch.zeros_like(query)

    monkeypatch.setattr(varlen.varlen, "varlen_attn", kernel)
    cache = PagedCache(layout(8, "float32", 8, 8), 4, "cpu")
    q, kv = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8)
    for invariant in (False, True):
        step = varlen.VarlenStep(cache, [SequenceStep([1, 2], 7, [2, 0])], 3, batch_invariant=invariant)
        assert step.attend(0, q, kv, kv, AttentionOptions()).shape == (1, 3, 4, 8)
    assert seen == [None, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("block_tokens", [64, 256], ids=["gathered", "by block table"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_on_a_gpu(family: str, block_tokens: int, tmp_path: Path) -> None:
    model = build(family, head_dim=64)
    engine = load(model, tmp_path, "bfloat16", device="cuda", block_tokens=block_tokens, chunk_tokens=256)
    assert engine.reads_block_tables == (block_tokens == 256)
