"""Heartbeats on the wire: what workers and nodes write is read back, anything else is one typed error."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.task import DecodeLoad
from prefill_worker.task import PrefillLoad
from scheduler.messages import NodeLoad, NodeReport, Reply, WorkerReport
from scheduler.report import FINISHED_MAX, REPORT_BYTES_MAX, MalformedReportError, read_report, write_reply

PREFILL = PrefillLoad(3, 1, 2000, (("r", 0, 100, 64, 0.25),))
DECODE = DecodeLoad(1, 2, 30, 100, 0.02, (("r", 1),))
NODE = {
    "endpoint": "tcp://h:1", "events": "tcp://h:2", "local": "unix:@n", "slots_total": 10, "slots_free": 4, "slot_bytes": 4096,
}  # fmt: skip


def wire(role: str, load: dict[str, Any], **changes: Any) -> bytes:
    report = {
        "v": 1, "role": role, "id": "x-0", "incarnation": "a", "actor": "x-0", "node_id": "node-0", "fence": 2, "load": load,
    }  # fmt: skip
    return msgpack.packb(report | changes)


def test_reads_what_members_write() -> None:
    assert read_report(wire("prefill", PREFILL.to_wire())) == WorkerReport("x-0", "a", "x-0", "node-0", 2, PREFILL)
    assert read_report(wire("decode", DECODE.to_wire())) == WorkerReport("x-0", "a", "x-0", "node-0", 2, DECODE)
    assert read_report(wire("node", NODE)) == NodeReport("x-0", "a", NodeLoad("tcp://h:1", "tcp://h:2", 10, 4, 4096, "unix:@n"))
    more = NODE | {"sequence": 7, "pulls": [["node-1", 1000, 0.5]], "draining": True}
    assert read_report(wire("node", more)) == NodeReport(
        "x-0", "a", NodeLoad("tcp://h:1", "tcp://h:2", 10, 4, 4096, "unix:@n", True, 7, (("node-1", 1000, 0.5),))
    )


def test_replies_are_plain_maps() -> None:
    assert msgpack.unpackb(write_reply(Reply(3, "tcp://h:1", "b"))) == {
        "fence": 3, "node_endpoint": "tcp://h:1", "node_incarnation": "b",
    }  # fmt: skip


BAD = {
    "empty": b"",
    "not msgpack": b"\xc1\xff\x00",
    "not a map": msgpack.packb([1, 2]),
    "trailing bytes": wire("prefill", PREFILL.to_wire()) + b"\x00",
    "other version": wire("prefill", PREFILL.to_wire(), v=2),
    "unknown role": wire("gateway", {}),
    "role of a wrong type": wire(3, PREFILL.to_wire()),  # type: ignore[arg-type]
    "no load": wire("prefill", {}),
    "load of a wrong type": wire("prefill", [1]),  # type: ignore[arg-type]
    "negative": wire("prefill", PREFILL.to_wire() | {"queued_tokens": -1}),
    "not a number": wire("decode", DECODE.to_wire() | {"step_s": math.nan}),
    "infinite": wire("prefill", PREFILL.to_wire() | {"finished": [["r", 0, 1, 0, math.inf]]}),
    "absurd": wire("decode", DECODE.to_wire() | {"free_blocks": 2**60}),
    "too many finished": wire("decode", DECODE.to_wire() | {"finished": [["r", 0]] * (FINISHED_MAX + 1)}),
    "short finished": wire("prefill", PREFILL.to_wire() | {"finished": [["r", 0]]}),
    "empty id": wire("prefill", PREFILL.to_wire(), id=""),
    "id of a wrong type": wire("prefill", PREFILL.to_wire(), id=7),
    "long id": wire("prefill", PREFILL.to_wire(), id="x" * 1000),
    "negative fence": wire("prefill", PREFILL.to_wire(), fence=-1),
    "no endpoint": wire("node", NODE | {"endpoint": None}),
    "no local endpoint": wire("node", {k: v for k, v in NODE.items() if k != "local"}),
    "draining of a wrong type": wire("node", NODE | {"draining": 1}),
    "malformed pulls": wire("node", NODE | {"pulls": [[1]]}),
    "over the limit": b"\x00" * (REPORT_BYTES_MAX + 1),
}


@pytest.mark.parametrize("name", BAD)
def test_anything_else_is_one_typed_error(name: str) -> None:
    with pytest.raises(MalformedReportError):
        read_report(BAD[name])


@given(st.binary(max_size=200), st.integers(0, 150), st.sampled_from(["prefill", "decode", "node"]))
def test_damaged_reports_never_raise_anything_else(noise: bytes, at: int, role: str) -> None:
    frame = wire(role, {"prefill": PREFILL.to_wire(), "decode": DECODE.to_wire(), "node": NODE}[role])
    for damaged in (noise, frame[:at] + noise + frame[at + len(noise) :], frame[:at]):
        try:
            read_report(damaged)
        except MalformedReportError:
            continue
