"""Models that can't be served, refused by name and with the reason."""

from __future__ import annotations

from typing import Final

from transformers import PretrainedConfig

SUPPORTED_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})
"""Kinds of ``config.layer_types`` whose whole state is the K/V of their tokens, and whose mask is a causal window."""


LENGTH_DEPENDENT_ROPE: Final = frozenset({"longrope", "dynamic"})
"""Kinds of RoPE whose frequencies transformers picks by the longest position of the whole call. Here a call is a piece of a
prompt, or one token each of strangers, so the K of a token would depend on its company: wrong for the model, and wrong in every
block that is stored."""


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
    varying = sorted(rope_kinds(getattr(config.get_text_config(decoder=True), "rope_parameters", None)) & LENGTH_DEPENDENT_ROPE)
    if varying:
        raise UnsupportedModelError(
            name,
            f"{config.model_type} rotates by the length of the whole text ({', '.join(varying)} RoPE): "
            "the K of a token would depend on what comes after it",
        )
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    strange = sorted({str(kind) for kind in kinds} - SUPPORTED_LAYERS)
    if strange:
        raise UnsupportedModelError(
            name,
            f"{config.model_type} has layers of kind {', '.join(strange)}; "
            f"only {' and '.join(sorted(SUPPORTED_LAYERS))} layers keep all their state as K/V blocks",
        )


def rope_kinds(parameters: object) -> set[str]:
    """The ``rope_type`` of all layers; parameters may be nested by kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    own = {str(parameters["rope_type"])} if "rope_type" in parameters else set[str]()
    return own.union(*(rope_kinds(value) for value in parameters.values()))
