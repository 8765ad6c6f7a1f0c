"""SIGKILL at random moments, again and again in one directory: what was acknowledged is readable, and nothing is wrong."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kv_pool.keys import BlockKey
from kv_pool.ssd.records import Place
from kv_pool.ssd.verify import Verification
from tests.kv_pool.ssd_scene import DEADLINE_S, Written
from tests.kv_pool.ssd_writer import make_scene

DELAY_S_MAX = 0.06


def kill_once(directory: Path, seed: int) -> list[list[str]]:
    """Whole lines that the writer said before it was killed."""
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.kv_pool.ssd_writer", str(directory), str(seed)], stdout=subprocess.PIPE, text=True
    )
    watchdog = threading.Timer(DEADLINE_S, writer.kill)
    watchdog.start()
    assert writer.stdout is not None
    lines: list[str] = []
    try:
        while not lines or not lines[-1].startswith("done"):
            lines.append(writer.stdout.readline())
            assert lines[-1], "it ended by itself"
        timer = threading.Timer(random.Random(seed).uniform(0, DELAY_S_MAX), writer.kill)
        timer.start()
        lines += writer.stdout.readlines()
        timer.join()
    finally:
        writer.kill()
        writer.wait()
        watchdog.cancel()
        writer.stdout.close()
    return [line.split() for line in lines if line.endswith("\n")]


def kill_often(directory: Path, points: int) -> None:
    acknowledged: dict[tuple[int, int], list[Written]] = {}
    total = 0
    for seed in range(1, points + 1):
        for word, segment, generation, *rest in kill_once(directory, seed):
            if word == "open":
                for known in [known for known in acknowledged if known[0] == int(segment)]:
                    del acknowledged[known]
                acknowledged[int(segment), int(generation)] = []
            else:
                page, length, key = int(rest[0]), int(rest[1]), BlockKey(bytes.fromhex(rest[2]))
                place = Place(int(segment), int(generation), page, length)
                acknowledged.setdefault((int(segment), int(generation)), []).append(Written(key, place, 0))
        scene = make_scene(str(directory))
        found = {(s.id, s.generation, e.page, e.length, e.key) for s in scene.start().segments for e in s.entries}
        for block in (block for blocks in acknowledged.values() for block in blocks):
            place = block.place
            assert (place.segment, place.generation, place.page, place.length, block.key) in found, f"lost at point {seed}"
            assert scene.reads_right(block), f"unreadable at point {seed}"
            total += 1
        for segment, generation, page, length, key in found:  # right bytes or a miss, acknowledged or not
            scene.reads_right(Written(key, Place(segment, generation, page, length), 0))
        scene.stop()
    assert total > 10 * points
    with Verification(str(directory), now=0.0) as verification:
        bad = {(found.segment, found.page) for found in verification.bad_records()}
    assert not bad & {(b.place.segment, b.place.page) for blocks in acknowledged.values() for b in blocks}


def test_a_writer_killed_at_20_random_points(tmp_path: Path):
    kill_often(tmp_path, 20)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_writer_killed_at_500_random_points(tmp_path: Path):
    kill_often(tmp_path, 500)
