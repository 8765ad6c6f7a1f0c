"""Replays ``transcripts/*.txt``: prose, commands, the expected answer. ``REWRITE=1`` writes the answers that came instead; read
the difference before you keep it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from scheduler_scene import Scene, keys_of, small_cluster

from decode_worker.task import DecodeLoad
from prefill_worker.task import PrefillLoad
from scheduler.messages import Notice
from scheduler.plan import Plan, Rejection

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


def shown(answer: Plan | Rejection) -> str:
    name = f"{answer.request_id}/{answer.attempt}: "
    if isinstance(answer, Rejection):
        return f"{name}rejected, {answer.reason}, retry after {answer.retry_after_s:.1f} s ({answer.detail})"
    source = f" from {answer.prefill_source.node_id}" if answer.prefill_source else ""
    t = answer.terms
    return (
        f"{name}{answer.prefill_worker} -> {answer.decode_worker}, {answer.cached_blocks} cached{source}; queue {t.queue_s:.3f}"
        f" load {t.load_s:.3f} compute {t.compute_s:.3f} handoff {t.handoff_s:.3f}"
    )


class Player:
    def __init__(self) -> None:
        self.scene = Scene()

    def play(self, line: str) -> list[str]:
        command, *words = line.split()
        match command, words:
            case "cluster", _:
                sizes = dict(word.split("=") for word in words)
                self.scene = small_cluster(**{role: int(count) for role, count in sizes.items()})
                return [", ".join(f"{w} {self.scene.standing(w)}" for w in self.scene.workers)]
            case "route", [request, document]:
                name, count = document.split(":")
                return [shown(self.scene.route(request, keys_of(name, int(count))))]
            case "store", [node, document]:
                name, count = document.split(":")
                self.scene.store(node, keys_of(name, int(count)))
                return []
            case "beat", [times]:
                return [f"{a.kind} {a.worker_id}" for a in self.scene.beat(int(times)) if isinstance(a, Notice)]
            case "done", [worker]:
                finished = tuple((*request, 100, 0, 0.25) for request in self.scene.state.fleet.prefill[worker].queue.open)
                self.scene.workers[worker].load = PrefillLoad(0, 0, 0, finished)
                self.scene.state.handle(self.scene.workers[worker].report(), self.scene.now)
                self.scene.workers[worker].load = PrefillLoad(0, 0, 0)
                return []
            case "full", [worker]:
                self.scene.workers[worker].load = DecodeLoad(5, 20, 3, 1000, 0.05)
                return []
            case "silent", [worker]:
                self.scene.silent.add(worker)
                return []
            case "speaks", [worker]:
                self.scene.silent.remove(worker)
                return []
            case _:
                raise ValueError(f"unknown command {line!r}")


def replay(text: str) -> str:
    """The transcript with the answers that came."""
    player, out, answers, skipping = Player(), [], [], False
    for line in text.splitlines():
        if line == "----":
            out += [line, *answers]
            answers, skipping = [], True
        elif not line.strip():
            skipping = False
            out.append(line)
        elif not skipping:
            out.append(line)
            if not line.startswith("#"):
                answers += player.play(line)
    return "\n".join(out) + "\n"


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    expected = path.read_text()
    played = replay(expected)
    if os.environ.get("REWRITE"):
        path.write_text(played)
    assert played == expected
