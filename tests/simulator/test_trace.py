"""A trace is read whole or not at all, and what is wrong with it is named by line and field."""

from __future__ import annotations

import json
import lzma
import math
from pathlib import Path

import pytest

from cluster.simulator.trace import TICK_S, TraceError, key_of, read_trace

GOOD = {"timestamp": 1000, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 3]}


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_what_is_in_the_file(tmp_path: Path):
    second = GOOD | {"timestamp": 2500, "class": "agent", "session": 7, "turn": 2, "hash_ids": [1, 2], "input_length": 1024}
    trace = read_trace(written(tmp_path / "t.jsonl", GOOD, second))
    first, last = trace.requests
    assert (first.arrived_s, first.input_tokens, first.output_tokens, first.block_ids) == (0.0, 1100, 20, (1, 2, 3))
    assert (last.arrived_s, last.request_class, last.session, last.turn) == (1.5, "agent", "7", 2)
    assert trace.full_blocks(first) == (1, 2)  # the third is partial: engines do not cache it
    assert trace.full_blocks(last) == (1, 2)
    assert trace.faster(3.0).requests[1].arrived_s == pytest.approx(0.5)
    assert len({key_of(i) for i in range(1000)}) == 1000


def test_compressed_files_and_limits(tmp_path: Path):
    path = tmp_path / "t.jsonl.xz"
    path.write_bytes(lzma.compress("".join(json.dumps(GOOD | {"timestamp": i}) + "\n" for i in range(10)).encode()))
    assert len(read_trace(path).requests) == 10
    assert len(read_trace(path, limit=4).requests) == 4
    assert read_trace(path, speed=2.0).requests[-1].arrived_s == pytest.approx(0.0045)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match=r"t\.jsonl\.xz:\d+: the file is cut or damaged"):
        read_trace(path)


def test_what_came_within_one_tick_is_spread_over_it(tmp_path: Path):
    rows = [GOOD | {"timestamp": at} for at in (0, 0, 0, 3000, 9000, 9000)]
    ticks = read_trace(written(tmp_path / "t.jsonl", *rows))
    assert [r.arrived_s for r in ticks.requests] == [0.0, TICK_S / 3, 2 * TICK_S / 3, 3.0, 9.0, 10.5]
    exact = read_trace(written(tmp_path / "e.jsonl", *rows, GOOD | {"timestamp": 9500}))
    assert [r.arrived_s for r in exact.requests] == [0.0, 0.0, 0.0, 3.0, 9.0, 9.0, 9.5]
    assert read_trace(tmp_path / "t.jsonl", tick_s=0.0).requests[1].arrived_s == 0.0


BAD = {
    "not JSON": ("{", r":2: this is not JSON"),
    "a list": ([1], r":2: an object is needed"),
    "no timestamp": ({k: v for k, v in GOOD.items() if k != "timestamp"}, r":2: timestamp: is missing"),
    "no ids": ({k: v for k, v in GOOD.items() if k != "hash_ids"}, r":2: hash_ids: is missing"),
    "a negative time": (GOOD | {"timestamp": -1}, r":2: timestamp: -1 is negative"),
    "a time that is text": (GOOD | {"timestamp": "5"}, r":2: timestamp: a number is needed"),
    "a time that is true": (GOOD | {"timestamp": True}, r":2: timestamp: a number is needed, not true"),
    "a time that is no number": ('{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": []}', r":2: timestamp:"),
    "no input": (GOOD | {"input_length": 0}, r":2: input_length: 0 is not from 1"),
    "half a token": (GOOD | {"output_length": 1.5}, r":2: output_length: a whole number"),
    "ids that are text": (GOOD | {"hash_ids": [1, "2", 3]}, r":2: hash_ids\[1\]: a whole number"),
    "ids that are no list": (GOOD | {"hash_ids": 5}, r":2: hash_ids: a list"),
    "too few ids": (GOOD | {"hash_ids": [1]}, r":2: hash_ids: 1 ids do not fit input_length 1100 .* \(2 to 3 are needed\)"),
    "an id twice": (GOOD | {"hash_ids": [1, 2, 2]}, r":2: hash_ids: an id is there twice"),
    "a class that is a list": (GOOD | {"class": []}, r":2: class: a text"),
    "a class of half a pair": (
        '{"timestamp": 1000, "input_length": 1, "output_length": 1, "hash_ids": [], "class": "\\ud800"}',
        r":2: class:",
    ),
    "a class without end": (GOOD | {"class": "a" * 300}, r":2: class: .* longer than 256 bytes"),
    "a time without end": (
        '{"timestamp": 1' + "0" * 400 + ', "input_length": 1, "output_length": 1, "hash_ids": []}',
        r":2: timestamp:",
    ),
    "infinity": ('{"timestamp": Infinity, "input_length": 1, "output_length": 1, "hash_ids": []}', r":2: timestamp:"),
    "nested without end": ("[" * 100_000, r":2: this is nested too deeply"),
    "out of order": (GOOD | {"timestamp": 999}, r":2: timestamp: before that of the line above"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_named_by_line_and_field(what: str, tmp_path: Path):
    row, message = BAD[what]
    with pytest.raises(TraceError, match=message):
        read_trace(written(tmp_path / "t.jsonl", GOOD, row, GOOD | {"timestamp": 5000}))


def test_a_line_that_was_cut_is_said_to_be(tmp_path: Path):
    path = written(tmp_path / "t.jsonl", GOOD)
    path.write_text(path.read_text() + json.dumps(GOOD)[:30])
    with pytest.raises(TraceError, match=r"t\.jsonl:2: this is not JSON.*truncated"):
        read_trace(path)


def test_an_empty_trace_is_none(tmp_path: Path):
    with pytest.raises(TraceError, match="no request"):
        read_trace(written(tmp_path / "t.jsonl"))


def test_a_replay_may_not_last_for_ever_but_a_cache_has_no_clock(tmp_path: Path):
    path = written(tmp_path / "t.jsonl", GOOD, GOOD | {"timestamp": 1e11})
    with pytest.raises(TraceError, match=r"t\.jsonl:2: timestamp: 1157\.41 days after the first; 31 are the most"):
        read_trace(path)
    assert read_trace(path, speed=1000.0).duration_s == pytest.approx(1e5, rel=1e-3)
    assert read_trace(path, span_max_s=math.inf).duration_s == pytest.approx(1e8, rel=1e-3)
