"""A cluster in one process for the gateway's tests: workers that answer deterministically, and break on demand.

The next token is a checksum of all tokens before it, so an answer is right only if every attempt started from exactly what the
earlier ones had answered: a lost, repeated or foreign token changes all that follow.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import time
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.gateway.answer import AnswerText
from cluster.gateway.app import create_app
from cluster.gateway.job import Job, ServedModel
from cluster.gateway.ports import PortError
from cluster.gateway.server import HttpServer
from cluster.gateway.service import GatewayService
from cluster.gateway.settings import GatewaySettings
from decode_worker.task import DecodeTask
from engine.serving.addresses import TokenSink
from engine.serving.token_stream import (
    DecodeStarted,
    Event,
    Failed,
    FailureCause,
    Finished,
    FinishReason,
    PrefillDone,
    TokenLogprob,
    Tokens,
    decode,
    encode,
)
from engine.text.codec import ChatTemplateError
from prefill_worker.task import PrefillTask
from scheduler.plan import Plan, PlanTerms, Rejection, RouteRequest

EOS = 256
MODEL = ServedModel(name="tiny", identity=(("weights", "none"),), block_tokens=4, context_max=512)
SINK = TokenSink("gateway-0", "inproc")


class ByteCodec:
    """One token per byte of UTF-8, and an end-of-sequence token."""

    eos_token_ids = (EOS,)
    vocab_size = 257

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        if messages[-1]["role"] == "assistant":
            raise ChatTemplateError("this template wants a question last")
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")


class ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(i for i in ids if i < 256))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


@dataclass
class Checked:
    emit: str
    stopped: bool


class PlainStops:
    """The slow, obvious stop checker."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""

    def push(self, text: str) -> Checked:
        self._held += text
        found = [self._held.index(s) for s in self._stops if s in self._held]
        if found:
            emit, self._held = self._held[: min(found)], ""
            return Checked(emit, True)
        keep = max((k for s in self._stops for k in range(1, len(s)) if self._held.endswith(s[:k])), default=0)
        emit, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return Checked(emit, False)

    def flush(self) -> str:
        emit, self._held = self._held, ""
        return emit


def answer_text(job: Job) -> AnswerText:
    return AnswerText(ByteDetokenizer(), PlainStops(job.stop))


def next_token(tokens: Sequence[int], seed: int) -> int:
    return ord("a") + zlib.crc32(repr((list(tokens), seed)).encode()) % 26


def reference(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


def reference_text(prompt: str, count: int, seed: int = 0) -> str:
    return bytes(reference(prompt.encode(), count, seed)).decode()


@dataclass
class Fault:
    """What goes wrong in one attempt. ``at``: after how many tokens of the attempt."""

    kind: str
    at: int = 0


@dataclass
class FakeCluster:
    """Implements ``ClusterPorts``. ``faults`` are used up, one per attempt of any request, in order."""

    prefills: tuple[str, ...] = ("prefill-0", "prefill-1")
    decodes: tuple[str, ...] = ("decode-0", "decode-1")
    faults: list[Fault] = field(default_factory=list)
    eos_after: int | None = None
    step_s: float = 0.0
    prefill_s: float = 0.0
    submit_s: float = 0.0
    avoids_strictly: bool = False
    cached_tokens: int = 0
    answers: Callable[[Sequence[int], int], int] = next_token
    rejections: list[Rejection | PortError] = field(default_factory=list)
    nodes: dict[str, dict[str, Any]] = field(default_factory=lambda: {f"node-{i}": {"draining": False} for i in range(2)})
    nodes_gone: set[str] = field(default_factory=set)
    scheduler_gone: bool = False
    deliver: Callable[[bytes], Any] = lambda frame: None
    notify_down: Callable[[str], Any] = lambda worker: None
    running: dict[tuple[str, str, int], asyncio.Task[None]] = field(default_factory=dict)
    occupied: set[tuple[str, int]] = field(default_factory=set)
    truths: list[tuple[str, float | None, int | None]] = field(default_factory=list)
    routed: list[RouteRequest] = field(default_factory=list)
    tasks: list[PrefillTask | DecodeTask] = field(default_factory=list)
    aborted: list[tuple[str, str, int]] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)
    _faults: dict[tuple[str, int], Fault] = field(default_factory=dict)
    _prefilled: dict[tuple[str, int], asyncio.Event] = field(default_factory=dict)

    # --- ClusterPorts -----------------------------------------------------------------------------------------------------

    async def route(self, request: RouteRequest) -> Plan | Rejection:
        self.routed.append(request)
        await asyncio.sleep(0)
        if self.rejections:
            reply = self.rejections.pop(0)
            if isinstance(reply, PortError):
                raise reply
            return reply
        key = (request.request_id, request.attempt)
        if self.avoids_strictly and (set(self.prefills) <= set(request.avoid) or set(self.decodes) <= set(request.avoid)):
            return Rejection(*key, "no_worker", 1.0)
        self.occupied.add(key)
        self._faults[key] = self.faults.pop(0) if self.faults else Fault("none")
        prefill = next((w for w in self.prefills if w not in request.avoid), self.prefills[0])
        decode_worker = next((w for w in self.decodes if w not in request.avoid), self.decodes[0])
        return Plan(*key, prefill, decode_worker, 0, None, None, PlanTerms(0.0, 0.0, 0.0, 0.0))

    async def submit_prefill(self, worker_id: str, task: PrefillTask) -> str | None:
        return await self._submit(worker_id, task, self._prefill(worker_id, task))

    async def submit_decode(self, worker_id: str, task: DecodeTask) -> str | None:
        return await self._submit(worker_id, task, self._decode(worker_id, task))

    async def abort(self, worker_id: str, request_id: str, attempt: int) -> None:
        self.aborted.append((worker_id, request_id, attempt))
        running = self.running.get((worker_id, request_id, attempt))
        if running is not None:
            running.cancel()

    async def finished(
        self, request_id: str, attempt: int, ttft_s: float | None = None, output_tokens: int | None = None
    ) -> None:
        self.occupied.discard((request_id, attempt))
        self.truths.append((request_id, ttft_s, output_tokens))

    async def report_failure(self, worker_id: str, request_id: str) -> None:
        self.reported.append(worker_id)

    async def notices_endpoint(self) -> str:
        return "tcp://127.0.0.1:1"

    async def pool_nodes(self) -> list[dict[str, Any]]:
        if self.scheduler_gone:
            raise PortError("scheduler.view did not answer in 2 s")
        return [{"id": node, "live": True, "draining": status["draining"]} for node, status in self.nodes.items()]

    async def node_status(self, node_id: str) -> dict[str, Any]:
        if node_id in self.nodes_gone:
            raise PortError(f"{node_id}.status: ActorDiedError")
        return dict(self.nodes[node_id])

    async def drain_node(self, node_id: str, *, enable: bool) -> dict[str, Any]:
        self.nodes[node_id]["draining"] = enable
        return await self.node_status(node_id)

    # --- workers ----------------------------------------------------------------------------------------------------------

    async def _submit(self, worker_id: str, task: Any, work: Any) -> str | None:
        await asyncio.sleep(self.submit_s)
        fault = self._faults[task.request_id, task.attempt]
        side = "prefill" if isinstance(task, PrefillTask) else "decode"
        if fault.kind in (f"{side}_unreachable", f"{side}_refuses"):
            work.close()
            if fault.kind.endswith("refuses"):
                return "the worker's queue is full"
            raise PortError(f"{worker_id} is gone")
        self.tasks.append(task)
        key = (worker_id, task.request_id, task.attempt)
        self.running[key] = running = asyncio.create_task(work)
        running.add_done_callback(lambda _: self.running.pop(key, None))
        return None

    def _send(self, worker_id: str, *events: Event) -> None:
        self.deliver(encode(f"{worker_id}:1", list(events)))

    def _token(self, task: PrefillTask | DecodeTask, index: int, tokens: list[int]) -> Tokens:
        eos = self.eos_after is not None and index >= self.eos_after and not task.sampling.ignore_eos
        token = EOS if eos else self.answers(tokens, task.sampling.seed)
        tokens.append(token)
        wanted = task.sampling.logprobs
        logprobs = None if wanted is None else (TokenLogprob(-0.5, tuple((97 + k, -0.5 - k) for k in range(wanted))),)
        return Tokens(task.request_id, task.attempt, index, (token,), logprobs)

    async def _prefill(self, worker_id: str, task: PrefillTask) -> None:
        key = (task.request_id, task.attempt)
        fault = self._faults[key]
        await asyncio.sleep(self.prefill_s)
        if await self._broken(fault, 0, worker_id, task):
            return
        first = self._token(task, task.answered, list(task.token_ids))
        done = PrefillDone(*key, len(task.token_ids), self.cached_tokens, 0, 0, 0, 0.001, 0.002, 0.003)
        finish = Finished(*key, FinishReason.STOP) if first.token_ids[0] == EOS else None
        if finish is None and not task.hand_over:
            finish = Finished(*key, FinishReason.LENGTH)
        if fault.kind == "overtaken":  # decode's frames come first
            asyncio.get_running_loop().call_later(0.005, self._send, worker_id, first, done)
        elif fault.kind != "first_lost":
            self._send(worker_id, first, done, *([finish] if finish else []))
        self._prefilled.setdefault(key, asyncio.Event()).set()

    async def _decode(self, worker_id: str, task: DecodeTask) -> None:
        key = (task.request_id, task.attempt)
        fault = self._faults[key]
        await self._prefilled.setdefault(key, asyncio.Event()).wait()
        tokens = list(task.token_ids)
        if self._token(task, task.answered, tokens).token_ids[0] == EOS:
            return
        self._send(worker_id, DecodeStarted(*key, 0.004))
        for index in range(task.answered + 1, task.max_new_tokens):
            await asyncio.sleep(self.step_s)
            if await self._broken(fault, index - task.answered, worker_id, task):
                return
            event = self._token(task, index, tokens)
            if fault.kind == "frame_lost" and index - task.answered == fault.at:
                continue
            self._send(worker_id, event)
            if fault.kind == "repeats":
                self._send(worker_id, event)
                self._send(worker_id, Tokens(task.request_id, task.attempt - 1, index + 1, (1,)))
                self._send("stranger", Tokens(task.request_id, task.attempt, index + 1, (1,)))
            if event.token_ids[0] == EOS:
                self._send(worker_id, Finished(*key, FinishReason.STOP))
                return
        self._send(worker_id, Finished(*key, FinishReason.LENGTH))

    async def _broken(self, fault: Fault, at: int, worker_id: str, task: PrefillTask | DecodeTask) -> bool:
        if fault.at != at:
            return False
        key = (task.request_id, task.attempt)
        match fault.kind:
            case "handoff" | "preempted" | "internal" | "deadline" | "too_slow":
                self._send(worker_id, Failed(*key, FailureCause(fault.kind)))
            case "down":
                self.notify_down(worker_id)
            case "ends_early":
                self._send(worker_id, Finished(*key, FinishReason.STOP))
            case "silent":
                pass
            case _:
                return False
        await asyncio.Event().wait()  # a broken worker holds on to its work until it is told to let go
        return True


FAULTS_AT = ("handoff", "preempted", "internal", "down", "ends_early", "silent")
FAULTS_ANY = (
    "prefill_unreachable",
    "decode_unreachable",
    "prefill_refuses",
    "decode_refuses",
    "first_lost",
    "overtaken",
    "repeats",
)

FAST = {"port": 0, "stall_timeout_s": 0.15, "gap_timeout_s": 0.05, "retry_backoff_s": 0.0, "call_timeout_s": 2.0, "drain_s": 0.2}


def service_for(
    cluster: FakeCluster, model: ServedModel = MODEL, clock: Callable[[], float] = time.monotonic, **settings: Any
) -> GatewayService:
    service = GatewayService(
        settings=GatewaySettings(**(FAST | settings)),
        model=model,
        codec=ByteCodec(),
        ports=cluster,
        sink=SINK,
        answer_text=answer_text,
        clock=clock,
    )
    cluster.deliver = lambda frame: service.dispatcher.on_events(*decode(frame))
    cluster.notify_down = service.dispatcher.on_worker_down
    return service


@dataclass
class Served:
    url: str
    service: GatewayService
    cluster: FakeCluster


@contextlib.asynccontextmanager
async def served(cluster: FakeCluster | None = None, model: ServedModel = MODEL, **settings: Any) -> AsyncIterator[Served]:
    """A real server on a free port of 127.0.0.1."""
    cluster = cluster or FakeCluster()
    service = service_for(cluster, model, **settings)
    server = HttpServer(create_app(service), service.settings)
    url = await server.start()
    try:
        yield Served(url, service, cluster)
    finally:
        await service.drain(service.settings.drain_s)
        await server.stop()
        await service.close()
        for task in list(cluster.running.values()):
            task.cancel()


async def until(condition: Callable[[], bool], timeout_s: float = 1.0) -> float:
    """Seconds until ``condition`` held; fails the test after ``timeout_s``."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, "the condition did not come true in time"
        await asyncio.sleep(0.002)
    return time.monotonic() - started
