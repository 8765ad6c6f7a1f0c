"""The ``moonpool`` command. Only what ``--help`` needs is imported here; each command imports the rest when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli.chat import chat
from cluster.cli.demo import defaults as demo_defaults
from cluster.cli.demo import demo
from cluster.cli.options import configured
from cluster.cli.pool import pool
from cluster.cli.serve import serve
from cluster.cli.show import config_
from cluster.cli.simulate import simulate

app = typer.Typer(
    name="moonpool",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(configured(serve))
app.command("chat")(chat)
app.command("simulate")(simulate)
app.command("demo")(configured(demo, defaults=demo_defaults))
app.command("config")(configured(config_))
app.add_typer(pool, name="pool")


def _version(wanted: bool) -> None:
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        typer.echo(version("moonpool"))
    except PackageNotFoundError:
        typer.echo("moonpool runs from a source folder that is not installed")
    raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False,
) -> None:
    """A disaggregated prefill/decode cluster for LLM serving around a shared KV-cache pool."""


def main() -> None:
    """Entry point of the ``moonpool`` command."""
    app()
