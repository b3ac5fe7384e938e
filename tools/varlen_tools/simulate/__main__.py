"""The command `varlen simulate`, such as `varlen simulate --loads 0.6,0.8 --policies token_budget,dp`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, get_args

import typer

from varlen.config import NO_LIMIT, EngineConfig, PolicyName
from varlen.errors import ConfigError
from varlen_client.cli.progress import with_progress
from varlen_tools import workloads
from varlen_tools.simulate import generate, grid, partition
from varlen_tools.simulate.batches import BatchFigures, BatchStudy, full_load, with_policy
from varlen_tools.simulate.command import (
    COSTS_HELP,
    MILLISECONDS,
    AsConfigured,
    CacheOption,
    SeedOption,
    TableOption,
    new_console,
    parse_numbers,
    table_of_loads,
    write_results,
)
from varlen_tools.simulate.costs import CostSource, cost_models
from varlen_tools.simulate.fleet_command import (
    AutoscaleOption,
    DeadOption,
    DecisionOption,
    DownOption,
    GoalOption,
    MetricsAgeOption,
    QueuedSecondsOption,
    ReplicasOption,
    RoutingOption,
    ScrapeOption,
    SlowOption,
    StartupOption,
    compare_routings,
    parse_autoscale,
    parse_routings,
)
from varlen_tools.simulate.fleet_study import FleetStudy
from varlen_tools.simulate.replicas import FleetOptions
from varlen_tools.simulate.routing import Routing
from varlen_tools.workloads import Arrival

# Lengths drawn to find the mean and the longest.
_DRAWN = 10_000
_HEADINGS = (
    "policy", "offered/s", "served/s", "mean ms", "p50", "p95", "p99", "batch", "padding", "refused", "lost"
)  # fmt: skip


class Stream(str, Enum):
    """How requests arrive."""

    poisson = "poisson"
    bursts = "bursts"


_STREAMS = {Stream.poisson: workloads.poisson_arrivals, Stream.bursts: workloads.burst_arrivals}


def main(
    context: typer.Context,
    policies: Annotated[
        str, typer.Option(help="By comma: policy, or policy/execution such as fifo/padded.")
    ] = ",".join(get_args(PolicyName)),
    loads: Annotated[
        str, typer.Option(help="By comma; 1 is full batches of the mean length, without padding.")
    ] = "0.2,0.4,0.6,0.8,0.9,1.0,1.2",
    costs: Annotated[CostSource, typer.Option(help=COSTS_HELP)] = CostSource.cpu,
    workers: Annotated[
        int, typer.Option(min=0, help="Batches that run at the same time; 0: 2 for cpu, else 1.")
    ] = 0,
    cache: CacheOption = "auto",
    stream: Annotated[Stream, typer.Option(help="How requests arrive.")] = Stream.poisson,
    lengths: Annotated[
        str,
        typer.Option(
            help="Shortest and longest uniform length, in tokens; or uniform, short, mixed."
        ),
    ] = "5-500",
    trace: Annotated[
        Path | None,
        typer.Option(
            help="CSV file; its first column of whole numbers replaces --lengths.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Requests of each run.")] = 4000,
    deadline_ms: Annotated[
        float, typer.Option(min=0, help="Deadline of each request; 0: none.")
    ] = 0.0,
    max_batch_sequences: AsConfigured = 64,
    max_batch_tokens: AsConfigured = 4096,
    goal_ms: Annotated[
        float, typer.Option(min=0, help="Also find the highest rate with this p99; 0: do not.")
    ] = 0.0,
    replicas: ReplicasOption = 0,
    routing: RoutingOption = Routing.least_requests.value,
    metrics_age: MetricsAgeOption = 0.5,
    slow_replica: SlowOption = 1.0,
    dead_seconds: DeadOption = 0.0,
    goal_p99: GoalOption = 0.0,
    autoscale: AutoscaleOption = None,
    queued_seconds: QueuedSecondsOption = 1.0,
    scrape_seconds: ScrapeOption = 15.0,
    decision_seconds: DecisionOption = 15.0,
    startup_seconds: StartupOption = 30.0,
    down_seconds: DownOption = 300.0,
    seed: SeedOption = 0,
    table: TableOption = None,
) -> None:
    """Compare scheduling policies on a virtual clock.

    The scheduler runs as in a server, with batch costs in place of a model. `--replicas` compares routings of replicas
    too.
    """
    if context.invoked_subcommand is not None:
        sources = map(context.get_parameter_source, context.params)
        if any(source is not None and source.name == "COMMANDLINE" for source in sources):
            # they would be lost
            raise typer.BadParameter(f"write the options after {context.invoked_subcommand}")
        return
    base = EngineConfig(
        max_batch_sequences=max_batch_sequences,
        max_batch_tokens=max_batch_tokens,
        max_queued_requests=NO_LIMIT,
        max_queued_tokens=NO_LIMIT,
    )
    try:
        configs = [with_policy(base, name) for name in policies.split(",")]
        population = _lengths(lengths, trace, max_batch_tokens)
        factors = parse_numbers("loads", loads)
        slots = workers or costs.workers
        routings = parse_routings(routing)
        if not replicas and (slow_replica != 1.0 or goal_p99 or autoscale):
            raise ValueError("--slow-replica, --goal-p99 and --autoscale need --replicas")
        scaling = parse_autoscale(
            autoscale,
            queued_seconds=queued_seconds,
            scrape_seconds=scrape_seconds,
            decision_seconds=decision_seconds,
            startup_seconds=startup_seconds,
            down_seconds=down_seconds,
        )
        fleet = FleetOptions(
            replicas=max(1, replicas),
            workers=slots,
            metrics_age=metrics_age,
            slow_factor=slow_replica,
            dead_seconds=dead_seconds,
            autoscale=scaling,
            seed=seed,
        )
        if replicas and goal_ms:
            raise ValueError("--goal-ms is for one engine; allowed with --replicas: --goal-p99")
        if scaling and goal_p99:
            raise ValueError("--goal-p99 is for a fixed number of replicas, without --autoscale")
        numbers = random.Random(seed)
        drawn = [numbers.choice(population) for _ in range(_DRAWN)]
        longest = max(drawn)
        if longest > max_batch_tokens:
            raise ValueError(
                f"a length of {longest} tokens; a batch has at most {max_batch_tokens}"
            )
        executions = {"packed", *(config.execution for config in configs)}
        make_model = cost_models(
            costs, executions, cache=cache, max_sequences=max_batch_sequences, longest=longest
        )
    except (ConfigError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error

    def make_arrivals(rate: float) -> list[Arrival]:
        arrivals = _STREAMS[stream](count, rate, population, seed)
        return workloads.with_deadline(arrivals, deadline_ms / MILLISECONDS or None)

    study = BatchStudy(make_model, make_arrivals, slots)
    one = full_load(make_model("packed"), drawn, max_batch_sequences, workers=slots)
    if replicas:
        fleets = FleetStudy(make_model, make_arrivals, fleet)
        rates = [factor * replicas * one for factor in factors]
        write_results(table, compare_routings(fleets, configs, rates, routings, goal_p99=goal_p99))
        return
    runs = [(config, factor * one) for factor in factors for config in configs]
    results = [study.measure(*run) for run in with_progress("simulating", runs)]
    console = new_console()
    console.print(
        f"{slots} workers; load 1 is {one:.1f} requests per second; {count:,} requests per run"
    )
    console.print(table_of_loads(_HEADINGS, results, _cells))
    write_results(table, results)
    for config in configs if goal_ms else ():
        most = study.most_within(config, p99=goal_ms / MILLISECONDS, upper=2 * one)
        console.print(
            f"{config.policy}, {config.execution}: {most:.1f} requests per second with a p99 of {goal_ms:g} ms"
        )


def _lengths(text: str, trace: Path | None, limit: int) -> Sequence[int]:
    if trace is not None:
        return workloads.trace_mix(trace, limit).lengths
    if text in workloads.MIXES:
        return workloads.named_mix(text, limit).lengths
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high)):
        raise ValueError(f'lengths are "{text}"; allowed: two whole numbers, such as 5-500')
    return range(int(low), int(high) + 1)


def _cells(result: BatchFigures) -> list[str]:
    times = (result.mean, result.p50, result.p95, result.p99)
    return [
        f"{result.policy}, {result.execution}",
        f"{result.offered:.1f}",
        f"{result.served:.1f}",
        *(f"{MILLISECONDS * seconds:.1f}" for seconds in times),
        f"{result.mean_batch:.1f}",
        f"{result.padding:.0%}",
        str(result.refused),
        str(result.lost),
    ]


app = typer.Typer(add_completion=False)
app.callback(invoke_without_command=True)(main)
app.command("generate")(generate.main)
app.command("grid")(grid.main)
app.command("partition")(partition.main)

if __name__ == "__main__":
    app()
