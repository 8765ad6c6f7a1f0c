"""``moonpool config``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from cluster.config.load import LoadedConfig


def config_(loaded: LoadedConfig) -> None:
    """Print the configuration in force and where each value comes from, as YAML.

    With the same flags, environment and file, 'moonpool serve' runs exactly this. Keys are never printed.
    """
    for line in as_yaml(loaded):
        typer.echo(line)


def as_yaml(loaded: LoadedConfig) -> Iterator[str]:
    """Lines of a file that sets the same again; the origin stands behind each value."""
    from cluster.config.schema import SECRETS, ClusterConfig

    for section in ClusterConfig.model_fields:
        yield f"{section}:"
        for name, value in getattr(loaded.config, section):
            key = f"{section}.{name}"
            if key in SECRETS:
                yield f"  # {name}: {len(value)} set, not shown ({loaded.origins[key]})"
            else:
                yield f"  {f'{name}: {_scalar(value)}':<44}# {loaded.origins[key]}"


def _scalar(value: Any) -> str:
    """JSON is YAML."""
    return json.dumps(value.value if isinstance(value, Enum) else value)
