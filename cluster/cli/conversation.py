"""A conversation line by line: history, streamed answers, and what the cache did for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.client.blocking import Client, TextStream
    from cluster.client.replies import Reply


class Conversation:
    """``say`` gets the text of answers, ``note`` everything else, a line at a time."""

    def __init__(
        self, client: Client, *, system: str, options: dict[str, Any], say: Callable[[str], None], note: Callable[[str], None]
    ) -> None:
        self._client = client
        self._start = [{"role": "system", "content": system}] if system else []
        self._options = options
        self._say = say
        self._note = note
        self.history = list(self._start)

    def run(self, lines: Iterable[str]) -> int:
        """Take each line until there are no more, or ``/exit``. Returns how many messages got no complete answer."""
        failed = 0
        for line in lines:
            message = line.strip()
            match message:
                case "":
                    continue
                case "/exit" | "/quit":
                    break
                case "/reset":
                    self.history = list(self._start)
                    self._note("forgotten")
                case _ if message.startswith("/") and message[1:].isalpha():
                    self._note("commands: /reset /exit")
                case _:
                    failed += not self.ask(message)
        return failed

    def ask(self, message: str) -> bool:
        """One turn. A turn that was not answered to its end leaves no trace in the history. Returns whether it was."""
        from cluster.client.errors import MoonpoolError

        asked = [*self.history, {"role": "user", "content": message}]
        try:
            with self._client.stream_chat(asked, details=True, **self._options) as stream:
                for piece in stream:
                    self._say(piece)
                reply = stream.reply()
        except MoonpoolError as error:
            self._say("\n")
            self._note(f"error: {error}")
            return False
        except KeyboardInterrupt:
            self._say("\n")
            self._note("ended")
            return False
        self._say("\n")
        self._note(summary(reply, stream))
        self.history = [*asked, {"role": "assistant", "content": reply.text}]
        return True


def summary(reply: Reply, stream: TextStream) -> str:
    """One line: prompt, cached tokens by tier, time to first token, speed."""
    usage, parts = reply.usage, []
    tiers = reply.details.cached_by_tier if reply.details is not None else {}
    by_tier = ", ".join(f"{tier} {tokens}" for tier, tokens in tiers.items() if tokens)
    parts.append(f"prompt {usage.prompt_tokens}, cached {usage.cached_tokens}{f' ({by_tier})' if by_tier else ''}")
    if stream.timing.ttft_s is not None:
        parts.append(f"TTFT {stream.timing.ttft_s:.2f} s")
    tbt_s = stream.timing.tbt_s(usage.completion_tokens)
    if tbt_s:
        parts.append(f"{usage.completion_tokens} tokens at {1 / tbt_s:.1f}/s")
    if reply.details is not None and reply.details.attempts > 1:
        parts.append(f"{reply.details.attempts} attempts")
    return f"[{' | '.join(parts)}]"
