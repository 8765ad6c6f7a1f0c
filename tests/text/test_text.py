"""Tokens to text and back: never half a character, never a stop string, the same text in the end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.codec import ChatTemplateError, TextCodec, load_tokenizer
from engine.text.detokenize import REPLACEMENT, IncrementalDetokenizer
from engine.text.stop import StopChecker
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
@given(ids=st.lists(st.integers(3, 260), max_size=40))
def test_any_tokens_even_broken_bytes_end_as_the_decoder_has_them(codec: TextCodec, ids: list[int]):
    assert "".join(streamed(codec, ids, [])) == codec.decode(ids)


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


# --- stop strings ----------------------------------------------------------------------------------------------------------


def run(stop: list[str], pieces: list[str]) -> tuple[str, bool]:
    checker = StopChecker(stop)
    out = ""
    for piece in pieces:
        result = checker.push(piece)
        out += result.emit
        if result.stopped:
            return out, True
    return out + checker.flush(), False


@pytest.mark.parametrize(
    ("stop", "pieces", "expected"),
    [
        (["END"], ["a EN", "D b"], ("a ", True)),
        (["END"], ["a EN", "x"], ("a ENx", False)),
        (["END"], ["E", "N"], ("EN", False)),
        (["\n\n"], ["a\n", "\nb"], ("a", True)),
        (["bc", "abcd"], ["abcd"], ("", True)),
        (["aab"], ["aa", "ab"], ("a", True)),
        ([], ["anything"], ("anything", False)),
        ([""], ["anything"], ("anything", False)),
    ],
)
def test_stop_strings(stop: list[str], pieces: list[str], expected: tuple[str, bool]):
    assert run(stop, pieces) == expected


@settings(deadline=None)
@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=10),
)
def test_against_a_twin_that_sees_the_whole_text(stop: list[str], pieces: list[str]):
    whole = "".join(pieces)
    found = [at for at in (whole.find(s) for s in stop) if at >= 0]
    out, stopped = run(stop, pieces)
    assert stopped == bool(found)
    if not found:
        assert out == whole
    else:
        # Pieces may reveal a later-beginning stop string first; never text behind the first end of any.
        ends = [whole.find(s) + len(s) for s in stop if s in whole]
        assert whole.startswith(out)
        assert len(out) <= min(ends)
        assert not any(s in out for s in stop)
