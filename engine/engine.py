"""A model and its paged K/V cache: tokens in, logits out.

The model is transformers' own class, unmodified; only its attention function is ours (``engine.attention``). Several sequences
go through it as one packed row of tokens with explicit positions, no mask and no cache object; what belongs to whom only the
attention knows. One forward at a time, from one thread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from engine.attention import interface, varlen
from engine.attention.steps import SequenceStep
from engine.cache.paged import PagedCache
from engine.models.files import ModelFiles
from engine.models.placement import effective_device
from engine.packing import PackedLinears
from engine.probe.refusal import UnsupportedModelError, refuse_by_config
from engine.probe.self_test import self_test
from engine.probe.shapes import probe
from engine.runner import ModelRunner
from engine.settings import ModelSettings, Reuse
from kv_pool.layout import BlockLayout

__all__ = ["Engine", "SequenceStep", "UnsupportedModelError"]


class Engine:
    """``layout``: a block's form. ``chunk_tokens``: prefill pieces end at its multiples. ``context_max``: longest sequence in
    tokens. ``reads_block_tables``: attention reads scattered blocks as cheaply as a run."""

    def __init__(
        self, runner: ModelRunner, layout: BlockLayout, files: ModelFiles, settings: ModelSettings, *, cache_bytes: int
    ) -> None:
        blocks = cache_bytes // layout.block_bytes
        if blocks < 1:
            raise ValueError(f"a KV cache of {cache_bytes} bytes holds no block of {layout.block_bytes} bytes")
        self._runner = runner
        self._fingerprint = files.fingerprint
        self._reuse = settings.reuse
        self.layout = layout
        self.chunk_tokens = settings.chunk_tokens
        self.device = str(runner.model.device)
        self.dtype = layout.dtype
        self.context_max = _context_max(runner.model.config, settings)
        self.reads_block_tables = runner.block_tables
        self.cache = PagedCache(layout, blocks, runner.model.device)

    @classmethod
    def load(
        cls, files: ModelFiles, settings: ModelSettings, *, cache_bytes: int, threads: int, pack_weights: bool = False
    ) -> Engine:
        """Map the weights, probe and test the model, set up a cache of at most ``cache_bytes``; compute on ``threads`` threads.

        ``pack_weights``: keep a private copy of the weights that makes decode faster (see ``engine.packing``).
        Raises UnsupportedModelError, and ValueError where the cache is too small or chunks don't end at block borders.
        """
        if settings.chunk_tokens % settings.block_tokens:
            raise ValueError(f"chunk_tokens {settings.chunk_tokens} is not a multiple of block_tokens {settings.block_tokens}")
        torch.set_num_threads(threads)
        model = _load_model(files, effective_device(settings))
        shapes, options = probe(files.name, model)
        layout = BlockLayout(shapes, settings.block_tokens, files.dtype)
        runner = ModelRunner(
            model,
            threads=threads,
            bitwise=settings.reuse is Reuse.BITWISE,
            packed=PackedLinears(model) if pack_weights else None,
            block_tables=varlen.why_not(model.device, layout, options) is None,
        )
        if settings.self_test:
            self_test(files.name, runner, layout, options)
        return cls(runner, layout, files, settings, cache_bytes=cache_bytes)

    def identity(self) -> list[tuple[str, str]]:
        """All that must agree before two workers may share a block: the parts of ``kv_pool.keys.cache_root``."""
        model = self._runner.model
        config = model.config.get_text_config(decoder=True)
        parts = [
            ("fingerprint", self._fingerprint),
            ("architecture", type(model).__name__),
            ("layout", self.layout.digest()),
            ("block_tokens", str(self.layout.block_tokens)),
            ("reuse", self._reuse.value),
            ("chunk_tokens", str(self.chunk_tokens)),
            ("rope", json.dumps(getattr(config, "rope_parameters", None), sort_keys=True, default=str)),
            ("adapter", "none"),
        ]
        if self._reuse is Reuse.BITWISE:
            # The same bits come from the same kernels only.
            parts.append(("kernels", f"{torch.__version__} {model.device.type} {torch.backends.cpu.get_cpu_capability()}"))
        return parts

    def forward(self, steps: Sequence[SequenceStep]) -> Tensor:
        """Logits ``[len(steps), vocab]`` float32 after each step's last token; the new tokens' K/V is then in the cache.

        A piece of several tokens always runs alone; steps of one token run together. Steps of one call are of different
        sequences.
        """
        single = [i for i, step in enumerate(steps) if len(step.token_ids) == 1]
        if len(single) == len(steps):
            return self._runner.decode(self.cache, steps)
        rows: dict[int, Tensor] = {}
        if single:
            rows.update(zip(single, self._runner.decode(self.cache, [steps[i] for i in single]), strict=True))
        for i, step in enumerate(steps):
            if i not in rows:
                rows[i] = self._runner.piece(self.cache, step)[0]
        return torch.stack([rows[i] for i in range(len(steps))])


def _load_model(files: ModelFiles, device: str) -> PreTrainedModel:
    """The weights as mapped pages that all processes share: nothing is converted on the way."""
    disable_progress_bar()
    config = AutoConfig.from_pretrained(files.path)
    refuse_by_config(files.name, config)
    dtype = getattr(torch, files.dtype)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(files.path, dtype=dtype)
        model.set_attn_implementation(interface.NAME)
    except ValueError as error:
        raise UnsupportedModelError(files.name, f"{config.model_type}: {error}") from error
    return model.to(torch.device(device)).eval()


def _context_max(config: PretrainedConfig, settings: ModelSettings) -> int:
    own = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    limits = [limit for limit in (own, settings.context_max) if limit]
    if not limits:
        raise ValueError("the model states no longest context: set model.context_max")
    return min(limits)
