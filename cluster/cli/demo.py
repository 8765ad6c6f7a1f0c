"""``moonpool demo``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from cluster.cli.serving import INTERRUPTED, force_end, running_cluster
from cluster.cli.signals import StopSignals

if TYPE_CHECKING:
    from cluster.config.load import LoadedConfig
    from cluster.config.sources import Setting


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
            with running_cluster(loaded.config, signals) as cluster, signals.interrupting():
                kept = play(cluster, loaded.config, console)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(0 if kept else 1)
