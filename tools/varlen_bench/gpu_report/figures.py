"""Rows of single figures, as most stages measure them."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, TypeAlias

import torch
import typer

from varlen_bench.harness.command import Output, Revision
from varlen_bench.harness.rows import Cell
from varlen_bench.harness.summary import Spread
from varlen_bench.kernels.gpu_run import GpuRun, finds_gpu
from varlen_bench.kernels.machine import Budget, Machine, gpu_machine

Seconds: TypeAlias = Annotated[float, typer.Option(min=1, help="Seconds; then it stops.")]
Figure: TypeAlias = dict[str, Cell]
Measure: TypeAlias = Callable[[Machine], Iterator[Figure]]

# Unit of a figure that is wrong unless it is 0.
MUST_BE_0 = "must be 0"
_WARM_UPS, _PASSES = 3, 40


def figure(part: str, case: str, name: str, value: float | None, unit: str) -> Figure:
    """Return the row of a figure; None if it was not measured."""
    return {"part": part, "case": case, "figure": name, "value": value, "unit": unit}


def device_time(start: Callable[[], object]) -> float:
    """Return the median microseconds of the work that `start` puts on the stream."""
    events = [
        [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        for _ in range(_PASSES)
    ]
    for _ in range(_WARM_UPS):
        start()
    for began, ended in events:
        began.record()
        start()
        ended.record()
    torch.cuda.synchronize()
    return Spread.of([1e3 * began.elapsed_time(ended) for began, ended in events]).median


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
    measure: Measure,
    seconds: float,
    output: Path | None,
    revision: str,
) -> None:
    """Print rows as they are measured, for some seconds, and append them to `output`."""
    if not finds_gpu(name):
        return
    budget, machine = Budget(seconds), gpu_machine(samples=30)
    run = GpuRun(context, f"gpu_report.{name}", machine, output=output, revision=revision)
    count = 0
    for row in within(budget, measure(machine)):
        run.show(" ".join(str(value) for value in row.values()))
        run.append([row])
        count += 1
    run.finish(name, {"figures": count})


def command(name: str, measure: Measure, text: str, *, seconds: float) -> Callable[..., None]:
    """Return the command of a stage that only measures.

    Args:
        name: name of its module.
        measure: returns all its figures.
        text: help of the command.
        seconds: default of `--budget`.
    """

    def main(
        context: typer.Context,
        budget: Seconds = seconds,
        revision: Revision = "",
        output: Output = None,
    ) -> None:
        write_figures(context, name, measure, budget, output, revision)

    main.__doc__ = text
    return main
