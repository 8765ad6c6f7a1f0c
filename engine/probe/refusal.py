"""Models that can't be served, refused by name and with the reason."""

from __future__ import annotations

from typing import Final

from transformers import PretrainedConfig

SUPPORTED_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})
"""Kinds of ``config.layer_types`` whose whole state is the K/V of their tokens, and whose mask is a causal window."""


class UnsupportedModelError(Exception):
    """``name`` can't be served, because of ``reason``."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"model {name} can't be served: {reason}")
        self.name = name
        self.reason = reason


def refuse_by_config(name: str, config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError where the configuration alone says that it won't work: before any weight is read."""
    if config.is_encoder_decoder:
        raise UnsupportedModelError(name, f"{config.model_type} is an encoder-decoder")
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    strange = sorted({str(kind) for kind in kinds} - SUPPORTED_LAYERS)
    if strange:
        raise UnsupportedModelError(
            name,
            f"{config.model_type} has layers of kind {', '.join(strange)}; "
            f"only {' and '.join(sorted(SUPPORTED_LAYERS))} layers keep all their state as K/V blocks",
        )
