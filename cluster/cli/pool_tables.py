"""The pool's nodes as tables. What a node does not say is shown as "?": it may be of another version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

UNKNOWN = "?"


def tables(nodes: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """DRAM of all nodes, then the SSDs of those that have one."""
    yield of_dram(nodes)
    with_ssd = [node for node in nodes if node["status"] is not None and node["status"].get("ssd") is not None]
    if with_ssd:
        yield of_ssd(with_ssd)


def of_dram(nodes: Sequence[Mapping[str, Any]]) -> Table:
    """One row per node; slots by state."""
    table = _table("Nodes and their DRAM", "node", "state")
    for heading in ("slots", "free", "written", "blocks", "quarant.", "size", "leases", "clients", "hits", "misses"):
        table.add_column(heading, justify="right", no_wrap=True)
    for node in nodes:
        counters = (node["status"] or {}).get("counters", {})
        slots, slot_bytes = counters.get("slots_total"), counters.get("slot_bytes")
        table.add_row(
            node["id"],
            state_text(node),
            *(
                _text(counters.get(f"slots_{state}"))
                for state in ("total", "free", "reserved", "committed", "quarantined")
            ),
            UNKNOWN if slots is None or slot_bytes is None else size_text(slots * slot_bytes),
            *(_text(counters.get(name)) for name in ("leases", "clients", "hits", "misses")),
        )  # fmt: skip
    return table


def of_ssd(nodes: Sequence[Mapping[str, Any]]) -> Table:
    """One row per node; segments by state and, those in use, by retention class."""
    table = _table("SSD tier", "node", "health")
    for heading in ("free", "open", "sealed", "dying", "records", "live", "dead", "budget used", "left", "amplif."):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("segments by class")
    for node in nodes:
        ssd = node["status"]["ssd"]
        log, disk = ssd.get("log", {}), ssd.get("disk", {})
        segments, classes = log.get("segments", {}), log.get("retentions", {})
        amplification = log.get("write_amplification")
        table.add_row(
            node["id"],
            health_text(log, disk),
            *(_text(segments.get(state)) for state in ("free", "open", "sealed", "dying")),
            _text(log.get("records")),
            *(_bytes(log.get(name)) for name in ("live_bytes", "dead_bytes", "budget_spent", "budget_left")),
            "-" if amplification is None else f"{amplification:.3f}",
            ", ".join(f"{name} {count}" for name, count in classes.items() if count) or "-",
        )
    return table


def state_text(node: Mapping[str, Any]) -> str:
    """How the node stands, in a word or two."""
    status = node["status"]
    if status is None:
        return "no answer"
    if status.get("draining"):
        return "drained, empty" if status.get("empty") else "draining"
    return "in use" if node["scheduler"].get("live") else "in use, not heard"


def health_text(log: Mapping[str, Any], disk: Mapping[str, Any]) -> str:
    """``up``, or what is wrong."""
    phase, reason = str(disk.get("ssd_phase", UNKNOWN)), str(disk.get("ssd_reason", ""))
    if disk.get("healthy") and log.get("up"):
        return "up"
    return f"{phase} ({reason})" if reason else phase


def size_text(count: float) -> str:
    """Bytes in the largest unit that gives at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("the last unit takes everything")


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table


def _text(value: Any) -> str:
    return UNKNOWN if value is None else str(value)


def _bytes(value: float | None) -> str:
    return UNKNOWN if value is None else size_text(value)
