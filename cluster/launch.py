"""Composition root: from one configuration to a running cluster.

Order: Ray, then scheduler and workers at once (loading the model takes longest), then pool nodes (their slot size is the model's
block size, which the workers know), then the gateway. Every wait has a deadline; whatever fails, all that was started is stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from cluster.config.schema import ClusterConfig
from cluster.ray_session import join_ray, leave_ray, start_local_ray
from cluster.supervisor import Supervisor

START_TIMEOUT_S: Final = 600.0
"""First start of a large model; the wait reports progress meanwhile."""
CALL_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 10.0
KEEP_TIMEOUT_S: Final = 5.0
"""For the scheduler to write its journal's end and what it has learnt."""
SCHEDULER: Final = "scheduler"
GATEWAY: Final = "gateway-0"

Progress = Callable[[str], None]


class LaunchError(RuntimeError):
    """The cluster did not start; the message names the part and the reason."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker process as it runs now."""

    worker_id: str
    role: str
    pid: int


@dataclass
class RunningCluster:
    """A started cluster. ``stop`` may be called at any time and twice."""

    url: str
    model_name: str
    description: dict[str, Any]
    _actors: dict[str, Any] = field(repr=False)
    _supervisor: Supervisor = field(repr=False)
    _stopped: bool = False

    def workers(self) -> list[WorkerInfo]:
        """The workers that answer within a second each."""
        import ray
        from ray.exceptions import RayError

        found: list[WorkerInfo] = []
        for name, actor in self._actors.items():
            role = name.rsplit("-", 1)[0]
            if role not in ("prefill", "decode", "node"):
                continue
            try:
                stats: Any = ray.get(actor.stats.remote(), timeout=1.0)
                found.append(WorkerInfo(name, role, int(stats["pid"])))
            except RayError:
                continue
        return found

    def stats(self, worker_id: str) -> dict[str, Any]:
        """Counters of one worker or node. Raises LaunchError when it does not answer."""
        import ray
        from ray.exceptions import RayError

        try:
            return ray.get(self._actors[worker_id].stats.remote(), timeout=CALL_TIMEOUT_S)
        except RayError as error:
            raise LaunchError(f"{worker_id} does not answer: {type(error).__name__}") from error

    def scheduler_view(self) -> dict[str, Any]:
        import ray

        return ray.get(self._actors[SCHEDULER].view.remote(), timeout=CALL_TIMEOUT_S)

    def kill_worker(self, worker_id: str, *, with_signal: int = signal.SIGKILL) -> int:
        """Send a signal to the worker's process (fault drills); returns its pid. Ray starts a replacement for a killed one."""
        for worker in self.workers():
            if worker.worker_id == worker_id:
                os.kill(worker.pid, with_signal)
                return worker.pid
        raise LaunchError(f"no live worker {worker_id!r}")

    def stop(self) -> None:
        """Drain the gateway, end every actor, leave Ray."""
        if self._stopped:
            return
        self._stopped = True
        self._supervisor.stop()
        _stop_actors(self._actors)
        leave_ray()


def start_cluster(config: ClusterConfig, *, progress: Progress = lambda _: None) -> RunningCluster:
    """Start everything that ``config`` asks for and wait until a request would be answered.

    Raises LaunchError, :class:`~cluster.ray_session.RayUnavailableError` or
    :class:`~engine.models.source.ModelNotAvailableError`; then nothing is left running.
    """
    from engine.models.source import resolve_model

    progress("model: looking it up")
    files = resolve_model(config.model, progress=progress)
    progress("ray: starting")
    _enter_ray(config)
    progress("scheduler: starting")  # also the caller's chance to take the signals back from Ray
    actors: dict[str, Any] = {}
    supervisor: Supervisor | None = None
    try:
        _start_scheduler(config, actors, files)
        _start_workers(config, actors, files)
        progress("workers: loading the model")
        description = _agreed_description(actors)
        progress("pool: starting its nodes")
        _start_nodes(config, actors, description)
        _wait_connected(actors, progress)
        progress("gateway: starting")
        url = _start_gateway(config, actors, description, files)
        supervisor = Supervisor(actors[GATEWAY])
        supervisor.start()
    except BaseException:
        if supervisor is not None:
            supervisor.stop()
        _stop_actors(actors)
        leave_ray()
        raise
    progress("ready")
    return RunningCluster(url, config.model.served_name or files.name, description, actors, supervisor)


def _enter_ray(config: ClusterConfig) -> None:
    settings = config.cluster
    if settings.address:
        join_ray(settings.address, namespace=settings.namespace, log_level=settings.log_level)
        return
    workers = config.prefill.workers + config.decode.workers
    start_local_ray(namespace=settings.namespace, cpus=max(os.cpu_count() or 1, workers), log_level=settings.log_level)


def _actor(
    config: ClusterConfig, cls: type, name: str, *, gpu: float = 0, cpus: float = 0, threads: int = 1, **options: Any
) -> Any:
    """A named Ray actor class, restarted for ever but never retrying a call: our own request ids make retries safe, Ray's
    would not."""
    import ray

    env = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1"}
    if not gpu:
        env["CUDA_VISIBLE_DEVICES"] = ""
    return ray.remote(cls).options(
        name=name,
        namespace=config.cluster.namespace,
        num_cpus=cpus,
        num_gpus=gpu,
        max_restarts=-1,
        max_task_retries=0,
        runtime_env={"env_vars": env},
        **options,
    )


def _start_scheduler(config: ClusterConfig, actors: dict[str, Any], files: Any) -> None:
    from scheduler.actor import SchedulerActor

    workers = f"{config.prefill.workers}+{config.decode.workers} workers"  # they share this machine's cores
    actors[SCHEDULER] = _actor(config, SchedulerActor, SCHEDULER).remote(
        config.scheduler.model_dump(mode="json"),
        config.pool.curve.model_dump(),
        config.prefill.order,
        model=f"{files.name} {files.fingerprint} {files.dtype} {config.model.device} {workers}",
    )


def _start_workers(config: ClusterConfig, actors: dict[str, Any], files: Any) -> None:
    from decode_worker.actor import DecodeActor
    from engine.models.placement import effective_dtype
    from prefill_worker.actor import PrefillActor

    workers = config.prefill.workers + config.decode.workers
    gpu = _gpu_share(config, workers)
    model = config.model.model_copy(update={"device": "cuda" if gpu else "cpu"})
    shared = max(1, (os.cpu_count() or 1) // workers)
    for role, cls, settings in (("prefill", PrefillActor, config.prefill), ("decode", DecodeActor, config.decode)):
        threads = settings.threads or shared
        for i in range(settings.workers):
            name = f"{role}-{i}"
            actors[name] = _actor(config, cls, name, gpu=gpu, cpus=1, threads=threads).remote(
                settings.model_copy(update={"threads": threads}).model_dump(mode="json"),
                worker_id=name,
                model=model.model_dump(mode="json"),
                node_id=f"node-{i % config.pool.nodes}",
                scheduler=SCHEDULER,
                namespace=config.cluster.namespace,
                heartbeat_s=config.scheduler.heartbeat_s,
                fingerprint=files.fingerprint if files.dtype == effective_dtype(model) else "",
                log_level=config.cluster.log_level,
            )


def _gpu_share(config: ClusterConfig, workers: int) -> float:
    """GPUs of one worker: a whole one where there are enough, else a share, so that one GPU serves a small cluster; 0 on CPU. The
    sizes of the device caches are the operator's to fit."""
    import ray

    if config.model.device == "cpu":
        return 0
    gpus = ray.cluster_resources().get("GPU", 0)
    if not gpus:
        if config.model.device == "cuda":
            raise LaunchError("model.device: cuda was asked for, and Ray knows of no GPU")
        return 0
    return 1.0 if gpus >= workers else int(100 * gpus / workers) / 100


def _agreed_description(actors: dict[str, Any]) -> dict[str, Any]:
    """What the workers say of the model. All must say the same, or a block of one would be wrong for another."""
    import ray
    from ray.exceptions import RayError

    workers = {name: actor for name, actor in actors.items() if name != SCHEDULER}
    described: dict[str, dict[str, Any]] = {}
    for name, actor in workers.items():
        try:
            described[name] = ray.get(actor.describe.remote(), timeout=START_TIMEOUT_S)
        except RayError as error:
            raise LaunchError(f"{name} did not start: {_cause(error)}") from error
    descriptions = [{k: v for k, v in d.items() if k != "worker"} for d in described.values()]
    if any(d != descriptions[0] for d in descriptions):
        raise LaunchError("the workers disagree about the model: the same files, dtype and device are needed everywhere")
    return descriptions[0]


def _cause(error: Exception) -> str:
    """The last line of what the actor raised: Ray's own text is a page long."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _start_nodes(config: ClusterConfig, actors: dict[str, Any], description: dict[str, Any]) -> None:
    import ray
    from ray.exceptions import RayError

    from kv_pool.actor import PoolNodeActor
    from kv_pool.layout import BlockLayout

    slot_bytes = BlockLayout.from_wire(description["layout"]).block_bytes
    nodes: dict[str, Any] = {}
    for i in range(config.pool.nodes):
        name = f"node-{i}"
        nodes[name] = _actor(config, PoolNodeActor, name).remote(
            node_id=name,
            slot_bytes=slot_bytes,
            block_tokens=config.model.block_tokens,
            settings=config.pool.model_dump(mode="json"),
            ssd=config.ssd.model_dump(mode="json"),
            scheduler_name=SCHEDULER,
            namespace=config.cluster.namespace,
            heartbeat_s=config.scheduler.heartbeat_s,
        )
    actors.update(nodes)
    for name, actor in nodes.items():
        try:
            ray.get(actor.describe.remote(), timeout=CALL_TIMEOUT_S)
        except RayError as error:
            raise LaunchError(f"{name} did not start: {_cause(error)}") from error


def _wait_connected(actors: dict[str, Any], progress: Progress) -> None:
    """Until every worker talks to its node and the scheduler would route to all of them."""
    import ray
    from ray.exceptions import RayError

    workers = {name: actor for name, actor in actors.items() if name.startswith(("prefill-", "decode-"))}
    progress("pool: waiting until every worker is connected")
    deadline = time.monotonic() + CALL_TIMEOUT_S
    while True:
        try:
            stats: Any = ray.get([a.stats.remote() for a in workers.values()], timeout=CALL_TIMEOUT_S)
            view: Any = ray.get(actors[SCHEDULER].view.remote(), timeout=CALL_TIMEOUT_S)
        except RayError as error:
            raise LaunchError(f"a worker or the scheduler died while the cluster came together: {_cause(error)}") from error
        live = {w["id"] for w in view["workers"] if w["standing"] == "live"}
        missing = [name for name, s in zip(workers, stats, strict=True) if not s["pool_connected"] or name not in live]
        if not missing:
            return
        if time.monotonic() > deadline:
            raise LaunchError(f"{', '.join(missing)} did not join the pool and the scheduler in {CALL_TIMEOUT_S:g} s")
        time.sleep(0.05)


def _start_gateway(config: ClusterConfig, actors: dict[str, Any], description: dict[str, Any], files: Any) -> str:
    import ray
    from ray.exceptions import RayError

    from cluster.gateway.actor import GatewayActor

    actors[GATEWAY] = _actor(config, GatewayActor, GATEWAY).remote(
        gateway_id=GATEWAY,
        settings=config.gateway.model_dump(mode="json"),
        model={
            "path": str(files.path),
            "name": config.model.served_name or files.name,
            "fingerprint": files.fingerprint,
            "dtype": files.dtype,
            "block_tokens": config.model.block_tokens,
            "reuse": config.model.reuse.value,
            "identity": description["identity"],
            "context_max": description["context_max"],
        },
        scheduler_name=SCHEDULER,
        namespace=config.cluster.namespace,
    )
    try:
        return ray.get(actors[GATEWAY].start.remote(), timeout=CALL_TIMEOUT_S)
    except RayError as error:
        raise LaunchError(f"the gateway did not start: {_cause(error)}") from error


def _stop_actors(actors: dict[str, Any]) -> None:
    """The gateway drains first; the scheduler writes what it keeps; then every actor ends for good."""
    import ray
    from ray.exceptions import RayError

    if not ray.is_initialized():
        return
    if GATEWAY in actors:
        with contextlib.suppress(RayError):  # dead or hung: it is killed below
            ray.get(actors[GATEWAY].stop.remote(), timeout=STOP_TIMEOUT_S)
    if SCHEDULER in actors:
        with contextlib.suppress(RayError):
            ray.get(actors[SCHEDULER].stop.remote(), timeout=KEEP_TIMEOUT_S)
    for actor in actors.values():
        try:
            ray.kill(actor, no_restart=True)
        except (RayError, ValueError):
            continue
    actors.clear()
