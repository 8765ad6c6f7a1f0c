"""What the engine promises its workers, beyond right numbers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from engine.engine import Engine, SequenceStep
from engine.models.source import resolve_model
from engine.settings import ModelSettings, Reuse
from tests.engine.conversation import prefill, random_prompt
from tests.engine.tiny_models import VOCABULARY, build, load, save


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return load(build("llama"), tmp_path)


def test_rows_come_back_in_the_order_of_the_steps(engine: Engine) -> None:
    ids = random_prompt(20, VOCABULARY, 3)
    a, b, c = (engine.cache.allocate(3) for _ in range(3))
    for table in (a, b):
        prefill(engine, ids[:10], table)
    step_a, step_b = SequenceStep(ids[10:11], 10, a), SequenceStep(ids[11:12], 10, b)
    alone = [engine.forward([step])[0] for step in (step_a, step_b, SequenceStep(ids[:7], 0, c))]
    mixed = engine.forward([step_b, SequenceStep(ids[:7], 0, c), step_a])
    assert mixed.shape == (3, VOCABULARY)
    assert mixed.dtype == torch.float32
    for row, expected in zip(mixed, (alone[1], alone[2], alone[0]), strict=True):
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("reuse", list(Reuse))
def test_a_step_writes_its_own_slots_only(reuse: Reuse, tmp_path: Path) -> None:
    engine = load(build("llama"), tmp_path, reuse=reuse)
    tables = [engine.cache.allocate(2) for _ in range(3)]
    before = [tensor.clone() for tensor in (*engine.cache.keys, *engine.cache.values)]
    engine.forward([SequenceStep([5], 3, tables[0]), SequenceStep([6], 8, tables[2])])
    size = engine.layout.block_tokens
    written = {tables[0][0] * size + 3, tables[2][1] * size}
    for old, new in zip(before, (*engine.cache.keys, *engine.cache.values), strict=True):
        changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) == written


def test_another_thread_computes_the_same_bits(engine: Engine) -> None:
    ids = random_prompt(20, VOCABULARY, 3)
    here = prefill(engine, ids, engine.cache.allocate(3))
    there: list[torch.Tensor] = []
    threads_seen: list[int] = []

    def work() -> None:
        there.append(prefill(engine, ids, engine.cache.allocate(3)))
        threads_seen.append(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=30)
    assert threads_seen == [1]
    assert torch.equal(here, there[0])


def test_the_context_is_the_models_unless_the_settings_shorten_it(tmp_path: Path) -> None:
    files = save(build("llama"), tmp_path)

    def context(limit: int) -> int:
        settings = ModelSettings(device="cpu", context_max=limit, self_test=False)
        return Engine.load(files, settings, cache_bytes=4 << 20, threads=1).context_max

    assert [context(limit) for limit in (0, 100, 10_000)] == [512, 100, 512]


def test_identity_changes_with_what_changes_the_bytes(tmp_path: Path) -> None:
    files = save(build("llama"), tmp_path)
    base = {"device": "cpu", "self_test": False, "block_tokens": 8, "chunk_tokens": 16}

    def identity(**changes: object) -> tuple[tuple[str, str], ...]:
        return tuple(Engine.load(files, ModelSettings(**{**base, **changes}), cache_bytes=4 << 20, threads=1).identity())  # type: ignore[arg-type]

    others = [identity(block_tokens=16), identity(chunk_tokens=32), identity(reuse=Reuse.BITWISE)]
    assert identity() == identity()
    assert len({identity(), *others}) == 4


@pytest.mark.model
def test_the_weights_stay_mapped_pages() -> None:
    """Several processes share one copy: loading must not make private ones."""
    settings = ModelSettings(device="cpu", dtype="float32", self_test=False)
    files = resolve_model(settings)
    before = _private_bytes()
    engine = Engine.load(files, settings, cache_bytes=64 << 20, threads=1)
    engine.forward([SequenceStep([1, 2, 3], 0, engine.cache.allocate(1))])
    weights = sum(file.stat().st_size for file in files.path.glob("*.safetensors"))
    assert _private_bytes() - before < weights / 4


def _private_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) * 1024
