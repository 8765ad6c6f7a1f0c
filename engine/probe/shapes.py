"""Shape of each layer's K and V, seen in a run of a few tokens rather than read from a configuration: the names there differ
from family to family, and the model's own calls are the truth."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.attention import kernels
from engine.attention.interface import UnsupportedAttentionError, running
from engine.attention.options import AttentionOptions
from engine.probe.refusal import UnsupportedModelError
from kv_pool.layout import LayerShape

PROBE_TOKENS: Final = 3


class _Recorder:
    """An attention step that keeps no K/V: it notes what passes, and attends causally so that the pass goes on."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.options: dict[int, AttentionOptions] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        self.shapes[layer] = LayerShape(kv_heads=k.shape[1], k_dim=k.shape[3], v_dim=v.shape[3])
        self.options[layer] = options
        return kernels.attention(q, k, v, options, causal=True).transpose(1, 2)


def probe(name: str, model: PreTrainedModel) -> tuple[tuple[LayerShape, ...], tuple[AttentionOptions, ...]]:
    """Shape and options of every layer, in order. Raises UnsupportedModelError where a layer keeps no K/V of its own."""
    recorder = _Recorder()
    ids = torch.arange(1, PROBE_TOKENS + 1, device=model.device).unsqueeze(0)
    positions = torch.arange(PROBE_TOKENS, device=model.device).unsqueeze(0)
    try:
        with torch.inference_mode(), running(recorder):
            model(input_ids=ids, position_ids=positions, use_cache=False)
    except UnsupportedAttentionError as error:
        raise UnsupportedModelError(name, str(error)) from error
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    missing = sorted(set(range(layers)) - recorder.shapes.keys())
    if not recorder.shapes:
        raise UnsupportedModelError(name, f"{model.config.model_type} doesn't use transformers' attention interface")
    if missing or len(recorder.shapes) != layers:
        raise UnsupportedModelError(
            name, f"{model.config.model_type}: {len(missing) or 'unknown'} of {layers} layers keep a state other than K/V"
        )
    return (
        tuple(recorder.shapes[layer] for layer in range(layers)),
        tuple(recorder.options[layer] for layer in range(layers)),
    )
