"""The gateway without HTTP: limits, from a checked request to a :class:`Generation`, readiness, draining."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from cluster.gateway.answer import AnswerText
from cluster.gateway.dispatch import Dispatcher
from cluster.gateway.generation import Generation
from cluster.gateway.job import Job, ServedModel
from cluster.gateway.metrics import GatewayMetrics
from cluster.gateway.openai.errors import ApiError
from cluster.gateway.openai.requests import ChatRequest, CompletionRequest, parse_chat, parse_completion
from cluster.gateway.openai.responses import ChatShape, CompletionShape, Envelope, Shape
from cluster.gateway.pool_admin import PoolAdmin
from cluster.gateway.ports import ClusterPorts, PortError
from cluster.gateway.prompts import Codec, Prompt, PromptReader, answer_length
from cluster.gateway.service_wish import ServiceWish
from cluster.gateway.settings import GatewaySettings
from engine.serving.addresses import TokenSink
from kv_pool.keys import CacheRoot, cache_root

READY_CHECK_PERIOD_S: Final = 1.0
TOKEN_NAMES_KEPT: Final = 65536
OVERLOAD_RETRY_S: Final = 1.0


class Slots:
    """How many answers are in work. Over the limit nothing waits: the client is told to come again."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.taken = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """One slot; call the result to hold ``n`` more for the same time. Raises :class:`ApiError` (429)."""
        held = 0

        def more(count: int) -> None:
            nonlocal held
            if self.taken + count > self._limit:
                raise ApiError.overloaded(OVERLOAD_RETRY_S)
            self.taken += count
            held += count
            self.idle.clear()

        more(1)
        try:
            yield more
        finally:
            self.taken -= held
            if not self.taken:
                self.idle.set()


@dataclass(frozen=True, slots=True)
class Call:
    """What the HTTP layer knows of a request besides its body. ``hold(n)`` takes ``n`` more of :class:`Slots`."""

    tenant: str
    arrived: float
    details: bool
    hold: Callable[[int], None]
    wish: ServiceWish = field(default_factory=ServiceWish)


class GatewayService:
    """Everything behind the routes. Belongs to one event loop."""

    def __init__(
        self, *, settings: GatewaySettings, model: ServedModel, codec: Codec, ports: ClusterPorts, sink: TokenSink,
        answer_text: Callable[[Job], AnswerText], tenant_secret: bytes = b"", clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.pool = PoolAdmin(ports)
        self.model = model
        self.metrics = GatewayMetrics()
        self.slots = Slots(settings.requests_max)
        self.draining = False
        self.dispatcher = Dispatcher(
            ports, model, sink, settings, self.metrics, eos_token_ids=codec.eos_token_ids,
            answer_text=answer_text, clock=clock,
        )  # fmt: skip
        self._ports = ports
        self._prompts = PromptReader(codec, model, settings)
        self._tenant_secret = tenant_secret
        self._token_name = functools.lru_cache(TOKEN_NAMES_KEPT)(lambda token_id: codec.decode((token_id,)))
        identity = "\n".join(f"{name}={value}" for name, value in sorted(model.identity))
        self._fingerprint = "fp_" + hashlib.blake2b(identity.encode(), digest_size=5).hexdigest()
        self._ready = (float("-inf"), False)
        self._ready_lock = asyncio.Lock()

    def now(self) -> float:
        return self.dispatcher.clock()

    async def chat(self, given: dict[str, Any], call: Call) -> tuple[Generation, bool]:
        """The generation that a chat request asks for, and whether it is a stream. Raises :class:`ApiError`."""
        request = parse_chat(given, self.settings)
        self._check(request)
        root = self._root(call.tenant, request.cache_salt)
        prompts = await self._prompts.chat(request, root)
        shape = ChatShape(self._envelope("chatcmpl-", request), request.logprobs, self._token_name)
        return self._generation(request, prompts, root, shape, call), request.stream

    async def completion(self, given: dict[str, Any], call: Call) -> tuple[Generation, bool]:
        """As :meth:`chat`, for a completions request."""
        request = parse_completion(given, self.settings)
        self._check(request)
        root = self._root(call.tenant, request.cache_salt)
        prompts = await self._prompts.completion(request, root)
        shape = CompletionShape(self._envelope("cmpl-", request), request.logprobs is not None, self._token_name)
        return self._generation(request, prompts, root, shape, call), request.stream

    async def ready(self) -> bool:
        """Whether a request would be taken now: not draining, and the scheduler answers (asked at most once a second)."""
        async with self._ready_lock:
            asked_at, answer = self._ready
            if self.now() - asked_at >= READY_CHECK_PERIOD_S:
                try:
                    await self._ports.notices_endpoint()
                    answer = True
                except PortError:
                    answer = False
                self._ready = (self.now(), answer)
        return answer and not self.draining

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests and give those under way ``timeout_s`` to finish."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.slots.idle.wait()

    async def close(self) -> None:
        """After the server has ended: wait for what ended answers still have to tell the cluster."""
        self._prompts.close()
        await self.dispatcher.settle(self.settings.call_timeout_s)

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _check(self, request: ChatRequest | CompletionRequest) -> None:
        if self.draining:
            raise ApiError.unavailable("The gateway is shutting down.", "draining")
        if request.model != self.model.name:
            raise ApiError.unknown_model(request.model)

    def _root(self, tenant: str, salt: str) -> CacheRoot:
        return cache_root(self.model.identity, tenant_secret=self._tenant_secret, tenant=tenant, salt=salt)

    def _envelope(self, prefix: str, request: ChatRequest | CompletionRequest) -> Envelope:
        response_id = prefix + secrets.token_hex(16)
        return Envelope(response_id, int(time.time()), self.model.name, self._fingerprint, request.include_usage)

    def _generation(
        self, request: ChatRequest | CompletionRequest, prompts: Sequence[Prompt], root: CacheRoot, shape: Shape, call: Call
    ) -> Generation:
        limit, default = self.model.context_max, self.settings.default_max_tokens
        lengths = [answer_length(request, prompt, limit, default) for prompt in prompts]
        choices = request.sampling(request.logprobs_wanted)
        call.hold(len(prompts) * len(choices) - 1)
        deadline = call.arrived + self.settings.request_timeout_s
        jobs = [
            # Random, not derived from anything of the client's: whoever guessed an id could address another's request.
            Job(
                secrets.token_hex(16),
                prompt.token_ids,
                root,
                prompt.keys,
                length,
                sampling,
                request.stops(),
                call.arrived,
                deadline,
                call.wish,
            )
            for prompt, length in zip(prompts, lengths, strict=True)
            for sampling in choices
        ]
        return Generation(
            self.dispatcher, self.metrics, jobs, shape, choices_per_prompt=len(choices), usage_in_stream=request.include_usage,
            details=call.details,
        )  # fmt: skip
