"""At load: does the model through our attention say what it says through its own?

Two sequences are run in uneven pieces, then together token by token, one in a run of blocks and one in scattered blocks; the
logits are compared with those of one pass through the model's own eager attention. It finds what no inspection of names does:
an unknown mask, a scale, a bias, a position that comes from elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.attention import interface
from engine.attention.options import AttentionOptions
from engine.attention.steps import SequenceStep
from engine.cache.paged import PagedCache
from engine.probe.refusal import UnsupportedModelError
from engine.runner import ModelRunner
from kv_pool.layout import BlockLayout

log = logging.getLogger(__name__)

WINDOW_MAX: Final = 192
"""Windows up to this many tokens are exceeded by the test's prompt; wider ones would cost seconds of every start."""
DECODE_TOKENS: Final = 3
FLOAT32_LOGIT_ERROR_MAX: Final = 1e-3
"""Absolute. Right attention measured 2e-6 to 6e-5, a window off by one or a scale off by a tenth 0.1 and more."""
HALF_RMS_ERROR_MAX: Final = {"bfloat16": 0.10, "float16": 0.05}
"""Root mean square of the error over the standard deviation of the logits: among a vocabulary of logits the largest single error
says little. Right attention measured 0.01 to 0.07 in bfloat16 (most where a rounding turns an expert's choice) and 0.001 to 0.02
in float16; a missing window, soft cap or sink 0.14 to 0.46. An error as small as a window off by one may pass in bfloat16."""


def self_test(name: str, runner: ModelRunner, layout: BlockLayout, options: Sequence[AttentionOptions]) -> None:
    """Raise UnsupportedModelError where the two disagree."""
    windows = {option.window for option in options if option.window is not None}
    uncovered = sorted(window for window in windows if window > WINDOW_MAX)
    if uncovered:
        log.info("self-test of %s: its windows of %s tokens are longer than the test's prompt", name, uncovered)
    long = max((window for window in windows if window <= WINDOW_MAX), default=16) + 17
    short = 11
    generator = torch.Generator().manual_seed(0)
    vocabulary = runner.model.config.get_text_config(decoder=True).vocab_size
    ids = [torch.randint(vocabulary, (count + DECODE_TOKENS,), generator=generator).tolist() for count in (long, short)]
    size = layout.block_tokens
    needed = [-(-len(sequence) // size) for sequence in ids]
    cache = PagedCache(layout, sum(needed) + 1, runner.model.device)
    tables = [list(range(needed[0])), list(range(needed[0], cache.block_count))[::-1]]
    ours = [
        _prefill(runner, cache, ids[0][:long], tables[0], (long // 2 + 1, 5)),
        _prefill(runner, cache, ids[1][:short], tables[1], (4,)),
    ]
    for i in range(DECODE_TOKENS):
        steps = [
            SequenceStep([sequence[count + i]], count + i, table)
            for sequence, count, table in zip(ids, (long, short), tables, strict=True)
        ]
        for rows, row in zip(ours, runner.decode(cache, steps), strict=True):
            rows.append(row)
    theirs = [_reference(runner.model, ids[0], (long // 2, long // 2 + 5), long), _reference(runner.model, ids[1], (3,), short)]
    _compare(name, layout.dtype, torch.stack([row for rows in ours for row in rows]), torch.cat(theirs))


def _prefill(runner: ModelRunner, cache: PagedCache, ids: list[int], table: list[int], pieces: tuple[int, ...]) -> list[Tensor]:
    """Logits after each of ``pieces`` and after the rest."""
    rows: list[Tensor] = []
    past = 0
    for count in (*pieces, len(ids) - sum(pieces)):
        rows.append(runner.piece(cache, SequenceStep(ids[past : past + count], past, table))[0])
        past += count
    return rows


def _reference(model: PreTrainedModel, ids: list[int], ends: tuple[int, ...], prompt: int) -> Tensor:
    """The model's own logits at positions ``ends``, at the prompt's last, and at those decoded."""
    keep = torch.tensor([*ends, *range(prompt - 1, len(ids))], device=model.device)
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            out = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False, logits_to_keep=keep)
    finally:
        model.set_attn_implementation(interface.NAME)
    return out.logits[0].float()


def _compare(name: str, dtype: str, ours: Tensor, theirs: Tensor) -> None:
    worst = (ours - theirs).abs().max().item()
    if dtype == "float32":
        fine = worst < FLOAT32_LOGIT_ERROR_MAX
        told = f"logits differ by up to {worst:.2g}, more than {FLOAT32_LOGIT_ERROR_MAX}"
    else:
        error = ((ours - theirs).square().mean().sqrt() / theirs.std()).item()
        fine = error < HALF_RMS_ERROR_MAX[dtype]
        told = f"logits differ by {error:.2g} of their deviation, more than {HALF_RMS_ERROR_MAX[dtype]}"
    if not fine:  # also where a number is NaN
        raise UnsupportedModelError(name, f"its attention is not computed right here: {told}")
    log.info("self-test of %s: logits differ by at most %.2g", name, worst)
