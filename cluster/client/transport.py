"""What both clients share about HTTP: addresses, limits, time, and how httpx's errors translate."""

from __future__ import annotations

import ipaddress
import time
from typing import Final
from urllib.parse import urlsplit

import httpx

from cluster.client.errors import MoonpoolError, ProtocolError, TimedOutError, UnreachableError

DEFAULT_URL: Final = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_S: Final = 600.0
"""Of a whole request, retries included: the gateway's own default limit."""
CONNECT_TIMEOUT_S: Final = 5.0
BODY_BYTES_MAX: Final = 64 * 1024 * 1024


class Deadline:
    """Seconds that are left of a request's time."""

    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s
        self._timeout_s = timeout_s

    def left_s(self) -> float:
        return self._end - time.monotonic()

    def httpx_timeout(self) -> httpx.Timeout:
        """Raises :class:`TimedOutError` when nothing is left. httpx's limits are per read, so the body is checked as well."""
        left_s = self.check()
        return httpx.Timeout(left_s, connect=min(CONNECT_TIMEOUT_S, left_s))

    def check(self) -> float:
        """What is left. Raises :class:`TimedOutError` when that is nothing."""
        left_s = self.left_s()
        if left_s <= 0:
            raise TimedOutError(f"no complete answer in {self._timeout_s:g} s")
        return left_s


class BodyLimit:
    """Counts bytes of a body."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > BODY_BYTES_MAX:
            raise ProtocolError(f"the answer is longer than {BODY_BYTES_MAX} bytes")
        self._parts.append(part)

    def body(self) -> bytes:
        return b"".join(self._parts)


def base_url(url: str) -> str:
    """Without a trailing slash or ``/v1``, so that the address of any OpenAI client works. Raises ValueError on no address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("the address must look like http://host:port")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def trusts_environment(url: str) -> bool:
    """Proxies of the environment count for other machines; a request to this one never leaves it."""
    host = urlsplit(url).hostname or ""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def headers(api_key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def translate(error: httpx.HTTPError) -> MoonpoolError:
    """httpx's error as ours. Its own text may hold an address, never a body."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        return UnreachableError(f"the server cannot be reached ({type(error).__name__})")
    if isinstance(error, httpx.TimeoutException):
        return TimedOutError(f"the server was silent for too long ({type(error).__name__})")
    if isinstance(error, httpx.TransportError):
        return ProtocolError(f"the connection broke ({type(error).__name__})")
    return ProtocolError(f"the server's answer cannot be read ({type(error).__name__})")
