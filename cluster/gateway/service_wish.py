"""What a client asks of the service of its request, in headers: ``x-request-class``, ``x-slo-ttft-ms``, ``x-slo-tpot-ms``,
``x-request-priority``.

The priority adds to that of the class. It is bounded much more tightly, since every client may write what it likes there; and
it is not RFC 9218's ``priority``, which browsers send by themselves."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers

from cluster.gateway.openai.errors import ApiError

CLASS_HEADER: Final = "x-request-class"
TTFT_HEADER: Final = "x-slo-ttft-ms"
TPOT_HEADER: Final = "x-slo-tpot-ms"
PRIORITY_HEADER: Final = "x-request-priority"
PRIORITY_MAX: Final = 10
MS_MAX: Final = 86_400_000
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_WHOLE: Final = re.compile(r"-?[0-9]{1,3}")
_NUMBER: Final = re.compile(r"[0-9]{1,8}(\.[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class ServiceWish:
    """A service class (empty: the default one), and targets in seconds that take the place of its own (None: the class's). A
    higher ``priority`` goes first; it is added to the class's."""

    request_class: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    priority: int = 0


def read_wish(headers: Headers) -> ServiceWish:
    """Raises :class:`ApiError` (400), naming the header."""
    name = headers.get(CLASS_HEADER, "")
    if name and not _NAME.fullmatch(name):
        message = f"{CLASS_HEADER}: expected a name of 1 to 64 of the characters a-z, 0-9, '_', '.', '-'."
        raise ApiError.invalid(message, CLASS_HEADER)
    return ServiceWish(name, _seconds(headers, TTFT_HEADER), _seconds(headers, TPOT_HEADER), _priority(headers))


def _priority(headers: Headers) -> int:
    given = headers.get(PRIORITY_HEADER, "0")
    if not _WHOLE.fullmatch(given) or abs(int(given)) > PRIORITY_MAX:
        message = f"{PRIORITY_HEADER}: expected a whole number from {-PRIORITY_MAX} to {PRIORITY_MAX}."
        raise ApiError.invalid(message, PRIORITY_HEADER)
    return int(given)


def _seconds(headers: Headers, header: str) -> float | None:
    given = headers.get(header)
    if given is None:
        return None
    value = float(given) if _NUMBER.fullmatch(given) else 0.0
    if not 0 < value <= MS_MAX:
        raise ApiError.invalid(f"{header}: expected milliseconds, above 0 and at most {MS_MAX}.", header)
    return value / 1000.0
