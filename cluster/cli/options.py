"""The flags that every command with a configuration takes, and how they become one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.config.flags import FLAGS

if TYPE_CHECKING:
    from cluster.config.load import LoadedConfig
    from cluster.config.sources import Setting

PANEL = "Configuration (each also in YAML and environment; see docs/configuration.md)"


def _option(name: str, text: str, metavar: str) -> Any:
    return typer.Option(FLAGS[name][0], help=text, metavar=metavar, rich_help_panel=PANEL, show_default=False)


ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="YAML file with settings.", metavar="FILE", rich_help_panel=PANEL, show_default=False),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any setting; may be repeated.", metavar="SECTION.FIELD=VALUE", rich_help_panel=PANEL, show_default=False),
]  # fmt: skip
Model = Annotated[str | None, _option("model", "'smollm2', a Hugging Face id, a folder or a .gguf file.", "MODEL")]
Host = Annotated[str | None, _option("host", "Address that the HTTP server binds.", "HOST")]
Port = Annotated[int | None, _option("port", "Port of the HTTP server; 0 takes any free one.", "PORT")]
Prefill = Annotated[int | None, _option("prefill", "Prefill workers.", "COUNT")]
Decode = Annotated[int | None, _option("decode", "Decode workers.", "COUNT")]
DType = Annotated[str | None, _option("dtype", "auto, float32, bfloat16 or float16.", "DTYPE")]
Device = Annotated[str | None, _option("device", "auto, cpu or cuda.", "DEVICE")]
Reuse = Annotated[str | None, _option("reuse", "block or bitwise: when cached KV may stand for computed KV.", "MODE")]
PoolDram = Annotated[str | None, _option("pool_dram", "DRAM of one pool node, such as 4GiB.", "SIZE")]
Address = Annotated[str | None, _option("address", "Ray cluster to join; without it one is started here.", "HOST:PORT")]


def load(parameters: dict[str, Any], *, defaults: Sequence[Setting] = ()) -> LoadedConfig:
    """The configuration behind a command's ``parameters`` (names as in :data:`FLAGS`, ``config`` and ``set_``).

    Ends the command with status 2 and a line per problem where there is one.
    """
    from cluster.config.errors import ConfigError
    from cluster.config.load import load_config
    from cluster.config.sources import Setting

    flags = [
        Setting(key, parameters[name], f"flag {flag}") for name, (flag, key) in FLAGS.items() if parameters.get(name) is not None
    ]
    try:
        return load_config(flags=flags, sets=parameters.get("set_") or (), file=parameters.get("config"), defaults=defaults)
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(f"error: {problem}", err=True)
        raise typer.Exit(2) from None
