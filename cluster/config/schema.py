"""The configuration of a cluster: one frozen model per section, and the checks that span sections."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cluster.gateway.settings import GatewaySettings
from decode_worker.task import DecodeSettings
from engine.settings import ModelSettings
from kv_pool.settings import PoolSettings, SsdSettings
from kv_pool.sizes import parse_size
from prefill_worker.task import PrefillSettings
from scheduler.admission.classes import parse_classes
from scheduler.plan import SchedulerSettings

SIZES: Final = frozenset({"prefill.device_cache", "decode.device_cache", "pool.dram", "ssd.capacity", "ssd.segment", "ssd.batch"})
"""Keys whose value is a size ('2GiB', or plain bytes)."""
SECRETS: Final = frozenset({"gateway.admin_keys", "gateway.api_keys"})
"""Keys whose value is never shown."""
SSD_SEGMENT_BYTES_MIN: Final = 2**20
SSD_SEGMENTS_MIN: Final = 4
"""Besides two for each retention class: one that is being filled, and one that may die for it."""


class ClusterSettings(BaseModel):
    """Where the cluster runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: Annotated[
        str, Field(description="Ray cluster to join ('auto' or host:port); empty starts a Ray of its own on this machine.")
    ] = ""
    namespace: Annotated[
        str, Field(min_length=1, max_length=128, description="Ray namespace of all actors: one cluster per namespace.")
    ] = "moonpool"
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"], Field(description="Least severe level that the processes log.")
    ] = "WARNING"


class ClusterConfig(BaseModel):
    """Everything that can be set. ``docs/configuration.md`` is made from these models."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelSettings = Field(default_factory=ModelSettings)
    prefill: PrefillSettings = Field(default_factory=PrefillSettings)
    decode: DecodeSettings = Field(default_factory=DecodeSettings)
    pool: PoolSettings = Field(default_factory=PoolSettings)
    ssd: SsdSettings = Field(default_factory=SsdSettings)
    scheduler: SchedulerSettings = Field(default_factory=SchedulerSettings)
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    cluster: ClusterSettings = Field(default_factory=ClusterSettings)

    @model_validator(mode="after")
    def _check(self) -> ClusterConfig:
        problems = [*self._bad_sizes(), *self._unbounded(), *self._bad_classes(), *self._conflicts()]
        problems = problems or [*self._ssd_conflicts()]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _bad_sizes(self) -> Iterator[str]:
        for key in sorted(SIZES):
            section, _, name = key.partition(".")
            try:
                parse_size(getattr(getattr(self, section), name))
            except ValueError as error:
                yield f"{key}: {error}"

    def _unbounded(self) -> Iterator[str]:
        for section in ClusterConfig.model_fields:
            for name, value in getattr(self, section):
                if isinstance(value, float) and not math.isfinite(value):
                    yield f"{section}.{name}: {value} is not a finite number (every wait has a limit)"

    def _bad_classes(self) -> Iterator[str]:
        try:
            parse_classes(self.scheduler.classes)
        except ValueError as error:
            yield str(error)

    def _conflicts(self) -> Iterator[str]:
        model, scheduler, pool = self.model, self.scheduler, self.pool
        if model.block_tokens & (model.block_tokens - 1):
            yield f"model.block_tokens: {model.block_tokens} is not a power of two"
        if model.chunk_tokens % model.block_tokens:
            yield f"model.chunk_tokens: {model.chunk_tokens} is not a multiple of model.block_tokens ({model.block_tokens})"
        if not scheduler.heartbeat_s < scheduler.suspect_after_s < scheduler.dead_after_s:
            yield (
                f"scheduler.suspect_after_s: {scheduler.suspect_after_s:g} must be over scheduler.heartbeat_s "
                f"({scheduler.heartbeat_s:g}) and under scheduler.dead_after_s ({scheduler.dead_after_s:g})"
            )
        if pool.client_dead_s > pool.lease_s:
            yield f"pool.client_dead_s: {pool.client_dead_s:g} is over pool.lease_s ({pool.lease_s:g}), so it would never count"
        most = max(self.prefill.workers, self.decode.workers)
        if pool.nodes > most:
            yield (
                f"pool.nodes: {pool.nodes} is more than the workers of either kind can use "
                f"(prefill.workers {self.prefill.workers}, decode.workers {self.decode.workers})"
            )

    def _ssd_conflicts(self) -> Iterator[str]:
        ssd = self.ssd
        capacity, segment = parse_size(ssd.capacity), parse_size(ssd.segment)
        if segment < SSD_SEGMENT_BYTES_MIN:
            yield f"ssd.segment: {ssd.segment} is under 1MiB"
        elif capacity // segment < (least := SSD_SEGMENTS_MIN + 2 * len(self.pool.retention)):
            yield (
                f"ssd.capacity: {ssd.capacity} holds fewer than {least} segments of ssd.segment ({ssd.segment}), which "
                f"{len(self.pool.retention)} classes (pool.retention) need"
            )
        if parse_size(ssd.batch) > segment:
            yield f"ssd.batch: {ssd.batch} is over ssd.segment ({ssd.segment})"
        if ssd.directory and self.pool.nodes > 1 and "{node}" not in ssd.directory:
            yield "ssd.directory: several nodes (pool.nodes) need '{node}' in it: each has a directory of its own"
