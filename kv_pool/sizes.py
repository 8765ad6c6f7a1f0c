"""Sizes and durations in configuration: ``2GiB``, ``512 MiB``, ``1_000_000``; ``30s``, ``4h``, ``14d``."""

from __future__ import annotations

import re

BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS = {"": 1, "b": 1} | BINARY | DECIMAL


def parse_size(text: str) -> int:
    """Bytes named by ``text``. Raises ValueError that says what is accepted."""
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"size {text!r}: expected a number with B, KiB, MiB, GiB, TiB (or KB, MB, GB, TB), such as '2GiB'")
    return int(float(match.group(1).replace("_", "")) * unit)


SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_duration(text: str) -> float:
    """Seconds named by ``text``. Raises ValueError that says what is accepted."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhd])\s*", text)
    seconds = float(match.group(1)) * SECONDS[match.group(2)] if match else 0.0
    if not seconds:
        raise ValueError(f"duration {text!r}: expected a number over 0 with s, m, h or d, such as '4h'")
    return seconds
