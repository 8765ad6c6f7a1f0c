"""The engine alone in a process (``python -m benchmarks.engine_child DTYPE THREADS [packed]``), asked line by line.

``{"do": "prefill", "prompt": [ids]}`` -> ``{"seconds": s}``: computing the prompt in canonical pieces and drawing the first
token. ``{"do": "decode", "context": n, "batch": b, "steps": k}`` -> ``{"seconds": s}``: ``k`` steps of ``b`` sequences whose
context starts at ``n`` tokens, draws included; one step before them is not counted.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Final, cast

import torch

from benchmarks.peers.lines import answers_to_own_stdout, serve
from engine.engine import Engine, SequenceStep
from engine.models.source import resolve_model
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import sample
from engine.serving.warm_up import warm_up
from engine.settings import ModelSettings

CACHE_BYTES: Final = 1 << 30
GREEDY: Final = SamplingParams(temperature=0)


class Child:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def handle(self, question: dict[str, Any]) -> dict[str, Any]:
        if question["do"] == "prefill":
            return {"seconds": self.prefill(question["prompt"])}
        return {"seconds": self.decode(question["context"], question["batch"], question["steps"])}

    def prefill(self, prompt: list[int]) -> float:
        engine, chunk = self._engine, self._engine.chunk_tokens
        started = time.perf_counter()
        blocks = engine.cache.allocate(-(-len(prompt) // engine.layout.block_tokens))
        logits = None
        for start in range(0, len(prompt), chunk):
            logits = engine.forward([SequenceStep(prompt[start : start + chunk], start, blocks)])
        if logits is None:
            raise ValueError("an empty prompt")
        sample(logits, [GREEDY], [0])
        taken = time.perf_counter() - started
        engine.cache.free(blocks)
        return taken

    def decode(self, context: int, batch: int, steps: int) -> float:
        engine = self._engine
        size = engine.layout.block_tokens
        tables = [engine.cache.allocate(-(-(context + steps + 1) // size)) for _ in range(batch)]
        drawn, started = [100] * batch, 0.0
        for i in range(steps + 1):
            if i == 1:
                started = time.perf_counter()
            logits = engine.forward([SequenceStep([t], context + i, table) for t, table in zip(drawn, tables, strict=True)])
            drawn = [one.token_id for one in sample(logits, [GREEDY] * batch, [i] * batch)]
        taken = time.perf_counter() - started
        for table in tables:
            engine.cache.free(table)
        return taken


def main() -> None:
    answer = answers_to_own_stdout()
    dtype, threads, packed = sys.argv[1], int(sys.argv[2]), "packed" in sys.argv[3:]
    # Where the dtype is the default, so is the device: then this engine is what a worker of the default cluster has.
    settings = ModelSettings(dtype=cast(Any, dtype), device="auto" if dtype == "auto" else "cpu")
    engine = Engine.load(resolve_model(settings), settings, cache_bytes=CACHE_BYTES, threads=threads, pack_weights=packed)
    warm_up(engine)
    serve(answer, Child(engine).handle, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
