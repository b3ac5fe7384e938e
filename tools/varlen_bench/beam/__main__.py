"""Command line of the benchmark of beam search; `make bench-beam` runs it with its defaults."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from varlen_bench.beam import report
from varlen_bench.beam.report import BASE, DATES
from varlen_bench.beam.run import BeamComparison, measure_steps
from varlen_bench.beam.step import StepTimes
from varlen_bench.beam.systems import OURS, SYSTEMS
from varlen_bench.beam.workload import date_requests, news_requests
from varlen_bench.compare.generating import RunSettings, compare_models
from varlen_bench.compare.passes import Requests
from varlen_bench.compare.results import Result
from varlen_bench.harness import command, machine
from varlen_bench.peers.checkpoints import TRANSFORMER_BASE, config_field, save_random_translator

_PACKAGES = ("torch", "transformers", "ctranslate2", "varlen")
_QUICK_REQUESTS = 8

app = typer.Typer(add_completion=False)


@app.command()
def main(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help=f"{BASE} and {DATES}, comma-separated; by default both.")
    ] = "",
    repository: Annotated[Path, typer.Option(help=f"Model repository of {DATES}.")] = Path(
        "model_repository"
    ),
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Measured passes of each system.")] = 3,
    load: Annotated[
        float, typer.Option(min=0.01, help="Poisson arrivals, as a share of transformers' speed.")
    ] = 0.5,
    only: command.Only = "",
    threads: command.Threads = 0,
    seed: command.Seed = 0,
    quick: command.Quick = False,
    revision: command.Revision = "",
    output: command.Output = None,
) -> None:
    """Compare varlen's beam search with transformers and CTranslate2 on this CPU."""
    cores = threads or machine.cpu_count()
    if quick:
        model, requests, rounds = model or DATES, min(requests, _QUICK_REQUESTS), 1
    with command.refused():
        names = command.select(model, (BASE, DATES))
        systems = [SYSTEMS[name] for name in command.select(only, SYSTEMS)]
    bench = command.started(
        context, "beam", cores, packages=_PACKAGES, quick=quick, revision=revision, output=output
    )
    results: list[Result] = []
    steps: list[StepTimes] = []
    settings = RunSettings(cores, rounds, load, seed)

    def prepare(name: str, scratch: Path) -> tuple[Path, Requests]:
        checkpoint = repository / DATES / "1"
        if name == BASE:
            checkpoint = scratch / name
            save_random_translator(TRANSFORMER_BASE, checkpoint)
        # without it, the tokenizer fails with a message that names no file
        vocabulary = config_field(checkpoint, "vocab_size")
        if name == DATES:
            return checkpoint, date_requests(checkpoint, requests, seed)
        positions = config_field(checkpoint, "max_position_embeddings")
        return checkpoint, news_requests(requests, vocabulary, positions, seed)

    for _, found in compare_models(BeamComparison, names, prepare, systems, settings, bench):
        bench.append(report.csv_rows(found, []))
        results += found
    if SYSTEMS[OURS] in systems:
        with TemporaryDirectory(prefix="varlen-bench-") as folder, bench.progress() as progress:
            progress("the step alone")
            steps = measure_steps(threads=cores, scratch=Path(folder))
        bench.append(report.csv_rows([], steps))
    bench.show(*report.tables(report.csv_rows(results, steps)))
    bench.finish("beam", report.bench_figures(results, steps, names))
    if any(result.system.is_ours and not result.rounds for result in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
