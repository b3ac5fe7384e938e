"""The command `python -m varlen_bench.simulate grid`: policies over many mixes, workers and loads.

Each cell is a mix of lengths, a number of workers and a load. All policies get the same arrivals in a cell, of several
seeds. The table has mean latency and p99 of each policy over a baseline's.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from statistics import fmean, geometric_mean
from typing import Annotated

import typer
from rich.table import Table

from varlen.config import NO_LIMIT, EngineConfig
from varlen.errors import ConfigError
from varlen_bench.simulate.batches import BatchStudy, full_load, with_policy
from varlen_bench.simulate.command import (
    TableOption,
    new_console,
    parse_counts,
    parse_positive,
    write_results,
)
from varlen_bench.simulate.costs import CostSource, cost_models
from varlen_bench.workloads import MIXES, Arrival, named_mix, poisson_arrivals
from varlen_client.cli.progress import show_progress

# Lengths of `uniform`, where three requests in ten have several rows.
ROWS = "rows"
_MANY_ROWS, _SHARE = range(2, 33), 0.3
_LONGEST = 500
_FORMULAS = ("cpu", "gpu")


@dataclass(frozen=True, slots=True)
class Cell:
    """One comparison.

    Attributes:
        costs, lengths, workers: names of costs and lengths, and number of workers.
        load: 1 is full batches of the mean length.
    """

    costs: str
    lengths: str
    workers: int
    load: float


@dataclass(frozen=True, slots=True)
class GridRow(Cell):
    """One policy in one cell; latencies are means over the seeds.

    Attributes:
        mean, p99: latency in seconds.
    """

    policy: str
    seeds: int
    count: int
    mean: float
    p99: float


def main(
    policies: Annotated[
        str, typer.Option(help="By comma: policy, or policy/execution.")
    ] = "dp,token_budget,none",
    over: Annotated[str, typer.Option(help="The policy that others are compared with.")] = (
        "token_budget"
    ),
    lengths: Annotated[
        str, typer.Option(help=f"By comma: {', '.join([*MIXES, ROWS])}.")
    ] = "uniform,short,mixed,rows",
    workers: Annotated[str, typer.Option(help="By comma; a GPU has one.")] = "1,2,4,16",
    loads: Annotated[str, typer.Option(help="By comma.")] = "0.6,0.8,0.95,1.2",
    costs: Annotated[str, typer.Option(help="By comma: cpu, gpu.")] = "cpu,gpu",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each cell.")] = 3,
    count: Annotated[int, typer.Option(min=1, help="Requests of each run.")] = 1000,
    table: TableOption = None,
) -> None:
    """Compare policies over mixes of lengths, workers and loads."""
    names = list(dict.fromkeys([*policies.split(","), over]))
    try:
        cells = list(
            _cells(costs, lengths, parse_counts("workers", workers), parse_positive("loads", loads))
        )
        for name in names:
            with_policy(EngineConfig(), name)
    except (ConfigError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    run = partial(run_cell, names=names, seeds=seeds, count=count)
    # a process for each core; spawned, since threads of libraries do not survive a fork
    with (
        show_progress("simulating", len(cells)) as on_progress,
        ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool,
    ):
        found = {}
        for cell, rows in zip(cells, pool.map(run, cells), strict=True):
            found[cell] = rows
            on_progress(len(found))
    console = new_console()
    console.print(_table(found, [name for name in names if name != over], over))
    write_results(table, [row for rows in found.values() for row in rows])


def run_cell(cell: Cell, *, names: Sequence[str], seeds: int, count: int) -> list[GridRow]:
    """Return the rows of all policies in one cell."""
    base = EngineConfig(max_queued_requests=NO_LIMIT, max_queued_tokens=NO_LIMIT)
    mix = named_mix("uniform" if cell.lengths == ROWS else cell.lengths, _LONGEST)
    rows = 1 + _SHARE * (fmean(_MANY_ROWS) - 1) if cell.lengths == ROWS else 1.0
    make_model = cost_models(
        CostSource(cell.costs), max_sequences=base.max_batch_sequences, longest=_LONGEST
    )
    one = full_load(
        make_model("packed"), mix.lengths, base.max_batch_sequences, workers=cell.workers
    )
    studies = [
        BatchStudy(make_model, partial(_arrivals, cell, mix.lengths, count, seed), cell.workers)
        for seed in range(seeds)
    ]
    found = []
    for name in names:
        config = with_policy(base, name)
        results = [study.measure(config, cell.load * one / rows) for study in studies]
        mean, p99 = fmean(each.mean for each in results), fmean(each.p99 for each in results)
        found.append(
            GridRow(**asdict(cell), policy=name, seeds=seeds, count=count, mean=mean, p99=p99)
        )
    return found


def _arrivals(
    cell: Cell, lengths: Sequence[int], count: int, seed: int, rate: float
) -> list[Arrival]:
    arrivals = poisson_arrivals(count, rate, lengths, seed)
    if cell.lengths != ROWS:
        return arrivals
    numbers = random.Random(seed)
    return [
        replace(each, rows=numbers.choice(_MANY_ROWS)) if numbers.random() < _SHARE else each
        for each in arrivals
    ]


def _cells(
    costs: str, lengths: str, workers: Sequence[int], loads: Sequence[float]
) -> Iterator[Cell]:
    """Yield every cell.

    Raises:
        ValueError: there are no such costs or lengths.
    """
    for name, allowed in ((costs, _FORMULAS), (lengths, (*MIXES, ROWS))):
        for word in name.split(","):
            if word not in allowed:
                raise ValueError(f'"{word}" is not known; allowed: {", ".join(allowed)}')
    for source, mix in product(costs.split(","), lengths.split(",")):
        for number, load in product(workers if source == "cpu" else [1], loads):
            yield Cell(source, mix, number, load)


def _table(found: Mapping[Cell, Sequence[GridRow]], names: Sequence[str], over: str) -> Table:
    """Return a line for each cell, then the geometric means and the worst ratios."""
    table = Table(title=f"mean latency, p99 over {over}")
    for heading in ("costs", "lengths", "workers", "load", *names):
        table.add_column(heading, no_wrap=True)
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for cell, rows in found.items():
        of = {row.policy: row for row in rows}
        for name in names:
            ratios[name].append((of[name].mean / of[over].mean, of[name].p99 / of[over].p99))
        cells = (f"{mean:.2f}, {p99:.2f}" for mean, p99 in (ratios[name][-1] for name in names))
        table.add_row(*map(str, astuple(cell)), *cells)
    table.add_section()
    for title, summary in (("geometric mean", geometric_mean), ("worst", max)):
        lines = (map(summary, zip(*ratios[name], strict=True)) for name in names)
        table.add_row(
            title, "", "", "", *(", ".join(f"{each:.2f}" for each in line) for line in lines)
        )
    return table


if __name__ == "__main__":
    typer.run(main)
