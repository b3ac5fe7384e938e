"""Measure single figures on this GPU: `python -m varlen_bench.gpu_report.measure NAME`."""

import logging
from typing import Annotated

import typer

from varlen_bench.gpu_report import decoders, encoders, load, products
from varlen_bench.gpu_report.figures import Measure, within
from varlen_bench.harness.command import Output, Revision, refused, select
from varlen_bench.kernels.machine import Budget, GpuRun, finds_gpu, gpu_machine

# Title and measurement of each file of figures.
FIGURES: dict[str, tuple[str, Measure]] = {
    "dependent_launch": ("Dependent launch on and off", encoders.dependent_launch),
    "first_loads": ("First loads of decoders", decoders.first_loads),
    "decode": ("Decode steps", decoders.steps),
    "overlap": ("Batches in flight", encoders.overlap),
    "serve": ("Requests that generate", decoders.requests),
    "load": ("Loads, answers, unused slots", load.measure_all),
    "products": ("Matrix products", products.measure_all),
}


def main(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=f"Of {', '.join(FIGURES)}.")],
    budget: Annotated[float, typer.Option(min=1, help="Seconds; then it stops.")] = 60,
    revision: Revision = "",
    output: Output = None,
) -> None:
    """Print figures as they are measured, for some seconds, and append them to the output."""
    with refused():
        (name,) = select(name, FIGURES)
    if not finds_gpu(name):
        return
    # a load reports its graphs
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    limit, machine = Budget(budget), gpu_machine(samples=30)
    run = GpuRun(context, "gpu_report.measure", machine, output=output, revision=revision)
    count = 0
    for row in within(limit, FIGURES[name][1](machine)):
        run.show(" ".join(str(value) for value in row.values()))
        run.append([row])
        count += 1
    run.finish(name, {"figures": count})


if __name__ == "__main__":
    typer.run(main)
