"""``moonpool chat``: a conversation with a running cluster, on a terminal or through a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from cluster.cli.conversation import Conversation

PROMPT = "> "


def chat(
    url: Annotated[str, typer.Option(help="Address of the cluster.", envvar="MOONPOOL_URL")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model to ask; without it the cluster's own.", show_default=False)] = "",
    api_key: Annotated[str, typer.Option(help="Key to send.", envvar="MOONPOOL_API_KEY", show_default=False)] = "",
    system: Annotated[str, typer.Option(help="System message.", show_default=False)] = "",
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.", min=1)] = 512,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.", min=0, max=2)] = 0.0,
    timeout: Annotated[float, typer.Option(help="Longest time for one answer in seconds.", min=1)] = 600.0,
) -> None:
    """Talk with a running cluster.

    One line is one message. /reset forgets the conversation, /exit (or Ctrl-D) ends it, Ctrl-C ends an answer. Through a pipe,
    answers go to standard output and everything else to standard error; the exit status is 1 if a message was not answered.
    """
    from cluster.client.blocking import Client

    interactive = sys.stdin.isatty()
    try:
        client = Client(url, api_key=api_key, model=model, timeout_s=timeout)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--url") from None
    with client:
        conversation = Conversation(
            client, system=system, options={"max_tokens": max_tokens, "temperature": temperature}, say=_say, note=_note
        )
        failed = conversation.run(_lines(interactive))
    if failed and not interactive:
        raise typer.Exit(1)


def _lines(interactive: bool) -> Iterator[str]:
    if not interactive:
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() a history)
    _note("/reset forgets, /exit ends, Ctrl-C ends an answer")
    while True:
        try:
            yield input(PROMPT)
        except (EOFError, KeyboardInterrupt):
            _note("")
            return


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(text: str) -> None:
    typer.secho(text, err=True, dim=True)
