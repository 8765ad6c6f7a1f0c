"""Text to token ids and back, for one model. Never imports torch: a gateway stays a light process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast


class ChatTemplateError(ValueError):
    """The messages cannot be put into the model's chat template (or it has none); the message says why, not what they said."""


class TextCodec:
    """Safe to call from several threads: the tokenizer is immutable once loaded."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.backend: Tokenizer = tokenizer.backend_tokenizer
        self.eos_token_ids = eos_token_ids
        """Tokens that end an answer, from the generation config and the tokenizer."""
        self.vocab_size = self.backend.get_vocab_size()
        self.special_token_ids = frozenset(tokenizer.all_special_ids)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` with whatever the model wants around a prompt (often nothing)."""
        return self.backend.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; special tokens give none."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of the conversation in the model's own chat format, ready for the assistant's answer. Raises ChatTemplateError."""
        if not self._tokenizer.chat_template:
            raise ChatTemplateError("this model has no chat template; use /v1/completions")
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the model's authors: it may refuse with anything
            raise ChatTemplateError(f"the model's chat template refuses these messages ({type(error).__name__})") from error
        return self.backend.encode(str(text), add_special_tokens=False).ids


def load_tokenizer(path: Path) -> TextCodec:
    """The tokenizer in a prepared model folder. Raises OSError or ValueError where the files are not a fast tokenizer."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    ends = {tokenizer.eos_token_id} if isinstance(tokenizer.eos_token_id, int) else set[int]()
    for name in ("generation_config.json", "config.json"):
        file = path / name
        if file.is_file():
            listed = json.loads(file.read_text()).get("eos_token_id")
            ends.update(listed if isinstance(listed, list) else [listed] if isinstance(listed, int) else [])
    return TextCodec(tokenizer, tuple(sorted(ends)))
