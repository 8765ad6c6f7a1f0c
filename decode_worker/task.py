"""What a decode worker accepts, and what it reports. No torch: the scheduler and the gateway import this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from engine.sampling.params import SamplingParams
from engine.serving.addresses import BlockSource, TokenSink
from kv_pool.keys import BlockKey, CacheRoot


class DecodeSettings(BaseModel):
    """The ``decode:`` section of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workers: Annotated[int, Field(ge=1, le=1024, description="Decode workers in the cluster.")] = 1
    threads: Annotated[int, Field(ge=0, description="Compute threads of one worker; 0 shares the cores out.")] = 0
    device_cache: Annotated[str, Field(description="Size of a worker's paged KV cache (bytes, or with KiB/MiB/GiB).")] = "2GiB"
    waiting_max: Annotated[int, Field(ge=1, description="Requests that may wait at one worker before it refuses.")] = 128
    batch_max: Annotated[int, Field(ge=1, le=1024, description="Sequences decoded together.")] = 32
    handoff_timeout_s: Annotated[
        float,
        Field(
            gt=0,
            description="Silence of the prefill side after which a handoff fails and the request is planned again.",
        ),
    ] = 60.0
    write_back: Annotated[bool, Field(description="Put generated blocks in the pool so that the next turn hits.")] = True


@dataclass(frozen=True, slots=True)
class Abort:
    """Inbox item: the gateway no longer wants this attempt."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class DecodeTask:
    """Continue a prompt from its prefilled blocks.

    ``token_ids`` (prompt, then on a later attempt the ``answered`` tokens) has ``len(keys)`` full blocks, which come from the
    pool
    under ``keys`` as the prefill worker publishes them at ``source`` (None: the worker's own node); the rest and the first token
    come under ``tail_key``. ``max_new_tokens`` counts the whole answer, ``answered`` included.
    ``root`` lets the worker name the blocks that it generates. ``budget_s`` is what is left of the request's own deadline.
    """

    request_id: str
    attempt: int
    token_ids: tuple[int, ...]
    answered: int
    keys: tuple[BlockKey, ...]
    tail_key: BlockKey
    source: BlockSource | None
    root: CacheRoot
    max_new_tokens: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    sink: TokenSink
    budget_s: float
    write_back: bool = True
    tpot_max_s: float | None = None
    """A step that would take longer once this sequence has joined refuses it there; None: no limit."""


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """A decode worker's report, part of each heartbeat. Sequences that are ``waiting`` have no blocks yet, those ``loading`` have
    them, those ``running`` are in the batch. ``step_s`` is the mean time of recent steps (0 when idle).
    ``finished`` are the (request_id, attempt) ended since the last report, at most 256. ``context_tokens`` are the tokens in the
    cache of the running sequences; ``steps`` are (sequences, context tokens, seconds) of steps since, at most 64."""

    waiting: int
    running: int
    free_blocks: int
    total_blocks: int
    step_s: float
    finished: tuple[tuple[str, int], ...] = ()
    batch_max: int = 1024
    """Sequences that can be active together: more would wait silently, so the scheduler gives it no more."""
    context_tokens: int = 0
    steps: tuple[tuple[int, int, float], ...] = ()
    loading: int = 0

    @property
    def sequences(self) -> int:
        return self.waiting + self.loading + self.running

    def to_wire(self) -> dict[str, Any]:
        return {
            "waiting": self.waiting,
            "running": self.running,
            "free_blocks": self.free_blocks,
            "total_blocks": self.total_blocks,
            "step_s": self.step_s,
            "finished": [list(f) for f in self.finished],
            "batch_max": self.batch_max,
            "context_tokens": self.context_tokens,
            "steps": [list(s) for s in self.steps],
            "loading": self.loading,
        }

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> DecodeLoad:
        return cls(
            int(data["waiting"]),
            int(data["running"]),
            int(data["free_blocks"]),
            int(data["total_blocks"]),
            float(data["step_s"]),
            tuple((str(f[0]), int(f[1])) for f in data["finished"]),
            int(data.get("batch_max", 1024)),
            int(data.get("context_tokens", 0)),
            tuple((int(s[0]), int(s[1]), float(s[2])) for s in data.get("steps", ())),
            int(data.get("loading", 0)),
        )
