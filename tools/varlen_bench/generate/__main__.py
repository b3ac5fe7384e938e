"""Command line of the generation benchmark; `make bench-generate` runs it with its defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from varlen_bench.compare.generating import RunSettings, compare_models
from varlen_bench.compare.passes import Requests
from varlen_bench.compare.results import Result
from varlen_bench.generate import report
from varlen_bench.generate.report import TINY_GPT2, Step
from varlen_bench.generate.run import GenerateComparison
from varlen_bench.generate.systems import OURS, SYSTEMS
from varlen_bench.generate.workload import trace_requests, uniform_requests
from varlen_bench.harness import command, machine
from varlen_bench.peers.checkpoints import (
    GPT2_SMALL,
    LLAMA_SMALL,
    config_field,
    save_random_decoder,
)

_PACKAGES = ("torch", "transformers", "ctranslate2", "varlen")
_RANDOM = {shape.name: shape for shape in (GPT2_SMALL, LLAMA_SMALL)}
_MODELS = (GPT2_SMALL.name, TINY_GPT2, LLAMA_SMALL.name)
_DEFAULT = ",".join(_MODELS[:2])

app = typer.Typer(add_completion=False)


@app.command()
def main(
    context: typer.Context,
    models: Annotated[
        str, typer.Option(help=f"{', '.join(_MODELS)}; comma-separated, by default {_DEFAULT}.")
    ] = "",
    repository: Annotated[Path, typer.Option(help=f"Model repository of {TINY_GPT2}.")] = Path(
        "model_repository"
    ),
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Measured passes of each system.")] = 3,
    load: Annotated[
        float, typer.Option(min=0.01, help="Poisson arrivals, as a share of the best peer's speed.")
    ] = 0.7,
    trace: Annotated[
        Path | None,
        typer.Option(help="CSV of an Azure LLM trace: TIMESTAMP, ContextTokens, GeneratedTokens."),
    ] = None,
    only: command.Only = "",
    threads: command.Threads = 0,
    seed: command.Seed = 0,
    quick: command.Quick = False,
    revision: command.Revision = "",
    output: command.Output = None,
) -> None:
    """Compare varlen's generation with four other engines on this CPU."""
    cores = threads or machine.cpu_count()
    if quick:
        models, requests, rounds = models or TINY_GPT2, min(requests, 8), 1
    with command.refused():
        names = command.select(models or _DEFAULT, _MODELS)
        systems = [SYSTEMS[name] for name in command.select(only, SYSTEMS)]
    bench = command.started(
        context,
        "generate",
        cores,
        packages=_PACKAGES,
        quick=quick,
        revision=revision,
        output=output,
    )
    results: list[Result] = []
    steps: list[Step] = []
    settings = RunSettings(cores, rounds, load, seed)

    def prepare(model: str, scratch: Path) -> tuple[Path, Requests]:
        if model in _RANDOM:
            shape, checkpoint = _RANDOM[model], scratch / model
            save_random_decoder(shape, checkpoint)
            vocabulary, positions = shape.vocabulary, shape.positions
        else:
            checkpoint = repository / TINY_GPT2 / "1"
            vocabulary = config_field(checkpoint, "vocab_size")
            positions = config_field(checkpoint, "n_positions")
        if trace is not None:
            return checkpoint, trace_requests(trace, requests, vocabulary, positions, seed)
        return checkpoint, uniform_requests(requests, vocabulary, positions, seed)

    compared = compare_models(GenerateComparison, names, prepare, systems, settings, bench)
    for comparison, found in compared:
        step = [comparison.decode_step()] if SYSTEMS[OURS] in systems else []
        bench.append(report.csv_rows(found, step))
        results += found
        steps += step
    bench.show(*report.tables(report.csv_rows(results, steps)))
    bench.finish("generate", report.bench_figures(results, steps, names))
    if any(result.system.is_ours and not result.rounds for result in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
