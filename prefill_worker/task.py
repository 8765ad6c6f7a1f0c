"""What a prefill worker accepts, and what it reports. No torch: the scheduler and the gateway import this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from engine.sampling.params import SamplingParams
from engine.serving.addresses import BlockSource, TokenSink
from kv_pool.keys import BlockKey

PATIENCE: Final = 5.0
"""Seconds of waiting that one second of work is worth."""
PRIORITY_S: Final = 10.0
"""Head start of one level of priority."""
HEAD_START_MAX_S: Final = 600.0

Order = Literal["shortest", "fcfs"]
Seconds = TypeVar("Seconds", float, NDArray[np.float64])


def precedence(order: Order, arrived_s: float, remaining_s: Seconds, priority: int) -> Seconds:
    """Which of the prompts at one worker goes first: the smallest. Workers sort by it, and the scheduler foresees with it.

    ``shortest``: ``arrived + PATIENCE · remaining - head start``. Mean time to first token is least when the shortest remaining
    work goes first (SRPT), but then long prompts may wait for ever. Here each second of waiting counts as 1/PATIENCE seconds less
    of work, so a prompt of ``w`` seconds is overtaken only by what comes within ``PATIENCE · w`` seconds after it. ``fcfs``:
    ``arrived - head start``. The head start of a priority is bounded too: nothing starves."""
    start = arrived_s - min(max(priority * PRIORITY_S, -HEAD_START_MAX_S), HEAD_START_MAX_S)
    return cast(Seconds, start + PATIENCE * remaining_s if order == "shortest" else start + 0.0 * remaining_s)


class PrefillSettings(BaseModel):
    """The ``prefill:`` section of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workers: Annotated[int, Field(ge=1, le=1024, description="Prefill workers in the cluster.")] = 1
    threads: Annotated[int, Field(ge=0, description="Compute threads of one worker; 0 shares the cores out.")] = 0
    device_cache: Annotated[str, Field(description="Size of a worker's paged KV cache (bytes, or with KiB/MiB/GiB).")] = "1GiB"
    waiting_max: Annotated[int, Field(ge=1, description="Requests that may wait at one worker before it refuses.")] = 64
    running_max: Annotated[int, Field(ge=1, description="Prompts interleaved by chunk at one worker.")] = 4
    order: Annotated[
        Order,
        Field(description="Which prompt computes next: the shortest, aged so that none starves, or first come, first served."),
    ] = "shortest"
    load_timeout_s: Annotated[float, Field(gt=0, description="A cached prefix not loaded by then is recomputed.")] = 5.0
    publish_timeout_s: Annotated[float, Field(gt=0, description="A handoff not stored by then fails and is planned again.")] = (
        10.0
    )


@dataclass(frozen=True, slots=True)
class Abort:
    """Inbox item: the gateway no longer wants this attempt."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class PrefillTask:
    """Compute the KV of ``token_ids`` and draw the next token.

    ``token_ids`` is the prompt, followed on a later attempt by the ``answered`` tokens that the client already has.
    ``keys`` name its full blocks in order (``len(token_ids) // block_tokens`` of them). The first ``cached_blocks`` are believed
    to be in the pool at ``source`` (None: at the worker's own node); being wrong costs a recompute only.
    ``tail_key`` is where the tokens after the last full block, and the first answer token, are handed over.
    ``budget_s`` is what is left of the request's own deadline when the task is sent. ``hand_over`` is False where the answer ends
    with this token (max_new_tokens == 1).
    """

    request_id: str
    attempt: int
    token_ids: tuple[int, ...]
    answered: int
    keys: tuple[BlockKey, ...]
    cached_blocks: int
    source: BlockSource | None
    tail_key: BlockKey
    hand_over: bool
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    sink: TokenSink
    budget_s: float
    priority: int = 0
    reusable_only_at_chunks: bool = False
    """``reuse: bitwise``: cached blocks count only up to a multiple of chunk_tokens."""
    load_max_blocks: int | None = None
    """Blocks after these are computed, cached or not, since that is sooner. None: load all that there are."""


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """A prefill worker's report, part of each heartbeat. ``running`` are loading or computing; one that is computed and only
    hands over is in ``finished`` and counts no more. ``queued_tokens`` are tokens still to compute, running included.
    ``finished`` are the (request_id, attempt, computed tokens, past tokens, compute seconds) since the last report, at most
    256. ``loads`` are the (bytes from DRAM, from SSD, from a remote DRAM, from a remote SSD, seconds) of loads ended since, at
    most 256."""

    waiting: int
    running: int
    queued_tokens: int
    finished: tuple[tuple[str, int, int, int, float], ...] = ()
    loads: tuple[tuple[int, int, int, int, float], ...] = ()
    piece_s: float = 0.0
    """Mean time of recent pieces (0: none yet): what is under way is not interrupted for what is shorter."""

    def to_wire(self) -> dict[str, Any]:
        return {
            "waiting": self.waiting,
            "running": self.running,
            "queued_tokens": self.queued_tokens,
            "finished": [list(f) for f in self.finished],
            "loads": [list(entry) for entry in self.loads],
            "piece_s": self.piece_s,
        }

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> PrefillLoad:
        finished = tuple((str(f[0]), int(f[1]), int(f[2]), int(f[3]), float(f[4])) for f in data["finished"])
        loads = tuple((int(e[0]), int(e[1]), int(e[2]), int(e[3]), float(e[4])) for e in data.get("loads", ()))
        piece_s = float(data.get("piece_s", 0.0))
        return cls(int(data["waiting"]), int(data["running"]), int(data["queued_tokens"]), finished, loads, piece_s)
