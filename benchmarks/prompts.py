"""Prompts of an exact number of tokens. Text of words that are one token each: what a client sends, tokenised by the gateway."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from engine.text.codec import TextCodec

WORD: Final = re.compile(r" [a-z]{3,8}")
WORDS_MIN: Final = 1000
IDS: Final = range(100, 40_000)


class Words:
    """``text(n, seed)`` has exactly ``n`` tokens and texts joined have as many as both: words begin with their space.

    Raises ValueError for a tokenizer that has too few such words.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._words = [
            word
            for word in (codec.decode([i]) for i in range(codec.vocab_size))
            if WORD.fullmatch(word) and len(codec.encode(word)) == 1
        ]
        if len(self._words) < WORDS_MIN:
            raise ValueError(f"the tokenizer has {len(self._words)} words of one token, {WORDS_MIN} are needed")

    @classmethod
    def of_model(cls, path: Path) -> Words:
        from engine.text.codec import load_tokenizer  # slow to import, and most runs need no text

        return cls(load_tokenizer(path))

    def text(self, tokens: int, *, seed: int) -> str:
        generator = random.Random(seed)
        return "".join(generator.choice(self._words) for _ in range(tokens))

    def ids(self, text: str) -> list[int]:
        return self._codec.encode(text)


def random_ids(tokens: int, generator: random.Random) -> list[int]:
    """Token ids of ordinary words in the default model."""
    return [generator.choice(IDS) for _ in range(tokens)]
