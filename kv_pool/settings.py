"""The ``pool:`` section of the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


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

    @property
    def curve(self) -> CurveSettings:
        return CurveSettings(secret_key_file=self.curve_secret_key_file, allowed_keys=self.curve_allowed_keys)
