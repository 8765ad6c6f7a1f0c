"""One forward pass of the model: packed tokens, explicit positions, the attention step that knows whose they are."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.attention import interface
from engine.attention.steps import AttentionStep, DecodeStep, PieceStep, SequenceStep
from engine.attention.varlen import VarlenStep
from engine.cache.paged import PagedCache
from engine.packing import PackedLinears

BITWISE_ROWS: Final = 16
"""Rows of every decode pass in bitwise mode. Matrix kernels round differently by the number of rows, so that number must not
depend on company."""
PACKED_ROWS: Final = 4
"""With packed weights four rows take less time than one, two or three (35 ms to 42, 49, 49 in float32): batches are filled up."""


class ModelRunner:
    """``bitwise``: a sequence's logits are the same to the bit in any company. ``packed``: decode multiplies with packed weights.
    ``block_tables``: attention reads them (CUDA). Not re-entrant; one thread at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        threads: int,
        bitwise: bool = False,
        packed: PackedLinears | None = None,
        block_tables: bool = False,
    ) -> None:
        self.model = model
        self.bitwise = bitwise
        # How many tokens an expert gets depends on the whole batch: such a model decodes one sequence at a time.
        self._bitwise_group = 1 if _has_experts(model) else BITWISE_ROWS
        self.block_tables = block_tables
        self._packs = packed is not None
        self._packed = packed or nullcontext()
        self._threads = threads
        self._thread = 0

    def piece(self, cache: PagedCache, step: SequenceStep) -> Tensor:
        """Logits ``[1, vocab]`` float32 after the last of one sequence's new tokens."""
        count = len(step.token_ids)
        attention: AttentionStep
        if self.block_tables:
            attention = VarlenStep(cache, [step], count, batch_invariant=self.bitwise)
        else:
            attention = PieceStep(cache, step)
        return self._run(attention, step.token_ids, range(step.past, step.past + count), last_only=True)

    def decode(self, cache: PagedCache, steps: Sequence[SequenceStep]) -> Tensor:
        """Logits ``[len(steps), vocab]`` float32 after one new token of each sequence."""
        if not self.bitwise:
            multiple = PACKED_ROWS if self._packs else 1
            return self._decode(cache, steps, -(-len(steps) // multiple) * multiple)
        size = self._bitwise_group
        groups = [steps[i : i + size] for i in range(0, len(steps), size)]
        return torch.cat([self._decode(cache, group, size) for group in groups])

    def _decode(self, cache: PagedCache, steps: Sequence[SequenceStep], rows: int) -> Tensor:
        attention: AttentionStep
        if self.block_tables:
            attention = VarlenStep(cache, steps, rows, batch_invariant=self.bitwise)
        else:
            attention = DecodeStep(cache, steps, rows)
        padding = [0] * (rows - len(steps))
        ids = [*(step.token_ids[0] for step in steps), *padding]
        with self._packed:
            logits = self._run(attention, ids, [*(step.past for step in steps), *padding], last_only=False)
        return logits[: len(steps)]

    def _run(self, attention: AttentionStep, ids: Sequence[int], positions: Sequence[int], *, last_only: bool) -> Tensor:
        if self._thread != threading.get_ident():
            # In OpenMP the number of threads belongs to the calling thread, and results depend on it to the bit.
            self._thread = threading.get_ident()
            torch.set_num_threads(self._threads)
        device = self.model.device
        with torch.inference_mode(), interface.running(attention):
            out = self.model(
                input_ids=torch.tensor([list(ids)], device=device),
                position_ids=torch.tensor([list(positions)], device=device),
                use_cache=False,
                logits_to_keep=int(last_only),  # 0 keeps all
            )
            return out.logits[0].float()


def _has_experts(model: PreTrainedModel) -> bool:
    """transformers stacks the weights of all experts of a layer in one parameter ``[experts, out, in]``."""
    return any(parameter.dim() == 3 for parameter in model.parameters())
