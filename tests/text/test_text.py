"""Tokens to text and back: never half a character, never a stop string, the same text in the end."""

from __future__ import annotations

import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engine.models.source import resolve_model
from engine.settings import ModelSettings
from engine.text.codec import ChatTemplateError, TextCodec, load_tokenizer
from engine.text.detokenize import REPLACEMENT, WINDOW_MAX, IncrementalDetokenizer
from tests.cluster.tiny_model import make_tiny_model

HARD = ["naïve café", "日本語のテキスト", "👩‍👩‍👧 family 🇪🇺", "a\u0301\u0328", "tabs\t\n\n  and  spaces ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "x=1;y='é'"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def codec(folder: Path) -> TextCodec:
    return load_tokenizer(folder)


def streamed(codec: TextCodec, ids: list[int], prompt: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(codec, prompt)
    return [*(detokenizer.push([token]) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", HARD)
def test_pieces_are_whole_characters_and_add_up(codec: TextCodec, text: str):
    ids = codec.encode(text)
    pieces = streamed(codec, ids, [])
    assert "".join(pieces) == text == codec.decode(ids)
    assert not any(REPLACEMENT in piece for piece in pieces)


@settings(deadline=None, max_examples=80)
@given(before=st.text(max_size=8), text=st.text(max_size=24), cut=st.integers(1, 4))
def test_any_text_in_any_grouping(codec: TextCodec, before: str, text: str, cut: int):
    prompt, ids = codec.encode(before), codec.encode(text)
    detokenizer = IncrementalDetokenizer(codec, prompt)
    out = "".join(detokenizer.push(ids[i : i + cut]) for i in range(0, len(ids), cut)) + detokenizer.flush()
    assert out == codec.decode(prompt + ids)[len(codec.decode(prompt)) :]


@settings(deadline=None, max_examples=80)
@given(ids=st.lists(st.integers(3, 260), max_size=60))
def test_any_tokens_even_broken_bytes_end_as_the_decoder_has_them(codec: TextCodec, ids: list[int]):
    assert "".join(streamed(codec, ids, [])) == codec.decode(ids)


@settings(deadline=None, max_examples=80)
@given(text=st.text("\ufffdé日👩a", max_size=40), cut=st.integers(0, 3))
def test_long_runs_without_text_lose_and_repeat_nothing(codec: TextCodec, text: str, cut: int):
    """More bytes without text than are held back, then a character that lies across the border."""
    ids = codec.encode("\ufffd" * 5)[cut:] + codec.encode(text)
    assert "".join(streamed(codec, ids, [])) == codec.decode(ids)


def test_what_is_held_back_is_bounded(codec: TextCodec):
    broken = codec.encode("日")[:1] * 100
    pieces = streamed(codec, broken, [])
    silent = max(len(run) for run in "".join("." if piece else " " for piece in pieces).split("."))
    assert silent <= 2 * WINDOW_MAX


def test_a_character_cut_off_by_the_end_comes_with_the_flush(codec: TextCodec):
    ids = codec.encode("日")[:-1]
    pieces = streamed(codec, ids, [])
    assert pieces[:-1] == [""] * len(ids)
    assert pieces[-1] == codec.decode(ids)


def test_special_tokens_have_no_text(codec: TextCodec):
    assert streamed(codec, [*codec.encode("end"), *codec.eos_token_ids], [])[-2:] == ["", ""]


def test_end_tokens_come_from_tokenizer_and_configuration(codec: TextCodec):
    assert codec.eos_token_ids == (2,)


def test_chat_template_is_the_models_own(codec: TextCodec):
    ids = codec.apply_chat_template([{"role": "user", "content": "hi"}])
    assert codec.backend.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_model_without_a_template_says_what_to_use(folder: Path, tmp_path: Path):
    import shutil

    copy = tmp_path / "plain"
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(ChatTemplateError, match="/v1/completions"):
        load_tokenizer(copy).apply_chat_template([{"role": "user", "content": "secret words"}])


def test_a_template_that_refuses_does_not_leak_the_prompt(folder: Path, tmp_path: Path):
    import shutil

    copy = tmp_path / "strict"
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").write_text("{{ raise_exception('bad: ' + messages[0]['content']) }}")
    with pytest.raises(ChatTemplateError) as caught:
        load_tokenizer(copy).apply_chat_template([{"role": "user", "content": "secret words"}])
    assert "secret" not in str(caught.value)


def test_a_gateway_never_imports_torch(folder: Path):
    code = (
        "import sys; from pathlib import Path; from engine.text.codec import load_tokenizer;"
        f"c = load_tokenizer(Path({str(folder)!r})); c.apply_chat_template([{{'role': 'user', 'content': 'x'}}]);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- byte fallback (Llama 2, Mistral, Gemma): a token per word, and 256 tokens for single bytes --------------------------------


@pytest.fixture(scope="module")
def fallback() -> TextCodec:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁cat", "s", "▁"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>"), (2,))


def in_bytes(data: bytes) -> list[int]:
    return [byte + 3 for byte in data]


WORDS = st.sampled_from([259, 260, 261, 262, 2]).map(lambda token: [token])
CHARACTERS = st.text("é日👩a", min_size=1, max_size=3).map(lambda text: in_bytes(text.encode()))


@settings(deadline=None, max_examples=80)
@given(prompt=st.lists(WORDS, max_size=3), answer=st.lists(st.one_of(WORDS, CHARACTERS), max_size=12))
def test_byte_fallback(fallback: TextCodec, prompt: list[list[int]], answer: list[list[int]]):
    before, ids = list(chain.from_iterable(prompt)), list(chain.from_iterable(answer))
    whole = fallback.decode(before + ids)[len(fallback.decode(before)) :]
    pieces = streamed(fallback, ids, before)
    assert "".join(pieces) == whole
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_bad_byte_takes_nothing_back_that_is_out(fallback: TextCodec):
    ids = [*in_bytes("日".encode()), *in_bytes(b"\xe6"), 259, *in_bytes("é".encode())]
    assert "".join(streamed(fallback, ids, [])) == f"日{REPLACEMENT} theé"


# --- the default model's tokenizer ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> TextCodec:
    return load_tokenizer(resolve_model(ModelSettings(dtype="float32")).path)


@pytest.mark.model
@settings(deadline=None, max_examples=100)
@given(prompt=st.text(max_size=8), text=st.text(max_size=40))
def test_any_text_with_the_real_tokenizer(real: TextCodec, prompt: str, text: str):
    before, ids = real.encode(prompt), real.encode(text)
    pieces = streamed(real, ids, before)
    assert "".join(pieces) == real.decode(before + ids)[len(real.decode(before)) :]
    if REPLACEMENT not in real.decode(ids):  # its vocabulary lacks a few bytes, so not every text comes back
        assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.model
@settings(deadline=None, max_examples=100)
@given(ids=st.lists(st.integers(0, 49_151), max_size=60))
def test_any_ids_with_the_real_tokenizer(real: TextCodec, ids: list[int]):
    assert "".join(streamed(real, ids, [])) == real.decode(ids)
