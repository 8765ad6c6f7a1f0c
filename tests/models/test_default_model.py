"""The default model itself, as it comes from the package."""

from __future__ import annotations

import pytest

from engine.models.checkpoint import inspect
from engine.models.files import ModelFiles
from engine.models.source import resolve_model
from engine.settings import ModelSettings
from engine.text.codec import load_tokenizer

pytestmark = pytest.mark.model

TALK = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve 日本 👩‍👩‍👧\n\n  x"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "<|im_end|> c"}],
]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return resolve_model(ModelSettings(dtype="float32"))


def test_it_is_prepared_in_the_dtype_that_runs(files: ModelFiles):
    held = inspect(files.path)
    assert (held.dtype, held.ready, held.weights) == ("float32", True, ("model.safetensors",))
    assert files.name == "smollm2-135m-instruct"
    assert (files.path / "model.safetensors").stat().st_size > 134_515_008 * 4


def test_a_second_start_is_quick(files: ModelFiles, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.models.digests.sha256", lambda path: pytest.fail(f"hashed {path}"))
    assert resolve_model(ModelSettings(dtype="float32"), progress=pytest.fail) == files


def test_the_light_tokenizer_gives_the_ids_of_the_models_own(files: ModelFiles):
    from transformers import AutoTokenizer

    ours, stock = load_tokenizer(files.path), AutoTokenizer.from_pretrained(files.path)
    for messages in TALK:
        whole = stock.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.apply_chat_template(messages) == whole
        assert ours.encode(messages[-1]["content"]) == stock(messages[-1]["content"])["input_ids"]
        assert ours.decode(whole) == stock.decode(whole, skip_special_tokens=True)
    assert ours.eos_token_ids == (2,)
