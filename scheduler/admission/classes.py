"""Service classes: what a request of each class is promised. Pure.

One row of ``scheduler.classes`` a class::

    interactive = ttft 2s tpot 100ms priority 10
    batch       = ttft 10m tpot 1s

The first row is the default: it counts for a request that names no class, or one that is not there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

CLASSES_MAX: Final = 64
PRIORITY_MAX: Final = 100
NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_UNITS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """Targets in seconds: to the first token, and per token after it. A higher ``priority`` goes first."""

    name: str
    ttft_s: float = math.inf
    tpot_s: float = math.inf
    priority: int = 0


def parse_classes(rows: Sequence[str]) -> dict[str, ServiceClass]:
    """The classes by name, the default first. Raises ValueError, naming the row and what is wrong with it."""
    if not 0 < len(rows) <= CLASSES_MAX:
        raise ValueError(f"scheduler.classes: 1 to {CLASSES_MAX} classes are needed, not {len(rows)}")
    classes: dict[str, ServiceClass] = {}
    for row in rows:
        service = _parse(row)
        if service.name in classes:
            raise ValueError(f"scheduler.classes: {service.name!r} is there twice")
        classes[service.name] = service
    return classes


def _parse(row: str) -> ServiceClass:
    name, equals, targets = (part.strip() for part in row.partition("="))
    if not equals or not NAME.fullmatch(name):
        raise ValueError(f"scheduler.classes: {row!r} is not of the form 'name=ttft 2s tpot 100ms priority 10'")
    words = targets.split()
    if len(words) % 2:
        raise ValueError(f"scheduler.classes: {name}: {words[-1]!r} has no value")
    found: dict[str, float] = {}
    for key, value in zip(words[::2], words[1::2], strict=True):
        if key in found:
            raise ValueError(f"scheduler.classes: {name}: {key} is there twice")
        match key:
            case "ttft" | "tpot":
                found[key] = _seconds(name, key, value)
            case "priority":
                found[key] = _priority(name, value)
            case _:
                raise ValueError(f"scheduler.classes: {name}: {key!r} is not one of ttft, tpot, priority")
    return ServiceClass(name, found.get("ttft", math.inf), found.get("tpot", math.inf), int(found.get("priority", 0)))


def _seconds(name: str, key: str, value: str) -> float:
    span = _SPAN.fullmatch(value)
    seconds = float(span[1]) * _UNITS[span[2]] if span else 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"scheduler.classes: {name}: {key} {value!r} is not a time above 0 such as 200ms, 2s or 10m")
    return seconds


def _priority(name: str, value: str) -> int:
    if not re.fullmatch(r"-?\d{1,9}", value) or abs(int(value)) > PRIORITY_MAX:
        raise ValueError(
            f"scheduler.classes: {name}: priority {value!r} is not a whole number from {-PRIORITY_MAX} to {PRIORITY_MAX}"
        )
    return int(value)
