"""The two requests: chat completions and completions. Everything here is checked before any worker hears of it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from cluster.gateway.openai.errors import ApiError
from cluster.gateway.openai.fields import keep_known, keep_known_in_message
from cluster.gateway.settings import GatewaySettings
from engine.sampling.params import LOGPROBS_MAX, SamplingParams

COMPLETION_LOGPROBS_MAX: Final = 5
SEED_MODULUS: Final = 2**64


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no character and which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("Input should be valid Unicode text (it contains half a surrogate pair)") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted and ignored: it pads chunks against an observer of encrypted traffic, and changes no answer."""


class _Common(_Strict):
    """Fields of both requests, with OpenAI's bounds. ``top_k``, ``ignore_eos`` and ``cache_salt`` are not OpenAI's."""

    model: Text
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    stop: Text | list[Text] | None = None
    ignore_eos: bool = False
    cache_salt: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] = ""

    def stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check_limits(self, limits: GatewaySettings) -> None:
        """What depends on the configuration, or on two fields at once. Raises :class:`ApiError` (400)."""
        if self.n > limits.n_max:
            raise ApiError.invalid(f"'n' is {self.n}; at most {limits.n_max} choices are made.", "n")
        if self.stream_options is not None and not self.stream:
            raise ApiError.invalid("'stream_options' is only allowed where 'stream' is true.", "stream_options")
        stops = self.stops()
        if len(stops) > limits.stop_max:
            raise ApiError.invalid(f"'stop' names {len(stops)} strings; at most {limits.stop_max} are allowed.", "stop")
        if any(not stop or len(stop) > limits.stop_chars_max for stop in stops):
            raise ApiError.invalid(f"Each string of 'stop' must have 1 to {limits.stop_chars_max} characters.", "stop")

    def sampling(self, logprobs: int | None) -> list[SamplingParams]:
        """One per choice: choice ``i`` draws with ``seed + i``, so that equal prompts do not give equal answers."""
        seed = secrets.randbits(64) if self.seed is None else self.seed
        return [
            SamplingParams(
                temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=(seed + i) % SEED_MODULUS,
                logprobs=logprobs, ignore_eos=self.ignore_eos,
            )
            for i in range(self.n)
        ]  # fmt: skip


class TextPart(_Strict):
    type: Literal["text"]
    text: Text
    cache_control: Any = None
    """A hint of other APIs about caching; hints never change an answer."""


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]

    def to_template(self) -> dict[str, str]:
        """As chat templates know it: one string, and the ``system`` role where OpenAI says ``developer``."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(_Common):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None

    prompt_field: ClassVar[str] = "messages"

    @property
    def length_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def length(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_limits(self, limits: GatewaySettings) -> None:
        super().check_limits(limits)
        if len(self.messages) > limits.messages_max:
            message = f"'messages' has {len(self.messages)} items; at most {limits.messages_max} are allowed."
            raise ApiError.invalid(message, "messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError.invalid("'top_logprobs' is only allowed where 'logprobs' is true.", "top_logprobs")
        for i, given in enumerate(self.messages):
            if given.content == []:
                raise ApiError.invalid("A message needs at least one content part.", f"messages[{i}].content")


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt given as token ids."""

    token_ids: tuple[int, ...]


class CompletionRequest(_Common):
    prompt_field: ClassVar[str] = "prompt"

    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=COMPLETION_LOGPROBS_MAX)] | None = None

    @property
    def length_field(self) -> str:
        return "max_tokens"

    @property
    def length(self) -> int | None:
        return self.max_tokens

    @property
    def logprobs_wanted(self) -> int | None:
        return self.logprobs

    def prompts(self, limits: GatewaySettings) -> list[str | TokenPrompt]:
        """A string, a list of strings, a token array, or a list of token arrays. Raises :class:`ApiError` (400)."""
        prompt = self.prompt
        if isinstance(prompt, str) or _is_tokens(prompt):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise ApiError.invalid("'prompt' must be a string, a list of strings, or one or more arrays of token ids.", "prompt")
        if len(prompt) > limits.prompts_max:
            raise ApiError.invalid(f"'prompt' has {len(prompt)} prompts; at most {limits.prompts_max} are allowed.", "prompt")
        return [_one_prompt(item, i) for i, item in enumerate(prompt)]


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], int)


def _one_prompt(item: object, index: int) -> str | TokenPrompt:
    where = f"prompt[{index}]"
    if isinstance(item, str):
        try:
            return _encodable(item)
        except ValueError as error:
            raise ApiError.invalid(f"'{where}': {error}.", where) from None
    if isinstance(item, list) and item and all(type(token) is int for token in item):
        return TokenPrompt(tuple(item))
    raise ApiError.invalid(f"'{where}' must be a string or a non-empty array of token ids.", where)


def parse_chat(given: Mapping[str, Any], limits: GatewaySettings) -> ChatRequest:
    """A checked request. Raises :class:`ApiError` (400) naming the field at fault."""
    kept = keep_known(given, ChatRequest.model_fields)
    messages = kept.get("messages")
    if isinstance(messages, list):
        kept["messages"] = [
            keep_known_in_message(message, Message.model_fields, f"messages[{i}]") if isinstance(message, dict) else message
            for i, message in enumerate(messages)
        ]
    return _checked(ChatRequest, kept, limits)


def parse_completion(given: Mapping[str, Any], limits: GatewaySettings) -> CompletionRequest:
    """A checked request. Raises :class:`ApiError` (400) naming the field at fault."""
    return _checked(CompletionRequest, keep_known(given, CompletionRequest.model_fields), limits)


AnyRequest = TypeVar("AnyRequest", bound=_Common)


def _checked(schema: type[AnyRequest], kept: Mapping[str, Any], limits: GatewaySettings) -> AnyRequest:
    try:
        request = schema.model_validate(kept)
    except ValidationError as error:
        # Never the input itself: it is the client's text.
        errors = error.errors(include_url=False, include_input=False, include_context=False)
        # Where a value may be a string or a list, both forms complain: the one that got further is the one that was meant.
        worst = max((e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]), key=lambda e: len(_path(e["loc"])))
        field, message = _path(worst["loc"]), worst["msg"].removeprefix("Value error, ")
        missing = worst["type"] == "missing"
        text = f"Missing required parameter: '{field}'." if missing else f"Invalid '{field}': {message}."
        raise ApiError.invalid(text, field, "missing_required_parameter" if missing else "invalid_value") from None
    request.check_limits(limits)
    return request


def _path(parts: Sequence[int | str]) -> str:
    """``messages[0].content`` from pydantic's location; the names of union members are left out."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _FIELDS:
            path += f".{part}" if path else part
    return path


_FIELDS: Final = frozenset().union(
    *(schema.model_fields for schema in (ChatRequest, CompletionRequest, Message, TextPart, StreamOptions))
)
