"""Every promised family, unmodified, against stock generate with eager attention in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.probe.self_test import FLOAT32_LOGIT_ERROR_MAX
from tests.engine.conversation import blocks_for, decode, prefill, random_prompt
from tests.engine.tiny_models import FAMILIES, VOCABULARY, build, load

LENGTHS = (5, 16, 39, 61)  # shorter and longer than a block, a piece, a window
TOKENS = 12


@pytest.mark.parametrize("pack_weights", [False, True], ids=["mapped", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_stock_generate(family: str, pack_weights: bool, tmp_path: Path) -> None:
    stock = build(family)
    engine = load(stock, tmp_path, pack_weights=pack_weights)
    prompts = [random_prompt(length, VOCABULARY, seed) for seed, length in enumerate(LENGTHS)]
    ours = [list(prompt) for prompt in prompts]
    tables, logits = [], []
    for i, ids in enumerate(ours):
        table = engine.cache.allocate(blocks_for(engine, len(ids) + TOKENS))
        tables.append(table if i % 2 else table[::-1])  # runs, and blocks in no order
        logits.append([prefill(engine, ids, tables[-1])])
        ids.append(int(logits[-1][0].argmax()))
    for rows in decode(engine, ours, tables, TOKENS - 1):
        for one, row in zip(logits, rows, strict=True):
            one.append(row)
    for prompt, ids, rows in zip(prompts, ours, logits, strict=True):
        out = stock.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert ids == out.sequences[0].tolist()
        assert (torch.stack(rows) - torch.cat(out.logits)).abs().max() < FLOAT32_LOGIT_ERROR_MAX


@pytest.mark.parametrize("family", FAMILIES)
def test_odd_pieces_change_nothing_but_rounding(family: str, tmp_path: Path) -> None:
    engine = load(build(family), tmp_path)
    ids = random_prompt(61, VOCABULARY, 1)
    tables = [engine.cache.allocate(blocks_for(engine, 61)) for _ in range(2)]
    whole = prefill(engine, ids, tables[0], borders=[61])
    pieces = prefill(engine, ids, tables[1], borders=[5, 6, 29, 36])
    assert (whole - pieces).abs().max() < FLOAT32_LOGIT_ERROR_MAX


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes_its_own_self_test(family: str, dtype: str, tmp_path: Path) -> None:
    engine = load(build(family), tmp_path, dtype)
    assert engine.dtype == dtype
    assert engine.cache.keys[0].dtype == getattr(torch, dtype)
