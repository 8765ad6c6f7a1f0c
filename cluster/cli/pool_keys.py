"""``moonpool pool keys``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def keys(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the two files go; made where it is missing.")],
) -> None:
    """Make a key pair for pool nodes that are reached from other machines.

    Writes pool.key (public: give it to the others, for their pool.curve_allowed_keys) and pool.key_secret (for
    pool.curve_secret_key_file of this machine; readable by its owner only). An existing pair is never overwritten.
    """
    from kv_pool.transport.curve import make_pair

    try:
        public, secret = make_pair(directory)
    except OSError as error:
        typer.echo(f"{error.filename or directory}: {error.strerror}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"public  {public}")
    typer.echo(f"secret  {secret}")


def register(group: typer.Typer) -> None:
    """Add the command to ``moonpool pool``."""
    group.command("keys")(keys)
