"""What hardware and model really cost, in the simulated world. The scheduler is never told: it learns from reports, as in
life."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

FOLDER: Final = files("cluster.simulator") / "profiles"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ProfileError(ValueError):
    """A profile that is not there or not whole; the text names the profile and the field."""


class Profile(BaseModel):
    """One node: its accelerators as one, its model, its links. Seconds, bytes, tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    source: str
    """Where the figures come from."""
    kv_bytes_per_token: Annotated[int, Field(gt=0)]
    prefill_s_per_token: Positive
    """a of ``T(n, p) = a·n + b·n·(n + 2p)`` for n tokens after p."""
    prefill_s_per_token_position: NotNegative
    """b."""
    prefill_s_per_piece: NotNegative
    """Fixed cost of one forward."""
    chunk_tokens: Annotated[int, Field(gt=0)]
    """Prefill works in pieces that end at multiples of this."""
    decode_s: Positive
    decode_s_per_sequence: NotNegative
    decode_s_per_context_token: NotNegative
    """A step takes ``decode_s + decode_s_per_sequence · sequences + decode_s_per_context_token · context tokens``."""
    device_tokens: Annotated[int, Field(gt=0)]
    """Tokens of K/V that the accelerators hold."""
    batch_max: Annotated[int, Field(gt=0)]
    nic_bytes_per_s: Positive
    """Each way."""
    device_copy_bytes_per_s: Positive
    """Between the node's DRAM and its accelerators."""
    ssd_read_bytes_per_s: Positive
    ssd_write_bytes_per_s: Positive
    latency_s: NotNegative
    """Of one message."""

    def prefill_s(self, tokens: int, past: int) -> float:
        """Seconds to compute ``tokens`` after ``past`` in one piece."""
        work = tokens * (self.prefill_s_per_token + self.prefill_s_per_token_position * (tokens + 2 * past))
        return self.prefill_s_per_piece + work

    def step_s(self, sequences: int, context_tokens: float) -> float:
        """Seconds of one decode step."""
        return self.decode_s + self.decode_s_per_sequence * sequences + self.decode_s_per_context_token * context_tokens


def profile_names() -> list[str]:
    return sorted(entry.name.removesuffix(".yaml") for entry in FOLDER.iterdir() if entry.name.endswith(".yaml"))


def load_profile(name: str) -> Profile:
    """The profile called ``name``, or the one in the file ``name`` (``*.yaml``). Raises ProfileError."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise ProfileError(f"profile: there is no file {name!r}")
        text = path.read_text(encoding="utf-8")
    elif name in profile_names():
        text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    else:
        raise ProfileError(f"profile: there is no {name!r}; known are: {', '.join(profile_names())} (or give a .yaml file)")
    try:
        return Profile.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ProfileError(f"profile {name}: not YAML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "profile"
        raise ProfileError(f"profile {name}: {field}: {first['msg']}") from error
