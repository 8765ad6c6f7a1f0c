"""``moonpool demo``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import typer

from cluster.cli.serving import INTERRUPTED, force_end, running_cluster
from cluster.cli.signals import StopSignals

if TYPE_CHECKING:
    from cluster.config.load import LoadedConfig
    from cluster.config.sources import Setting


log = logging.getLogger(__name__)


def defaults() -> list[Setting]:
    """Sizes for this machine."""
    from cluster.demo import sizing

    return sizing.defaults()


def demo(loaded: LoadedConfig) -> None:
    """Show the whole thing at work: questions about one long document, a chat that hits its own first turn, a killed worker.

    Starts a cluster of its own on a free port, checks all that it shows, and ends with status 1 if anything did not happen.
    """
    from rich.console import Console

    from cluster.demo.play import play

    console = Console(highlight=False)
    with StopSignals(force_end) as signals:
        try:
            # What Ray would say is what the last act shows: a worker was killed.
            with (
                running_cluster(loaded.config, signals, on_ray_message=log.info) as cluster,
                signals.interrupting(),
            ):
                kept = play(cluster, loaded.config, console)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(0 if kept else 1)
