"""Command line of the benchmark of `varlen adopt`; `make bench-adopt` runs it with its defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from varlen.execution.int8.calibration_texts import TEXTS
from varlen.models.checkpoint_folder import Checkpoint
from varlen_bench.adopt.stock_ensemble import NAME, write_stock_ensemble
from varlen_bench.harness import command, machine
from varlen_bench.harness.rows import Cell
from varlen_bench.peers.exports import exported
from varlen_tools.adopt.adoption import Adoption, Wish, adopt_model
from varlen_tools.adopt.command import print_adoption
from varlen_tools.adopt.load import Measured
from varlen_tools.local_server import end_on_sigterm
from varlen_tools.serve.server import server_command

_PACKAGES = ("torch", "transformers", "onnxruntime", "tokenizers", "tritonclient", "varlen")

app = typer.Typer(add_completion=False)


@app.command()
def main(
    context: typer.Context,
    model: Annotated[Path, typer.Option(help="Checkpoint that both serve.")] = Path(
        "model_repository/minilm/1"
    ),
    concurrency: Annotated[int, typer.Option(min=1, help="Texts in flight.")] = 16,
    seconds: Annotated[float, typer.Option(min=1, help="Load on each model.")] = 30.0,
    quick: command.Quick = False,
    revision: command.Revision = "",
    output: command.Output = None,
) -> None:
    """Adopt a stock ensemble of a tokenizer and an ONNX encoder in fp32."""
    cores = machine.cpu_count()
    bench = command.started(
        context, "adopt", cores, packages=_PACKAGES, quick=quick, revision=revision, output=output
    )
    with bench.progress() as progress, TemporaryDirectory() as folder:
        progress("exporting the encoder")
        onnx = exported(model, "onnxruntime", "fp32") / "model.onnx"
        repository = Path(folder, "repository")
        write_stock_ensemble(repository, Checkpoint.open(model), onnx)
        wish = Wish(
            repository=repository,
            model=NAME,
            checkpoint=str(model),
            name=None,
            output=None,
            settings={},
            dtype=None,
            texts=TEXTS,
            concurrency=concurrency,
            seconds=3.0 if quick else seconds,
            force=False,
        )
        with server_command() as server:
            done = adopt_model(wish, server, report=progress)
    rows = list(_rows(done, model.resolve().parent.name, concurrency))
    bench.append(rows)
    print_adoption(done)
    bench.finish("adopt", {f"{row['dtype']}_ratio": row["ratio"] for row in rows[1:]})
    if not done.agrees:
        raise typer.Exit(1)


def _rows(done: Adoption, model: str, concurrency: int) -> Iterator[Mapping[str, Cell]]:
    """Yield a row for the ensemble, and for the new model in each dtype."""
    (lengths,) = (side.lengths for side in done.old_sides if side.lengths)
    systems: list[tuple[str, str | None, Measured | None, float | None]] = [
        (done.old.name, done.old_dtype, done.old_load, None)
    ]
    systems += [
        ("varlen", each.side.dtype, each.load, each.comparison.cosine) for each in done.candidates
    ]
    for system, dtype, load, cosine in systems:
        assert load is not None
        assert done.old_load is not None
        yield {
            "model": model,
            "texts": len(lengths),
            "mean_tokens": sum(lengths) / len(lengths),
            "concurrency": concurrency,
            "system": system,
            "dtype": dtype,
            "texts_per_second": load.rate,
            "p50_ms": load.percentile(0.5),
            "p99_ms": load.percentile(0.99),
            "ratio": load.rate / done.old_load.rate,
            "cosine_min": cosine,
        }


if __name__ == "__main__":
    end_on_sigterm()
    app()
