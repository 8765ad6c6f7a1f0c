"""Tiny random models of the families that are promised, each with the trait that makes it special."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.engine import Engine
from engine.models.files import ModelFiles
from engine.settings import ModelSettings

VOCABULARY = 211
WINDOW = 24

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large enough that greedy choices are far apart
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {"head_dim": 16, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {  # K and V of different sizes
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
    },
}


def build(model_type: str, **changes: Any) -> PreTrainedModel:
    """A random model, the same each time, in its own eager attention."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(model_type, **{**_COMMON, **FAMILIES.get(model_type, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    return model


def save(model: PreTrainedModel, folder: Path, dtype: str = "float32") -> ModelFiles:
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return ModelFiles(folder, "tiny", "00", dtype)


def load(model: PreTrainedModel, folder: Path, dtype: str = "float32", *, pack_weights: bool = False, **settings: Any) -> Engine:
    chosen = ModelSettings(**{"block_tokens": 8, "chunk_tokens": 16, "device": "cpu", **settings})
    return Engine.load(save(model, folder, dtype), chosen, cache_bytes=4 << 20, threads=1, pack_weights=pack_weights)
