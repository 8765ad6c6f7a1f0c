"""Keys of requests, compared so that the time it takes says nothing of them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers


class KeySet:
    """Keys as they are sent in ``Authorization: Bearer``. Holds digests only."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = {hashlib.sha256(key.encode()).digest() for key in keys}

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, headers: Headers) -> bytes | None:
        """The digest of the key that ``headers`` carry, if it is one of these."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        # All keys are compared, each in constant time: how long this takes says nothing about any of them.
        found = [known for known in self._digests if hmac.compare_digest(known, given)]
        return found[0] if found and scheme.lower() == "bearer" else None
