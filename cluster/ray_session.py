"""Starting Ray on this machine, or joining one that runs.

Ray is told three things that its defaults leave open, before it is imported (it reads them at import):

* ``RAY_AUTH_MODE``: always explicit. A cluster of our own gets a random token that lives as long as it does.
* ``RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0``: the switch by which Ray binds *all* its ports to loopback, as it does by default on
systems
  where it supports one machine only. Passing node IP 127.0.0.1 alone does not: Ray resolves it to the interface's address.
* ``RAY_ENABLE_UV_RUN_RUNTIME_ENV=0``: workers run in the environment that the driver runs in.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from typing import Any, Final

OBJECT_STORE_BYTES: Final = 100 * 1024 * 1024
"""Ray's object store carries nothing of ours but small call arguments: KV bytes never enter it."""
AUTH_TOKEN_BYTES: Final = 32


class RayUnavailableError(RuntimeError):
    """Ray could not be started or joined; the message says what to look at."""


def start_local_ray(*, namespace: str, cpus: int, log_level: str) -> None:
    """A Ray of our own on 127.0.0.1, ended by :func:`leave_ray`."""
    _require_fresh_process()
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(AUTH_TOKEN_BYTES)
    _init(
        address="local", namespace=namespace, num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1",
        object_store_memory=OBJECT_STORE_BYTES, log_to_driver=False, logging_level=log_level,
    )  # fmt: skip


def join_ray(address: str, *, namespace: str, log_level: str) -> None:
    """Join the cluster at ``address`` (``host:port``, or ``auto``) with the auth mode of the environment, ``token`` unless
    set."""
    _require_fresh_process()
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    _init(address=address, namespace=namespace, log_to_driver=False, logging_level=log_level)


def leave_ray() -> None:
    """Shut down what :func:`start_local_ray` started, or leave what :func:`join_ray` joined. Safe to call twice."""
    import ray

    with contextlib.suppress(Exception):
        ray.shutdown()


def _require_fresh_process() -> None:
    """Ray reads its switches at import: too late once somebody else imported it with others."""
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        raise RayUnavailableError("Ray is already running in this process; start the cluster from a process of its own")


def _init(**options: Any) -> None:
    import ray

    try:
        ray.init(**options)
    except Exception as error:
        raise RayUnavailableError(f"Ray did not start or could not be joined ({type(error).__name__}: {error})") from error
