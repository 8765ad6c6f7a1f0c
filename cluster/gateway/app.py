"""The HTTP routes, and what surrounds all of them: request ids, keys, error bodies, counting."""

from __future__ import annotations

import json
import logging
import re
import secrets
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.gateway.exchange import OUTCOME, TENANT, Exchange
from cluster.gateway.keys import KeySet
from cluster.gateway.openai.body import parse_object, read_body
from cluster.gateway.openai.errors import ApiError
from cluster.gateway.openai.responses import model_card
from cluster.gateway.pool_admin import AdminGate
from cluster.gateway.service import GatewayService

log = logging.getLogger(__name__)

ORDER_BYTES_MAX: Final = 1024
ORDER_TIMEOUT_S: Final = 10.0
REQUEST_ID: Final = "x-request-id"
POOL_PATH: Final = "/pool"
"""Begins all paths that are for operators."""
OPEN_PATHS: Final = frozenset({"/health", "/live"})
"""Answered without a key: they say nothing but yes or no."""
COUNTED_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/live", "/metrics"})
_REQUEST_ID_FORM: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def create_app(service: GatewayService) -> ASGIApp:
    """The ASGI application of ``service``."""
    app = FastAPI(title="moonpool", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_route("/v1/chat/completions", Exchange(service, service.chat), methods=["POST"])  # pyright: ignore[reportArgumentType]
    app.add_route("/v1/completions", Exchange(service, service.completion), methods=["POST"])  # pyright: ignore[reportArgumentType]
    card = model_card(service.model.name, service.model.created)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != service.model.name:
            raise ApiError.unknown_model(name)
        return _json(card)

    @app.get("/health")
    async def health() -> Response:
        """Ready: a request sent now would be taken."""
        ready = await service.ready()
        return _json({"status": "ready" if ready else "not_ready"}, 200 if ready else 503)

    @app.get("/live")
    async def live() -> Response:
        """The process runs and its event loop turns."""
        return _json({"status": "live"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get(f"{POOL_PATH}/nodes")
    async def pool_nodes() -> Response:
        return _json({"nodes": await service.pool.nodes()})

    @app.get(f"{POOL_PATH}/nodes/{{node_id}}")
    async def pool_node(node_id: str) -> Response:
        return _json(await service.pool.node(node_id))

    @app.post(f"{POOL_PATH}/nodes/{{node_id}}/drain")
    async def drain(node_id: str, request: Request) -> Response:
        """Body ``{"enable": true}``: have it emptied; false: use it again."""
        return _json(await service.pool.drain(node_id, enable=await _enable(request)))

    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    return Edge(app, service)


class Edge:
    """Outermost layer, on every path: request id in and out, key, count, and errors in OpenAI's form only."""

    def __init__(self, app: ASGIApp, service: GatewayService) -> None:
        self._app = app
        self._service = service
        self._keys = KeySet(service.settings.api_keys)
        self._admins = AdminGate(service.settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
            return
        started, status, headers = self._service.now(), 0, Headers(scope=scope)
        request_id = _request_id(headers)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            if scope["path"].startswith(POOL_PATH):
                self._admins.check(scope, headers)
            elif not self._admitted(scope, headers):
                raise _WRONG_KEY
            await self._app(scope, receive, send_with_id)
        except ApiError as error:
            await _error_response(error)(scope, receive, send_with_id)
        except Exception as error:
            log.exception("request %s failed for a reason of the gateway's own", request_id)
            scope[OUTCOME] = "500"
            if not status:
                await _error_response(ApiError.internal(type(error).__name__))(scope, receive, send_with_id)
        finally:
            self._count(scope, status, self._service.now() - started, request_id)

    def _admitted(self, scope: Scope, headers: Headers) -> bool:
        if not self._keys or scope["path"] in OPEN_PATHS:
            return True
        found = self._keys.find(headers)
        if found is None:
            return False
        if not self._service.settings.share_cache_between_keys:
            scope[TENANT] = found.hex()
        return True

    def _count(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        path = scope["path"]
        outcome = scope.get(OUTCOME) or ("ok" if 200 <= status < 400 else str(status) if status else "client_gone")
        route = path if path in COUNTED_PATHS else "other"
        self._service.metrics.requests.labels(route, outcome).inc()
        log.info("request %s %s: %s in %.3f s", request_id, route, outcome, seconds)
        if path.endswith("/completions"):
            self._service.metrics.request_seconds.observe(seconds)


_WRONG_KEY: Final = ApiError(401, "Incorrect API key provided.", code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _request_id(headers: Headers) -> str:
    """The client's own, where it is harmless in a header and a log line, or a new one. It names nothing inside the cluster."""
    given = headers.get(REQUEST_ID, "")
    return given if _REQUEST_ID_FORM.fullmatch(given) else f"req_{secrets.token_hex(16)}"


def _json(data: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(data), status, media_type="application/json")


async def _enable(request: Request) -> bool:
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ApiError(415, "The body must be application/json.", code="unsupported_media_type")
    declared = request.headers.get("content-length")
    body = await read_body(request.stream(), declared, bytes_max=ORDER_BYTES_MAX, timeout_s=ORDER_TIMEOUT_S)
    order = parse_object(body, depth_max=1)
    if list(order) != ["enable"] or not isinstance(order["enable"], bool):
        raise ApiError.invalid('The body must be {"enable": true} or {"enable": false}.', "enable")
    return order["enable"]


def _error_response(error: ApiError) -> Response:
    return Response(error.to_json(), error.status, error.headers, media_type="application/json")


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, wrong method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} is not allowed here." if error.status_code == 405 else "There is nothing at this path."
    code = "method_not_allowed" if error.status_code == 405 else "unknown_url"
    return _error_response(ApiError(error.status_code, message, code=code, headers=dict(error.headers or {})))
