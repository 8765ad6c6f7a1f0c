"""RoPE whose frequencies depend on the longest text of a call would make a token's K depend on its company: refused by name."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, PretrainedConfig

from engine.probe.refusal import UnsupportedModelError, refuse_by_config


def config_with(**rope: object) -> PretrainedConfig:
    return LlamaConfig(rope_parameters={"rope_theta": 10000.0, **rope})


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("nested", [False, True])
def test_length_dependent_rope_is_refused(kind: str, nested: bool):
    config = config_with(rope_type="default")
    own = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    config.rope_parameters = {"full_attention": own} if nested else own
    with pytest.raises(UnsupportedModelError, match=kind):
        refuse_by_config("some-model", config)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_rope_that_depends_on_the_position_alone_is_served(kind: str):
    config = config_with(rope_type="default")
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    refuse_by_config("some-model", config)
