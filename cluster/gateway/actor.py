"""Ray shell of the gateway: an asyncio actor, so every method is a coroutine and none may block the loop."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Any, Final

from cluster.gateway.gateway import Gateway
from cluster.gateway.job import ServedModel
from cluster.gateway.ray_ports import RayPorts
from cluster.gateway.settings import GatewaySettings
from cluster.gateway.text import answer_text_for
from engine.settings import Reuse
from engine.text.codec import load_tokenizer

STOP_MARGIN_S: Final = 5.0
"""Beyond the drain, for the server and the last calls to the workers."""


class GatewayActor:
    """``settings`` is the dumped ``gateway:`` section. ``model`` has ``path`` (the folder with the tokenizer), ``name``,
    ``block_tokens``, ``reuse`` and, as the workers describe them, ``identity`` and ``context_max``. ``scheduler_name`` and
    ``namespace`` find the scheduler; a worker's id is the name of its actor there."""

    def __init__(
        self, *, gateway_id: str, settings: dict[str, Any], model: dict[str, Any], scheduler_name: str, namespace: str,
        log_level: str = "WARNING",
    ) -> None:  # fmt: skip
        logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._gateway_id = gateway_id
        self._settings = GatewaySettings(**settings)
        self._model = ServedModel(
            name=model["name"],
            identity=tuple((str(name), str(value)) for name, value in model["identity"]),
            block_tokens=model["block_tokens"],
            context_max=model["context_max"],
            bitwise=model["reuse"] == Reuse.BITWISE.value,
            created=int(time.time()),
        )
        self._path = Path(model["path"])
        self._ports = RayPorts(scheduler=scheduler_name, namespace=namespace, timeout_s=self._settings.call_timeout_s)
        self._changing = asyncio.Lock()
        self._gateway: Gateway | None = None
        self._url = ""

    async def start(self) -> str:
        """Serve, if that is not done already; returns the base URL. Raises OSError when the address is taken."""
        async with self._changing:
            if self._gateway is None:
                codec = await asyncio.to_thread(load_tokenizer, self._path)
                gateway = Gateway(
                    gateway_id=self._gateway_id, settings=self._settings, model=self._model, codec=codec, ports=self._ports,
                    answer_text=answer_text_for(codec),
                )  # fmt: skip
                self._url = await gateway.start()
                self._gateway = gateway
            return self._url

    async def stop(self) -> None:
        """Drain and close, within ``drain_s`` and a margin. Safe to call twice, and without ``start``."""
        async with self._changing:
            gateway, self._gateway = self._gateway, None
            if gateway is not None:
                async with asyncio.timeout(self._settings.drain_s + STOP_MARGIN_S):
                    await gateway.stop()

    async def stats(self) -> dict[str, Any]:
        """``answers_in_flight`` is 0 when nothing of any request is left here."""
        in_flight = 0 if self._gateway is None else self._gateway.service.dispatcher.in_flight
        return {"pid": os.getpid(), "url": self._url, "answers_in_flight": in_flight}
