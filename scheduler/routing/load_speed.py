"""How long a worker takes to load cached blocks, by the medium they come from; learned from what it reports. Pure.

    seconds = DRAM bytes · d + SSD bytes · s + remote DRAM bytes · r + remote SSD bytes · q

One load mixes media, so its error is shared among them by their predicted share (normalised LMS): what took most of the time is
corrected most.
"""

from __future__ import annotations

from typing import Final

WEIGHT: Final = 0.2
"""Of the newest load."""
SAMPLE_BYTES_MIN: Final = 64 * 1024
"""Smaller loads measure latency, not the medium."""
SURPRISE_MAX: Final = 8.0
PER_BYTE_MIN, PER_BYTE_MAX = 1e-12, 1e-4


class LoadSpeeds:
    """``per_byte``: seconds per byte from (DRAM, SSD, remote DRAM, remote SSD). The arguments are first guesses, bytes per
    second: of a copy within a machine, of its drive, and of a link between two."""

    __slots__ = ("observed", "per_byte")

    def __init__(self, dram: float = 4e9, ssd: float = 1e9, link: float = 1e9) -> None:
        self.per_byte: tuple[float, float, float, float] = (1 / dram, 1 / ssd, 1 / link, 1 / link + 1 / ssd)
        self.observed = 0

    def seconds(self, dram: float, ssd: float, remote_dram: float, remote_ssd: float) -> float:
        """Predicted seconds to load so many bytes from each medium."""
        return sum(size * each for size, each in zip((dram, ssd, remote_dram, remote_ssd), self.per_byte, strict=True))

    def observe(self, dram: int, ssd: int, remote_dram: int, remote_ssd: int, seconds: float) -> None:
        """A load took ``seconds``. What cannot be, and what is too small to tell, is ignored."""
        sizes = (dram, ssd, remote_dram, remote_ssd)
        if min(sizes) < 0 or sum(sizes) < SAMPLE_BYTES_MIN or not 0.0 < seconds < float("inf"):
            return
        expected = self.seconds(*sizes)
        ratio = min(max(seconds / expected, 1 / SURPRISE_MAX), SURPRISE_MAX)
        learned: list[float] = []
        for size, each in zip(sizes, self.per_byte, strict=True):
            share = size * each / expected
            # In the logarithm, so that no coefficient can become negative: twice and half as fast are equally far.
            learned.append(min(max(each * ratio ** (WEIGHT * share), PER_BYTE_MIN), PER_BYTE_MAX))
        self.per_byte = (learned[0], learned[1], learned[2], learned[3])
        self.observed += 1

    def recall(self, per_byte: tuple[float, float, float, float]) -> None:
        """Take what was learnt earlier in place of the first guesses. Ignored once anything was observed."""
        if not self.observed:
            self.per_byte = per_byte
