"""``moonpool simulate``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

if TYPE_CHECKING:
    from cluster.simulator.cluster import SimulationSettings
    from cluster.simulator.trace import Trace

BAD_INPUT: Final = 2
CHANGED: Final = 1
TARGET_MAX_S: Final = 86_400.0


def simulate(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where the report goes; an earlier report there is replaced.")
    ],
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Traffic in Mooncake's form, .jsonl or .jsonl.xz.")
    ] = None,
    profile: Annotated[
        str, typer.Option(help="Hardware and model: a name that comes with moonpool, or a .yaml file.")
    ] = "llama3-70b-a800x8",
    prefill: Annotated[int, typer.Option(min=1, max=1024, help="Prefill workers (with --colocated: nodes that do both).")] = 8,
    decode: Annotated[int, typer.Option(min=1, max=1024, help="Decode workers.")] = 8,
    dram_blocks: Annotated[
        int, typer.Option(min=1, max=100_000_000, help="DRAM of one node, in blocks of the trace (512 tokens).")
    ] = 5859,
    ssd_blocks: Annotated[int, typer.Option(min=0, max=100_000_000, help="SSD of one node, in blocks; 0: none.")] = 0,
    policy: Annotated[
        str, typer.Option(help="Routing policy; with --cache-only eviction policies, several with commas between.")
    ] = "ours",
    admission: Annotated[str, typer.Option(help="none, early or predictive.")] = "none",
    eviction: Annotated[str, typer.Option(help="Which blocks leave DRAM first.")] = "lru",
    pulled_copy: Annotated[
        str, typer.Option(help="What a node does with blocks that another node pulled: goes_first or stays.")
    ] = ("goes_first"),
    order: Annotated[str, typer.Option(help="Of the prompts at one worker: shortest or fcfs.")] = "shortest",
    threshold: Annotated[
        float, typer.Option(min=1, max=1e6, help="Policy mooncake: best over own match above which it pulls.")
    ] = 2.0,
    colocated: Annotated[bool, typer.Option("--colocated", help="Prefill and decode share each node's accelerators.")] = False,
    slo_ttft: Annotated[
        float, typer.Option(min=0.001, max=TARGET_MAX_S, help="Target of the time to first token, seconds.")
    ] = 30.0,
    slo_tbt: Annotated[
        float, typer.Option(min=0.001, max=TARGET_MAX_S, help="Target of the time between tokens, seconds.")
    ] = 0.1,
    speed: Annotated[float, typer.Option(min=0.01, max=1000, help="Replay so many times as fast as recorded.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many requests.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of whatever is random.")] = 0,
    cache_only: Annotated[bool, typer.Option("--cache-only", help="Hit rates without time.")] = False,
    capacity_blocks: Annotated[
        str, typer.Option(help="With --cache-only: capacities in blocks, several with commas between.")
    ] = "1000,3000,10000,30000",
    journal: Annotated[
        Path | None,
        typer.Option("--journal", metavar="FILE", help="Replay a live scheduler's journal instead, and compare its plans."),
    ] = None,
) -> None:
    """Replay recorded traffic against a simulated cluster that runs the production scheduler, worker and pool code.

    Writes report.json, requests.jsonl, report.html and report.png. Equal arguments give equal bytes.
    """
    from cluster.simulator.report.files import OutputError, check_folder
    from cluster.simulator.trace import SPAN_MAX_S, TraceError, read_trace

    try:
        check_folder(out)
        if journal is not None:
            _replay_journal(journal, out)
            return
        if trace is None:
            _refuse("--trace: a file is needed")
        traffic = read_trace(trace, speed=speed, limit=limit, span_max_s=math.inf if cache_only else SPAN_MAX_S)
    except (TraceError, OutputError) as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"--trace: {error.filename}: {error.strerror}")
    if cache_only:
        _cache_only(traffic, policy if policy != "ours" else "lru,belady", capacity_blocks, out)
        return
    settings = _settings(
        profile, prefill, decode, dram_blocks, ssd_blocks, eviction, pulled_copy, order, seed, slo_ttft, slo_tbt,
        {
            "policy": policy, "admission": admission, "seed": seed, "balancing_threshold": threshold, "colocated": colocated,
            "classes": (f"default=ttft {slo_ttft:.6f}s tpot {slo_tbt:.6f}s",),
        },
    )  # fmt: skip
    _timed(traffic, settings, speed, slo_ttft, slo_tbt, out)


def _settings(
    profile: str, prefill: int, decode: int, dram_blocks: int, ssd_blocks: int, eviction: str, pulled_copy: str, order: str,
    seed: int, slo_ttft: float, slo_tbt: float, scheduler: dict[str, Any],
) -> SimulationSettings:  # fmt: skip
    from pydantic import ValidationError

    from cluster.simulator.cluster import HEARTBEAT_S, SimulationSettings, first_guesses, worker_settings
    from cluster.simulator.gateway import REQUEST_TIMEOUT_S
    from cluster.simulator.profile import ProfileError, load_profile
    from kv_pool.settings import PoolSettings
    from scheduler.plan import SchedulerSettings

    try:
        hardware = load_profile(profile)
    except ProfileError as error:
        _refuse(str(error))
    except (OSError, UnicodeError) as error:
        _refuse(f"--profile: {profile}: {error}")
    try:
        chosen = SchedulerSettings(
            heartbeat_s=HEARTBEAT_S,
            suspect_after_s=3 * HEARTBEAT_S,
            dead_after_s=6 * HEARTBEAT_S,
            request_life_s=2 * REQUEST_TIMEOUT_S,
            **scheduler,
        )
        return SimulationSettings(
            hardware, prefill, decode, dram_blocks, ssd_blocks, first_guesses(chosen, hardware),
            PoolSettings.model_validate({"eviction": eviction, "pulled_copy": pulled_copy}),
            worker_settings(order), seed=seed, ttft_target_s=slo_ttft, tpot_target_s=slo_tbt,
        )  # fmt: skip
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        _refuse(f"--{field.replace('_', '-')}: {first['msg'].replace('Input should be', 'known are:')}")


def _timed(traffic: Trace, settings: SimulationSettings, speed: float, slo_ttft: float, slo_tbt: float, out: Path) -> None:
    from cluster.cli.simulate_progress import progress_bar
    from cluster.simulator.cluster import simulate as run
    from cluster.simulator.report.page import page, plot
    from cluster.simulator.report.summary import request_row, summarise

    try:
        with progress_bar(len(traffic.requests)) as told:
            result = run(traffic, settings, progress=told)
    except MemoryError:
        _refuse("--dram-blocks, --ssd-blocks: this machine has no memory to keep account of so many")
    report = summarise(traffic, settings, result, speed=speed, ttft_target_s=slo_ttft, tbt_target_s=slo_tbt)
    picture = plot(report, result)
    _write(
        out,
        {
            "report.json": (report.model_dump_json(indent=1) + "\n").encode(),
            "requests.jsonl": "".join(
                request_row(record, slo_ttft, slo_tbt).model_dump_json() + "\n" for record in result.records
            ).encode(),
            "report.html": page(report, picture).encode(),
            "report.png": picture,
        },
    )
    latency, done = report.latency, report.outcomes.completed
    typer.echo(
        f"{done:,} of {report.run.requests:,} completed; mean TTFT {_shown(latency.ttft_s.mean)} s,"
        f" p90 {_shown(latency.ttft_s.p90)} s; token hit rate {report.tokens.hit_rate:.1%};"
        f" goodput {report.goodput.share:.1%}; written to {out}"
    )


def _cache_only(traffic: Trace, policies: str, capacities: str, out: Path) -> None:
    from cluster.cli.simulate_progress import progress_bar
    from cluster.simulator.cache_only.replay import POLICIES, replay
    from cluster.simulator.report.page import page_cache_only, plot_cache_only
    from cluster.simulator.report.schema import SCHEMA_VERSION, CacheOnlyReport, CacheOnlyRow

    names = [name.strip() for name in policies.split(",")]
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        _refuse(f"--policy: there is no {unknown[0]!r}; known are: {', '.join(POLICIES)}")
    try:
        sizes = sorted({int(size) for size in capacities.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        _refuse(f"--capacity-blocks: {capacities!r} is not a list of whole numbers above 0 with commas between")
    rows: list[CacheOnlyRow] = []
    total = len(traffic.requests)
    with progress_bar(total * len(names) * len(sizes)) as told:
        for name in names:
            for size in sizes:
                before = len(rows) * total
                found = replay(traffic, name, size, progress=lambda done, before=before: told(before + done, 0.0))
                rows.append(
                    CacheOnlyRow(
                        policy=name,
                        capacity_blocks=size,
                        block_references=found.block_references,
                        block_hits=found.block_hits,
                        block_hit_rate=round(found.block_hit_rate, 6),
                        token_hit_rate=round(found.token_hit_rate, 6),
                        evictions=found.evictions,
                    )
                )
    report = CacheOnlyReport(
        schema_version=SCHEMA_VERSION, trace=traffic.name, requests=total, block_tokens=traffic.block_tokens, rows=rows
    )  # fmt: skip
    picture = plot_cache_only(report)
    _write(
        out,
        {
            "report.json": (report.model_dump_json(indent=1) + "\n").encode(),
            "report.html": page_cache_only(report, picture).encode(),
            "report.png": picture,
        },
    )
    for row in rows:
        typer.echo(
            f"{row.policy:8} {row.capacity_blocks:>9,} blocks  tokens {row.token_hit_rate:.4f}  blocks {row.block_hit_rate:.4f}"
        )


def _replay_journal(journal: Path, out: Path) -> None:
    from cluster.simulator.replay import JournalError, replay_journal

    try:
        found = replay_journal(journal)
    except JournalError as error:
        _refuse(f"--journal: {error}")
    _write(out, {"report.json": (found.model_dump_json(indent=1) + "\n").encode()})
    typer.echo(
        f"{found.rows:,} rows, {found.plans:,} plans: "
        + ("equal" if found.equal else f"different from row {found.first_difference}")
    )
    if not found.equal:
        raise typer.Exit(CHANGED)


def _write(out: Path, files: dict[str, bytes]) -> None:
    from cluster.simulator.report.files import OutputError, write_folder

    try:
        write_folder(out, files)
    except OutputError as error:
        _refuse(str(error))


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _refuse(message: str) -> NoReturn:
    typer.echo(" ".join(message.split()), err=True)  # one line, whatever a parser wrote
    raise typer.Exit(BAD_INPUT)
