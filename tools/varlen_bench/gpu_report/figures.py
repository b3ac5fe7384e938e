"""Rows of single figures, as the stages "load" and "products" measure them."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from varlen_bench.harness.rows import Cell
from varlen_bench.kernels.gpu_run import GpuRun, finds_gpu
from varlen_bench.kernels.machine import Budget, Machine, gpu_machine

Seconds: TypeAlias = Annotated[float, typer.Option(min=1, help="Seconds; then it stops.")]
Figure: TypeAlias = dict[str, Cell]


def figure(part: str, case: str, name: str, value: float | None, unit: str) -> Figure:
    """Return the row of a figure; None if it was not measured."""
    return {"part": part, "case": case, "figure": name, "value": value, "unit": unit}


def within(budget: Budget, rows: Iterable[Figure]) -> Iterator[Figure]:
    """Yield rows until the budget is spent."""
    for row in rows:
        yield row
        if not budget.allows():
            print(budget.spent_note)
            return


def write_figures(
    context: typer.Context,
    name: str,
    measure: Callable[[Machine, Budget], Iterator[Figure]],
    seconds: float,
    output: Path | None,
    revision: str,
) -> None:
    """Measure on this GPU; print rows as they are measured and append them to `output`."""
    if not finds_gpu(name):
        return
    budget, machine = Budget(seconds), gpu_machine(samples=30)
    gpu = machine.gpu, machine.driver
    run = GpuRun(context, f"gpu_report.{name}", gpu, output=output, revision=revision)
    count = 0
    for row in measure(machine, budget):
        run.show(" ".join(str(value) for value in row.values()))
        run.append([row])
        count += 1
    run.finish(name, {"figures": count})
