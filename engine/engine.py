"""A model and its paged K/V cache: tokens in, logits out.

The model is transformers' own class, unmodified; only its attention function is ours (``engine.attention``). Several sequences
go through it as one packed row of tokens with explicit positions, no mask and no cache object; what belongs to whom only the
attention knows. One forward at a time, from one thread.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from engine.attention import interface
from engine.attention.steps import AttentionStep, DecodeStep, PieceStep
from engine.cache.paged import PagedCache
from engine.models.files import ModelFiles
from engine.models.placement import effective_device
from engine.probe.refusal import UnsupportedModelError, refuse_by_config
from engine.probe.shapes import probe
from engine.settings import ModelSettings, Reuse
from kv_pool.layout import BlockLayout

__all__ = ["Engine", "SequenceStep", "UnsupportedModelError"]

BITWISE_ROWS: Final = 16
"""Rows of every decode forward in bitwise mode. Matrix kernels round differently by the number of rows, so it must not depend on
company."""


@dataclass(slots=True)
class SequenceStep:
    """The next ``token_ids`` of a sequence that has ``past`` tokens in the cache. ``blocks`` are the sequence's, in order, and
    cover ``past + len(token_ids)`` tokens."""

    token_ids: Sequence[int]
    past: int
    blocks: Sequence[int]


class Engine:
    """``layout``: a block's form. ``chunk_tokens``: prefill pieces end at its multiples. ``context_max``: longest sequence in
    tokens. ``reads_block_tables``: attention reads scattered blocks as cheaply as a run."""

    def __init__(
        self, model: PreTrainedModel, layout: BlockLayout, files: ModelFiles, settings: ModelSettings, *, blocks: int, threads: int
    ) -> None:
        self._model = model
        self._fingerprint = files.fingerprint
        self._threads = threads
        self._thread = 0
        self._reuse = settings.reuse
        self.name = files.name
        self.layout = layout
        self.chunk_tokens = settings.chunk_tokens
        self.device = str(model.device)
        self.dtype = layout.dtype
        self.context_max = _context_max(model.config, settings)
        self.cache = PagedCache(layout, blocks, model.device)
        self.reads_block_tables = False

    @classmethod
    def load(cls, files: ModelFiles, settings: ModelSettings, *, cache_bytes: int, threads: int) -> Engine:
        """Map the weights, probe and test the model, set up a cache of at most ``cache_bytes``; compute on ``threads`` threads.

        Raises UnsupportedModelError, and ValueError where the cache is too small or chunks don't end at block borders.
        """
        if settings.chunk_tokens % settings.block_tokens:
            raise ValueError(f"chunk_tokens {settings.chunk_tokens} is not a multiple of block_tokens {settings.block_tokens}")
        torch.set_num_threads(threads)
        model = _load_model(files, effective_device(settings))
        shapes, _ = probe(files.name, model)
        layout = BlockLayout(shapes, settings.block_tokens, files.dtype)
        blocks = cache_bytes // layout.block_bytes
        if blocks < 1:
            raise ValueError(f"a KV cache of {cache_bytes} bytes holds no block of {layout.block_bytes} bytes")
        return cls(model, layout, files, settings, blocks=blocks, threads=threads)

    def identity(self) -> list[tuple[str, str]]:
        """All that must agree before two workers may share a block: the parts of ``kv_pool.keys.cache_root``."""
        config = self._model.config.get_text_config(decoder=True)
        parts = [
            ("fingerprint", self._fingerprint),
            ("architecture", type(self._model).__name__),
            ("layout", self.layout.digest()),
            ("block_tokens", str(self.layout.block_tokens)),
            ("reuse", self._reuse.value),
            ("chunk_tokens", str(self.chunk_tokens)),
            ("rope", json.dumps(getattr(config, "rope_parameters", None), sort_keys=True, default=str)),
            ("adapter", "none"),
        ]
        if self._reuse is Reuse.BITWISE:
            # The same bits only come from the same kernels.
            parts.append(("kernels", f"{torch.__version__} {self.device} {torch.backends.cpu.get_cpu_capability()}"))
        return parts

    def forward(self, steps: Sequence[SequenceStep]) -> Tensor:
        """Logits ``[len(steps), vocab]`` float32 after each step's last token; the new tokens' K/V is then in the cache.

        A piece of several tokens always runs alone. Single tokens run together; in bitwise mode in forwards of exactly
        ``BITWISE_ROWS`` rows.
        """
        self._use_threads()
        single = [i for i, step in enumerate(steps) if len(step.token_ids) == 1]
        group = BITWISE_ROWS if self._reuse is Reuse.BITWISE else max(1, len(single))
        with torch.inference_mode():
            if len(single) == len(steps) <= group:
                return self._decode(steps)
            logits = torch.empty(len(steps), self._model.config.get_text_config(decoder=True).vocab_size, device=self.device)
            for begin in range(0, len(single), group):
                rows = single[begin : begin + group]
                logits[rows] = self._decode([steps[i] for i in rows])
            for i, step in enumerate(steps):
                if len(step.token_ids) > 1:
                    logits[i] = self._piece(step)
            return logits

    # --- inside ----------------------------------------------------------------------------------------------------------

    def _piece(self, step: SequenceStep) -> Tensor:
        count = len(step.token_ids)
        attention = PieceStep(self.cache, step.past, count, step.blocks)
        return self._run(attention, step.token_ids, range(step.past, step.past + count), 1)[0]

    def _decode(self, steps: Sequence[SequenceStep]) -> Tensor:
        rows = BITWISE_ROWS if self._reuse is Reuse.BITWISE else len(steps)
        padding = [0] * (rows - len(steps))
        pasts = [step.past for step in steps]
        attention = DecodeStep(self.cache, pasts, [step.blocks for step in steps], rows)
        ids = [step.token_ids[0] for step in steps]
        return self._run(attention, [*ids, *padding], [*pasts, *padding], 0)[: len(steps)]

    def _run(self, attention: AttentionStep, ids: Sequence[int], positions: Sequence[int], keep: int) -> Tensor:
        """Logits of the last ``keep`` rows (0: of all), ``[rows, vocab]`` float32."""
        with interface.running(attention):
            out = self._model(
                input_ids=torch.tensor([ids], device=self.device),
                position_ids=torch.tensor([positions], device=self.device),
                use_cache=False,
                logits_to_keep=keep,
            )
        return out.logits[0].float()

    def _use_threads(self) -> None:
        """The number of threads is a property of the calling thread in OpenMP; results depend on it to the bit."""
        if self._thread != threading.get_ident():
            self._thread = threading.get_ident()
            torch.set_num_threads(self._threads)


def _load_model(files: ModelFiles, device: str) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(files.path)
    refuse_by_config(files.name, config)
    dtype = getattr(torch, files.dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(files.path, dtype=dtype, attn_implementation=interface.NAME)
    except ValueError as error:
        raise UnsupportedModelError(files.name, f"{config.model_type}: {error}") from error
    return model.to(device).eval()


def _context_max(config: PretrainedConfig, settings: ModelSettings) -> int:
    own = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    limits = [limit for limit in (own, settings.context_max) if limit]
    if not limits:
        raise ValueError("the model states no longest context: set model.context_max")
    return min(limits)
