"""Heartbeats on the wire: one msgpack map up, one map down. Pure.

Up: ``{"v": 1, "role": "prefill" | "decode" | "node", "id", "incarnation", "actor", "node_id", "fence", "load": {...}}``.
Down: ``{"fence", "node_endpoint", "node_incarnation"}``. Whatever is not of this form is one typed error.
"""

from __future__ import annotations

from typing import Any, Final, cast

import msgpack

from decode_worker.task import DecodeLoad
from prefill_worker.task import PrefillLoad
from scheduler.messages import NodeLoad, NodeReport, Reply, WorkerReport

REPORT_BYTES_MAX: Final = 256 * 1024
VERSION: Final = 1
NAME_CHARS_MAX: Final = 256
FINISHED_MAX: Final = 1024
PULLS_MAX: Final = 256
NUMBER_MAX: Final = 2**53


class MalformedReportError(ValueError):
    """A heartbeat that is not what this module describes; the text names the field, never its value."""


def read_report(frame: bytes) -> WorkerReport | NodeReport:
    """Parse one heartbeat. Raises :class:`MalformedReportError`."""
    if len(frame) > REPORT_BYTES_MAX:
        raise MalformedReportError(f"a report of {len(frame)} bytes is over the limit of {REPORT_BYTES_MAX}")
    try:
        report = msgpack.unpackb(frame)
        if not isinstance(report, dict) or report.get("v") != VERSION:
            raise MalformedReportError(f"v: expected {VERSION}")
        return _report(cast(dict[str, Any], report))
    except MalformedReportError:
        raise
    except Exception as error:
        raise MalformedReportError(f"malformed report: {type(error).__name__}") from error


def write_reply(reply: Reply) -> bytes:
    fields = {"fence": reply.fence, "node_endpoint": reply.node_endpoint, "node_incarnation": reply.node_incarnation}
    return cast(bytes, msgpack.packb(fields))


def _report(report: dict[str, Any]) -> WorkerReport | NodeReport:
    who, incarnation, load = _name(report, "id"), _name(report, "incarnation"), report["load"]
    match report["role"]:
        case "node":
            return NodeReport(who, incarnation, _node_load(load))
        case "prefill":
            parsed = PrefillLoad.from_wire(load)
            _check("load", parsed.waiting, parsed.running, parsed.queued_tokens, parsed.piece_s)
            for _, attempt, tokens, past, seconds in parsed.finished:
                _check("finished", attempt, tokens, past, seconds)
            for entry in parsed.loads:
                _check("loads", *entry)
            if len(parsed.loads) > FINISHED_MAX:
                raise MalformedReportError(f"loads: more than {FINISHED_MAX}")
        case "decode":
            parsed = DecodeLoad.from_wire(load)
            _check("load", parsed.waiting, parsed.loading, parsed.running, parsed.free_blocks, parsed.total_blocks, parsed.step_s)
            _check("load", parsed.context_tokens)
            for step in parsed.steps:
                _check("steps", *step)
            if len(parsed.steps) > FINISHED_MAX:
                raise MalformedReportError(f"steps: more than {FINISHED_MAX}")
        case _:
            raise MalformedReportError("role: expected prefill, decode or node")
    if len(parsed.finished) > FINISHED_MAX:
        raise MalformedReportError(f"finished: more than {FINISHED_MAX}")
    fence = int(report["fence"])
    _check("fence", fence)
    return WorkerReport(who, incarnation, _name(report, "actor"), _name(report, "node_id"), fence, parsed)


def _node_load(load: dict[str, Any]) -> NodeLoad:
    sequence = None if load.get("sequence") is None else int(load["sequence"])
    pulls = tuple((str(p[0]), int(p[1]), float(p[2])) for p in load.get("pulls", ()))
    if len(pulls) > PULLS_MAX:
        raise MalformedReportError(f"pulls: more than {PULLS_MAX}")
    draining = load.get("draining", False)
    if not isinstance(draining, bool):
        raise MalformedReportError("draining: true or false is needed")
    slots = int(load["slots_total"]), int(load["slots_free"]), int(load["slot_bytes"])
    _check("load", *slots)
    return NodeLoad(_name(load, "endpoint"), _name(load, "events"), *slots, _name(load, "local"), draining, sequence, pulls)


def _name(fields: dict[str, Any], field: str) -> str:
    value = fields[field]
    if not isinstance(value, str) or not 0 < len(value) <= NAME_CHARS_MAX:
        raise MalformedReportError(f"{field}: expected 1 to {NAME_CHARS_MAX} characters")
    return value


def _check(field: str, *numbers: float) -> None:
    """Numbers of the world that cannot be negative, nor NaN or absurd: a sum with one of those is lost for ever."""
    for number in numbers:
        if not 0 <= number <= NUMBER_MAX:
            raise MalformedReportError(f"{field}: a number out of range")
