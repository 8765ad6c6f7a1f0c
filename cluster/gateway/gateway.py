"""All parts of one gateway put together: token socket, notices, service, HTTP server. No Ray here."""

from __future__ import annotations

from collections.abc import Callable

from cluster.gateway.answer import AnswerText
from cluster.gateway.app import create_app
from cluster.gateway.job import Job, ServedModel
from cluster.gateway.notices_in import NoticesIn
from cluster.gateway.ports import ClusterPorts
from cluster.gateway.prompts import Codec
from cluster.gateway.server import HttpServer
from cluster.gateway.service import GatewayService
from cluster.gateway.settings import GatewaySettings
from cluster.gateway.tokens_in import TokensIn
from engine.serving.addresses import TokenSink
from engine.serving.token_stream import Event


class Gateway:
    """A gateway from ``start`` to ``stop``, both once. Belongs to one event loop."""

    def __init__(
        self, *, gateway_id: str, settings: GatewaySettings, model: ServedModel, codec: Codec, ports: ClusterPorts,
        answer_text: Callable[[Job], AnswerText],
    ) -> None:  # fmt: skip
        self._tokens = TokensIn(self._on_events, self._on_malformed)
        self._notices = NoticesIn(ports.notices_endpoint, self._on_down)
        self.service = GatewayService(
            settings=settings, model=model, codec=codec, ports=ports, sink=TokenSink(gateway_id, self._tokens.bind()),
            answer_text=answer_text,
        )  # fmt: skip
        self._server = HttpServer(create_app(self.service), settings)

    async def start(self) -> str:
        """Take requests from now on; returns the base URL. Raises OSError when the address is taken, with nothing left open."""
        self._tokens.start()
        self._notices.start()
        try:
            return await self._server.start()
        except BaseException:
            await self._close()
            raise

    async def stop(self) -> None:
        """Let requests under way finish for ``drain_s``, then end them; then close every socket."""
        await self.service.drain(self.service.settings.drain_s)
        await self._server.stop()
        await self._close()

    async def _close(self) -> None:
        await self.service.close()
        await self._notices.stop()
        await self._tokens.stop()

    def _on_events(self, sender: str, events: list[Event]) -> None:
        self.service.dispatcher.on_events(sender, events)

    def _on_malformed(self) -> None:
        self.service.metrics.frames_malformed.inc()

    def _on_down(self, worker_id: str) -> None:
        self.service.metrics.workers_down.inc()
        self.service.dispatcher.on_worker_down(worker_id)
