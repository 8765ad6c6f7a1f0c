"""How the next token is drawn. No torch here: the gateway and the scheduler carry these too."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

LOGPROBS_MAX = 20


class SamplingParams(BaseModel):
    """Of one request. ``temperature == 0`` is greedy. A draw is a fixed function of (``seed``, position in the answer), so
    neither company in the batch nor a move to another worker changes it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0, description="0 keeps every token")] = 0
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    logprobs: Annotated[int | None, Field(ge=0, le=LOGPROBS_MAX, description="alternatives reported, None for no logprobs")] = (
        None
    )
    ignore_eos: bool = False
