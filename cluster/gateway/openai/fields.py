"""Which of OpenAI's request fields are understood, which may be ignored, and which must not be.

A field that would change the answer is refused by name unless it says what is done anyway (``tools: []``). A field that would not
(bookkeeping of OpenAI's own service) is ignored. A name that nobody knows is an error: it is most often a misspelt one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from cluster.gateway.openai.errors import ApiError, shown

IGNORED: Final = frozenset({
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store",
    "user",
})  # fmt: skip

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields that are not supported, and the values (besides null) that ask for nothing."""

IGNORED_IN_MESSAGES: Final = frozenset({"name", "refusal", "annotations"})
NEUTRAL_IN_MESSAGES: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (), "function_call": (), "tool_calls": ([],), "tool_call_id": (), "reasoning_content": ("",),
}  # fmt: skip


def keep_known(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The fields of a request that its schema knows. Raises :class:`ApiError` (400) naming one that may not be ignored."""
    return _keep(given, known, IGNORED, NEUTRAL, "")


def keep_known_in_message(given: Mapping[str, Any], known: Collection[str], path: str) -> dict[str, Any]:
    """As :func:`keep_known`, for the message at ``path``."""
    return _keep(given, known, IGNORED_IN_MESSAGES, NEUTRAL_IN_MESSAGES, f"{path}.")


_Neutral = Mapping[str, tuple[Any, ...]]


def _keep(
    given: Mapping[str, Any], known: Collection[str], ignored: Collection[str], neutral: _Neutral, prefix: str
) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in given.items():
        if name in known:
            if value is not None:  # OpenAI's API takes null for "not given"
                kept[name] = value
        elif name in ignored:
            continue
        elif name in neutral:
            if value is not None and not any(_same(value, other) for other in neutral[name]):
                raise ApiError.invalid(f"'{prefix}{name}' is not supported.", f"{prefix}{name}", "unsupported_parameter")
        else:
            field = f"{prefix}{shown(name)}"
            raise ApiError.invalid(f"Unrecognized request argument: '{field}'.", field, "unknown_parameter")
    return kept


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)
