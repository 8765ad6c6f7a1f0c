"""The engine beside stock transformers on the same weights, in one process: prefill and decode rates.

Each measurement is a list of tokens per second, one per repeat; the candidates of one cell take turns, so that whatever else the
machine does hits all of them alike. Read ratios of medians. Targets: prefill >= 0.95 of the stock forward, decode >= 1.15 of the
better of stock generate and generate_batch.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList

from engine.engine import Engine, SequenceStep
from engine.models.files import ModelFiles
from engine.settings import ModelSettings

Rates = dict[str, list[float]]

LENGTHS: Final = (512, 2048)
CONTEXTS: Final = (256, 1024)
BATCHES: Final = (1, 4, 16)
REPEATS: Final = 5
STEPS: Final = 6
"""Decode steps of a repeat; the first is not counted."""
CACHE_BYTES: Final = 2 << 30


def prefill_rates(
    files: ModelFiles, *, threads: int, lengths: Sequence[int] = LENGTHS, repeats: int = REPEATS
) -> dict[int, Rates]:
    """Prompt tokens per second by prompt length: ``engine`` (in canonical chunks) and ``stock_forward`` (whole, sdpa)."""
    engine, stock = _engine(files, threads, decodes=False), _stock(files, threads)

    def engine_run(ids: list[int]) -> None:
        blocks = engine.cache.allocate(-(-len(ids) // engine.layout.block_tokens))
        for start in range(0, len(ids), engine.chunk_tokens):
            engine.forward([SequenceStep(ids[start : start + engine.chunk_tokens], start, blocks)])
        engine.cache.free(blocks)

    def stock_run(ids: list[int]) -> None:
        with torch.inference_mode():
            stock(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1)

    rates: dict[int, Rates] = {}
    for length in lengths:
        cell = rates[length] = {"engine": [], "stock_forward": []}
        for repeat in range(repeats + 1):
            ids = _tokens(length, repeat)
            for name, run in (("engine", engine_run), ("stock_forward", stock_run)):
                started = time.perf_counter()
                run(ids)
                if repeat:  # the first warms up
                    cell[name].append(length / (time.perf_counter() - started))
    return rates


def decode_rates(
    files: ModelFiles,
    *,
    threads: int,
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = BATCHES,
    repeats: int = REPEATS,
) -> dict[tuple[int, int], Rates]:
    """Answer tokens per second of all sequences together, by (context, batch): ``engine``, ``stock_generate`` (equal lengths, so
    no padding: its best case) and ``generate_batch`` (transformers' continuous batching).

    Steps alone are timed. The first two start from K/V of random numbers; the third can't be given any, so it computes one
    prompt and shares its blocks among the batch.
    """
    engine, stock, batching = _engine(files, threads, decodes=True), _stock(files, threads), _stock(files, threads)
    rates: dict[tuple[int, int], Rates] = {}
    for context, batch in itertools.product(contexts, batches):
        candidates: dict[str, Callable[[], list[float]]] = {
            "engine": lambda c=context, b=batch: _engine_steps(engine, c, b),
            "stock_generate": lambda c=context, b=batch: _stock_steps(stock, c, b),
            "generate_batch": lambda c=context, b=batch: _continuous_steps(batching, c, b),
        }
        cell = rates[context, batch] = {name: [] for name in candidates}
        for repeat in range(repeats):
            for name, run in candidates.items():
                if name == "generate_batch" and repeat != repeats // 2:
                    continue  # its prompts cost minutes: one run, whose steps are its repeats
                seconds = run()
                if name == "generate_batch":
                    cell[name] = [batch / s for s in seconds]
                else:
                    cell[name].append(batch / statistics.median(seconds))
    return rates


def _engine_steps(engine: Engine, context: int, batch: int) -> list[float]:
    size = engine.layout.block_tokens
    tables = [engine.cache.allocate(-(-(context + STEPS) // size)) for _ in range(batch)]
    tokens = _tokens(batch, 0)
    seconds = []
    for i in range(STEPS):
        started = time.perf_counter()
        logits = engine.forward([SequenceStep([t], context + i, table) for t, table in zip(tokens, tables, strict=True)])
        tokens = logits.argmax(-1).tolist()
        seconds.append(time.perf_counter() - started)
    for table in tables:
        engine.cache.free(table)
    return seconds[1:]


class _Clock(LogitsProcessor):
    """Notes when each step's logits arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.times.append(time.perf_counter())
        return scores


def _stock_steps(stock: Any, context: int, batch: int) -> list[float]:
    config = stock.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        shape = (batch, config.num_key_value_heads, context, head_dim)
        cache.update(torch.randn(shape, dtype=stock.dtype), torch.randn(shape, dtype=stock.dtype), layer)
    ids = torch.tensor([_tokens(context + 1, 0)] * batch)
    clock = _Clock()
    stock.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        generation_config=_greedy(STEPS),
        logits_processor=LogitsProcessorList([clock]),
    )
    return [b - a for a, b in itertools.pairwise(clock.times)]


def _continuous_steps(model: Any, context: int, batch: int) -> list[float]:
    prompts = [[*_tokens(context, 0)[:-1], 100 + i] for i in range(batch)]
    with torch.inference_mode():
        outputs = model.generate_batch(prompts, generation_config=_greedy(STEPS + 12), record_timestamps=True)
    # Only steps in which every sequence of the batch got a token.
    times = [output.timestamps for output in outputs.values()]
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    steps = [b - a for a, b in itertools.pairwise(sorted(t for t in times[0] if begin <= t <= end))]
    if len(steps) < STEPS:
        raise RuntimeError(f"generate_batch made only {len(steps)} steps with the whole batch in it")
    return steps


def _greedy(tokens: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)


def _tokens(count: int, seed: int) -> list[int]:
    return torch.randint(100, 40_000, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _engine(files: ModelFiles, threads: int, *, decodes: bool) -> Engine:
    settings = ModelSettings(device="cpu", self_test=False)
    return Engine.load(files, settings, cache_bytes=CACHE_BYTES, threads=threads, pack_weights=decodes)


def _stock(files: ModelFiles, threads: int) -> Any:
    torch.set_num_threads(threads)
    return AutoModelForCausalLM.from_pretrained(files.path, dtype=getattr(torch, files.dtype), attn_implementation="sdpa").eval()
