"""``moonpool serve``."""

from __future__ import annotations

import ipaddress
import json
from typing import TYPE_CHECKING, Final

import typer

from cluster.cli.serving import INTERRUPTED, force_end, running_cluster
from cluster.cli.signals import StopSignals

if TYPE_CHECKING:
    from cluster.config.load import LoadedConfig
    from cluster.config.schema import ClusterConfig

READY: Final = """\
moonpool serves {model} at {url}/v1

  curl {url}/v1/chat/completions -H 'content-type: application/json'{curl_key} \\
    -d '{body}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key={key})
  client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Hello!"}}])

  moonpool chat --url {url}

Ctrl-C stops it."""


def serve(loaded: LoadedConfig) -> None:
    """Start a cluster and serve its model over HTTP until Ctrl-C.

    The API is OpenAI's: /v1/chat/completions, /v1/completions, /v1/models; besides /health, /live and /metrics.
    """
    settings = loaded.config
    if warning := exposure(settings):
        typer.echo(f"warning: {warning}", err=True)
    with StopSignals(force_end) as signals:
        try:
            with running_cluster(settings, signals) as cluster:
                typer.echo(greeting(cluster.url, cluster.model_name, keys=bool(settings.gateway.api_keys)))
                signals.wait()
                typer.echo("stopping (again Ctrl-C: by force)", err=True)
        except KeyboardInterrupt:
            typer.echo("stopped before it was ready", err=True)
            raise typer.Exit(INTERRUPTED) from None


def greeting(url: str, model: str, *, keys: bool) -> str:
    """What to do with the cluster, to be copied from the screen. Never shows a key."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    curl_key = " -H 'authorization: Bearer YOUR_KEY'" if keys else ""
    return READY.format(url=url, model=model, body=body, curl_key=curl_key, key='"YOUR_KEY"' if keys else '"none"')


def exposure(config: ClusterConfig) -> str | None:
    """What to know about an address that other machines reach, or None."""
    host = config.gateway.host
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if loopback or config.gateway.api_keys:
        return None
    return f"{host} is reachable from other machines and gateway.api_keys is empty: whoever reaches the port may use the model"
