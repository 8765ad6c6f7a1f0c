"""The flags that every command with a configuration takes, and how they become one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cluster.config.flags import FLAGS

if TYPE_CHECKING:
    from cluster.config.load import LoadedConfig
    from cluster.config.sources import Setting

PANEL: Final = "Configuration (docs/configuration.md)"

TEXTS: Final[dict[str, tuple[type, str, str]]] = {
    "model": (str, "MODEL", "'smollm2', a Hugging Face id, a folder or a .gguf file."),
    "host": (str, "HOST", "Address that the HTTP server binds; loopback unless set."),
    "port": (int, "PORT", "Port of the HTTP server; 0 takes any free one."),
    "prefill": (int, "COUNT", "Prefill workers."),
    "decode": (int, "COUNT", "Decode workers."),
    "dtype": (str, "DTYPE", "auto, float32, bfloat16 or float16."),
    "device": (str, "DEVICE", "auto, cpu or cuda."),
    "reuse": (str, "MODE", "block or bitwise: when cached KV may stand for computed KV."),
    "pool_dram": (str, "SIZE", "DRAM of one pool node, such as 4GiB."),
    "address": (str, "HOST:PORT", "Ray cluster to join; without it one is started here."),
}
"""Of each friendly flag: type, placeholder and help."""


def configured(
    command: Callable[[LoadedConfig], None], *, defaults: Callable[[], Sequence[Setting]] = list
) -> Callable[..., None]:
    """``command`` as typer takes it: with a parameter per flag in the place of the configuration that they make.

    ``defaults`` are the command's own, weaker than anything a person wrote.
    """

    @functools.wraps(command)
    def run(**parameters: Any) -> None:
        command(load(parameters, defaults=defaults()))

    annotations: dict[str, Any] = {name: Annotated[kind | None, _option(FLAGS[name][0], text, metavar)]
                                   for name, (kind, metavar, text) in TEXTS.items()}  # fmt: skip
    annotations["config"] = Annotated[Path | None, _option("--config", "YAML file with settings.", "FILE")]
    annotations["set_"] = Annotated[list[str] | None, _option("--set", "Any setting; may be repeated.", "SECTION.FIELD=VALUE")]
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = annotations
    return run


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


def _option(flag: str, text: str, metavar: str) -> Any:
    return typer.Option(flag, help=text, metavar=metavar, rich_help_panel=PANEL, show_default=False)
