"""Rows of single figures, as the stages "load" and "products" measure them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeAlias

import torch
import typer

from varlen_bench.harness.command import Run
from varlen_bench.harness.rows import Cell
from varlen_bench.kernels.machine import Machine

Seconds: TypeAlias = Annotated[float, typer.Option(min=1, help="Seconds; then it stops.")]
PACKAGES = ("torch", "triton", "transformers", "varlen")


def figure(part: str, case: str, name: str, value: float | None, unit: str) -> dict[str, Cell]:
    """Return the row of a figure; None if it was not measured."""
    return {"part": part, "case": case, "figure": name, "value": value, "unit": unit}


def write_figures(
    context: typer.Context,
    module: str,
    rows: Iterable[dict[str, Cell]],
    machine: Machine,
    output: Path | None,
    revision: str,
) -> None:
    """Print rows as they are measured and append them to `output`."""
    run = Run(
        context,
        f"varlen_bench.gpu_report.{module}",
        threads=torch.get_num_threads(),
        packages=PACKAGES,
        output=output,
        revision=revision,
    )
    count = 0
    for row in rows:
        run.show(" ".join(str(value) for value in row.values()))
        run.append([{"gpu": machine.gpu, "driver": machine.driver, **row}])
        count += 1
    run.finish(module, {"gpu": machine.gpu.replace(" ", "_"), "figures": count})
