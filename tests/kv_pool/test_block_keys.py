"""Identity: the same prefix has the same keys on every machine, anything else has others."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_pool.keys import BlockChain, block_key, cache_root, chain_keys, private_key
from kv_pool.layout import BlockLayout, LayerShape
from kv_pool.sizes import parse_size

ROOT = cache_root([("weights", "w"), ("dtype", "float32")])
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_golden_keys_do_not_drift():
    """A stored block must still be found by the next release: a change here needs a new protocol name."""
    assert ROOT.hex() == "e07d179489e7b9c9dce871c66fca95a8c155a47d676c5b0c03594bec77ddd34b"
    assert [key.hex() for key in chain_keys(ROOT, range(8), 4)] == [
        "f6466d4b1a3189b75aa4967089b803fe",
        "3b75e38234fbe766033917d672440cf4",
    ]


def test_keys_are_the_same_in_another_process_with_another_hash_seed():
    code = (
        "from kv_pool.keys import *;print(chain_keys(cache_root([('weights','w'),('dtype','float32')]), range(8), 4)[-1].hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in "12"
    }
    assert seen == {chain_keys(ROOT, range(8), 4)[-1].hex()}


@given(a=tokens, b=tokens)
def test_chains_agree_exactly_as_far_as_the_tokens_do(a: list[int], b: list[int]):
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    keys_a, keys_b = chain_keys(ROOT, a, 4), chain_keys(ROOT, b, 4)
    for i in range(min(len(keys_a), len(keys_b))):
        assert (keys_a[i] == keys_b[i]) == ((i + 1) * 4 <= shared)


@given(whole=tokens, cut=st.integers(0, 40))
def test_a_chain_grown_or_resumed_equals_one_made_at_once(whole: list[int], cut: int):
    grown = BlockChain(ROOT, 4, whole[:cut])
    grown.extend(whole[cut:])
    assert grown.keys == chain_keys(ROOT, whole, 4)
    full = len(whole) // 4
    resumed = BlockChain.resumed(ROOT, 4, grown.keys, whole[full * 4 :])
    resumed.extend([1, 2, 3, 4])
    grown.extend([1, 2, 3, 4])
    assert resumed.keys == grown.keys


@pytest.mark.parametrize(
    "other",
    [
        cache_root([("weights", "x"), ("dtype", "float32")]),
        cache_root([("weights", "w"), ("dtype", "bfloat16")]),
        cache_root([("weights", "w"), ("dtype", "float32")], tenant="acme"),
        cache_root([("weights", "w"), ("dtype", "float32")], salt="mine"),
        cache_root([("weights", "w"), ("dtype", "float32"), ("adapter", "lora")]),
        cache_root([("weightsw", ""), ("dtype", "float32")]),
    ],
)
def test_another_identity_never_hits(other: bytes):
    assert other != ROOT
    assert not set(chain_keys(other, range(64), 4)) & set(chain_keys(ROOT, range(64), 4))


def test_a_tenant_cannot_be_guessed_without_the_secret():
    parts = [("weights", "w")]
    assert cache_root(parts, tenant="acme", tenant_secret=b"a") != cache_root(parts, tenant="acme", tenant_secret=b"b")


def test_a_tail_is_private_to_request_and_attempt():
    keys = {private_key(ROOT, name, attempt) for name in ("a", "b") for attempt in (0, 1)}
    assert len(keys) == 4
    assert not keys & set(chain_keys(ROOT, range(64), 4))


def test_order_of_identity_parts_does_not_matter_but_values_do():
    assert cache_root([("a", "1"), ("b", "2")]) == cache_root([("b", "2"), ("a", "1")])
    assert cache_root([("a", "2"), ("b", "1")]) != cache_root([("a", "1"), ("b", "2")])


def test_first_block_differs_from_the_same_tokens_later():
    first = block_key(ROOT, None, [1, 2, 3, 4])
    assert block_key(ROOT, first, [1, 2, 3, 4]) != first


@settings(deadline=None)
@given(
    layers=st.lists(st.builds(LayerShape, st.integers(1, 8), st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=4),
    size=st.sampled_from([1, 16, 64]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_layout_survives_the_wire_and_sizes_add_up(layers: list[LayerShape], size: int, dtype: str):
    layout = BlockLayout(tuple(layers), size, dtype)
    assert BlockLayout.from_wire(layout.to_wire()) == layout
    width = 4 if dtype == "float32" else 2
    assert layout.block_bytes == width * size * sum(s.kv_heads * (s.k_dim + s.v_dim) for s in layers)
    other = BlockLayout(tuple(layers), size * 2, dtype)
    assert other.digest() != layout.digest()


def test_smollm2_block_is_what_the_docs_say():
    layout = BlockLayout((LayerShape(3, 64, 64),) * 30, 64, "float32")
    assert layout.token_bytes == 46_080
    assert layout.uniform


@pytest.mark.parametrize(("size", "dtype"), [(0, "float32"), (48, "float32"), (64, "int8")])
def test_a_bad_layout_is_named(size: int, dtype: str):
    with pytest.raises(ValueError, match=r"block_tokens|dtype"):
        BlockLayout((LayerShape(1, 1, 1),), size, dtype)


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2 << 30), ("512 MiB", 512 << 20), ("1_000", 1000), ("1.5KiB", 1536), ("3gb", 3 * 10**9)]
)
def test_sizes(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XB", "1e9", "two"])
def test_a_bad_size_says_what_is_accepted(text: str):
    with pytest.raises(ValueError, match="expected a number"):
        parse_size(text)
