"""Process that holds one cluster for a test: JSON lines in, JSON lines out. With ``TEST_FAULT_FOLDER`` set its workers take
fault orders."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import Any

from cluster.config.schema import ClusterConfig
from cluster.launch import RunningCluster, start_cluster
from tests.cluster import faults


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever anybody prints goes to the log; the pipe carries answers only
    if os.environ.get(faults.FOLDER_VARIABLE):
        import decode_worker.actor
        import prefill_worker.actor

        prefill_worker.actor.PrefillActor = faults.FaultyPrefillActor
        decode_worker.actor.DecodeActor = faults.FaultyDecodeActor
    cluster: RunningCluster | None = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["verb"] == "start":
                cluster = start_cluster(ClusterConfig(**order["overrides"]), progress=lambda text: print(text, file=sys.stderr))
                value: Any = {"url": cluster.url, "model": cluster.model_name, "description": cluster.description}
            else:
                assert cluster is not None
                value = answer(cluster, order)
            reply = {"value": value}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(reply) + "\n")
        out.flush()
        if order["verb"] == "stop":
            return
    if cluster is not None:
        cluster.stop()


def answer(cluster: RunningCluster, order: dict[str, Any]) -> Any:
    match order["verb"]:
        case "workers":
            return [[w.worker_id, w.role, w.pid] for w in cluster.workers()]
        case "stats":
            found = {}
            for worker in cluster.workers():
                with contextlib.suppress(Exception):
                    found[worker.worker_id] = cluster.stats(worker.worker_id)
            return found
        case "view":
            return cluster.scheduler_view()
        case "kill":
            return cluster.kill_worker(order["worker"], with_signal=signal.Signals(order["signal"]))
        case "stop":
            cluster.stop()
            return None
        case verb:
            raise ValueError(f"unknown verb {verb}")


if __name__ == "__main__":
    main()
