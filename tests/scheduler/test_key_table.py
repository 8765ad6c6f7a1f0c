"""The key table against a dict, and what a key costs in it."""

from __future__ import annotations

import hashlib
import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_pool.keys import BlockKey
from scheduler.key_table import BUCKETS_MIN, KEYS_PER_BUCKET_MAX, WAYS, KeyTable, word_of, words_of

FEW_BUCKETS = st.sampled_from(
    [0, 1, 2, 3, *(BUCKETS_MIN * i for i in range(2 * WAYS)), *(BUCKETS_MIN * i + 1 for i in range(12))]
)
"""Words of which many want the same bucket, and the word 0, which an empty place has as well."""


def digests(start: int, count: int) -> list[BlockKey]:
    blob = hashlib.shake_128(start.to_bytes(8)).digest(16 * count)
    return [BlockKey(blob[i : i + 16]) for i in range(0, len(blob), 16)]


def same(table: KeyTable, twin: dict[int, int], words: list[int]) -> None:
    assert len(table) == len(twin)
    expected = [twin.get(word, 0) for word in words]
    array = np.array(words, np.uint64)
    assert table.get_many(array).tolist() == expected
    assert [table.get(word) for word in words] == expected
    known = expected.index(0) if 0 in expected else len(expected)
    assert table.prefix(array).tolist() == expected[:known]


@given(st.lists(st.tuples(FEW_BUCKETS, st.integers(0, 3)), max_size=120), st.lists(FEW_BUCKETS, max_size=20))
def test_one_by_one_it_does_what_a_dict_does(puts: list[tuple[int, int]], asked: list[int]) -> None:
    table, twin = KeyTable(), dict[int, int]()
    for word, value in puts:
        table.put(word, value)
        twin[word] = value
    same(table, {word: value for word, value in twin.items() if value}, [*asked, *twin])


@given(st.lists(st.dictionaries(FEW_BUCKETS, st.integers(0, 3)), max_size=8), st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_many_at_once_it_does_what_a_dict_does(changes: list[dict[int, int]], renamed: list[int]) -> None:
    table, twin = KeyTable(), dict[int, int]()
    for change in changes:
        table.put_many(np.array(list(change), np.uint64), np.array(list(change.values()), np.uint32))
        twin = {word: value for word, value in (twin | change).items() if value}
        same(table, twin, list(twin | change))
    assert table.used(4)[1:].tolist() == [value in twin.values() for value in (1, 2, 3)]
    table.replace(np.array([0, *renamed], np.uint32))
    same(table, {word: renamed[value - 1] for word, value in twin.items() if renamed[value - 1]}, list(twin))


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_it_grows_without_losing_a_key(seed: int, at_once: bool) -> None:
    words = words_of(digests(seed, 6 * BUCKETS_MIN * KEYS_PER_BUCKET_MAX))
    values = np.arange(1, len(words) + 1, dtype=np.uint32)
    table = KeyTable()
    if at_once:
        table.put_many(words, values)
    else:
        for word, value in zip(words.tolist(), values.tolist(), strict=True):
            table.put(word, value)
    assert len(table) == len(words)
    assert (table.get_many(words) == values).all()
    assert len(table._beside) < 0.03 * len(words)
    table.put_many(words, np.zeros_like(values))
    assert len(table) == 0
    assert not table._words.any()


def test_a_key_and_its_word() -> None:
    keys = [*digests(1, 3), BlockKey(bytes(16)), BlockKey((5).to_bytes(16)), BlockKey((6).to_bytes(16))]
    assert words_of(keys).tolist() == [word_of(key) for key in keys]
    assert len({word_of(key) for key in keys}) == len(keys)


def test_keys_that_all_want_one_bucket_are_kept_all_the_same() -> None:
    table = KeyTable()
    words = (np.arange(3000, dtype=np.uint64) << np.uint64(40)).astype(np.uint64)
    table.put_many(words, np.ones(3000, np.uint32))
    assert table.get_many(words).all()
    assert len(table) == 3000


def test_a_key_costs_less_than_two_hundred_bytes_and_a_chain_less_than_a_dict_at_a_million() -> None:
    """The bound for time is a wide one: the machine is shared."""
    keys = digests(7, 1_000_000)
    table = KeyTable()
    table.put_many(words_of(keys), np.ones(len(keys), np.uint32))
    beside = len(table._beside) * 160
    assert (table.bytes_used + beside) / len(keys) < 60
    taken: list[float] = []
    for start in range(0, 990_000, 7_919):
        chain = [BlockKey(bytes(bytearray(key))) for key in keys[start : start + 128]]
        began = time.perf_counter()
        found = table.prefix(words_of(chain))
        taken.append(time.perf_counter() - began)
        assert len(found) == 128
    assert sorted(taken)[len(taken) // 4] < 200e-6
