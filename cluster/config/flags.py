"""The friendly flags: the settings that people change most, each with a short name of its own. All others have ``--set``."""

from __future__ import annotations

from typing import Final

FLAGS: Final = {
    "model": ("--model", "model.source"),
    "host": ("--host", "gateway.host"),
    "port": ("--port", "gateway.port"),
    "prefill": ("--prefill", "prefill.workers"),
    "decode": ("--decode", "decode.workers"),
    "dtype": ("--dtype", "model.dtype"),
    "device": ("--device", "model.device"),
    "reuse": ("--reuse", "model.reuse"),
    "pool_dram": ("--pool-dram", "pool.dram"),
    "address": ("--address", "cluster.address"),
}
"""Parameter name of a command -> (flag, key)."""
