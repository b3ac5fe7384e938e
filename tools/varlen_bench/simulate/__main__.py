"""The command `python -m varlen_bench.simulate`, such as with `--loads 0.6,0.8 --policies token_budget,dp`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, get_args

import typer

from varlen.config import NO_LIMIT, EngineConfig, PolicyName
from varlen.errors import ConfigError
from varlen_bench import workloads
from varlen_bench.harness.options import with_options
from varlen_bench.simulate import generate, grid, partition
from varlen_bench.simulate.batches import BatchFigures, BatchStudy, full_load, with_policy
from varlen_bench.simulate.command import (
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
from varlen_bench.simulate.costs import CostSource, cost_models
from varlen_bench.workloads import Arrival
from varlen_client.cli.progress import with_progress

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


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `python -m varlen_bench.simulate`."""

    policies: Annotated[
        str, typer.Option(help="By comma: policy, or policy/execution such as fifo/padded.")
    ] = ",".join(get_args(PolicyName))
    loads: Annotated[
        str, typer.Option(help="By comma; 1 is full batches of the mean length, without padding.")
    ] = "0.2,0.4,0.6,0.8,0.9,1.0,1.2"
    costs: Annotated[CostSource, typer.Option(help=COSTS_HELP)] = CostSource.cpu
    workers: Annotated[
        int, typer.Option(min=0, help="Batches that run at the same time; 0: 2 for cpu, else 1.")
    ] = 0
    cache: CacheOption = "auto"
    stream: Annotated[Stream, typer.Option(help="How requests arrive.")] = Stream.poisson
    lengths: Annotated[
        str,
        typer.Option(
            help="Shortest and longest uniform length, in tokens; or uniform, short, mixed."
        ),
    ] = "5-500"
    trace: Annotated[
        Path | None,
        typer.Option(
            help="CSV file; its first column of whole numbers replaces --lengths.",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    count: Annotated[int, typer.Option(min=1, help="Requests of each run.")] = 4000
    deadline_ms: Annotated[
        float, typer.Option(min=0, help="Deadline of each request; 0: none.")
    ] = 0.0
    max_batch_sequences: AsConfigured = 64
    max_batch_tokens: AsConfigured = 4096
    goal_ms: Annotated[
        float, typer.Option(min=0, help="Also find the highest rate with this p99; 0: do not.")
    ] = 0.0
    seed: SeedOption = 0
    table: TableOption = None

    def configs(self) -> list[EngineConfig]:
        """Return the configuration of each policy."""
        base = EngineConfig(
            max_batch_sequences=self.max_batch_sequences,
            max_batch_tokens=self.max_batch_tokens,
            max_queued_requests=NO_LIMIT,
            max_queued_tokens=NO_LIMIT,
        )
        return [with_policy(base, name) for name in self.policies.split(",")]

    def population(self) -> Sequence[int]:
        """Return the lengths that requests are drawn from."""
        if self.trace is not None:
            return workloads.trace_mix(self.trace, self.max_batch_tokens).lengths
        if self.lengths in workloads.MIXES:
            return workloads.named_mix(self.lengths, self.max_batch_tokens).lengths
        low, _, high = self.lengths.partition("-")
        if not (low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high)):
            raise ValueError(
                f'lengths are "{self.lengths}"; allowed: two whole numbers, such as 5-500'
            )
        return range(int(low), int(high) + 1)

    def study(
        self, configs: Sequence[EngineConfig], population: Sequence[int]
    ) -> tuple[BatchStudy, float]:
        """Return the study, and the requests per second of a load of 1."""
        numbers = random.Random(self.seed)
        drawn = [numbers.choice(population) for _ in range(_DRAWN)]
        longest, workers = max(drawn), self.workers or self.costs.workers
        if longest > self.max_batch_tokens:
            raise ValueError(
                f"a length of {longest} tokens; a batch has at most {self.max_batch_tokens}"
            )
        make_model = cost_models(
            self.costs,
            {"packed", *(config.execution for config in configs)},
            cache=self.cache,
            max_sequences=self.max_batch_sequences,
            longest=longest,
        )

        def make_arrivals(rate: float) -> list[Arrival]:
            arrivals = _STREAMS[self.stream](self.count, rate, population, self.seed)
            return workloads.with_deadline(arrivals, self.deadline_ms / MILLISECONDS or None)

        one = full_load(make_model("packed"), drawn, self.max_batch_sequences, workers=workers)
        return BatchStudy(make_model, make_arrivals, workers), one


@with_options(Options)
def main(context: typer.Context, options: Options) -> None:
    """Compare scheduling policies on a virtual clock.

    The scheduler runs as in a server, with batch costs in place of a model.
    """
    if context.invoked_subcommand is not None:
        sources = map(context.get_parameter_source, context.params)
        if any(source is not None and source.name == "COMMANDLINE" for source in sources):
            # they would be lost
            raise typer.BadParameter(f"write the options after {context.invoked_subcommand}")
        return
    try:
        configs = options.configs()
        population = options.population()
        factors = parse_numbers("loads", options.loads)
        study, one = options.study(configs, population)
    except (ConfigError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    runs = [(config, factor * one) for factor in factors for config in configs]
    results = [study.measure(*run) for run in with_progress("simulating", runs)]
    console = new_console()
    console.print(
        f"{study.workers} workers; load 1 is {one:.1f} requests per second;"
        f" {options.count:,} requests per run"
    )
    console.print(table_of_loads(_HEADINGS, results, _cells))
    write_results(options.table, results)
    goal = options.goal_ms
    for config in configs if goal else ():
        most = study.most_within(config, p99=goal / MILLISECONDS, upper=2 * one)
        console.print(
            f"{config.policy}, {config.execution}: {most:.1f} requests per second with a p99 of {goal:g} ms"
        )


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
