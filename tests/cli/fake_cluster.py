"""The ``moonpool`` command with a cluster that is not there: each phase as slow, or as broken, as the environment says."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import cluster.launch
from cluster.cli import serving
from cluster.cli.app import main


class FakeCluster:
    url = "http://127.0.0.1:8123"
    model_name = "tiny"

    def stop(self) -> None:
        print("stopping", flush=True)
        time.sleep(float(os.environ.get("FAKE_STOP_S", "0")))
        print("stopped", flush=True)


def start_cluster(config: Any, *, progress: Callable[[str], None]) -> FakeCluster:
    progress("ray: starting")
    if os.environ.get("FAKE_START_ERROR"):
        raise cluster.launch.LaunchError(os.environ["FAKE_START_ERROR"])
    take_sigterm_as_ray_does()
    progress("workers: loading the model")
    try:
        print("starting", flush=True)  # inside: the signal that this calls for may come at once
        time.sleep(float(os.environ.get("FAKE_START_S", "0")))
    except BaseException:
        print("cleaned", flush=True)
        raise
    take_sigterm_as_ray_does()
    return FakeCluster()


def take_sigterm_as_ray_does() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os.abort())


cluster.launch.start_cluster = start_cluster  # type: ignore[assignment]
if os.environ.get("FAKE_DEADLINE_S"):
    serving.STOP_DEADLINE_S = float(os.environ["FAKE_DEADLINE_S"])  # type: ignore[misc]
main()
