"""The demo's three acts on a running cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console

from cluster.client.blocking import Client
from cluster.client.errors import MoonpoolError
from cluster.config.schema import ClusterConfig
from cluster.demo import promises, script, tables
from cluster.demo.promises import Kill, Promise
from cluster.demo.turn import Turn, ask
from cluster.launch import LaunchError, RunningCluster
from engine.settings import Reuse

KILL_AT_SHARE = 1 / 3
"""Of the undisturbed answer's pieces: enough before it to see who answers, enough after it to see the answer go on."""


class Drill(Protocol):
    """What the last act needs of a cluster."""

    def decode_tokens(self) -> dict[str, int]:
        """Tokens that each decode worker has made so far."""
        ...

    def kill(self, worker_id: str) -> int:
        """SIGKILL; returns the pid."""
        ...


def play(cluster: RunningCluster, config: ClusterConfig, console: Console) -> bool:
    """All acts and their verdict, on ``console``. Returns whether everything promised happened."""
    began = time.monotonic()
    console.print(_introduction(cluster, config), markup=False)
    keys = config.gateway.api_keys
    try:
        with Client(cluster.url, model=cluster.model_name, api_key=keys[0] if keys else "") as client:
            stage = Stage(client, console)
            asked, verdict = _document(stage)
            chat, promise = _chat(stage, config)
            disturbed, about_kill = _kill(stage, RayDrill(cluster), exact=cluster.description["dtype"] == "float32")
    except (MoonpoolError, LaunchError) as error:
        console.print(f"\nThe demo ends here: {error}", markup=False)
        return False
    verdict += [promise, *about_kill]
    console.print()
    console.print(tables.of_turns([*asked, *chat, *disturbed], asked[0].ttft_s))
    console.print(tables.of_promises(verdict))
    kept = all(item.kept for item in verdict)
    console.print(f"{'Everything promised happened' if kept else 'NOT everything promised happened'} "
                  f"({time.monotonic() - began:.0f} s after the cluster was ready).")  # fmt: skip
    return kept


class Stage:
    """Asks on ``client`` and shows it on ``console``."""

    def __init__(self, client: Client, console: Console) -> None:
        self._client = client
        self._console = console

    def title(self, text: str) -> None:
        self._console.print()
        self._console.rule(text, align="left")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, style="dim")

    def ask(
        self,
        label: str,
        shown: str,
        conversation: script.Conversation,
        max_tokens: int,
        *,
        after: Callable[[int], None] | None = None,
    ) -> Turn:
        """Show the question and its answer as it comes. ``after`` hears how many pieces have come, after each."""
        console, pieces = self._console, 0
        console.print(f"\n{label}: {shown}", markup=False, style="bold")

        def on_piece(piece: str) -> None:
            nonlocal pieces
            pieces += 1
            console.print(piece, end="", markup=False, soft_wrap=True)
            if after is not None:
                after(pieces)

        turn = ask(self._client, label, conversation, max_tokens=max_tokens, on_piece=on_piece)
        console.print()
        tiers = ", ".join(f"{tier} {tokens}" for tier, tokens in turn.tiers.items() if tokens)
        cached = f"{turn.reply.usage.cached_tokens} cached" + (f" ({tiers})" if tiers else "")
        self.say(f"  [{turn.reply.usage.prompt_tokens} prompt tokens, {cached}, first text after {turn.ttft_s:.2f} s]")
        return turn


def _document(stage: Stage) -> tuple[list[Turn], list[Promise]]:
    stage.title("1. Several questions about one long document")
    stage.say("Only the first one has to compute the document's KV; the others find it in the pool.")
    turns = [
        stage.ask(f"Q{i}", question, script.about_document(question), script.ANSWER_TOKENS_MAX)
        for i, question in enumerate(script.QUESTIONS, start=1)
    ]
    return turns, promises.of_document(turns)


def _chat(stage: Stage, config: ClusterConfig) -> tuple[list[Turn], Promise]:
    stage.title("2. A chat whose second turn finds its first")
    history: script.Conversation = []
    turns: list[Turn] = []
    for i, message in enumerate(script.CHAT_TURNS, start=1):
        history = [*history, {"role": "user", "content": message}]
        turns.append(stage.ask(f"chat {i}", message, history, script.CHAT_TOKENS_MAX))
        history = [*history, {"role": "assistant", "content": turns[-1].reply.text}]
    unit = config.model.block_tokens if config.model.reuse is Reuse.BLOCK else config.model.chunk_tokens
    return turns, promises.of_chat(turns[0], turns[1], unit_tokens=unit)


def _kill(stage: Stage, drill: Drill, *, exact: bool) -> tuple[list[Turn], list[Promise]]:
    stage.title("3. A decode worker is killed in the middle of an answer")
    conversation = script.about_document(script.CONTINUE)
    undisturbed = stage.ask("Q5", script.CONTINUE, conversation, script.CONTINUE_TOKENS_MAX)
    kill_at = max(2, round(undisturbed.reply.usage.completion_tokens * KILL_AT_SHARE))
    before = drill.decode_tokens()
    kill: Kill | None = None

    def after(pieces: int) -> None:
        nonlocal kill
        if pieces == kill_at and kill is None:
            kill = _kill_busiest(drill, before, pieces)
            stage.say(f"\n  >>> SIGKILL to {kill.worker_id or 'nobody'} (pid {kill.pid}) <<<")

    disturbed = stage.ask(
        "Q5, killed", f"{script.CONTINUE} (the same again)", conversation, script.CONTINUE_TOKENS_MAX, after=after
    )
    return [undisturbed, disturbed], promises.of_kill(undisturbed, disturbed, kill, exact=exact)


def _kill_busiest(drill: Drill, before: dict[str, int], pieces: int) -> Kill:
    """Kill whoever made most tokens since ``before``: only one answer is under way."""
    made = {worker_id: tokens - before.get(worker_id, 0) for worker_id, tokens in drill.decode_tokens().items()}
    busiest = max(made, key=lambda worker_id: made[worker_id], default="")
    if not busiest or made[busiest] <= 0:
        return Kill("", 0, pieces)
    return Kill(busiest, drill.kill(busiest), pieces)


class RayDrill:
    """The drill on real workers."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster

    def decode_tokens(self) -> dict[str, int]:
        workers = [worker.worker_id for worker in self._cluster.workers() if worker.role == "decode"]
        return {worker_id: int(self._cluster.stats(worker_id)["tokens_total"]) for worker_id in workers}

    def kill(self, worker_id: str) -> int:
        return self._cluster.kill_worker(worker_id)


def _introduction(cluster: RunningCluster, config: ClusterConfig) -> str:
    description, prefill, decode = cluster.description, config.prefill.workers, config.decode.workers
    survivor = "the last act kills one of them" if decode > 1 else "the last act kills it, and Ray restarts it"
    return (
        f"{cluster.model_name} ({description['dtype']} on {description['device']}) at {cluster.url}\n"
        f"{prefill} prefill and {decode} decode worker{'s' if decode > 1 else ''} ({survivor}), {config.pool.nodes} pool node"
        f"{'s' if config.pool.nodes > 1 else ''} of {config.pool.dram}"
    )
