"""float32, greedy: the cluster's tokens are those of stock transformers generate, on the real default model and real prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.models.source import resolve_model
from engine.settings import ModelSettings
from tests.cluster.conftest import ClusterProcess

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(600)]

QUESTIONS = Path(__file__).resolve().parents[1] / "data" / "mt_bench_20.jsonl"
TOKENS = 12
FOLLOW_UP_TOKENS = 6

Message = dict[str, str]


@pytest.fixture(scope="module")
def questions() -> list[list[str]]:
    return [json.loads(line)["turns"] for line in QUESTIONS.read_text().splitlines()]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    settings = {"gateway": {"port": 0}, "prefill": {"device_cache": "512MiB"}, "decode": {"device_cache": "1GiB"}}
    process = ClusterProcess(settings, log=tmp_path_factory.mktemp("cluster") / "launcher.log")
    yield process
    process.stop()


class Stock:
    """Unmodified transformers on the same files: one prompt at a time, greedy."""

    def __init__(self) -> None:
        files = resolve_model(ModelSettings())
        self.tokenizer = AutoTokenizer.from_pretrained(files.path)
        self.model = AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float32).eval()

    def answer(self, messages: list[Message], tokens: int) -> list[int]:
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=tokens,
                do_sample=False,
            )
        return out[0, len(ids) :].tolist()

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def stock() -> Stock:
    return Stock()


@pytest.fixture(scope="module")
def expected(stock: Stock, questions: list[list[str]]) -> list[str]:
    return [stock.text(stock.answer([user(turns[0])], TOKENS)) for turns in questions]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def ask(cluster: ClusterProcess, messages: list[Message], tokens: int) -> tuple[str, int]:
    """The answer's text and how many prompt tokens came from a cache."""
    answer: Any = cluster.client().chat.completions.create(
        model=cluster.model, messages=messages, max_tokens=tokens, temperature=0
    )
    return answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens


def test_cold_one_at_a_time(cluster: ClusterProcess, questions: list[list[str]], expected: list[str]):
    answers = [ask(cluster, [user(turns[0])], TOKENS)[0] for turns in questions]
    assert answers == expected


def test_with_a_cached_prefix_and_eight_at_a_time(cluster: ClusterProcess, questions: list[list[str]], expected: list[str]):
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda turns: ask(cluster, [user(turns[0])], TOKENS), questions))
    assert [text for text, _ in results] == expected
    long_prompts = [cached for turns, (_, cached) in zip(questions, results, strict=True) if len(turns[0]) > 400]
    assert long_prompts
    assert all(cached >= 64 for cached in long_prompts)


def test_second_turns_that_continue_the_first(
    cluster: ClusterProcess, stock: Stock, questions: list[list[str]], expected: list[str]
):
    chosen = list(zip(questions, expected, strict=True))[:6]
    conversations = [[user(t[0]), {"role": "assistant", "content": text}, user(t[1])] for t, text in chosen]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda messages: ask(cluster, messages, FOLLOW_UP_TOKENS), conversations))
    wanted = [stock.text(stock.answer(messages, FOLLOW_UP_TOKENS)) for messages in conversations]
    assert [text for text, _ in results] == wanted
    assert sum(cached > 0 for _, cached in results) >= len(results) // 2
