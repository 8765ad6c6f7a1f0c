"""When a request is sent again: only where the server cannot have begun to answer it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cluster.client.errors import MoonpoolError, OverloadedError, UnreachableError

FIRST_WAIT_S: Final = 0.1
WAIT_MAX_S: Final = 2.0
RETRY_AFTER_MAX_S: Final = 20.0
"""A server may ask for more; it is asked again after this long, once per attempt left."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """``attempts`` includes the first one."""

    attempts: int = 3

    def wait_s(self, error: MoonpoolError, failed: int, left_s: float) -> float | None:
        """How long to wait before attempt ``failed + 1``, or None: give up. ``left_s`` is what is left of the request's time.

        Retried are connections that did not come about (0.1 s, 0.2 s, ... at most 2 s) and 429 (its ``Retry-After``, at most
        20 s). Everything else may have cost work already, or would fail again.
        """
        if failed >= self.attempts or not isinstance(error, UnreachableError | OverloadedError):
            return None
        wait_s = min(FIRST_WAIT_S * 2 ** (failed - 1), WAIT_MAX_S)
        if isinstance(error, OverloadedError) and error.retry_after_s is not None:
            wait_s = min(error.retry_after_s, RETRY_AFTER_MAX_S)
        return wait_s if wait_s < left_s else None
