"""``reuse: bitwise``: the same bits cached and cold, alone and in company, in a run of blocks and in scattered ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.engine import Engine
from engine.models.source import resolve_model
from engine.settings import ModelSettings, Reuse
from tests.engine.conversation import blocks_for, decode, prefill, random_prompt
from tests.engine.tiny_models import VOCABULARY, build, load

DTYPES = ("float32", "bfloat16")
FAMILIES = ("llama", "mistral", "mixtral")


def kv_of(engine: Engine, table: Sequence[int], tokens: int) -> Tensor:
    size = engine.layout.block_tokens
    slots = [table[i // size] * size + i % size for i in range(tokens)]
    return torch.cat([tensor[slots].flatten().view(torch.uint8) for tensor in (*engine.cache.keys, *engine.cache.values)])


def check_cached_equals_cold(engine: Engine, ids: list[int], cached: int) -> None:
    count = blocks_for(engine, len(ids))
    cold_table = engine.cache.allocate(count)
    cold = prefill(engine, ids, cold_table)
    for table in (engine.cache.allocate(count), engine.cache.allocate(count)[::-1]):  # a run, then no run
        for source, target in zip(cold_table[: blocks_for(engine, cached)], table, strict=False):
            row = bytearray(engine.layout.block_bytes)
            engine.cache.export_block(source, memoryview(row))
            engine.cache.import_block(memoryview(row), target)
        warm = prefill(engine, ids, table, cached=cached)
        assert torch.equal(cold, warm)
        assert torch.equal(kv_of(engine, cold_table, len(ids)), kv_of(engine, table, len(ids)))
        engine.cache.free(table)
    engine.cache.free(cold_table)


def check_alone_equals_company(engine: Engine, prompts: list[list[int]], tokens: int) -> None:
    def run(chosen: Sequence[int], scattered: bool) -> dict[int, Tensor]:
        sequences = [list(prompts[i]) for i in chosen]
        tables = [engine.cache.allocate(blocks_for(engine, len(ids) + tokens)) for ids in sequences]
        if scattered:
            tables = [table[::-1] for table in tables]
        for ids, table in zip(sequences, tables, strict=True):
            prefill(engine, ids[:-1], table)
        logits = torch.stack(decode(engine, sequences, tables, tokens), dim=1)
        for table in tables:
            engine.cache.free(table)
        return dict(zip(chosen, logits, strict=True))

    everyone = list(range(len(prompts)))
    together = run(everyone, scattered=False)
    backwards = run(everyone[::-1], scattered=True)
    for i in everyone:
        assert torch.equal(together[i], backwards[i])
    for few in ([0], [1], [2, 0, 3]):
        for i, logits in run(few, scattered=False).items():
            assert torch.equal(together[i], logits)


@pytest.mark.parametrize("pack_weights", [False, True], ids=["mapped", "packed"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models(family: str, dtype: str, pack_weights: bool, tmp_path: Path) -> None:
    engine = load(build(family), tmp_path, dtype, pack_weights=pack_weights, reuse=Reuse.BITWISE)
    check_cached_equals_cold(engine, random_prompt(61, VOCABULARY, 1), cached=32)
    check_cached_equals_cold(engine, random_prompt(49, VOCABULARY, 2), cached=48)  # one token left: a prefill of one row
    check_alone_equals_company(engine, [random_prompt(9 + 3 * i, VOCABULARY, i) for i in range(19)], tokens=3)


@pytest.mark.model
@pytest.mark.parametrize("dtype", DTYPES)
def test_default_model(dtype: str) -> None:
    settings = ModelSettings(device="cpu", dtype=dtype, chunk_tokens=64, block_tokens=32, reuse=Reuse.BITWISE, self_test=False)  # type: ignore[arg-type]
    engine = Engine.load(resolve_model(settings), settings, cache_bytes=256 << 20, threads=1, pack_weights=True)
    check_cached_equals_cold(engine, random_prompt(151, 40_000, 1), cached=128)
    check_alone_equals_company(engine, [random_prompt(6 + 7 * i, 40_000, i) for i in range(5)], tokens=2)
