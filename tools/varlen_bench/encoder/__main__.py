"""Command line of the encoder benchmark; `make bench-encoder` runs it with its defaults."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from varlen.errors import CheckpointError
from varlen.models.checkpoint_folder import Checkpoint
from varlen_bench.encoder import report
from varlen_bench.encoder.run import EncoderComparison
from varlen_bench.encoder.systems import SYSTEMS
from varlen_bench.encoder.workload import grid_workloads, short_workload, uniform_workload
from varlen_bench.harness import command, machine
from varlen_bench.peers.pooling import POOLING_MODES, PoolingMode
from varlen_bench.peers.random_encoders import RANDOM_ENCODERS, random_encoder

_MINILM = Path("model_repository/minilm/1")
_PACKAGES = ("torch", "transformers", "onnxruntime", "openvino", "ctranslate2", "varlen")

app = typer.Typer(add_completion=False)


@app.command()
def main(
    context: typer.Context,
    model: Annotated[
        Path,
        typer.Option(
            help="Hugging Face folder of an embedding model, or one with random weights: "
            + ", ".join(RANDOM_ENCODERS)
        ),
    ] = _MINILM,
    rounds: Annotated[int, typer.Option(min=1, help="Measured passes of each system.")] = 5,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of 5-500 tokens.")] = 96,
    queries: Annotated[int, typer.Option(min=1, help="Short queries.")] = 512,
    grid: Annotated[
        bool,
        typer.Option("--grid", help="Only batches of 1 and 20 equal sequences, of 10-500 tokens."),
    ] = False,
    only: command.Only = "",
    threads: command.Threads = 0,
    seed: command.Seed = 0,
    quick: command.Quick = False,
    revision: command.Revision = "",
    output: command.Output = None,
) -> None:
    """Compare varlen's encoder with transformers, zentorch, onnxruntime, OpenVINO and CTranslate2."""
    cores = threads or machine.cpu_count()
    if quick:
        rounds, sequences, queries = min(rounds, 2), min(sequences, 24), min(queries, 96)
    with command.refused(CheckpointError):
        if str(model) in RANDOM_ENCODERS:
            model = random_encoder(str(model), tokenizer=_MINILM)
        pooling = _pooling(model)
        systems = [SYSTEMS[name] for name in command.select(only, SYSTEMS)]
        if grid:
            workloads = grid_workloads(model, seed)
        else:
            workloads = [
                uniform_workload(model, sequences, seed),
                short_workload(model, queries, seed),
            ]
    if quick and not grid:
        workloads = [workload.with_fewer_sizes() for workload in workloads]
    bench = command.started(
        context, "encoder", cores, packages=_PACKAGES, quick=quick, revision=revision, output=output
    )
    with TemporaryDirectory(prefix="varlen-bench-") as scratch, bench.progress() as progress:
        comparison = EncoderComparison(model, pooling, workloads, Path(scratch), progress, cores)
        results = comparison.compare(systems, rounds)
    rows = report.csv_rows(results, _model_name(model))
    bench.append(rows)
    bench.show(*report.tables(rows))
    if grid:
        bench.finish("encoder_grid", report.grid_figures(results))
    else:
        bench.finish("encoder", report.bench_figures(results))
    if any(result.system.is_ours and not result.rounds for result in results):
        raise typer.Exit(1)


def _pooling(model: Path) -> PoolingMode:
    """Return how a model pools; its peers do the same."""
    checkpoint = Checkpoint.open(model)
    mode, *others = checkpoint.pooling
    if others or checkpoint.dense or mode not in POOLING_MODES:
        raise ValueError(
            f"{model} pools by {' and '.join(checkpoint.pooling)}, with {len(checkpoint.dense)} dense layers; "
            f"the peers of this benchmark pool by one of {', '.join(POOLING_MODES)}, with none"
        )
    return mode


def _model_name(model: Path) -> str:
    """Return the name of a model; its folder may be a version of it."""
    path = model.resolve()
    return path.parent.name if path.name.isdigit() else path.name


if __name__ == "__main__":
    app()
