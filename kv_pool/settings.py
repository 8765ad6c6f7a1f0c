"""The ``pool:`` section of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kv_pool.sizes import parse_duration


class SsdSettings(BaseModel):
    """The SSD tier of a node. Each node needs a directory of its own: ``{node}`` in the path stands for the node's name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    directory: Annotated[
        str, Field(description="Where a node keeps its SSD log; `{node}` stands for the node's name. Empty: no SSD tier.")
    ] = ""
    capacity: Annotated[str, Field(description="SSD space of one node, taken up by preallocated segment files.")] = "64GiB"
    segment: Annotated[
        str, Field(description="Size of one segment file. A segment dies as a whole and is used again in place.")
    ] = "256MiB"
    dwpd: Annotated[
        float, Field(gt=0, description="Drive writes per day: capacity x dwpd bytes may be written in any 24 hours.")
    ] = 1.0
    threads: Annotated[int, Field(ge=1, le=64, description="Threads that read and write, so many operations in flight.")] = 4
    reads_in_flight: Annotated[int, Field(ge=1, le=1024, description="Blocks that may be read at a time.")] = 16
    writes_in_flight: Annotated[int, Field(ge=1, le=64, description="Group commits that may be under way at a time.")] = 4
    batch: Annotated[str, Field(description="Bytes of one group commit at most.")] = "32MiB"
    free_target: Annotated[
        float, Field(gt=0, lt=1, description="Share of DRAM kept free by moving blocks to the SSD ahead of need.")
    ] = 0.05
    hang_s: Annotated[float, Field(gt=0, description="A disk operation that takes longer shows a disk that hangs.")] = 10.0
    retry_s: Annotated[float, Field(gt=0, description="First pause before a disk that failed is tried again; doubles.")] = 2.0


class CurveSettings(BaseModel):
    """Keys of a process that talks to nodes off loopback."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    secret_key_file: str = ""
    allowed_keys: str = ""


class PoolSettings(BaseModel):
    """One pool node runs on each machine (several on one machine where ``nodes`` asks for it)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes: Annotated[int, Field(ge=1, le=1024, description="Pool nodes in the cluster.")] = 1
    dram: Annotated[str, Field(description="DRAM of one node's arena (bytes, or with KiB/MiB/GiB).")] = "2GiB"
    host: Annotated[str, Field(description="Address that a node binds; loopback unless set.")] = "127.0.0.1"
    curve_secret_key_file: Annotated[
        str,
        Field(
            description="File with this cluster's or node's CURVE key pair (`moonpool pool keys DIR` makes one); needed "
            "where `pool.host` is not loopback."
        ),
    ] = ""
    curve_allowed_keys: Annotated[
        str, Field(description="Directory of public keys (`*.key`), or one such file, that are let in beside the node's own.")
    ] = ""
    lease_s: Annotated[float, Field(gt=0, description="Life of a read lease and of a reservation that nobody renews.")] = 10.0
    client_dead_s: Annotated[
        float, Field(gt=0, description="Silence after which a worker's leases and reservations are taken back.")
    ] = 5.0
    handoff_ttl_s: Annotated[float, Field(gt=0, description="Life of a handed-over tail that nobody fetched.")] = 120.0
    fetch_inflight_blocks: Annotated[
        int, Field(ge=1, le=256, description="Blocks on the way from one other node at a time (credit window).")
    ] = 8
    waiting_acquires_max: Annotated[int, Field(ge=1, description="Acquires that may wait at a node.")] = 1024
    eviction: Annotated[Literal["lru", "lfu", "s3fifo", "sieve", "gdsf"], Field(description="Which blocks leave DRAM first.")] = (
        "lru"
    )
    pulled_copy: Annotated[
        Literal["goes_first", "stays"],
        Field(
            description="A block that another node has pulled goes first where DRAM is short, so that the nodes together hold"
            " more; or stays as long as any other."
        ),
    ] = "goes_first"
    retention: Annotated[
        tuple[str, ...],
        Field(
            min_length=1,
            max_length=64,
            description="Retention classes and how long their blocks live on SSD (s, m, h or d); the first is the default.",
        ),
    ] = ("chat=24h", "agent=4h", "coding=14d", "batch=1h")

    @field_validator("retention")
    @classmethod
    def _retention_is_sound(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = [name for name, _ in map(parse_retention, value)]
        if len(set(names)) != len(names):
            raise ValueError("each class once")
        return value

    @property
    def retention_classes(self) -> dict[str, float]:
        """Seconds that a block of each class lives on SSD, in order: a class's place is its number."""
        return dict(map(parse_retention, self.retention))

    @property
    def curve(self) -> CurveSettings:
        return CurveSettings(secret_key_file=self.curve_secret_key_file, allowed_keys=self.curve_allowed_keys)


def parse_retention(text: str) -> tuple[str, float]:
    """``name=duration`` as (name, seconds). Raises ValueError."""
    name, equals, duration = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise ValueError(f"{text!r} is not name=duration")
    return name.strip(), parse_duration(duration)
