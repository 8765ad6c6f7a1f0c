"""``moonpool demo``."""

from __future__ import annotations

import typer

from cluster.cli import options
from cluster.cli.serving import INTERRUPTED, force_end, running_cluster
from cluster.cli.signals import StopSignals


def demo(
    context: typer.Context,
    model: options.Model = None,
    host: options.Host = None,
    port: options.Port = None,
    prefill: options.Prefill = None,
    decode: options.Decode = None,
    dtype: options.DType = None,
    device: options.Device = None,
    reuse: options.Reuse = None,
    pool_dram: options.PoolDram = None,
    address: options.Address = None,
    config: options.ConfigFile = None,
    set_: options.Sets = None,
) -> None:
    """Show the whole thing at work: questions about one long document, a chat that hits its own first turn, a killed worker.

    Starts a cluster of its own on a free port, checks everything that it shows, and ends with status 1 if anything did not happen.
    """
    from rich.console import Console

    from cluster.demo.play import play
    from cluster.demo.sizing import defaults

    loaded = options.load(context.params, defaults=defaults())
    console = Console(highlight=False)
    with StopSignals(force_end) as signals:
        try:
            with running_cluster(loaded.config, signals) as cluster, signals.interrupting():
                kept = play(cluster, loaded.config, console)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(0 if kept else 1)
