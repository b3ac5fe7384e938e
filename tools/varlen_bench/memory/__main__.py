"""Command line of the memory benchmark; `make bench-memory` runs it with its defaults."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from varlen_bench.harness import machine
from varlen_bench.harness import rows as bench_report
from varlen_bench.kernels.grid import EncoderShape
from varlen_bench.memory import report
from varlen_bench.memory.cases import OURS, cases, encoders
from varlen_bench.memory.rows import Row
from varlen_bench.memory.run import Device, Say, Settings, measure_cases, measure_server
from varlen_bench.memory.soak import Soak
from varlen_tools.local_server import end_on_sigterm

DEFAULT_OUTPUT = Path("docs/benchmarks/memory.csv")
REPOSITORY, MODEL = Path("model_repository"), "minilm"
PACKAGES = ("torch", "transformers", "varlen")
_SERVED = 20_000
# Requests of a quick look at a server, those before the first look at its memory, and those between two.
_QUICK_SERVED, _QUICK_WARMUP, _QUICK_EVERY = 500, 100, 50

app = typer.Typer(add_completion=False)


@app.command()
def main(
    only: Annotated[str, typer.Option(help="Encoders by name, by comma; all when empty.")] = "",
    device: Annotated[Device, typer.Option(help="Where encoders run.")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="Cores; 0: all.")] = 0,
    served: Annotated[int, typer.Option(min=0, help="Requests to a server; 0: none.")] = _SERVED,
    longest: Annotated[int, typer.Option(min=5, help="Their tokens, uniform from 5 on.")] = 256,
    repository: Annotated[Path, typer.Option(help="Model repository of the server.")] = REPOSITORY,
    model: Annotated[str, typer.Option(help="Model of it.")] = MODEL,
    quick: Annotated[
        bool, typer.Option("--quick", help="A look, not a measurement: few requests, no CSV.")
    ] = False,
    revision: Annotated[str, typer.Option(help="Git's, where the tree is a copy.")] = "",
    output: Annotated[
        Path | None,
        typer.Option(help=f"CSV file to append rows to; {DEFAULT_OUTPUT} unless --quick."),
    ] = None,
) -> None:
    """Compare the memory of a forward pass with its bound and with transformers, and watch a server's."""
    try:
        chosen = encoders(only)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    settings = Settings(device, threads or machine.cpu_count())
    soak = Soak(repository, model, requests=served, longest=longest)
    if quick:
        few = min(served, _QUICK_SERVED)
        soak = replace(soak, requests=few, warmup=_QUICK_WARMUP, every=_QUICK_EVERY)
    elif output is None:
        output = DEFAULT_OUTPUT
    provenance = bench_report.provenance(
        threads=settings.threads,
        packages=PACKAGES,
        command=_command(only, device, soak, quick=quick),
        root=Path.cwd(),
    )
    if revision:
        provenance = replace(provenance, revision=revision)
    console = Console(width=None if os.isatty(1) else 160)
    rows: list[Row] = []
    with console.status("start") as status:
        say: Say = status.update if console.is_terminal else console.print
        for found in _measure_all(chosen, settings, soak, say, quick=quick):
            rows += found
            if output is not None:
                bench_report.append_rows(output, provenance, [asdict(row) for row in found])
    _show(console, rows)
    if output is not None:
        console.print(f"rows appended to {output}")
    print(bench_report.bench_line("memory", report.bench_figures(rows)), flush=True)
    if any(row.note for row in rows if row.system == OURS):
        raise typer.Exit(1)


def _measure_all(
    chosen: list[EncoderShape], settings: Settings, soak: Soak, say: Say, *, quick: bool
) -> Iterator[list[Row]]:
    for encoder in chosen:
        yield from measure_cases(cases(encoder, quick=quick), settings, say)
    if soak.requests:
        yield measure_server(soak, say)


def _show(console: Console, rows: list[Row]) -> None:
    for table in report.tables(rows):
        console.print(table)
    for line in [*report.soak_lines(rows), *report.notes(rows)]:
        console.print(line, highlight=False, markup=False)


def _command(only: str, device: str, soak: Soak, *, quick: bool) -> str:
    words = ["python", "-m", "varlen_bench.memory"]
    words += ["--only", only] if only else []
    words += ["--device", device] if device != "cpu" else []
    words += ["--served", str(soak.requests), "--longest", str(soak.longest)]
    words += ["--model", soak.model] if soak.model != MODEL else []
    words += ["--quick"] if quick else []
    return shlex.join(words)


if __name__ == "__main__":
    end_on_sigterm()
    app()
