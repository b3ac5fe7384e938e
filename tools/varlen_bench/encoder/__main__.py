"""Command line of the encoder benchmark; `make bench-encoder` runs it with its defaults."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from varlen_bench.encoder import report
from varlen_bench.encoder.run import Settings, chosen_systems, run
from varlen_bench.encoder.workload import Workload, short_workload, uniform_workload
from varlen_bench.harness import machine
from varlen_bench.harness import rows as bench_report
from varlen_bench.peers import exports

DEFAULT_MODEL = Path("model_repository/minilm/1")
DEFAULT_OUTPUT = Path("docs/benchmarks/encoder.csv")
PACKAGES = ("torch", "transformers", "onnxruntime", "ctranslate2", "varlen")

app = typer.Typer(add_completion=False)


@app.command()
def main(
    model: Annotated[
        Path, typer.Option(help="Hugging Face folder of a mean-pooled BERT.")
    ] = DEFAULT_MODEL,
    rounds: Annotated[int, typer.Option(min=1, help="Measured passes of each system.")] = 5,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of lengths 5-500.")] = 96,
    queries: Annotated[int, typer.Option(min=1, help="Short queries.")] = 512,
    systems: Annotated[
        str, typer.Option(help="Names or their beginnings, by comma; all when empty.")
    ] = "",
    threads: Annotated[int, typer.Option(min=0, help="Threads per batch; 0: all cores.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the workloads.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version: a look, not a measurement.")
    ] = False,
    output: Annotated[Path, typer.Option(help="CSV file to append rows to.")] = DEFAULT_OUTPUT,
) -> None:
    """Compare our encoder with transformers, onnxruntime and CTranslate2 on this CPU."""
    if quick:
        rounds, sequences, queries = min(rounds, 2), min(sequences, 24), min(queries, 96)
    console = Console(width=None if os.isatty(1) else 160)
    try:
        _check_pooling(model)
        wanted = chosen_systems(systems)
        workloads = [
            uniform_workload(model, sequences, seed),
            short_workload(model, queries, seed),
        ]
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    if quick:
        workloads = [_fewer_candidates(workload) for workload in workloads]
    settings = Settings(
        model=model.resolve(),
        cache=exports.cache_folder(),
        threads=threads or machine.cpu_count(),
        rounds=rounds,
        systems=wanted,
    )
    provenance = bench_report.provenance(
        threads=settings.threads,
        packages=PACKAGES,
        command=_command(model, rounds, sequences, queries, systems, seed, quick),
        root=Path.cwd(),
    )
    with console.status("start") as status:
        # A log gets lines, a terminal one line that changes.
        say = status.update if console.is_terminal else console.print
        results = run(settings, workloads, say)

    for workload in workloads:
        console.print(report.table(results, workload.name))
    bench_report.append_rows(output, provenance, report.csv_rows(results, _model_name(model)))
    console.print(f"rows appended to {output}")
    print(bench_report.bench_line("encoder", report.bench_figures(results)), flush=True)
    if any(r.failed and r.system.is_ours for r in results):
        raise typer.Exit(1)


def _check_pooling(model: Path) -> None:
    """Refuse a model whose own vectors are pooled in another way than the peers here do."""
    path = model / "1_Pooling" / "config.json"
    if not path.exists():
        raise ValueError(
            f"{model} has no 1_Pooling/config.json; give a sentence-transformers folder"
        )
    pooling = json.loads(path.read_text(encoding="utf-8"))
    mean = pooling.get("pooling_mode_mean_tokens") or pooling.get("pooling_mode") == "mean"
    if not mean:
        raise ValueError(f"{model} does not pool by mean; the peers of this benchmark do")


def _fewer_candidates(workload: Workload) -> Workload:
    return replace(
        workload,
        batch_sizes=workload.batch_sizes[1::2],
        batch_tokens=workload.batch_tokens[1::2],
    )


def _model_name(model: Path) -> str:
    """Return the repository's name for the model, whose versions are folders called by numbers."""
    path = model.resolve()
    return path.parent.name if path.name.isdigit() else path.name


def _command(
    model: Path, rounds: int, sequences: int, queries: int, systems: str, seed: int, quick: bool
) -> str:
    words = ["python", "-m", "varlen_bench.encoder"]
    if model != DEFAULT_MODEL:
        words += ["--model", model.name if model.is_absolute() else str(model)]
    words += ["--rounds", str(rounds), "--sequences", str(sequences), "--queries", str(queries)]
    words += ["--systems", systems] if systems else []
    words += ["--seed", str(seed)] if seed else []
    words += ["--quick"] if quick else []
    return shlex.join(words)


if __name__ == "__main__":
    app()
