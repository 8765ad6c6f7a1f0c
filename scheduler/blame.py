"""Whom a failure speaks against. Pure.

A request that fails wherever it runs is itself the cause, and must not quarantine one worker after the other: only its first
``BLAMES_MAX`` failures count.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

BLAMES_MAX: Final = 2
REQUESTS_MAX: Final = 4096


class BlameLedger:
    """Counts failures by request; the requests that failed longest ago are forgotten."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, int] = OrderedDict()

    def counts(self, request_id: str) -> bool:
        """Note one more failure of the request; says whether it speaks against the worker."""
        count = self._counts.pop(request_id, 0) + 1
        self._counts[request_id] = count
        if len(self._counts) > REQUESTS_MAX:
            self._counts.popitem(last=False)
        return count <= BLAMES_MAX
