"""The engine alone in a process: reads a JSON list of token ids a line, answers its milliseconds to the first draw."""

from __future__ import annotations

import json
import sys
import time

from engine.engine import Engine, SequenceStep
from engine.models.source import resolve_model
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import sample
from engine.serving.actor import warm_up
from engine.settings import ModelSettings


def main() -> None:
    settings = ModelSettings()
    engine = Engine.load(resolve_model(settings), settings, cache_bytes=1 << 30, threads=int(sys.argv[1]))
    warm_up(engine)
    print("ready", flush=True)
    size, chunk = engine.layout.block_tokens, engine.chunk_tokens
    for line in sys.stdin:
        prompt = json.loads(line)
        blocks = engine.cache.allocate(-(-len(prompt) // size))
        started = time.perf_counter()
        for start in range(0, len(prompt), chunk):
            logits = engine.forward([SequenceStep(prompt[start : start + chunk], start, blocks)])
        sample(logits, [SamplingParams(temperature=0)], [0])
        print(1e3 * (time.perf_counter() - started), flush=True)
        engine.cache.free(blocks)


if __name__ == "__main__":
    main()
