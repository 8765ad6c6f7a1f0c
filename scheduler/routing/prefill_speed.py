"""How long a worker takes to compute a piece of a prompt, learned from what it reports. Pure.

Attention makes later tokens dearer: computing ``n`` tokens after ``p`` cached ones takes

    T(n, p) = a·n + b·n·(n + 2p)  seconds          (the difference of a·x + b·x² between x = p and x = p + n)

so that the seconds per token, ``T / n = a + b·(n + 2p)``, are a straight line over ``u = n + 2p``: one weighted line fit with
forgetting, kept as five sums.
"""

from __future__ import annotations

from typing import Final

FORGETTING: Final = 0.95
"""Weight that an observation keeps when the next full one comes: about the last 20 count."""
FULL_WEIGHT_TOKENS: Final = 256
"""Shorter pieces weigh less: their time is mostly the fixed cost of a forward."""
PRIOR_WEIGHT: Final = 1.0
SPREAD_PRIOR: Final = 512.0
"""Tokens of spread in ``u`` below which a slope is not believed."""
RECALLED_WEIGHT: Final = 0.2
"""Of a whole recalled line: a full observation outweighs it five times, so that a wrong line is forgotten as soon as a guess."""
RECALLED_TOKENS: Final = 8192.0
"""Where in ``u`` the recalled line is pinned, beside 0."""
SURPRISE_MAX: Final = 8.0
"""One observation counts as at most this many times dearer or cheaper than predicted: a paused machine is not a slow model."""


class PrefillSpeed:
    """``tokens_per_s`` is the guess before anything was seen: ``a = 1 / tokens_per_s``, ``b = 0``."""

    __slots__ = ("_r", "_u", "_ur", "_uu", "_w", "observed", "per_token", "per_token_position")

    def __init__(self, tokens_per_s: float) -> None:
        self.per_token = 1.0 / tokens_per_s
        """a, seconds per token."""
        self.per_token_position = 0.0
        """b, seconds per token and token of position."""
        self.observed = 0
        # Weighted sums of 1, u, r, u², u·r, with r = T / n; the guess counts as one observation at u = 0.
        self._w, self._u, self._r = PRIOR_WEIGHT, 0.0, PRIOR_WEIGHT * self.per_token
        self._uu, self._ur = 0.0, 0.0

    def seconds(self, tokens: int, past: int = 0) -> float:
        """Predicted seconds to compute ``tokens`` after ``past`` cached tokens."""
        return tokens * (self.per_token + self.per_token_position * (tokens + 2 * past))

    def observe(self, tokens: int, past: int, seconds: float) -> None:
        """A worker computed ``tokens`` after ``past`` in ``seconds``. What cannot be (no tokens, no time) is ignored."""
        if tokens <= 0 or past < 0 or not 0.0 < seconds < float("inf"):
            return
        expected = self.seconds(tokens, past)
        seconds = min(max(seconds, expected / SURPRISE_MAX), expected * SURPRISE_MAX)
        weight = min(1.0, tokens / FULL_WEIGHT_TOKENS)
        keep = FORGETTING**weight
        u, r = float(tokens + 2 * past), seconds / tokens
        self._w = keep * self._w + weight
        self._u = keep * self._u + weight * u
        self._r = keep * self._r + weight * r
        self._uu = keep * self._uu + weight * u * u
        self._ur = keep * self._ur + weight * u * r
        self.observed += 1
        self._fit()

    def recall(self, per_token: float, per_token_position: float) -> None:
        """Take a line learnt earlier in place of the guess: two points on it, of little weight. Ignored once anything was
        observed."""
        if self.observed:
            return
        weight, u = RECALLED_WEIGHT / 2, RECALLED_TOKENS
        far = per_token + per_token_position * u
        self._w, self._u, self._r = 2 * weight, weight * u, weight * (per_token + far)
        self._uu, self._ur = weight * u * u, weight * u * far
        self.per_token, self.per_token_position = per_token, per_token_position

    def _fit(self) -> None:
        mean_u, mean_r = self._u / self._w, self._r / self._w
        variance = self._uu / self._w - mean_u * mean_u
        covariance = self._ur / self._w - mean_u * mean_r
        slope = max(0.0, covariance / (variance + SPREAD_PRIOR**2))
        # Neither coefficient may be negative, or a long prompt would seem free; the line still passes through the means.
        slope = min(slope, 0.9 * mean_r / mean_u) if mean_u > 0 else 0.0
        self.per_token_position = slope
        self.per_token = mean_r - slope * mean_u
