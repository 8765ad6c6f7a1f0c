"""The API's JSON, both ways: requests out of arguments, replies and stream chunks out of bodies. Pure, shared by both clients."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from cluster.client.errors import ProtocolError, error_in_stream
from cluster.client.replies import Details, Reply, Usage

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETION_PATH: Final = "/v1/completions"
DETAILS_HEADER: Final = "x-moonpool-details"
DONE: Final = "[DONE]"

Messages = str | Sequence[Mapping[str, Any]]
"""A conversation, or the text of its one user message."""


class Request(NamedTuple):
    """What is to be sent. ``body`` is None for GET."""

    path: str
    body: dict[str, Any] | None = None
    headers: dict[str, str] | None = None


def chat_request(messages: Messages, model: str, options: Mapping[str, Any], *, stream: bool, details: bool) -> Request:
    conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else [dict(m) for m in messages]
    return _request(CHAT_PATH, {"model": model, "messages": conversation}, options, stream=stream, details=details)


def completion_request(prompt: str, model: str, options: Mapping[str, Any], *, stream: bool, details: bool) -> Request:
    return _request(COMPLETION_PATH, {"model": model, "prompt": prompt}, options, stream=stream, details=details)


def _request(path: str, body: dict[str, Any], options: Mapping[str, Any], *, stream: bool, details: bool) -> Request:
    body |= {name: value for name, value in options.items() if value is not None}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Request(path, body, {DETAILS_HEADER: "1"} if details else {})


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises :class:`ProtocolError`."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise ProtocolError("the answer is not JSON") from None
    if not isinstance(data, dict):
        raise ProtocolError("the answer is not a JSON object")
    return data


def parse_models(data: Mapping[str, Any]) -> list[str]:
    try:
        return [str(model["id"]) for model in data["data"]]
    except (KeyError, TypeError):
        raise ProtocolError("the list of models is not in the API's form") from None


def first_model(names: Sequence[str]) -> str:
    if not names:
        raise ProtocolError("the server answers for no model")
    return names[0]


def parse_reply(data: Mapping[str, Any], request_id: str) -> Reply:
    """A whole answer (its first choice) of either endpoint. Raises :class:`ProtocolError`."""
    try:
        choice = data["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        usage = parse_usage(data["usage"])
        return Reply(
            str(text), str(choice["finish_reason"]), usage, str(data["model"]), request_id, parse_details(data), raw=data
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        raise ProtocolError("the answer is not in the API's form") from None


def parse_usage(data: Mapping[str, Any]) -> Usage:
    cached = (data.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Usage(int(data["prompt_tokens"]), int(data["completion_tokens"]), int(cached))


def parse_details(data: Mapping[str, Any]) -> Details | None:
    """Details of the first choice, where the server sent them."""
    if "moonpool" not in data:
        return None
    choice = data["moonpool"]["choices"][0]
    tiers = {str(tier): int(tokens) for tier, tokens in choice["cached_tokens"].items()}
    times = {
        name: choice.get(name) for name in ("queue_s", "load_s", "prefill_s", "handoff_s", "ttft_s", "tbt_s")
    }  # fmt: skip
    return Details(int(choice["attempts"]), tiers, **times)


@dataclass(slots=True)
class StreamState:
    """What has arrived of a streamed answer. ``take`` gives the text that an event adds ('' for none)."""

    request_id: str = ""
    text: str = ""
    finish_reason: str = ""
    model: str = ""
    usage: Usage | None = None
    details: Details | None = None
    done: bool = False

    def take(self, event: str) -> str:
        """Raises :class:`ProtocolError` on what is no chunk, and :class:`ApiError` where the server reports a failure."""
        if event == DONE:
            self.done = True
            return ""
        data = parse_object(event.encode())
        if "error" in data:
            raise error_in_stream(data["error"], self.request_id)
        try:
            return self._chunk(data)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError):
            raise ProtocolError("a chunk of the stream is not in the API's form") from None

    def _chunk(self, data: Mapping[str, Any]) -> str:
        self.model = str(data["model"])
        if data.get("usage"):
            self.usage = parse_usage(data["usage"])
        self.details = parse_details(data) or self.details
        delta = ""
        for choice in data["choices"]:
            if choice["index"] != 0:
                continue
            delta += (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
            self.finish_reason = str(choice.get("finish_reason") or self.finish_reason)
        self.text += delta
        return delta

    def reply(self) -> Reply:
        """The whole answer, once ``done``. Raises :class:`ProtocolError` when the stream left something out."""
        if not self.done or self.usage is None or not self.finish_reason:
            raise ProtocolError("the stream is not complete")
        return Reply(self.text, self.finish_reason, self.usage, self.model, self.request_id, self.details)
