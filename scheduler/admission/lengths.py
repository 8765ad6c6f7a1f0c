"""How long answers will be, from the answers of the same class so far. Pure.

Per class an exponentially weighted mean, over about the last ``WINDOW`` answers; before there were any, the configured guess
counts as ``PRIOR`` of them. Few requests use all the tokens that they may have, so their limit is only a cap."""

from __future__ import annotations

from typing import Final

WINDOW: Final = 500
PRIOR: Final = 20
CLASSES_MAX: Final = 256


class AnswerLengths:
    """``first_guess`` is in tokens."""

    def __init__(self, first_guess: float) -> None:
        self._first_guess = float(first_guess)
        self._seen: dict[str, tuple[float, float]] = {}
        """Class to (weight, mean)."""

    def expected(self, class_name: str, max_new_tokens: int) -> float:
        """Tokens that an answer of this class will have, of ``max_new_tokens`` at most."""
        _, mean = self._seen.get(class_name, (0.0, self._first_guess))
        return min(float(max_new_tokens), mean)

    def observe(self, class_name: str, tokens: int) -> None:
        """An answer of ``tokens`` tokens is complete. Classes beyond ``CLASSES_MAX`` are not learned."""
        if tokens < 0 or (class_name not in self._seen and len(self._seen) >= CLASSES_MAX):
            return
        weight, mean = self._seen.get(class_name, (float(PRIOR), self._first_guess))
        weight = min(weight + 1.0, float(WINDOW))
        self._seen[class_name] = weight, mean + (tokens - mean) / weight
