"""One HTTP request's answers while they are made: several choices and prompts side by side, as a stream or as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from cluster.gateway.answer import TokenReport
from cluster.gateway.dispatch import Answer, Dispatcher
from cluster.gateway.job import Job
from cluster.gateway.metrics import GatewayMetrics, cached_by_tier
from cluster.gateway.openai.responses import DONE, Choice, Shape, Usage, sse


@dataclass(slots=True)
class _Collected:
    text: list[str] = field(default_factory=list)
    reports: list[TokenReport] = field(default_factory=list)


class Generation:
    """``jobs`` in the order of the response's choices; ``choices_per_prompt`` of them share each prompt.

    ``details``: add an object ``moonpool`` with cached tokens by tier and timings to the response (or the stream's last chunk).
    """

    def __init__(
        self, dispatcher: Dispatcher, metrics: GatewayMetrics, jobs: Sequence[Job], shape: Shape, *, choices_per_prompt: int,
        usage_in_stream: bool, details: bool,
    ) -> None:  # fmt: skip
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._shape = shape
        self._choices_per_prompt = choices_per_prompt
        self._usage_in_stream = usage_in_stream
        self._details = details
        self._fresh = asyncio.Event()
        self._answers = [dispatcher.prepare(job, self._fresh) for job in jobs]

    async def whole(self) -> dict[str, Any]:
        """Wait for all answers. Raises :class:`ApiError` if one fails."""
        collected = [_Collected() for _ in self._answers]
        async with self._running():
            while not self._over():
                await self._news()
                for answer, parts in zip(self._answers, collected, strict=True):
                    # Taken as it comes, so that nothing is joined twice.
                    if (part := answer.flight.take()) is not None:
                        parts.text.append(part.text)
                        parts.reports.extend(part.reports)
        choices = [
            Choice(i, "".join(parts.text), str(answer.flight.finish_reason), tuple(parts.reports))
            for i, (answer, parts) in enumerate(zip(self._answers, collected, strict=True))
        ]
        return self._shape.whole(choices, self.usage()) | self._extra()

    async def stream(self) -> AsyncGenerator[bytes]:
        """Server-sent events. The first comes with the first token, so that an error before it can still be a status.

        Raises :class:`ApiError` if an answer fails; must be closed (``aclose``) if it is not read to its end.
        """
        opened: set[int] = set()
        ended: set[int] = set()
        async with self._running():
            while len(ended) < len(self._answers):
                await self._news()
                for index, answer in enumerate(self._answers):
                    for chunk in self._chunks(index, answer, opened, ended):
                        yield sse(chunk)
        if self._usage_in_stream:
            yield sse(self._shape.usage(self.usage()) | self._extra())
        elif self._details:
            yield sse({**self._shape.usage(self.usage()), "usage": None} | self._extra())
        yield DONE

    def usage(self) -> Usage:
        prompts = self._answers[:: self._choices_per_prompt]
        return Usage(
            prompt_tokens=sum(len(answer.flight.job.prompt_ids) for answer in prompts),
            completion_tokens=sum(len(answer.flight.tokens) for answer in self._answers),
            cached_tokens=sum(sum(cached_by_tier(answer.flight).values()) for answer in prompts),
        )

    def _chunks(self, index: int, answer: Answer, opened: set[int], ended: set[int]) -> list[dict[str, Any]]:
        """What is new of one choice."""
        flight, shape, chunks = answer.flight, self._shape, list[dict[str, Any]]()
        if index in ended or not (flight.tokens or answer.over):
            return chunks
        if index not in opened:
            opened.add(index)
            opening = shape.opening(index)
            chunks += [] if opening is None else [opening]
        if (part := flight.take()) is not None:
            chunks.append(shape.part(index, part))
        if flight.finish_reason is not None:
            ended.add(index)
            chunks.append(shape.ending(index, flight.finish_reason))
        return chunks

    def _over(self) -> bool:
        return all(answer.over for answer in self._answers)

    async def _news(self) -> None:
        """Wait until some answer has something new. Raises its error if it failed."""
        await self._fresh.wait()
        self._fresh.clear()
        for answer in self._answers:
            if answer.error is not None:
                raise answer.error

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """The answers' drivers run inside; leaving early, for whatever reason, gives everything back."""
        drivers = [asyncio.create_task(self._dispatcher.drive(answer)) for answer in self._answers]
        self._metrics.in_flight.inc(len(drivers))
        try:
            yield
        finally:
            for driver in drivers:
                driver.cancel()
            await asyncio.wait(drivers)
            self._metrics.in_flight.dec(len(drivers))
            for answer in self._answers:
                self._metrics.answered(answer.flight)

    def _extra(self) -> dict[str, Any]:
        return {"moonpool": {"choices": [_detail(answer) for answer in self._answers]}} if self._details else {}


def _detail(answer: Answer) -> dict[str, Any]:
    """Where one choice's time went, in seconds, and which tier its cached prefix came from."""
    flight, timing = answer.flight, answer.flight.timing
    done, gaps = timing.prefill, timing.gaps_s
    return {
        "attempts": answer.attempts,
        "cached_tokens": cached_by_tier(flight),
        "queue_s": done and done.queue_s,
        "load_s": done and done.load_s,
        "prefill_s": done and done.compute_s,
        "handoff_s": timing.handoff_s,
        "ttft_s": None if timing.first_token_at is None else timing.first_token_at - flight.job.arrived,
        "tbt_s": sum(gaps) / len(gaps) if gaps else None,
    }
