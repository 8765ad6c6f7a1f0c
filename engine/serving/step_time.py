"""How long a decode step takes, learned from what was measured. Pure; workers and the scheduler use it.

    step = base + per_sequence · sequences + per_token · context tokens        seconds

A decode step reads all weights once (base), each sequence's activations (per_sequence) and each sequence's K/V (per_token). Three
coefficients by least squares over exponentially forgotten observations, each scaled to about 1 and drawn a little towards what is
believed already (ridge), so that a batch that never changes does not send one coefficient up and another down. None is negative.
"""

from __future__ import annotations

from typing import Final

import numpy as np

FORGETTING: Final = 0.99
RIDGE: Final = 0.3
"""Weight of the present belief, as a number of observations."""
SCALES: Final = np.array([1.0, 16.0, 32768.0])
"""Sequences and context tokens of a usual step."""
SURPRISE_MAX: Final = 8.0
"""One step counts as at most this many times slower or faster than predicted: a paused machine is not a slow model."""

STEP_MIN_S: Final = 1e-9
STEP_MAX_S: Final = 3600.0
SEQUENCES_MAX: Final = 1 << 16
CONTEXT_TOKENS_MAX: Final = 1 << 36
"""What is beyond these was not measured: it comes from a broken report, and would make the equations singular."""


class StepTime:
    """``first_guess_s`` is what a step takes before any was measured, whatever its batch."""

    __slots__ = ("_believed", "_fresh", "_gram", "_moment", "_recalled", "_weight", "observed")

    def __init__(self, first_guess_s: float) -> None:
        self.observed = 0
        self._believed = np.array([first_guess_s, 0.0, 0.0])
        self._gram = np.zeros((3, 3))
        self._moment = np.zeros(3)
        self._weight = 1.0
        self._recalled = False
        self._fresh = True
        """Whether ``_believed`` takes in all that was observed: a fit is worth it only when somebody asks."""

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Seconds: base, per sequence, per context token."""
        if not self._fresh:
            self._fit(self._weight)
            self._fresh = True
        base, per_sequence, per_token = (self._believed / SCALES).tolist()
        return base, per_sequence, per_token

    @property
    def believed(self) -> tuple[float, float, float]:
        """The coefficients of the last fit. Unlike :attr:`coefficients` this never fits anew, so it changes no later one."""
        base, per_sequence, per_token = (self._believed / SCALES).tolist()
        return base, per_sequence, per_token

    def recall(self, base: float, per_sequence: float, per_token: float) -> None:
        """Take what was learnt earlier in place of the first guess. Ignored once anything was observed, or where all are 0."""
        if not self.observed and base + per_sequence + per_token >= STEP_MIN_S:
            self._believed = np.array([base, per_sequence, per_token]) * SCALES
            self._recalled = True

    def seconds(self, sequences: float, context_tokens: float) -> float:
        """Predicted seconds of a step of ``sequences`` that have ``context_tokens`` in all."""
        base, per_sequence, per_token = self.coefficients
        return base + per_sequence * sequences + per_token * context_tokens

    def observe(self, sequences: int, context_tokens: int, seconds: float) -> None:
        """A step took ``seconds``. What cannot be is ignored."""
        if not (0 < sequences <= SEQUENCES_MAX and 0 <= context_tokens <= CONTEXT_TOKENS_MAX):
            return
        if not STEP_MIN_S <= seconds <= STEP_MAX_S:
            return
        # Where only the context counts so far, a step without context is expected to take nothing at all.
        expected = max(STEP_MIN_S, self.seconds(sequences, context_tokens))
        if self.observed:
            seconds = min(max(seconds, expected / SURPRISE_MAX), expected * SURPRISE_MAX)
        x = np.array([1.0, sequences, context_tokens]) / SCALES
        # Relative errors: a step of 300 ms must not outweigh ten of 30 ms.
        weight = 1.0 / seconds
        self._gram = FORGETTING * self._gram + weight * np.outer(x, x)
        self._moment = FORGETTING * self._moment + weight * seconds * x
        self.observed += 1
        self._weight = weight
        self._fresh = False

    def _fit(self, weight: float) -> None:
        """Least squares with no negative coefficient: those that come out negative are left out, and the rest fitted again."""
        used = [0, 1, 2]
        while used:
            ridge = RIDGE * weight * np.eye(len(used))
            prior = self._believed[used] if self.observed > 1 or self._recalled else np.zeros(len(used))
            found = np.linalg.solve(self._gram[np.ix_(used, used)] + ridge, self._moment[used] + ridge @ prior)
            kept = [place for place, value in zip(used, found, strict=True) if value > 0.0]
            if len(kept) == len(used):
                self._believed = np.zeros(3)
                self._believed[used] = found
                return
            used = kept
