"""Command line of the memory benchmark; `make bench-memory` runs it with its defaults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from varlen_bench.compare.results import Result
from varlen_bench.harness import command, machine
from varlen_bench.memory.cases import ENCODERS, OURS, cases
from varlen_bench.memory.rows import bench_figures, csv_rows, notes, tables
from varlen_bench.memory.run import Device, measure_cases, measure_server
from varlen_bench.memory.soak import Soak
from varlen_tools.local_server import end_on_sigterm

_PACKAGES = ("torch", "transformers", "varlen")

app = typer.Typer(add_completion=False)


@app.command()
def main(
    context: typer.Context,
    only: command.Only = "",
    device: Annotated[Device, typer.Option(help="Where encoders run.")] = "cpu",
    threads: command.Threads = 0,
    served: Annotated[int, typer.Option(min=0, help="Requests to a server; 0: none.")] = 20_000,
    longest: Annotated[int, typer.Option(min=5, help="Their words, uniform from 5 on.")] = 256,
    repository: Annotated[Path, typer.Option(help="Model repository of the server.")] = Path(
        "model_repository"
    ),
    model: Annotated[str, typer.Option(help="Model of the server.")] = "minilm",
    quick: command.Quick = False,
    revision: command.Revision = "",
    output: command.Output = None,
) -> None:
    """Compare the memory of a forward pass with transformers, and watch a server's."""
    with command.refused():
        encoders = [ENCODERS[name] for name in command.select(only, ENCODERS)]
    cores = threads or machine.cpu_count()
    bench = command.started(
        context, "memory", cores, packages=_PACKAGES, quick=quick, revision=revision, output=output
    )
    soak = Soak(repository, model, requests=served, longest=longest)
    if quick:
        soak = replace(soak, requests=min(served, 500), warmup=100, every=50)

    def measure(progress: command.Progress) -> Iterator[list[Result]]:
        for encoder in encoders:
            found = cases(encoder, quick=quick)
            yield from measure_cases(found, progress, device=device, threads=cores)
        if soak.requests:
            yield measure_server(soak, progress)

    results: list[Result] = []
    with bench.progress() as progress:
        for found in measure(progress):
            bench.append(csv_rows(found))
            results += found
    bench.show(*tables(results), *notes(results))
    bench.finish("memory", bench_figures(results))
    if any(result.note for result in results if result.system == OURS):
        raise typer.Exit(1)


if __name__ == "__main__":
    end_on_sigterm()
    app()
