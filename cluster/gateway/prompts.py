"""From messages or text to token ids and block keys. Long prompts go to a few threads, so that the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from cluster.gateway.job import ServedModel
from cluster.gateway.openai.errors import ApiError
from cluster.gateway.openai.requests import ChatRequest, CompletionRequest, TokenPrompt
from cluster.gateway.settings import GatewaySettings
from engine.text.codec import ChatTemplateError
from kv_pool.keys import BlockKey, CacheRoot, chain_keys

Result = TypeVar("Result")


class Codec(Protocol):
    """What the gateway needs of ``engine.text``'s TextCodec; its methods may be called from several threads."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """``keys`` name the full blocks of ``token_ids``."""

    token_ids: tuple[int, ...]
    keys: tuple[BlockKey, ...]


class PromptReader:
    """Turns a checked request into prompts that fit the context."""

    def __init__(self, codec: Codec, model: ServedModel, settings: GatewaySettings) -> None:
        self._codec = codec
        self._model = model
        self._settings = settings
        self._threads = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")

    async def chat(self, request: ChatRequest, root: CacheRoot) -> list[Prompt]:
        """The one prompt of a chat request. Raises :class:`ApiError` (400)."""
        messages = [message.to_template() for message in request.messages]
        chars = sum(len(message["content"]) for message in messages)
        return [await self._off_loop(chars, lambda: self._prompt(self._render(messages), root, "messages"))]

    async def completion(self, request: CompletionRequest, root: CacheRoot) -> list[Prompt]:
        """The prompts of a completions request, in order. Raises :class:`ApiError` (400)."""
        found: list[Prompt] = []
        for i, given in enumerate(request.prompts(self._settings)):
            field = f"prompt[{i}]" if isinstance(request.prompt, list) and not isinstance(request.prompt[0], int) else "prompt"
            size = len(given.token_ids) if isinstance(given, TokenPrompt) else len(given)
            found.append(await self._off_loop(size, lambda given=given, field=field: self._given(given, root, field)))
        return found

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _off_loop(self, size: int, work: Callable[[], Result]) -> Result:
        if size <= self._settings.inline_chars_max:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _render(self, messages: list[dict[str, str]]) -> list[int]:
        try:
            return self._codec.apply_chat_template(messages)
        except ChatTemplateError as error:  # many templates refuse orders of roles that they were not made for
            raise ApiError.invalid(f"{error}.", "messages", "chat_template") from None

    def _given(self, given: str | TokenPrompt, root: CacheRoot, field: str) -> Prompt:
        if isinstance(given, str):
            return self._prompt(self._codec.encode(given), root, field)
        if not all(0 <= token < self._codec.vocab_size for token in given.token_ids):
            raise ApiError.invalid(f"'{field}' has token ids outside 0 .. {self._codec.vocab_size - 1}.", field)
        return self._prompt(given.token_ids, root, field)

    def _prompt(self, token_ids: Sequence[int], root: CacheRoot, field: str) -> Prompt:
        limit = self._model.context_max
        if not token_ids:
            raise ApiError.invalid(f"'{field}' has no tokens.", field)
        if len(token_ids) >= limit:
            message = f"This model's maximum context length is {limit} tokens; '{field}' has {len(token_ids)}: no room to answer."
            raise ApiError.invalid(message, field, "context_length_exceeded")
        return Prompt(tuple(token_ids), tuple(chain_keys(root, token_ids, self._model.block_tokens)))


def answer_length(request: ChatRequest | CompletionRequest, prompt: Prompt, limit: int, default: int) -> int:
    """Tokens that the answer to ``prompt`` may have in a context of ``limit``. ``default`` (0: the rest of the context) is for a
    client that names none. Raises :class:`ApiError` (400) when prompt and answer do not fit together."""
    room = limit - len(prompt.token_ids)
    wanted = request.length
    if wanted is None:
        return min(default or room, room)
    if wanted > room:
        raise ApiError.invalid(
            f"This model's maximum context length is {limit} tokens, but {len(prompt.token_ids)} in '{request.prompt_field}' and "
            f"{wanted} in '{request.length_field}' make {len(prompt.token_ids) + wanted}.",
            request.length_field,
            "context_length_exceeded",
        )
    return wanted
