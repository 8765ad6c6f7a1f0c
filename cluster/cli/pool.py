"""``moonpool pool``: look at the nodes of a running cluster, empty one, and check an SSD directory that no node has open."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cluster.cli import pool_keys

if TYPE_CHECKING:
    from cluster.client.pool import PoolAdmin
    from kv_pool.ssd.verify import BadRecord, VerifyReport

CANNOT: Final = 2
"""Exit status where the question could not be put at all."""
INTERRUPTED: Final = 130

pool = typer.Typer(
    no_args_is_help=True,
    help="Look after the pool: its nodes, their DRAM and their SSDs.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

pool_keys.register(pool)

Url = Annotated[str, typer.Option(help="Address of the cluster.", envvar="MOONPOOL_URL")]
AdminKey = Annotated[
    str,
    typer.Option(
        help="One of the cluster's gateway.admin_keys; on its own machine none is needed while it has no keys at all.",
        envvar="MOONPOOL_ADMIN_KEY",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
HERE: Final = "http://127.0.0.1:8000"


@pool.command()
def inspect(
    nodes: Annotated[
        list[str] | None, typer.Argument(metavar="[NODE]...", help="Nodes to show; all unless named.", show_default=False)
    ] = None,
    url: Url = HERE,
    admin_key: AdminKey = "",
    as_json: AsJson = False,
) -> None:
    """Show what the pool's nodes hold: slots and blocks in DRAM, leases, clients, SSD segments and the write budget.

    The exit status is 1 if a node does not answer, 2 if the cluster does not.
    """
    from cluster.client.errors import MoonpoolError

    try:
        with _admin(url, admin_key) as admin:
            found = [admin.node(node) for node in nodes] if nodes else admin.nodes()
    except MoonpoolError as error:
        raise _cannot(error) from None
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        from rich.console import Console

        from cluster.cli.pool_tables import tables

        console = Console(highlight=False)
        for table in tables(found):
            console.print(table)
    for node in found:
        if node["error"] is not None:
            typer.echo(f"error: {node['id']} does not answer: {node['error']}", err=True)
    if any(node["error"] is not None for node in found):
        raise typer.Exit(1)


@pool.command()
def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node, such as node-0.", show_default=False)],
    url: Url = HERE,
    admin_key: AdminKey = "",
    timeout: Annotated[float, typer.Option(help="Longest time to wait until it is empty, in seconds.", min=0)] = 600.0,
    undo: Annotated[bool, typer.Option("--undo", help="Take the node into use again instead.")] = False,
) -> None:
    """Empty a node, so that its process can be stopped without a loss.

    The node takes no more blocks, lets its readers finish and writes what is worth it to its SSD; the scheduler stops planning
    with it and with the workers beside it. It stays like this until --undo or a restart, whether or not this command waits.

    The exit status is 0 once the node is empty, 1 if it is not in time, 2 if it could not be told.
    """
    from cluster.cli.pool_drain import wait_empty
    from cluster.client.errors import MoonpoolError

    with _admin(url, admin_key) as admin:
        try:
            told = admin.drain(node, enable=not undo)
        except MoonpoolError as error:
            raise _cannot(error) from None
        if undo:
            typer.echo(f"{node} is in use again")
            return
        try:
            empty = wait_empty(told, lambda: admin.node(node), timeout_s=timeout, say=typer.echo)
        except KeyboardInterrupt:
            typer.echo(f"{node} is still being drained: 'moonpool pool drain {node}' waits again, --undo takes it back", err=True)
            raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(0 if empty else 1)


@pool.command()
def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A node's SSD directory.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Check every record in an SSD directory, byte for byte, while no node has it open. Changes nothing.

    Prints each bad record as it is found. The exit status is 1 if there is any, 2 if the directory cannot be checked: it is in
    use, not there, or not an SSD tier's.
    """
    from kv_pool.ssd.disk.directory import DirectoryInUseError
    from kv_pool.ssd.records import SsdFormatError
    from kv_pool.ssd.verify import Verification

    bad: list[BadRecord] = []
    try:
        with Verification(str(directory), now=time.time()) as verification:
            for each in verification.bad_records():
                bad.append(each)
                if not as_json:
                    typer.echo(f"segment {each.segment}, page {each.page}: {each.reason}")
            report = verification.report
    except (SsdFormatError, DirectoryInUseError, OSError) as error:
        raise _cannot(error.strerror or str(error) if isinstance(error, OSError) else error, about=str(directory)) from None
    _say_verified(report, bad, as_json=as_json)
    raise typer.Exit(1 if bad else 0)


def _say_verified(report: VerifyReport, bad: list[BadRecord], *, as_json: bool) -> None:
    from dataclasses import asdict

    if as_json:
        typer.echo(json.dumps({"report": asdict(report), "bad": [asdict(each) for each in bad]}, indent=2))
        return
    from cluster.cli.pool_tables import size_text

    typer.echo(
        f"{report.segments} segments, {size_text(report.bytes_checked)} checked: {report.good} records good, {report.bad} bad,"
        f" {report.expired} expired, {report.dead} not reachable; {report.damaged_pages} damaged segment pages"
    )


def _admin(url: str, key: str) -> PoolAdmin:
    from cluster.client.pool import PoolAdmin

    try:
        return PoolAdmin(url, key=key)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--url") from None


def _cannot(error: object, *, about: str = "") -> typer.Exit:
    sys.stdout.flush()
    typer.echo(f"error: {about}{': ' if about else ''}{error}", err=True)
    return typer.Exit(CANNOT)
