"""The demo's tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from cluster.demo.promises import Promise
from cluster.demo.turn import Turn

TIERS = ("device", "dram", "ssd", "remote")


def of_turns(turns: Sequence[Turn], cold_s: float) -> Table:
    """One row per request: what was cached where, and what that did to its times."""
    table = Table(
        title="Cached tokens by tier, and what they are worth", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1)
    )
    table.add_column("request", no_wrap=True)
    for heading in ("prompt", *TIERS, "TTFT", "TBT", "of cold"):
        table.add_column(heading, justify="right", no_wrap=True)
    for turn in turns:
        about_document = turn.label.startswith("Q")
        table.add_row(
            turn.label,
            str(turn.reply.usage.prompt_tokens),
            *(str(turn.tiers.get(tier, 0)) for tier in TIERS),
            f"{turn.ttft_s:.2f} s",
            "-" if turn.tbt_s is None else f"{turn.tbt_s * 1000:.0f} ms",
            f"{turn.ttft_s / cold_s:.2f}" if about_document else "",
        )
    return table


def of_promises(promises: Sequence[Promise]) -> Table:
    table = Table(title="What was promised", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("")
    table.add_column("promise")
    table.add_column("seen")
    for promise in promises:
        table.add_row("[green]yes[/]" if promise.kept else "[red]NO[/]", promise.text, promise.detail)
    return table
