"""A small real HTTP server in a thread that answers as the API does, or as it must not, by the name of the model asked for."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

USAGE = {
    "prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15, "prompt_tokens_details": {"cached_tokens": 8},
}  # fmt: skip
DETAILS = {
    "choices": [
        {"attempts": 2, "cached_tokens": {"device": 0, "dram": 8, "remote": 0}, "queue_s": 0.0, "load_s": 0.1, "prefill_s": 0.2,
         "handoff_s": None, "ttft_s": 0.3, "tbt_s": None}
    ]
}  # fmt: skip
PIECES = ["Ünder", " the", " wäter"]
METRICS = """\
# HELP moonpool_gateway_cached_tokens_total x
# TYPE moonpool_gateway_cached_tokens_total counter
moonpool_gateway_cached_tokens_total{tier="dram"} 512.0
# HELP up x
# TYPE up gauge
up 1.0
"""
ERROR = {"error": {"message": "no room", "type": "rate_limit_error", "param": None, "code": "overloaded"}}


def sse(data: Any) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def chunk(kind: str, piece: str, finish: str | None = None) -> dict[str, Any]:
    text = {"delta": {"content": piece}} if kind == "chat" else {"text": piece}
    return {"id": "1", "model": "good", "choices": [{"index": 0, "finish_reason": finish} | text], "usage": None}


class FakeApi:
    """``seen`` are the bodies asked with; ``gone`` counts streams whose client left early."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.gone = 0
        self.calls: dict[str, int] = {}
        self.models = ["good", "other"]
        app = FastAPI()
        app.add_api_route("/v1/models", self._models)
        app.add_api_route("/metrics", lambda: Response(METRICS, media_type="text/plain"))
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"], response_model=None)
        app.add_api_route("/v1/completions", self._completion, methods=["POST"], response_model=None)
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self._server.started:
            assert time.monotonic() < deadline, "the fake server did not start"
            threading.Event().wait(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    async def _models(self) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name} for name in self.models]})

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, "chat")

    async def _completion(self, request: Request) -> Response:
        return await self._answer(request, "text")

    async def _answer(self, request: Request, kind: str) -> Response:
        body = await request.json()
        self.seen.append(body)
        self.headers.append(dict(request.headers))
        model = body["model"]
        self.calls[model] = self.calls.get(model, 0) + 1
        if model == "twice-busy" and self.calls[model] <= 2:
            return JSONResponse(ERROR, 429, {"retry-after": "0"})
        if model.startswith("status-"):
            return JSONResponse(ERROR, int(model.removeprefix("status-")), {"x-request-id": "r1", "retry-after": "0"})
        if model == "proxy-page":
            return Response("<html>bad gateway</html>", 502)
        if model == "not-json":
            return Response("hello")
        if model == "strange":
            return JSONResponse({"choices": []})
        if model == "slow":
            await asyncio.sleep(5)
        headers = {"x-request-id": "r1"}
        if body.get("stream"):
            details = request.headers.get("x-moonpool-details") == "1"
            return StreamingResponse(self._stream(model, kind, details), media_type="text/event-stream", headers=headers)
        text = "".join(PIECES)
        content = {"message": {"role": "assistant", "content": text}} if kind == "chat" else {"text": text}
        choice = {"index": 0, "finish_reason": "stop"} | content
        extra = {"moonpool": DETAILS} if request.headers.get("x-moonpool-details") == "1" else {}
        return JSONResponse({"id": "1", "model": "good", "choices": [choice], "usage": USAGE} | extra, headers=headers)

    async def _stream(self, model: str, kind: str, details: bool) -> AsyncIterator[bytes]:
        yield b": a comment\n\n"
        first = sse(chunk(kind, PIECES[0]))
        yield first[:15]  # events arrive in any pieces
        await asyncio.sleep(0)
        yield first[15:]
        match model:
            case "bad-sse":
                yield b"data: {not json\n\n"
            case "bad-chunk":
                yield sse({"model": "good", "choices": [{"index": 0}]})
            case "not-utf8":
                yield b"data: \xff\xfe\n\n"
            case "cut":
                raise ConnectionResetError  # uvicorn drops the connection
            case "ends-early":
                return
            case "no-usage":
                yield sse(chunk(kind, "", "stop")) + b"data: [DONE]\n\n"
            case "fails":
                yield sse({"error": {"message": "tried 4 times", "type": "server_error", "code": "attempts_exhausted"}})
                yield b"data: [DONE]\n\n"
            case "endless":
                try:
                    while True:
                        await asyncio.sleep(0.01)
                        yield sse(chunk(kind, "x"))
                finally:
                    self.gone += 1
            case _:
                yield sse(chunk(kind, PIECES[1])) + sse(chunk(kind, PIECES[2]))
                yield sse(chunk(kind, "", "length"))
                extra = {"moonpool": DETAILS} if details else {}
                yield sse({"id": "1", "model": "good", "choices": [], "usage": USAGE} | extra) + b"data: [DONE]\n\n"
