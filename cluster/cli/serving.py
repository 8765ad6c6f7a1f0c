"""Holding a cluster for as long as a command needs it: start with progress, end on signals, always within a deadline."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NoReturn

import typer

from cluster.cli.progress import StartProgress
from cluster.cli.ray_messages import ray_messages_aside
from cluster.cli.signals import StopSignals

if TYPE_CHECKING:
    from cluster.config.schema import ClusterConfig
    from cluster.launch import RunningCluster

STOP_DEADLINE_S: Final = 30.0
"""For a clean end: the gateway's drain, the actors, Ray. Then the process ends anyway and Ray's own reaper ends the rest."""
INTERRUPTED: Final = 130


def force_end() -> NoReturn:
    """End now. Ray's processes watch this one and end with it."""
    typer.echo("stopping by force", err=True)
    os._exit(INTERRUPTED)


def tell(message: str) -> None:
    """Something of Ray's that the person at the terminal should know."""
    typer.echo(f"ray: {message}", err=True)


@contextmanager
def running_cluster(
    config: ClusterConfig, signals: StopSignals, *, on_ray_message: Callable[[str], None] = tell
) -> Iterator[RunningCluster]:
    """A started cluster, stopped on the way out. Ends the command with a message where it cannot be started.

    Raises KeyboardInterrupt when a signal comes while it starts; everything that was started has been stopped then.
    """
    with ray_messages_aside(on_ray_message):
        cluster = _start(config, signals)
        try:
            yield cluster
        finally:
            stop_in_time(cluster.stop, STOP_DEADLINE_S)


def stop_in_time(stop: Callable[[], None], deadline_s: float, force: Callable[[], object] = force_end) -> None:
    """``stop()`` here, ``force()`` from a timer if it takes longer than ``deadline_s``."""
    timer = threading.Timer(deadline_s, force)
    timer.daemon = True
    timer.start()
    try:
        stop()
    finally:
        timer.cancel()


def _start(config: ClusterConfig, signals: StopSignals) -> RunningCluster:
    from cluster.launch import LaunchError, start_cluster
    from cluster.ray_session import RayUnavailableError
    from engine.models.source import ModelNotAvailableError

    try:
        with signals.interrupting(), StartProgress() as progress:

            def on_step(step: str) -> None:
                signals.install()  # Ray puts handlers of its own in place as it starts
                progress(step)

            return start_cluster(config, progress=on_step)
    except (LaunchError, RayUnavailableError, ModelNotAvailableError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except SystemExit:  # Ray's handler of SIGTERM, between its start and our next step
        raise KeyboardInterrupt from None
    finally:
        signals.install()
