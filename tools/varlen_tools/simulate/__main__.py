"""The command: `python -m varlen_tools.simulate --loads 0.6,0.8 --policies token_budget,dp`."""

from __future__ import annotations

import csv
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from varlen.config import EngineConfig, Execution
from varlen.costs.model import CostModel
from varlen.costs.store import CostStore, StoredCosts
from varlen.errors import ConfigError
from varlen_tools import workloads
from varlen_tools.simulate.draw import draw
from varlen_tools.simulate.study import Point, compare, full_load, most_within, with_policy
from varlen_tools.workloads import Arrival, DrawLength

_NO_CAP = 10**9
# Lengths drawn to know the mean of a mix.
_DRAWN = 10_000
_MILLISECONDS = 1e3
# Of what is printed to a file.
_WIDTH = 120

app = typer.Typer(add_completion=False)


class Costs(str, Enum):
    """Where the seconds of a batch come from: a formula, or what was measured on this machine."""

    cpu = "cpu"
    gpu = "gpu"
    measured = "measured"


class Stream(str, Enum):
    """How requests come."""

    poisson = "poisson"
    bursts = "bursts"


_STREAMS = {Stream.poisson: workloads.poisson_arrivals, Stream.bursts: workloads.burst_arrivals}


def cpu_seconds(count: int, length: int) -> float:
    """Return the seconds of a small encoder on a CPU, made up: tokens are costly, a batch is not."""
    return 1.5e-3 + 30e-6 * count * length + 20e-9 * count * length**2


def gpu_seconds(count: int, length: int) -> float:
    """Return the seconds of a small encoder on a GPU, made up: few tokens cost as much as 256."""
    return 2e-3 + 4e-6 * max(256, count * length) + 2e-9 * count * length**2


@app.command()
def main(
    policies: Annotated[
        str, typer.Option(help="By comma: policy, or policy/execution as dp/padded.")
    ] = "none,fifo,token_budget,dp",
    loads: Annotated[
        str, typer.Option(help="By comma; 1 is full batches of the mean length, without padding.")
    ] = "0.2,0.4,0.6,0.8,0.9,1.0,1.2",
    costs: Annotated[Costs, typer.Option(help="Of batches.")] = Costs.cpu,
    cache: Annotated[
        str, typer.Option("--cache-folder", help="Of measured costs; the newest are taken.")
    ] = "auto",
    stream: Annotated[Stream, typer.Option(help="How requests come.")] = Stream.poisson,
    lengths: Annotated[str, typer.Option(help="Uniform between two, in tokens.")] = "5-500",
    trace: Annotated[
        Path | None, typer.Option(help="A CSV file of lengths, in place of --lengths.")
    ] = None,
    column: Annotated[str, typer.Option(help="Of the trace.")] = "tokens",
    count: Annotated[int, typer.Option(min=1, help="Requests of each run.")] = 4000,
    deadline_ms: Annotated[float, typer.Option(min=0, help="Of each request; 0: none.")] = 0.0,
    max_batch_sequences: Annotated[int, typer.Option(min=1)] = 20,
    max_batch_tokens: Annotated[int, typer.Option(min=1)] = 4096,
    max_wait_ms: Annotated[int, typer.Option(min=1)] = 1000,
    goal_ms: Annotated[
        float, typer.Option(min=0, help="Also: most requests a second with this p99; 0: no.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.")] = 0,
    output: Annotated[Path | None, typer.Option(help="A picture: .png or .svg.")] = None,
    table: Annotated[Path | None, typer.Option(help="A CSV file of all points.")] = None,
) -> None:
    """Run the scheduler on a virtual clock and say what each policy makes of a load."""
    base = EngineConfig(
        max_batch_sequences=max_batch_sequences,
        max_batch_tokens=max_batch_tokens,
        max_wait_ms=max_wait_ms,
        max_queued_requests=_NO_CAP,
        max_queued_tokens=_NO_CAP,
    )
    try:
        configs = [with_policy(base, name) for name in policies.split(",")]
        mix = _lengths(lengths, trace, column)
        factors = [float(load) for load in loads.split(",")]
    except (ConfigError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    drawn = [mix(numbers) for numbers in [random.Random(seed)] for _ in range(_DRAWN)]
    if max(drawn) > max_batch_tokens:
        raise typer.BadParameter(
            f"a length of {max(drawn)} tokens is more than the {max_batch_tokens} of a batch"
        )
    make_table = _tables(costs, cache, max_batch_sequences, max(drawn))

    def make_costs(config: EngineConfig) -> Callable[[], CostModel]:
        return lambda: make_table(config.execution)

    def make_arrivals(rate: float) -> list[Arrival]:
        came = _STREAMS[stream](count, rate, mix, seed)
        return workloads.with_deadline(came, deadline_ms / _MILLISECONDS or None)

    one = full_load(make_table("packed"), drawn, max_batch_sequences)
    rates = [factor * one for factor in factors]
    points = list(compare(configs, make_costs, make_arrivals, rates))
    console = Console(width=None if os.isatty(1) else _WIDTH)
    console.print(f"load 1 is {one:.1f} requests a second; {count:,} requests a run")
    console.print(_table(points))
    if table is not None:
        _write(table, points)
    if goal_ms:
        for config in configs:
            most = most_within(
                config,
                make_costs(config),
                make_arrivals,
                p99=goal_ms / _MILLISECONDS,
                upper=2 * one,
            )
            console.print(
                f"{config.policy}, {config.execution}: {most:.1f} requests a second with a p99 of {goal_ms:g} ms"
            )
    if output is not None:
        draw(points, output, f"{stream.value} arrivals, costs: {costs.value}")
        console.print(str(output))


def _write(path: Path, points: Sequence[Point]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Point)], lineterminator="\n")
        writer.writeheader()
        for point in points:
            row = asdict(point)
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def _lengths(text: str, trace: Path | None, column: str) -> DrawLength:
    if trace is not None:
        return workloads.sampled_lengths(workloads.read_lengths(trace, column))
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high)):
        raise ValueError(f'lengths are "{text}"; allowed: two whole numbers, as 5-500')
    return workloads.uniform_lengths(int(low), int(high))


def _tables(
    costs: Costs, cache: str, max_sequences: int, longest: int
) -> Callable[[Execution], CostModel]:
    """Return a function that makes a new table of costs for an execution."""
    if costs is Costs.measured:
        # imports torch, which nothing else here needs
        from varlen.cost_warmup import cache_folder

        found = CostStore(cache_folder(cache)).entries()
        return lambda execution: _newest(found, execution).measurement.model(execution)
    formula = cpu_seconds if costs is Costs.cpu else gpu_seconds
    return lambda execution: CostModel.of_function(
        formula, execution, max_sequences=max_sequences, max_length=longest
    )


def _newest(found: Sequence[StoredCosts], execution: Execution) -> StoredCosts:
    of_execution = [costs for costs in found if costs.key["execution"] == execution]
    if not of_execution:
        raise typer.BadParameter(
            f"no costs of {execution} batches are in the cache: python -m varlen_tools.profile_costs measures them"
        )
    return max(of_execution, key=lambda costs: costs.measured_at)


def _table(points: Sequence[Point]) -> Table:
    table = Table("policy", "offered/s", "served/s", "mean ms", "p50", "p95", "p99")
    for name in ("a batch", "padding", "refused", "lost"):
        table.add_column(name)
    last = None
    for point in points:
        if last not in (None, point.offered):
            table.add_section()
        last = point.offered
        times = (point.mean, point.p50, point.p95, point.p99)
        table.add_row(
            f"{point.policy}, {point.execution}",
            f"{point.offered:.1f}",
            f"{point.served:.1f}",
            *(f"{_MILLISECONDS * value:.1f}" for value in times),
            f"{point.mean_batch:.1f}",
            f"{point.padding:.0%}",
            str(point.refused),
            str(point.lost),
        )
    return table


if __name__ == "__main__":
    app()
