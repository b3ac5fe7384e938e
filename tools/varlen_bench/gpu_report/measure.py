"""Measure single figures on this GPU: `python -m varlen_bench.gpu_report.measure NAME`."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from varlen_bench.gpu_report import (
    ahead,
    decoders,
    encoders,
    judge,
    load,
    products,
    served_peers,
)
from varlen_bench.gpu_report.figures import Figure, Measure, within
from varlen_bench.gpu_report.served_models import DeviceType, Served, write_repository
from varlen_bench.harness.command import Output, Revision, refused, select
from varlen_bench.kernels.machine import Budget, GpuRun, fake_machine, finds_gpu, gpu_machine


def _in_server(name: str) -> Callable[[Served], Iterator[Figure]]:
    """Return a measurement that needs the client, which only the environment of the server has."""

    def measure(served: Served) -> Iterator[Figure]:
        from varlen_bench.gpu_report import server

        found: Iterator[Figure] = getattr(server, name)(served)
        return found

    return measure


# Title and measurement of each file of figures.
FIGURES: dict[str, tuple[str, Measure]] = {
    "dependent_launch": ("Dependent launch on and off", encoders.dependent_launch),
    "first_loads": ("First loads of decoders", decoders.first_loads),
    "decode": ("Decode steps", decoders.steps),
    "ahead": ("Steps started ahead, kernels of a graph", ahead.steps),
    "overlap": ("Batches in flight", encoders.overlap),
    "serve": ("Requests that generate", decoders.requests),
    "load": ("Loads, answers, unused slots", load.measure_all),
    "products": ("Matrix products", products.measure_all),
}
# The same of a real server.
SERVED: dict[str, tuple[str, Callable[[Served], Iterator[Figure]]]] = {
    "models": ("Checkpoints and bundle", write_repository),
    "server": ("A server with models of this GPU", _in_server("measure_server")),
    "judge": ("Answers beside transformers'", judge.judge),
    "eight": ("Eight models on one GPU", _in_server("measure_eight")),
    "peers": ("The same models elsewhere", served_peers.measure_peers),
}


def main(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=f"Of {', '.join([*FIGURES, *SERVED])}.")],
    budget: Annotated[float, typer.Option(min=1, help="Seconds; then it stops.")] = 60,
    served: Annotated[
        Path | None, typer.Option(help="Folder of the models and answers of a server.")
    ] = None,
    bundle: Annotated[Path | None, typer.Option(help="A bundle with the server.")] = None,
    device: Annotated[
        DeviceType, typer.Option(help="cpu: a rehearsal of what needs a server, with small shapes.")
    ] = "cuda",
    revision: Revision = "",
    output: Output = None,
) -> None:
    """Print figures as they are measured, for some seconds, and append them to the output."""
    with refused():
        (name,) = select(name, [*FIGURES, *SERVED])
        if (name in SERVED) != (served is not None):
            raise ValueError(f"{name}: --served is for {', '.join(SERVED)}, which need it")
    is_cpu = device == "cpu" and served is not None
    if not is_cpu and not finds_gpu(name):
        return
    # a load reports its graphs
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    limit, machine = Budget(budget), fake_machine() if is_cpu else gpu_machine(samples=30)
    run = GpuRun(context, "gpu_report.measure", machine, output=output, revision=revision)
    if served is not None:
        rows = SERVED[name][1](Served(served, device, limit, bundle))
    else:
        rows = within(limit, FIGURES[name][1](machine))
    count = 0
    for row in rows:
        run.show(" ".join(str(value) for value in row.values()))
        run.append([row])
        count += 1
    run.finish(name, {"figures": count})


if __name__ == "__main__":
    typer.run(main)
