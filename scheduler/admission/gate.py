"""Whether a request is taken at all, before any work is done for it. Pure.

==========  =========================================  =======================================================================
gate        asks                                       goes wrong
==========  =========================================  =======================================================================
none        TTFT                                       the decode worker finds out after the prefill was computed for nothing
early       TTFT, time per token with the batch that   decode load lags by one prefill: the gate opens while it looks empty and
            is decoding now                            shuts when all that it let in arrives; it oscillates (Mooncake, section 7)
predictive  TTFT, time per token with the batch that   what is expected of answers' lengths
            will be decoding when this prefill ends
==========  =========================================  =======================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from scheduler.admission.classes import ServiceClass


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the chosen pair would give, in seconds: time to the first token; a step with this request in the present batch, and in
    the batch at the end of its prefill; and the time until a sequence there is expected to end."""

    ttft_s: float
    tpot_now_s: float
    tpot_then_s: float
    relief_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    admit: bool
    reason: str = ""
    retry_after_s: float = 0.0


ADMITTED: Final = Verdict(admit=True)


class Gate(Protocol):
    def judge(self, target: ServiceClass, forecast: Forecast) -> Verdict: ...


class NoGate:
    """Only the prefill side."""

    def judge(self, target: ServiceClass, forecast: Forecast) -> Verdict:
        return _first_token(target, forecast)


class Early:
    def judge(self, target: ServiceClass, forecast: Forecast) -> Verdict:
        return _both(target, forecast, forecast.tpot_now_s)


class Predictive:
    def judge(self, target: ServiceClass, forecast: Forecast) -> Verdict:
        return _both(target, forecast, forecast.tpot_then_s)


GATES: Final[Mapping[str, Gate]] = {"none": NoGate(), "early": Early(), "predictive": Predictive()}


def _first_token(target: ServiceClass, forecast: Forecast) -> Verdict:
    late_s = forecast.ttft_s - target.ttft_s
    if late_s > 0:
        return Verdict(admit=False, reason="the first token would be too late", retry_after_s=late_s)
    return ADMITTED


def _both(target: ServiceClass, forecast: Forecast, tpot_s: float) -> Verdict:
    verdict = _first_token(target, forecast)
    if verdict.admit and tpot_s > target.tpot_s:
        return Verdict(admit=False, reason="the tokens would come too slowly", retry_after_s=forecast.relief_s)
    return verdict
