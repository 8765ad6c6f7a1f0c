"""The ``model:`` section of the configuration."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Reuse(StrEnum):
    """When a cached block may stand for a computed one (DESIGN: canonical chunks)."""

    BLOCK = "block"  # at any block border: equal to a cold run up to rounding
    BITWISE = "bitwise"  # at chunk borders, and only what prefill computed: equal bit for bit


class ModelSettings(BaseModel):
    """Which model runs, and how."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Annotated[str, Field(description="Model: 'smollm2' (the default), a Hugging Face id, a folder, or a .gguf file.")] = (
        "smollm2"
    )
    served_name: Annotated[str, Field(description="Name in the API; empty takes it from the source.")] = ""
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Field(description="Where the model runs; auto takes CUDA where there is one.")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(description="Compute and KV type; auto is float32 on CPU, bfloat16 on CUDA."),
    ] = "auto"
    block_tokens: Annotated[int, Field(ge=1, le=4096, description="Tokens of a KV block, a power of two.")] = 64
    chunk_tokens: Annotated[int, Field(ge=1, le=65536, description="Tokens of a prefill piece, a multiple of block_tokens.")] = (
        256
    )
    reuse: Annotated[Reuse, Field(description="When a cached block may stand for a computed one: block or bitwise.")] = (
        Reuse.BLOCK
    )
    context_max: Annotated[int, Field(ge=0, description="Longest prompt + answer in tokens; 0 takes the model's own limit.")] = 0
    self_test: Annotated[bool, Field(description="Check the attention path against the model's own at load.")] = True
