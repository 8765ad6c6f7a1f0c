"""The key table against a dict."""

from __future__ import annotations

import random

from kv_pool.ssd.keytable import KeyTable
from tests.kv_pool.ssd_twin import key_of


def test_it_is_a_dict() -> None:
    """Keys come and go, thousands at a time, so that shards grow and every kind of gap is closed."""
    draw, table, twin, free, rows = random.Random(7), KeyTable(), dict[int, int](), list[int](), 0
    for step in range(40_000):
        number = draw.randrange(6000)
        assert table.row(key_of(number)) == twin.get(number)
        grows = step // 8000 % 2 == 0
        if number in twin and draw.random() < (0.2 if grows else 0.9):
            table.remove(twin[number])
            free.append(twin.pop(number))
        elif number not in twin and draw.random() < (0.9 if grows else 0.1):
            row = free.pop() if free else rows
            rows = max(rows, row + 1)
            table.add(key_of(number), row)
            twin[number] = row
    assert len(table) == len(twin) > 500
    assert sorted(table) == sorted(twin.values())
    for number in range(6000):
        assert table.row(key_of(number)) == twin.get(number)
        assert number not in twin or table.key(twin[number]) == key_of(number)
