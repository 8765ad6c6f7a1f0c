"""From flags, environment, file and defaults to one checked configuration, remembering where each value came from.

Precedence, strongest first: flag (friendly or ``--set``) > environment > YAML file > default.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from cluster.config.errors import ConfigError
from cluster.config.keys import known_fields
from cluster.config.schema import ClusterConfig
from cluster.config.sources import Setting, from_environment, from_file, from_sets

DEFAULT: Final = "default"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """``origins`` has every known key: where its value was written, or ``default``."""

    config: ClusterConfig
    origins: Mapping[str, str]

    def value(self, key: str) -> Any:
        section, _, name = key.partition(".")
        return getattr(getattr(self.config, section), name)


def load_config(
    *,
    flags: Sequence[Setting] = (),
    sets: Sequence[str] = (),
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    defaults: Sequence[Setting] = (),
) -> LoadedConfig:
    """The effective configuration. ``defaults`` are a command's own (weaker than everything that a person wrote).

    Raises :class:`ConfigError` naming every problem and where it was written.
    """
    environment = os.environ if environment is None else environment
    if file is None and environment.get("MOONPOOL_CONFIG"):
        file = Path(environment["MOONPOOL_CONFIG"])
    layers: list[Sequence[Setting]] = [defaults]
    problems: list[str] = []
    for read in (
        lambda: from_file(file) if file is not None else [],
        lambda: from_environment(environment),
        lambda: from_sets(sets),
    ):
        try:
            layers.append(read())
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    # A friendly flag and its --set twin are equally strong: setting both differently is a mistake worth a word.
    problems = _contradictions(flags, layers[-1])
    if problems:
        raise ConfigError(problems)
    chosen = {setting.key: setting for layer in [*layers, flags] for setting in layer}
    return LoadedConfig(_validated(chosen), {key: chosen[key].origin if key in chosen else DEFAULT for key in known_fields()})


def _contradictions(flags: Sequence[Setting], sets: Sequence[Setting]) -> list[str]:
    by_key = {setting.key: setting for setting in sets}
    return [
        f"{flag.key}: {flag.origin} and {by_key[flag.key].origin} say different things"
        for flag in flags
        if flag.key in by_key and str(by_key[flag.key].value) != str(flag.value)
    ]


def _validated(chosen: Mapping[str, Setting]) -> ClusterConfig:
    nested: dict[str, dict[str, Any]] = {}
    for setting in chosen.values():
        section, _, name = setting.key.partition(".")
        nested.setdefault(section, {})[name] = setting.value
    try:
        return ClusterConfig.model_validate(nested)
    except ValidationError as error:
        # Never the input itself: it may be a key.
        found = error.errors(include_url=False, include_input=False, include_context=False)
        raise ConfigError([line for item in found for line in _explained(item["loc"], item["msg"], chosen)]) from None


def _explained(path: tuple[int | str, ...], message: str, chosen: Mapping[str, Setting]) -> list[str]:
    message = message.removeprefix("Value error, ")
    key = ".".join(map(str, path[:2]))
    if key in known_fields():
        return [f"{key}: {message}{_origins([key], chosen)}"]
    # A check across fields: its lines name their keys themselves.
    return [line + _origins(re.findall(r"[a-z]+\.[a-z_]+", line), chosen) for line in message.splitlines()]


def _origins(keys: Sequence[str], chosen: Mapping[str, Setting]) -> str:
    origins = dict.fromkeys(chosen[key].origin for key in keys if key in chosen)
    return f" [{', '.join(origins)}]" if origins else ""
