"""Models that can't be served are refused by name and reason, before they answer anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention import interface
from engine.attention.options import AttentionOptions
from engine.engine import Engine, UnsupportedModelError
from engine.models.files import ModelFiles
from engine.settings import ModelSettings
from tests.engine.tiny_models import build, load, save

RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4},
    "qwen3_next": {
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "jamba": {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
}
NO_INTERFACE: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global"], 4]]},
}
OTHER_MASKS: dict[str, dict[str, Any]] = {
    "llama4_text": {"head_dim": 16, "num_local_experts": 2, "attention_chunk_size": 16, "intermediate_size_mlp": 48},
}


@pytest.mark.parametrize("model_type", [*RECURRENT, *NO_INTERFACE, *OTHER_MASKS])
def test_refused_with_a_reason(model_type: str, tmp_path: Path) -> None:
    changes = {**RECURRENT, **NO_INTERFACE, **OTHER_MASKS}[model_type]
    with pytest.raises(UnsupportedModelError, match="model tiny can't be served: ") as refusal:
        load(build(model_type, **changes), tmp_path)
    assert refusal.value.name == "tiny"
    assert model_type.removesuffix("_text") in refusal.value.reason


def test_an_encoder_decoder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config(d_model=16, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        Engine.load(ModelFiles(tmp_path, "tiny", "00", "float32"), ModelSettings(device="cpu"), cache_bytes=1 << 20, threads=1)


@pytest.mark.parametrize(
    ("family", "broken"),
    [
        ("mistral", lambda options: options._replace(window=None)),
        ("mistral", lambda options: options._replace(window=options.window + 1)),
        ("gemma2", lambda options: options._replace(softcap=None)),
        ("gpt_oss", lambda options: options._replace(sinks=None)),
        ("llama", lambda options: options._replace(scale=options.scale * 1.05)),
    ],
    ids=["no window", "window off by one", "no soft cap", "no sinks", "scale"],
)
def test_the_self_test_catches(family: str, broken: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "AttentionOptions", lambda *fields: broken(AttentionOptions(*fields)))
    with pytest.raises(UnsupportedModelError, match="not computed right"):
        load(build(family), tmp_path)


def test_the_self_test_catches_logits_that_are_no_numbers(tmp_path: Path) -> None:
    model = build("llama")
    with torch.no_grad():
        model.get_parameter("model.norm.weight").fill_(torch.nan)
    with pytest.raises(UnsupportedModelError, match="not computed right"):
        load(model, tmp_path)


def test_settings_that_cannot_work_are_named(tmp_path: Path) -> None:
    files = save(build("llama"), tmp_path)
    with pytest.raises(ValueError, match="chunk_tokens 24 is not a multiple of block_tokens 16"):
        Engine.load(files, ModelSettings(chunk_tokens=24, block_tokens=16), cache_bytes=1 << 20, threads=1)
    with pytest.raises(ValueError, match="holds no block"):
        Engine.load(files, ModelSettings(device="cpu"), cache_bytes=100, threads=1)
